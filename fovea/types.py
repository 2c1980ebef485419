"""The domain types: what passes between the stages.

Shape letters used everywhere: `B` batch, `N` images in the corpus, `K` candidates kept, `T` phrases (regions)
of one query, `R` query-free regions of one image, `D` embedding width, `P` patches, `S` side of the square
model input in pixels, `L` tokens of a text, `H`/`W` height and width of an image in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

# A COCO run-length mask: {"size": [H, W], "counts": bytes}, as pycocotools reads and writes it.
RLE = dict[str, Any]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]
UInt8Array = np.ndarray[Any, np.dtype[np.uint8]]

# The rows of the fusion table (METHOD.md 1.5). `learned` is whichever calibration the run chose as its
# default.
FUSIONS = ("global", "local", "local_eq5", "add", "multiply", "eq9", "ranking", "learned")


@dataclass(frozen=True)
class Query:
    """A question (or a caption used as one). Gold fields are empty at inference.

    Attributes:
        id: unique within its tables.
        text: the question as asked.
        image_id: the picture that comes with the question (RoRA-VLM), else None.
        answers: accepted answers.
        gold_image_ids: every image that answers the question; the denominator of recall.
        gold_passage_ids: the same for text.
        candidate_image_ids: the dataset's own candidate list (corpus `candidates`), empty when it has none.
        split: name of the split.
        kind: `question`, `caption`, `entity`, or the dataset's own question type.
        keywords: what a correct answer must mention, where the dataset says so (WebQA's official score).
    """

    id: str
    text: str
    image_id: str | None = None
    answers: tuple[str, ...] = ()
    gold_image_ids: tuple[str, ...] = ()
    gold_passage_ids: tuple[str, ...] = ()
    candidate_image_ids: tuple[str, ...] = ()
    split: str = ""
    kind: str = "question"
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """One image that the coarse stage kept.

    Attributes:
        image_id: id in the images table.
        caption: its caption, or empty.
        global_score: cosine of query and whole image, [-1, 1].
        rank: 1 is the best.
    """

    image_id: str
    caption: str
    global_score: float
    rank: int


@dataclass(frozen=True)
class Phrase:
    """A referent that the question names (HuLiRAG eq. 3).

    Attributes:
        id: unique within the query, in question order: `p0`, `p1`, …
        text: the minimal noun phrase with its modifiers.
        span: character offsets in the query, end exclusive.
        index: 1 for a first mention, 2 for the second genuinely repeated one, …
        kind: `noun_phrase`, or `whole_query` when the question has no usable noun phrase.
    """

    id: str
    text: str
    span: tuple[int, int]
    index: int = 1
    kind: Literal["noun_phrase", "whole_query"] = "noun_phrase"


@dataclass(frozen=True)
class Region:
    """A part of one image.

    Attributes:
        id: unique within its image.
        box: float32 [4], xyxy, pixels of the EXIF-upright original.
        mask: COCO RLE of the EXIF-upright original, or None when only the box is known.
        phrase_id: the phrase it grounds, or None for a query-free region.
        label: category or phrase it was annotated with, or empty.
        scores: named scores, e.g. `detector` in [0, 1], `similarity` cosine in [-1, 1], `weight` (eq. 4) in
            [0, 1].
    """

    id: str
    box: FloatArray
    mask: RLE | None
    phrase_id: str | None = None
    label: str = ""
    scores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredImage:
    """A candidate after reweighting.

    Attributes:
        candidate: what the coarse stage said.
        regions: the region chosen for each phrase, in phrase order (phrases without a region are absent).
        global_score: cosine of query and whole image, [-1, 1].
        local_score: weighted regional score (eq. 5 or the run's rule).
        score: the fused score that the order follows; recomputable from the two above and the run's weights.
        relevance: RS in (0, 1), or None when no relevance stage ran.
    """

    candidate: Candidate
    regions: tuple[Region, ...]
    global_score: float
    local_score: float
    score: float
    relevance: float | None = None


@dataclass(frozen=True)
class Evidence:
    """Everything the answer may rest on.

    Attributes:
        query: the question.
        phrases: what it names.
        images: descending by `score`.
    """

    query: Query
    phrases: tuple[Phrase, ...]
    images: tuple[ScoredImage, ...]
