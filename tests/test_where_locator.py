"""fovea.where.Locator and union: boxes of many phrases, one look by the segmenter, nothing found."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fovea import masks, where
from fovea.models import segmenters
from fovea.models.detectors import Detection
from fovea.models.grounding_dino import GroundingDino
from fovea.types import Region
from fovea.where import Locator, union

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import random_models  # noqa: E402

IMAGE = np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)


class Told:
    """A detector that finds what it is told."""

    key, joint = "told", False

    def __init__(self, boxes):
        self.boxes = boxes

    def detect(self, image, phrases):
        out = []
        for phrase in phrases:
            boxes = np.array(self.boxes.get(phrase, []), np.float32).reshape(-1, 4)
            out.append(Detection(boxes, np.linspace(0.9, 0.5, len(boxes), dtype=np.float32)))
        return out


class Boxes:
    """A segmenter whose masks are the boxes; counts its calls."""

    key = "boxes"

    def __init__(self):
        self.calls = []

    def segment(self, image, boxes_K4):
        self.calls.append(len(boxes_K4))
        return masks.from_boxes(boxes_K4, *image.shape[:2])


FOUND = {"man": [[0, 0, 40, 30], [10, 10, 20, 20]], "dog": [[50, 30, 80, 60]]}


def test_regions_by_phrase():
    """Two boxes, none, one: each phrase keeps its own, in order, and the segmenter is called once."""
    segmenter = Boxes()
    got = Locator(Told(FOUND), segmenter).locate(IMAGE, ["man", "sign", "dog"])
    assert [[r.id for r in own] for own in got] == [["r0", "r1"], [], ["r0"]]
    assert segmenter.calls == [3]
    for phrase, own in zip(["man", "sign", "dog"], got, strict=True):
        for region, box in zip(own, FOUND.get(phrase, []), strict=True):
            assert region.label == phrase and region.phrase_id is None
            assert region.box.tolist() == box == masks.to_box(region.mask).tolist()
    assert [round(r.scores["detector"], 6) for r in got[0]] == [0.9, 0.5]


def test_nothing_found():
    """PITFALLS 12: no phrase, no box: empty lists, and the segmenter never sees the image."""
    segmenter = Boxes()
    locator = Locator(Told({}), segmenter)
    assert locator.locate(IMAGE, []) == []
    assert locator.locate(IMAGE, ["man", "dog"]) == [[], []]
    assert segmenter.calls == []


def test_without_a_segmenter():
    """Boxes only: the masks are None, the key is the detector's."""
    locator = Locator(Told(FOUND))
    assert [r.mask for own in locator.locate(IMAGE, ["man", "dog"]) for r in own] == [None] * 3
    assert locator.key == "told" and not locator.joint
    assert Locator(Told(FOUND), Boxes()).key == "told+boxes"


def test_large_images_go_in_parts(monkeypatch):
    """Masks beyond the bound are made in several parts; the regions are the same."""
    expected = Locator(Told(FOUND), Boxes()).locate(IMAGE, ["man", "dog"])
    monkeypatch.setattr(where, "_MAX_PIXELS", 2 * 60 * 80)
    segmenter = Boxes()
    got = Locator(Told(FOUND), segmenter).locate(IMAGE, ["man", "dog"])
    assert segmenter.calls == [2, 1]
    assert [[r.mask for r in own] for own in got] == [[r.mask for r in own] for own in expected]


@pytest.mark.parametrize("prompt", ["single", "joint"])
def test_real_models(tmp_path, prompt, monkeypatch):
    """GroundingDINO and SAM: the masks of the boxes, one embedding for all phrases; one pixel, a strip."""
    detector = GroundingDino(random_models.grounding_dino(tmp_path / "dino", tiny=True), prompt=prompt)
    sam = segmenters.load(random_models.official_sam(tmp_path / "sam.pth", tiny=True))
    locator = Locator(detector, sam)
    assert locator.key == f"{detector.key}+{sam.key}" and locator.joint == (prompt == "joint")
    embedded = []
    embed = sam._embed
    monkeypatch.setattr(sam, "_embed", lambda image: embedded.append(image.shape) or embed(image))
    phrases = ["a man", "", "the white dog"]
    got = locator.locate(IMAGE, phrases)
    assert len(embedded) == 1 and got[1] == [] and got[0] and got[2]
    for own, expected in zip(got, detector.detect(IMAGE, phrases), strict=True):
        boxes = np.array([r.box for r in own]).reshape(-1, 4)
        np.testing.assert_array_equal(boxes, expected.boxes)
        made = masks.decode_many([r.mask for r in own], (60, 80))
        np.testing.assert_array_equal(made, sam.segment(IMAGE, boxes))
    for shape in [(1, 1), (3000, 2), (1, 9000)]:
        assert len(locator.locate(np.zeros((*shape, 3), np.uint8), phrases)) == 3


def region(id_, box, mask=True, **scores):
    rle = masks.encode(masks.from_boxes(np.array([box], np.float32), 10, 10)[0]) if mask else None
    return Region(id_, np.array(box, np.float32), rle, label="man", scores=scores)


def test_union_by_hand():
    """2 × 2 and 3 × 3 pixels that share one: 12 pixels, the box around both, the higher score."""
    got = union([region("r0", [0, 0, 2, 2], detector=0.5), region("r1", [1, 1, 4, 4], detector=0.75)])
    assert masks.area(got.mask) == 12 and got.box.tolist() == [0, 0, 4, 4]
    assert (got.id, got.label, got.scores) == ("r0", "man", {"detector": 0.75})


def test_union_of_few():
    """None of nothing, the region itself of one; boxes without masks; an empty mask; masks of two sizes."""
    one = region("r0", [0, 0, 2, 2])
    assert union([]) is None and union([one]) is one
    bare = region("r1", [5, 5, 6, 6], mask=False)
    assert union([one, bare]).mask is None and union([one, bare]).box.tolist() == [0, 0, 6, 6]
    empty = Region("r2", one.box, masks.encode(np.zeros((10, 10), bool)))
    assert union([empty, one]).mask == one.mask
    other = Region("r3", one.box, masks.encode(np.ones((3, 4), bool)))
    with pytest.raises(ValueError, match=r"masks of one image have one size; got \[\[10, 10\], \[3, 4\]\]"):
        union([one, other])
