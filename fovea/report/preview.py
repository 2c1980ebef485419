"""Images with what was found in them → one HTML sheet: phrases, boxes, masks, weights, heat maps.

To be looked at before anything is trained on the masks: `scripts/precompute_masks.py --preview N`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fovea import masks
from fovea.heatmap import Heat, Maps, look
from fovea.images import BadImage, ImageReader
from fovea.models.encoders import Encoder
from fovea.region_bank import View, region_masks
from fovea.report import queries
from fovea.report.overlay import Outline, Picture, outline, picture
from fovea.report.page import NUM_COLOURS, environment
from fovea.types import BoolArray, FloatArray, Phrase, Region, UInt8Array

PICTURE_SIDE = 640  # longest side of an embedded photo, pixels
HEAT_SIDE = 480
OUTLINE_SIDE = 320
# Regions of query-free proposals that the list names one by one; all of them are drawn.
LISTED = 24
TAG_HEIGHT = 1.4  # letter sizes


@dataclass(frozen=True)
class Sample:
    """One image, what was asked, and what was found.

    Attributes:
        row: of the images table; its `id` is shown.
        pixels: uint8 [H, W, 3], EXIF-upright: boxes and masks are in its coordinates.
        question: as asked; None for query-free proposals.
        phrases: [T], in the question's order; empty for query-free proposals.
        regions: [T] lists, one a phrase; for query-free proposals one list of all regions.
        weights: α of eq. 4, normalised, one a phrase; for query-free proposals one a region.
        covered: share of the image's pixels under any region, [0, 1]: the sum of the weights as printed.
        heat: the two heat maps, or None.
    """

    row: Mapping[str, Any]
    pixels: UInt8Array
    question: str | None
    phrases: Sequence[Phrase]
    regions: Sequence[Sequence[Region]]
    weights: FloatArray
    covered: float
    heat: Maps | None = None


def sample(
    row: Mapping[str, Any],
    pixels: UInt8Array,
    regions: Sequence[Sequence[Region]],
    *,
    question: str | None = None,
    phrases: Sequence[Phrase] = (),
    encoder: Encoder | None = None,
    view: View | None = None,
) -> Sample:
    """Weigh what was found (eq. 4; several boxes of a phrase count as their union), and paint its heat maps.

    Args:
        row: of the images table.
        pixels: uint8 [H, W, 3].
        regions: one list a phrase; for query-free proposals one list of all regions.
        question: None for query-free proposals.
        phrases: [T].
        encoder: paints the heat maps when there is a question; in evaluation mode.
        view: how the encoder is shown a region; `View()` by default.

    Raises:
        ValueError: the lists do not fit the phrases, or a mask does not fit the image.
    """
    if len(regions) != (len(phrases) if question is not None else 1):
        raise ValueError(
            f"image {row['id']}: {len(regions)} lists of regions for {len(phrases)} phrases; one a phrase is "
            "needed, and a single list when there is no question"
        )
    height, width = pixels.shape[:2]
    if question is None:
        found = region_masks(regions[0], height, width)
    else:
        found = phrase_masks(regions, height, width)
    weights = masks.region_weights(found)
    covered = float(found.any(axis=0).mean()) if found.size else 0.0
    heat = None
    if encoder is not None and question is not None:
        texts = [phrase.text for phrase in phrases]
        heat = look(encoder, pixels, question, texts, found, weights_T=weights, view=view or View())
    return Sample(row, pixels, question, phrases, regions, weights, covered, heat)


def phrase_masks(regions: Sequence[Sequence[Region]], height: int, width: int) -> BoolArray:
    """Per phrase the union of its regions, bool [T, H, W]; empty for a phrase without a region."""
    out = np.zeros((len(regions), height, width), np.bool_)
    for t, own in enumerate(regions):
        if own:
            out[t] = region_masks(own, height, width).any(axis=0)
    return out


def collect(
    rows: Iterable[dict[str, Any]],
    reader: ImageReader,
    regions_of: Callable[[Mapping[str, Any], Sequence[str]], Sequence[Sequence[Region]]],
    asked: Callable[[Mapping[str, Any]], tuple[str, Sequence[Phrase]] | None],
    *,
    encoder: Encoder | None = None,
    view: View | None = None,
) -> Iterator[Sample]:
    """Samples of images whose regions are stored; unreadable images are left out (and stand in `reader.bad`).

    Args:
        rows: of the images table, the images to show.
        reader: gives their pixels.
        regions_of: (row, texts of the phrases) → one list of regions a phrase; for no phrases a single list.
        asked: row → (question, phrases), or None for query-free proposals.
        encoder: paints the heat maps.
        view: how the encoder is shown a region.
    """
    for row in rows:
        try:
            pixels = reader.read(row)
        except BadImage:
            continue
        question, phrases = asked(row) or (None, ())
        regions = regions_of(row, [phrase.text for phrase in phrases])
        yield sample(
            row, pixels, regions, question=question, phrases=phrases, encoder=encoder, view=view
        )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """One line of a card's list: a phrase, or a query-free region.

    Attributes:
        colour: index of its colour.
        text: the phrase, or a description of the region.
        weight: α of eq. 4, normalised.
        scores: per name the values of its regions, as they are printed.
        masks: outlines of its regions' masks.
        boxes: x, y, width, height of its regions, pixels of the original.
        tag: what stands beside its first box.
        tag_at: x, y of the tag's top left corner and its width, pixels of the original.
    """

    colour: int
    text: str
    weight: float
    scores: list[str]
    masks: list[Outline]
    boxes: list[tuple[float, float, float, float]]
    tag: str = ""
    tag_at: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Card:
    """One sample as the sheet draws it; `unit` is the tags' letter size, pixels of the original."""

    id: str
    caption: str
    picture: Picture
    pieces: list[tuple[str, int | None]] | None
    found: list[Found]
    unlisted: int
    num_regions: int
    covered: float
    unit: float
    heat: list[tuple[str, Picture, Heat]] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        """Phrases without a region."""
        return 0 if self.pieces is None else sum(not line.boxes for line in self.found)


