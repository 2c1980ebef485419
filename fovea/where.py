"""Phrase × Image → Regions: which part of an image a phrase means, and how much of the image it is (eq. 4).

Two ways. `Locator` asks a detector for each phrase and refines its boxes to masks, as the paper does. Or the
regions of an image are proposed and embedded once, independent of any query (`fovea.region_bank`); grounding
a phrase is then a matrix product and an arg-max (`ground_candidates`).

Shapes: `M` rows (query × candidate), `T` phrases of a query (padded), `R` regions of one image, `D`
embedding width, `C` cells of one image (see `RegionEmbeddings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fovea import masks
from fovea.models.detectors import Detector
from fovea.models.segmenters import Segmenter
from fovea.types import RLE, BoolArray, FloatArray, Region, UInt8Array

if TYPE_CHECKING:  # it needs torch, which filling a mask store with proposals does not
    from fovea.region_bank import RegionEmbeddings

Float64Array = np.ndarray[Any, np.dtype[np.float64]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
EPS = 1e-6  # ε of eq. 4
_MAX_PIXELS = 2**28  # of the masks held at once, 256 MB; a 640 × 480 image reaches it with 873 boxes


class Grounding(NamedTuple):
    """The region of each phrase of each row; [M, T], padded like a missing phrase.

    Attributes:
        region: int64, position among the image's regions, R for the whole image, −1 for none.
        similarity: float64, cos(phrase, region), NaN for none.
        question_similarity: float64, cos(question, region), NaN for none.
        eq4: float64, α as printed over the regions chosen for this row, 0 for none.
    """

    region: IntArray
    similarity: Float64Array
    question_similarity: Float64Array
    eq4: Float64Array


def nothing_grounded(num_rows: int, width: int = 0) -> Grounding:
    """[M, T] of phrases that mean no region."""
    shape = (num_rows, width)
    return Grounding(
        np.full(shape, -1, np.int64), np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape)
    )


def ground(phrases_TD: FloatArray, regions_RD: FloatArray) -> tuple[IntArray, FloatArray]:
    """The most similar region of each phrase, the first of equal ones.

    Args:
        phrases_TD: [..., T, D], unit length.
        regions_RD: [R, D], unit length; R may be 0.

    Returns:
        int64 [..., T] (−1 without regions) and the cosines (NaN without regions).
    """
    if len(regions_RD) == 0:
        shape = phrases_TD.shape[:-1]
        return np.full(shape, -1, np.int64), np.full(shape, np.nan, np.float32)
    similarity = phrases_TD @ regions_RD.T
    return similarity.argmax(-1), similarity.max(-1)


def shares(chosen: IntArray, cells: BoolArray, areas: Float64Array) -> Float64Array:
    """Eq. 4 as printed: α_k = mean_p [m_k(p) / (Σ_l m_l(p) + ε)] over the chosen regions of one image.

    Args:
        chosen: int [n, T], n choices of T regions; −1 for none. A region chosen twice shares its pixels
            with itself.
        cells: bool [C, R] and
        areas: float64 [C], as `partition` makes them.

    Returns:
        float64 [n, T]; each row sums to the share of the image that its regions cover (up to ε).
    """
    member = cells.T[chosen].astype(np.float64) * (chosen >= 0)[..., None]  # [n, T, C]
    alpha: Float64Array = np.einsum("ntc,c,nc->nt", member, areas, 1 / (member.sum(1) + EPS), optimize=True)
    return alpha


def ground_candidates(
    phrases: Sequence[FloatArray],
    questions_QD: FloatArray,
    query: IntArray,
    image_ids: Sequence[str],
    images: Mapping[str, RegionEmbeddings],
    *,
    names: Sequence[Sequence[str | None]] | None = None,
    full_mask_if_missing: bool = False,
) -> Grounding:
    """Ground the phrases of many queries in their candidates; one matrix product an image.

    Args:
        phrases: [Q] arrays [T_q, D], unit length, by the local encoder.
        questions_QD: the whole questions, by the local encoder.
        query: int64 [M], row → query.
        image_ids: [M], row → image.
        images: region embeddings of all of them.
        names: [Q] lists of T_q ids: the region that a phrase means, where a detector was asked for it; None
            for the most similar of all regions of the image.
        full_mask_if_missing: ground a phrase without a region in the whole image (missing_phrase
            `full_mask`).
    """
    counts = np.array([len(own) for own in phrases], np.int64)
    width, num_rows = int(counts.max(initial=0)), len(query)
    padded = np.zeros((len(phrases), width, questions_QD.shape[1]), np.float32)
    for q, own in enumerate(phrases):
        padded[q, : len(own)] = own
    out = nothing_grounded(num_rows, width)
    rows_of: dict[str, list[int]] = {}
    for row, image_id in enumerate(image_ids):
        rows_of.setdefault(image_id, []).append(row)
    for image_id, rows in rows_of.items():
        image, asked = images[image_id], query[rows]
        if names is None:
            region, similarity = ground(padded[asked], image.vectors[:-1])
        else:
            region, similarity = _own(padded[asked], image, [names[q] for q in asked])
        if full_mask_if_missing:
            lost = region < 0
            region = np.where(lost, len(image.regions), region)
            similarity = np.where(lost, padded[asked] @ image.vectors[-1], similarity)
        real = np.arange(width) < counts[asked][:, None]
        region = np.where(real, region, -1)
        found = region >= 0
        questions = np.take_along_axis(questions_QD[asked] @ image.vectors.T, np.maximum(region, 0), 1)
        out.region[rows] = region
        out.similarity[rows] = np.where(found, similarity, np.nan)
        out.question_similarity[rows] = np.where(found, questions, np.nan)
        out.eq4[rows] = shares(region, image.cells, image.areas)
    return out


def _own(
    phrases_MTD: FloatArray, image: RegionEmbeddings, names: Sequence[Sequence[str | None]]
) -> tuple[IntArray, FloatArray]:
    """As `ground`, for phrases that have a region of their own, or none."""
    place = {region.id: r for r, region in enumerate(image.regions)}
    chosen = np.full(phrases_MTD.shape[:2], -1, np.int64)
    for m, own in enumerate(names):
        chosen[m, : len(own)] = [-1 if name is None else place.get(name, -1) for name in own]
    cosines = np.einsum("mtd,mtd->mt", phrases_MTD, image.vectors[chosen])
    return chosen, np.where(chosen >= 0, cosines, np.nan).astype(np.float32)


class Locator:
    """Phrases × image → regions (METHOD.md 1.3): boxes by a detector, refined to masks by a segmenter.

    Attributes:
        detector: finds the boxes of each phrase.
        segmenter: makes a mask of each box, or None: the regions are boxes only.
    """

    def __init__(self, detector: Detector, segmenter: Segmenter | None = None) -> None:
        self.detector = detector
        self.segmenter = segmenter

    @property
    def key(self) -> str:
        """`<detector.key>+<segmenter.key>`, or the detector's alone."""
        return self.detector.key if self.segmenter is None else f"{self.detector.key}+{self.segmenter.key}"

    @property
    def joint(self) -> bool:
        """Whether the regions of a phrase depend on the phrases that were asked with it."""
        return self.detector.joint

    def locate(self, image: UInt8Array, phrases: Sequence[str]) -> list[list[Region]]:
        """The regions of each phrase.

        The segmenter gets the boxes of all phrases together, so that it encodes the image once, and not at
        all where nothing was found. (Masks of more than 256 million pixels go through it in several parts;
        it keeps the last image's embedding.)

        Args:
            image: uint8 [H, W, 3], RGB, EXIF-upright.
            phrases: the texts to look for.

        Returns:
            for each phrase, in order, its regions, best first: `r0`, `r1`, … with the phrase as label and
            `scores["detector"]` in (0, 1). No region is a normal result, and so is an empty mask.
        """
        found = self.detector.detect(image, phrases)
        made = iter(self._masks(image, np.concatenate([own.boxes for own in found]) if found else _NO_BOX))
        return [
            [
                Region(f"r{i}", box, next(made), label=phrase, scores={"detector": float(score)})
                for i, (box, score) in enumerate(zip(own.boxes, own.scores, strict=True))
            ]
            for phrase, own in zip(phrases, found, strict=True)
        ]

    def _masks(self, image: UInt8Array, boxes_K4: FloatArray) -> list[RLE] | list[None]:
        """The mask of every box."""
        if self.segmenter is None:
            return [None] * len(boxes_K4)
        step = max(1, _MAX_PIXELS // (image.shape[0] * image.shape[1]))
        return [
            masks.encode(mask)
            for start in range(0, len(boxes_K4), step)
            for mask in self.segmenter.segment(image, boxes_K4[start : start + step])
        ]


_NO_BOX = np.zeros((0, 4), np.float32)


def union(regions: Sequence[Region]) -> Region | None:
    """The regions of one phrase → one: several boxes of a phrase have the union as its mask (METHOD.md 1.3).

    Args:
        regions: of one phrase in one image.

    Returns:
        None for no region. Else id, phrase and label are the first's, the box is the smallest around all
        boxes, and every score is the highest of its name. The mask is None unless all regions have one: a
        box that is not segmented says nothing about pixels.

    Raises:
        ValueError: the masks have several sizes.
    """
    if not regions:
        return None
    if len(regions) == 1:
        return regions[0]
    first = regions[0]
    boxes = np.stack([region.box for region in regions])
    box = np.concatenate([boxes[:, :2].min(0), boxes[:, 2:].max(0)]).astype(np.float32)
    rles = [region.mask for region in regions if region.mask is not None]
    if len({tuple(rle["size"]) for rle in rles}) > 1:
        raise ValueError(f"masks of one image have one size; got {[rle['size'] for rle in rles]}")
    names = dict.fromkeys(name for region in regions for name in region.scores)
    scores = {name: max(region.scores[name] for region in regions if name in region.scores) for name in names}
    mask = masks.union(rles) if len(rles) == len(regions) else None
    return Region(first.id, box, mask, first.phrase_id, first.label, scores)
