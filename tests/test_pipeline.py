"""fovea.pipeline: the cascade on a corpus small enough to work by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from fovea.images import ImageTransform
from fovea.index.dense import DenseIndex
from fovea.models.encoders import Encoder
from fovea.pipeline import WHOLE, Cascade, whole_question
from fovea.region_bank import RegionEmbeddings, partition
from fovea.region_sources import WholeImage
from fovea.retrieve import Retriever
from fovea.reweight import Calibration, Calibrations
from fovea.score_table import BEYOND
from fovea.types import Phrase, Query, Region


class WrittenEncoder(Encoder):
    """A text encoder whose embeddings are written down."""

    def __init__(self, vectors):
        super().__init__()
        self.vectors, self.texts = vectors, list(vectors)
        self.embed_dim = len(next(iter(vectors.values())))
        self.transform = ImageTransform(8)
        self.tokenizer = lambda texts: torch.tensor([[self.texts.index(t)] for t in texts])
        self.logit_scale = torch.nn.Parameter(torch.zeros(()))
        self.eval()

    def encode_image(self, pixels, alpha=None):
        raise AssertionError("images are embedded beforehand in these tests")

    def encode_text(self, tokens):
        return torch.tensor([self.vectors[self.texts[int(t)]] for t in tokens])

    def depth_of(self, name):
        return None

    def text_parameters(self):
        return []

    def spec(self):
        return {}


class WrittenRegions:
    """A region bank whose embeddings are written down."""

    whole = True

    def __init__(self, encoder, images):
        self.encoder, self.images, self.key, self.asked = encoder, images, {"written": True}, []

    source = WholeImage()  # asked for nothing by phrase

    def embed(self, rows, asked):
        self.asked += [row["id"] for row in rows]
        return {id_: self.images[id_] for id_ in self.asked}


def angle(degrees):
    return [math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]


def image_of(*angles):
    """Regions at these angles, halves of a 2-pixel image for two, the whole image for one."""
    masks = np.zeros((len(angles) + 1, 1, 2), bool)
    masks[-1] = True
    for r in range(len(angles)):
        masks[r, 0, r : r + 1 if len(angles) > 1 else 2] = True
    regions = tuple(Region(f"r{r}", np.zeros(4, np.float32), None) for r in range(len(angles)))
    vectors = np.array([angle(a) for a in (*angles, 45)], np.float32)
    return RegionEmbeddings(regions, vectors, *partition(masks))


@pytest.fixture
def cascade():
    """Four images at 10°, 20°, 30°, 40° seen coarsely; the question lies at 0°, its phrases at 0° and 90°.

    K = 2 keeps `a` and `b`. Regions: a at 0° and 60°; b at 0° and 90°; c none; d at 45°.
    """
    ids = ["a", "b", "c", "d"]
    coarse = np.array([angle(a) for a in (10, 20, 30, 40)], np.float32)
    encoder = WrittenEncoder({"q": angle(0), "x": angle(0), "y": angle(90)})
    index = DenseIndex.build(ids, coarse, manifest={"encoder": "e", "fingerprint": "f", "corpus": "full"})
    bank = WrittenRegions(
        encoder, {"a": image_of(0, 60), "b": image_of(0, 90), "c": image_of(), "d": image_of(45)}
    )
    rows = {id_: {"id": id_, "caption": f"caption {id_}", "width": 2, "height": 1} for id_ in ids}

    def what(texts):
        return [[Phrase("p0", "x", (0, 1)), Phrase("p1", "y", (0, 1))] for _ in texts]

    def build(**options):
        return Cascade(
            Retriever(encoder, index), what, bank, rows, **{"num_candidates": 2, "fusion": "add"} | options
        )

    return build


def cos(degrees):
    return math.cos(math.radians(degrees))


def test_scores_by_hand(cascade):
    """S_global is the coarse cosine; each phrase takes its nearest region, half the image each, so α = ½.

    Image a: x → r0 (cos 0°), y → r1 (cos 30°). Image b: x → r0 (1), y → r1 (1). Eq. 5 uses the question at
    0° instead: a: ½ (1 + cos 60°), b: ½ (1 + cos 90°).
    """
    table = cascade().scores([Query("1", "q", gold_image_ids=("b",))])
    assert table.image_ids == ("a", "b") and table.rank.tolist() == [1, 2]
    assert table.global_ == pytest.approx([cos(10), cos(20)], abs=1e-6)
    assert table.region_ids == (("r0", "r1"), ("r0", "r1"))
    assert table.similarity == pytest.approx(np.array([[1, cos(30)], [1, 1]]), abs=1e-6)
    assert table.local == pytest.approx([(1 + cos(30)) / 2, 1], abs=1e-6)
    assert table.local_eq5 == pytest.approx([0.75, 0.5], abs=1e-5)
    assert table.is_gold.tolist() == [False, True] and table.negative.tolist() == [True, False]
    assert table.num_gold.tolist() == [1]


def test_golds_beyond_the_top_k_are_scored_but_not_ranked(cascade):
    """d and c are gold but outside the top 2: rows of rank −1 with cosines; `gone` is no image there."""
    query = Query("1", "q", gold_image_ids=("d", "c", "gone"))
    table = cascade().scores([query])
    assert table.image_ids == ("a", "b", "c", "d") and table.rank.tolist() == [1, 2, BEYOND, BEYOND]
    assert table.global_[2:] == pytest.approx([cos(30), cos(40)], abs=1e-6)
    assert table.local[2:] == pytest.approx(
        [0, cos(45)], abs=1e-6
    )  # c has no region; both phrases → d's only one
    assert table.num_gold.tolist() == [3]
    assert [i.candidate.image_id for i in cascade().retrieve([query])[0].images] == ["b", "a"]


@pytest.mark.parametrize(
    ("missing", "expected"), [("zero", 0.0), ("ignore", 0.0), ("full_mask", (cos(45) + cos(45)) / 2)]
)
def test_image_without_regions(cascade, missing, expected):
    """Nothing found follows the missing rule: no evidence, or the whole image (at 45°) for each phrase."""
    found = cascade(num_candidates=3, missing_phrase=missing, fusion="local")
    (evidence,) = found.retrieve([Query("1", "q")])
    scored = next(i for i in evidence.images if i.candidate.image_id == "c")
    assert scored.local_score == pytest.approx(expected, abs=1e-5)
    assert [r.id for r in scored.regions] == ([WHOLE, WHOLE] if missing == "full_mask" else [])


def test_evidence_carries_what_recomputes_it(cascade):
    """Order, captions, regions with their phrase, cosine and weight; the score is W_g S_g + W_l S_l + B."""
    fits = Calibrations(*[Calibration("ranking", 2.0, 3.0, 1.0)] * 3)
    (evidence,) = cascade(fusion="learned", calibrations=fits).retrieve([Query("1", "q")])
    assert [i.candidate.image_id for i in evidence.images] == ["b", "a"]  # S_local overrules S_global
    assert [i.candidate.rank for i in evidence.images] == [2, 1]
    for image in evidence.images:
        local = sum(r.scores["weight"] * r.scores["similarity"] for r in image.regions)
        assert image.local_score == pytest.approx(local)
        assert image.score == pytest.approx(2 * image.global_score + 3 * local + 1)
        assert [r.phrase_id for r in image.regions] == ["p0", "p1"]
        assert image.candidate.caption == f"caption {image.candidate.image_id}"


def test_only_candidates_are_looked_at_closely(cascade):
    """Regions are embedded for the top K alone."""
    found = cascade()
    found.scores([Query("1", "q"), Query("2", "q")])
    assert found.where.asked == ["a", "b"]


def test_equal_scores_put_the_larger_id_first(cascade):
    """The tie rule of trec_eval, also in what the user sees."""
    fits = Calibrations(*[Calibration("eq9", 0.0, 0.0, 0.0)] * 3)
    (evidence,) = cascade(fusion="eq9", calibrations=fits, num_candidates=4).retrieve([Query("1", "q")])
    assert [i.candidate.image_id for i in evidence.images] == ["d", "c", "b", "a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"fusion": "sum"}, "fusion `sum`: one of global"), ({"fusion": "learned"}, "needs a calibration")],
)
def test_impossible_settings_fail_at_once(cascade, options, message):
    """Before anything is computed."""
    with pytest.raises(ValueError, match=message):
        cascade(**options)


def test_whole_question_is_the_only_phrase():
    """The ablation "w/o what"."""
    (phrases,) = whole_question(["what is red ?"])
    assert [(p.text, p.span, p.kind) for p in phrases] == [("what is red ?", (0, 13), "whole_query")]


def test_importing_the_pipeline_is_light():
    """torch, faiss, spaCy and Lightning load when a stage runs, not before."""
    heavy = "('torch', 'faiss', 'spacy', 'lightning')"
    code = f"import sys, fovea.pipeline; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