def build(
    out_html: str | Path,
    samples: Iterable[Sample],
    *,
    title: str = "preview",
    made_by: str = "",
    left_out: int = 0,
) -> Path:
    """Write the sheet: one self-contained file that needs no network.

    Args:
        out_html: the file to write; its folder is made.
        samples: consumed one by one, so that only the scaled-down pictures stay in memory.
        title: shown at the top, e.g. the name of the tables.
        made_by: what made the regions (the mask store's key).
        left_out: images that could not be read.

    Returns:
        The path of the sheet.
    """
    path = Path(out_html)
    cards = [_card(number, item) for number, item in enumerate(samples)]
    asked = [card for card in cards if card.pieces is not None]
    text = environment().get_template("preview.html.j2").render(
        title=title,
        made_by=made_by,
        cards=cards,
        num_colours=NUM_COLOURS,
        num_phrases=sum(len(card.found) for card in asked),
        num_missing=sum(card.num_missing for card in asked),
        num_regions=sum(card.num_regions for card in cards),
        num_asked=len(asked),
        left_out=left_out,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = path.with_name(f".{path.name}.writing")
    writing.write_text(text)
    writing.replace(path)
    return path


def _card(number: int, item: Sample) -> Card:
    height, width = item.pixels.shape[:2]
    unit = max(width, height) / (34 if item.question is not None else 42)
    pieces = None
    if item.question is None:
        named = [_region_name(region) for region in item.regions[0]]
        groups: list[Sequence[Region]] = [[region] for region in item.regions[0]]
    else:
        spans = [{"text": phrase.text, "span": phrase.span} for phrase in item.phrases]
        marked = queries.highlight(item.question, spans)
        pieces = [(text, None if index is None else index % NUM_COLOURS) for text, index in marked]
        named = [_phrase_name(phrase) for phrase in item.phrases]
        groups = list(item.regions)
    found = [
        _found(n, text, regions, float(weight))
        for n, (text, regions, weight) in enumerate(zip(named, groups, item.weights, strict=True))
    ]
    tags = [
        f"{n}" if item.question is None else f"{n} · {line.weight:.2f}"
        for n, line in enumerate(found, start=1)
    ]
    found = [
        replace(line, tag=tag, tag_at=at)
        for line, tag, at in zip(found, tags, place(found, tags, (width, height), unit), strict=True)
    ]
    heat = []
    if item.heat is not None:
        for name, painted in item.heat._asdict().items():
            heat.append((name, picture(f"{name}{number}", painted.picture, side=HEAT_SIDE), painted))
    return Card(
        id=str(item.row["id"]),
        caption=str(item.row.get("caption") or ""),
        picture=picture(f"im{number}", item.pixels, side=PICTURE_SIDE),
        pieces=pieces,
        found=found,
        unlisted=max(0, len(found) - LISTED) if item.question is None else 0,
        num_regions=sum(map(len, item.regions)),
        covered=item.covered,
        unit=unit,
        heat=heat,
    )


def _phrase_name(phrase: Phrase) -> str:
    if phrase.kind == "whole_query":
        return f"{phrase.text} (the whole question)"
    return phrase.text if phrase.index == 1 else f"{phrase.text} (mention {phrase.index})"


def _region_name(region: Region) -> str:
    left, top, right, bottom = (round(float(value)) for value in region.box)
    size = f"{right - left} × {bottom - top} at {left}, {top}"
    return f"{region.label}: {size}" if region.label else size


def _found(number: int, text: str, regions: Sequence[Region], weight: float) -> Found:
    colour = number % NUM_COLOURS
    boxes, outlines = [], []
    scores: dict[str, list[str]] = {}
    for region in regions:
        left, top, right, bottom = (float(value) for value in region.box)
        boxes.append((left, top, right - left, bottom - top))
        for name, value in region.scores.items():
            scores.setdefault(name, []).append(f"{value:.2f}")
    # The union is the phrase's mask (HuLiRAG); painted one by one, overlaps would hide the picture.
    rles = [region.mask for region in regions if region.mask is not None]
    if rles:
        outlines.append(outline({"rle": masks.union(rles)}, text, colour, side=OUTLINE_SIDE))
    lines = [f"{name} {', '.join(values)}" for name, values in scores.items()]
    return Found(colour, text, weight, lines, outlines, boxes)


def place(
    found: Sequence[Found], tags: Sequence[str], size: tuple[int, int], unit: float
) -> list[tuple[float, float, float]]:
    """x, y, width of each tag: inside the image, at its first box, below a tag that is already there.

    Args:
        found: the lines that the tags belong to.
        tags: their texts.
        size: (W, H) of the image.
        unit: letter size; a tag is 1.4 units high.
    """
    out: list[tuple[float, float, float]] = []
    high = TAG_HEIGHT * unit
    for line, tag in zip(found, tags, strict=True):
        wide = unit * (0.62 * len(tag) + 0.6)
        x, y = line.boxes[0][:2] if line.boxes else (0.0, 0.0)
        x = max(0.0, min(x, size[0] - wide))
        y = first = max(0.0, min(y, size[1] - high))
        taken = [at for at, other in zip(out, found, strict=False) if other.boxes]
        beside = [b for a, b, w in taken if a < x + wide and x < a + w]
        while hit := [b for b in beside if abs(b - y) < 0.99 * high]:
            y = max(hit) + high
        # Nowhere free down to the edge: better hidden in part than outside.
        out.append((x, y if y + high <= size[1] else first, wide))
    return out
