"""Phrase × Image → Regions: which part of an image a phrase means, and how much of the image it is (eq. 4).

The regions of an image are proposed and embedded once, independent of any query (`fovea.region_bank`);
grounding a phrase is then a matrix product and an arg-max.

Shapes: `M` rows (query × candidate), `T` phrases of a query (padded), `R` regions of one image, `D`
embedding width, `C` cells of one image (see `RegionEmbeddings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fovea.region_bank import RegionEmbeddings
from fovea.types import BoolArray, FloatArray

Float64Array = np.ndarray[Any, np.dtype[np.float64]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
EPS = 1e-6  # ε of eq. 4


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
    full_mask_if_missing: bool = False,
) -> Grounding:
    """Ground the phrases of many queries in their candidates; one matrix product an image.

    Args:
        phrases: [Q] arrays [T_q, D], unit length, by the local encoder.
        questions_QD: the whole questions, by the local encoder.
        query: int64 [M], row → query.
        image_ids: [M], row → image.
        images: region embeddings of all of them.
        full_mask_if_missing: ground a phrase in the whole image where the image has no region
            (missing_phrase `full_mask`).
    """
    counts = np.array([len(own) for own in phrases], np.int64)
    width, num_rows = int(counts.max(initial=0)), len(query)
    padded = np.zeros((len(phrases), width, questions_QD.shape[1]), np.float32)
    for q, own in enumerate(phrases):
        padded[q, : len(own)] = own
    out = Grounding(
        np.full((num_rows, width), -1, np.int64),
        np.full((num_rows, width), np.nan),
        np.full((num_rows, width), np.nan),
        np.zeros((num_rows, width)),
    )
    rows_of: dict[str, list[int]] = {}
    for row, image_id in enumerate(image_ids):
        rows_of.setdefault(image_id, []).append(row)
    for image_id, rows in rows_of.items():
        image, asked = images[image_id], query[rows]
        region, similarity = ground(padded[asked], image.vectors[:-1])
        if full_mask_if_missing and len(image.regions) == 0:
            region = np.zeros_like(region)
            similarity = padded[asked] @ image.vectors[-1]
        real = np.arange(width) < counts[asked][:, None]
        region = np.where(real, region, -1)
        found = region >= 0
        questions = np.take_along_axis(questions_QD[asked] @ image.vectors.T, np.maximum(region, 0), 1)
        out.region[rows] = region
        out.similarity[rows] = np.where(found, similarity, np.nan)
        out.question_similarity[rows] = np.where(found, questions, np.nan)
        out.eq4[rows] = shares(region, image.cells, image.areas)
    return out
