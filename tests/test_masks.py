"""Masks agree with pycocotools' own results exactly; eq. 4 by hand; views and turns keep mask and pixels
together.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco

from fovea import masks


@pytest.fixture(scope="module")
def oracles(shared_data: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((shared_data / "coco_mask_oracles.json").read_text())
    return data


@pytest.fixture(scope="module")
def instances(shared_data: Path) -> dict[str, Any]:
    path = shared_data / "photos/coco_mini_train2017/annotations/instances_train2017.json"
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@pytest.fixture(scope="module")
def annotations(instances: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in instances["annotations"]}


def test_oracles(oracles: dict[str, Any], annotations: dict[int, dict[str, Any]]) -> None:
    """24 COCO annotations (polygons and crowds): counts, area, bbox and mask hash equal pycocotools'
    exactly.
    """
    assert {case["kind"] for case in oracles["masks"]} >= {"crowd RLE"} and len(oracles["masks"]) == 24
    for case in oracles["masks"]:
        height, width = case["size"]
        rle = masks.from_coco(annotations[case["ann_id"]]["segmentation"], height, width)
        mask = masks.decode(rle)
        assert rle["counts"].decode() == case["rle_counts"] and masks.area(rle) == case["area"] == mask.sum()
        assert hashlib.sha256(mask.astype(np.uint8).tobytes()).hexdigest() == case["mask_sha256"]
        x, y, w, h = case["bbox_xywh"]
        assert masks.to_box(mask).tolist() == masks.to_box(rle).tolist() == [x, y, x + w, y + h]
        assert masks.encode(mask) == {"size": [height, width], "counts": case["rle_counts"].encode()}
        assert masks.from_coco({"size": case["size"], "counts": case["rle_counts"]}, height, width) == rle


def test_iou_oracle(
    oracles: dict[str, Any], instances: dict[str, Any], annotations: dict[int, dict[str, Any]]
) -> None:
    """The 14 × 14 IoU matrix of one photo equals pycocotools' to its six printed digits."""
    case = oracles["iou"]
    photo = next(row for row in instances["images"] if row["id"] == case["image_id"])
    height, width = photo["height"], photo["width"]
    rles = [masks.from_coco(annotations[i]["segmentation"], height, width) for i in case["ann_ids"]]
    assert np.abs(masks.iou(rles, rles) - np.array(case["mask_iou"])).max() <= 5.1e-7
    assert masks.iou([], rles).shape == (0, 14)


def test_many_masks_and_no_mask() -> None:
    """T = 0 keeps the image's size; masks of two sizes are refused."""
    rng = np.random.default_rng(0)
    stack = rng.random((5, 7, 11)) < 0.4
    rles = [masks.encode(mask) for mask in stack]
    assert np.array_equal(masks.decode_many(rles), stack)
    assert masks.decode_many([], (7, 11)).shape == (0, 7, 11)
    with pytest.raises(ValueError, match="one size"):
        masks.decode_many([*rles, masks.encode(np.ones((2, 2), bool))])
    assert np.array_equal(masks.union(stack), stack.any(0))
    assert np.array_equal(masks.decode(masks.union(rles)), stack.any(0))
    with pytest.raises(ValueError, match=r"bool \[H, W\]"):
        masks.encode(np.ones((2, 2), np.uint8))  # type: ignore[arg-type]


def test_degenerate_polygons() -> None:
    """Fewer than three points cover nothing: pycocotools alone would read [1, 1, 5, 5] as a box of 25
    pixels.
    """
    square = [2.0, 2.0, 6.0, 2.0, 6.0, 6.0, 2.0, 6.0]
    assert masks.area(masks.from_polygons([square], 10, 10)) == 16
    assert masks.area(masks.from_polygons([[1, 1, 5, 5], square, [3, 3]], 10, 10)) == 16
    assert masks.area(masks.from_polygons([[1, 1, 5, 5]], 10, 10)) == 0
    assert masks.area(masks.from_polygons([], 10, 10)) == 0
    for bad in ([1, 2, 3, 4, 5], [0, 0, float("nan"), 1, 2, 2], [0, 0, 1e12, 1, 2, 2]):
        with pytest.raises(ValueError, match="even number of finite"):
            masks.from_polygons([bad], 10, 10)


_BAD_RLE = [
    ({"size": [4, 4], "counts": [3, 14]}, "add up to 17"),
    ({"size": [4, 4], "counts": [3, -3, 16]}, "-3"),
    ({"size": [4, 5], "counts": [20]}, "size"),
    ({"size": [4, 4], "counts": "0"}, "add up to 0"),
    ({"size": [4, 4], "counts": "\x01\x02"}, "none of a compressed RLE"),
    ({"size": [4, 4], "counts": "P"}, "end in the middle"),
    ({"size": [4, 4]}, "list of polygons or"),
    ("abc", "list of polygons or"),
]


@pytest.mark.parametrize("segmentation,reason", _BAD_RLE)
def test_wrong_run_lengths_are_refused(segmentation: Any, reason: str) -> None:
    """pycocotools writes past its buffer on run lengths that do not fit; we say what is wrong before it
    sees them.
    """
    with pytest.raises(ValueError, match=reason):
        masks.from_coco(segmentation, 4, 4)


def test_boxes_to_masks() -> None:
    """A box covers the pixels whose centres lie in it: x 1–3, y 0–2 are 2 × 2 pixels; half pixels round by
    centre.
    """
    boxes = np.array([[1, 0, 3, 2], [0.4, 0.4, 1.6, 1.4], [3, 3, 3, 3]], np.float32)
    found = masks.from_boxes(boxes, 4, 5)
    assert found.sum((1, 2)).tolist() == [4, 2, 0]
    assert masks.to_box(found[0]).tolist() == [1, 0, 3, 2]
    assert masks.to_box(found[2]).tolist() == [0, 0, 0, 0]
    assert masks.from_boxes(np.zeros((0, 4), np.float32), 4, 5).shape == (0, 4, 5)


def test_eq4_by_hand() -> None:
    """Four pixels; m_1 covers pixels 0, 1 and m_2 covers 1, 2; pixel 3 is bare.

    As printed: α_1 = (1 + 1/2) / 4 = 0.375 = α_2; they add up to the covered 3/4. Normalised: 0.5 each. With
    m_2 covering pixel 1 alone: α_1 = (1 + 1/2) / 4 = 0.375, α_2 = (1/2) / 4 = 0.125, normalised 0.75 and
    0.25.
    """
    pair = np.array([[[1, 1, 0, 0]], [[0, 1, 1, 0]]], bool)
    assert np.allclose(masks.region_weights(pair, normalise=False), [0.375, 0.375], atol=1e-6)
    assert np.allclose(masks.region_weights(pair), [0.5, 0.5], atol=1e-6)
    inner = np.array([[[1, 1, 0, 0]], [[0, 1, 0, 0]]], bool)
    assert np.allclose(masks.region_weights(inner, normalise=False), [0.375, 0.125], atol=1e-6)
    assert np.allclose(masks.region_weights(inner), [0.75, 0.25], atol=1e-6)


def test_eq4_soft_empty_and_absent_masks() -> None:
    """Float masks share fractionally (0.2 against 0.6 → 1/4, 3/4); an empty mask weighs 0; none gives
    none; never NaN.
    """
    soft = np.stack([np.full((3, 3), 0.2), np.full((3, 3), 0.6)]).astype(np.float32)
    assert np.allclose(masks.region_weights(soft, normalise=False), [0.25, 0.75], atol=1e-5)
    one_empty = np.stack([np.ones((3, 3), bool), np.zeros((3, 3), bool)])
    assert np.allclose(masks.region_weights(one_empty), [1, 0])
    for empty in (np.zeros((2, 3, 3), bool), np.zeros((2, 0, 3), bool)):
        assert masks.region_weights(empty).tolist() == [0, 0]
    assert masks.region_weights(np.zeros((0, 3, 3), bool)).shape == (0,)


def test_eq4_equals_the_formula_on_random_masks() -> None:
    """On random overlapping masks the weights equal the printed double loop; normalised ones add up to 1."""
    stack = np.random.default_rng(1).random((4, 6, 5)) < 0.5
    expected = [
        np.mean([[stack[k, y, x] / (stack[:, y, x].sum() + 1e-6) for x in range(5)] for y in range(6)])
        for k in range(4)
    ]
    assert np.allclose(masks.region_weights(stack, normalise=False), expected, atol=1e-6)
    assert abs(float(masks.region_weights(stack).sum()) - 1) < 1e-6


def test_region_view() -> None:
    """A 2 × 4 mask in a 6 × 8 image: cropped to its 4 × 4 square; background zero or kept; a margin of 1/4
    adds 1.
    """
    image = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3) + 50
    mask = np.zeros((6, 8), bool)
    mask[2:4, 3:7] = True
    removed, alpha = masks.region_view(image, mask)
    assert np.array_equal(removed, image * mask[..., None]) and np.array_equal(alpha, mask)
    kept, _ = masks.region_view(image, mask, background="keep")
    assert np.array_equal(kept, image)
    patch, alpha = masks.region_view(image, mask, background="keep", crop=True)
    assert np.array_equal(patch, image[1:5, 3:7]) and np.array_equal(alpha, mask[1:5, 3:7])
    patch, alpha = masks.region_view(image, mask, crop=True, margin=0.25)
    assert patch.shape == (6, 6, 3) and alpha.sum() == 8
    assert np.array_equal(patch > 0, alpha[..., None].repeat(3, 2))


@pytest.mark.parametrize("corner", [(0, 0), (0, 7), (5, 0), (5, 7)])
def test_region_view_at_the_border(corner: tuple[int, int]) -> None:
    """A square that leaves the image is padded with zeros in image and mask; the object keeps all its
    pixels.
    """
    image, mask = np.full((6, 8, 3), 9, np.uint8), np.zeros((6, 8), bool)
    mask[corner] = True
    patch, alpha = masks.region_view(image, mask, background="keep", crop=True, margin=2.0)
    assert patch.shape == (5, 5, 3) and alpha.sum() == 1 and alpha[2, 2]
    assert (patch[..., 0] == 9).sum() == 9


def test_region_view_of_nothing() -> None:
    """An empty mask is no crash: no crop, an all-zero patch and alpha."""
    patch, alpha = masks.region_view(np.ones((4, 5, 3), np.uint8), np.zeros((4, 5), bool), crop=True)
    assert patch.shape == (4, 5, 3) and not patch.any() and not alpha.any()
    with pytest.raises(ValueError, match="same size"):
        masks.region_view(np.ones((4, 5, 3), np.uint8), np.zeros((5, 4), bool))


# What EXIF says of the stored first row and first column: where they are in the upright picture.
_STORED_CORNER = {1: "TL", 2: "TR", 3: "BR", 4: "BL", 5: "TL", 6: "TR", 7: "BR", 8: "BL"}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turns(orientation: int) -> None:
    """The stored pixel (0, 0) lands in the corner that the EXIF standard names, and boxes turn like masks."""
    stack = np.zeros((2, 4, 6), bool)
    stack[0, 0, 0] = True
    stack[1, 1:3, 2:6] = True
    turned = masks.orient_masks(stack, orientation)
    assert turned.shape == ((2, 4, 6) if orientation < 5 else (2, 6, 4))
    y, x = np.argwhere(turned[0])[0]
    corner = ("T" if y == 0 else "B") + ("L" if x == 0 else "R")
    assert corner == _STORED_CORNER[orientation]
    boxes = np.stack([masks.to_box(mask) for mask in stack])
    expected = [masks.to_box(mask).tolist() for mask in turned]
    assert masks.orient_boxes(boxes, orientation, 4, 6).tolist() == expected
    with pytest.raises(ValueError, match="1 to 8"):
        masks.orient_masks(stack, 9)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (7, 5), (40, 30)])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_labels_become_their_masks(shape, count):
    """Every label of a random segmentation, also one without a pixel, equals encoding its mask."""
    labels = np.random.default_rng(count).integers(0, count, shape)
    labels[labels == 3] = 4
    expected = [masks.encode(labels == i) for i in range(labels.max() + 1)]
    assert masks.encode_labels(labels) == expected
    blocks = np.kron(labels, np.ones((3, 4), int))  # longer runs, of whole columns
    assert masks.encode_labels(blocks) == [masks.encode(blocks == i) for i in range(labels.max() + 1)]


def test_decoded_masks_are_contiguous_and_whole():
    """Empty, full, one pixel in a corner, a box that touches every edge."""
    drawn = np.zeros((5, 6, 7), bool)
    drawn[1] = True
    drawn[2, 0, 6] = drawn[3, 5, 0] = True
    drawn[4, [0, 5, 2, 3], [3, 2, 0, 6]] = True
    got = masks.decode_many([masks.encode(mask) for mask in drawn])
    np.testing.assert_array_equal(got, drawn)
    assert got.flags.c_contiguous and masks.decode(masks.encode(drawn[4])).flags.c_contiguous


def test_many_masks_equal_pycocotools():
    """Random sizes, also beyond 64-bit words, densities, zero-length runs: bit for bit what pycocotools says;
    damaged run lengths are refused instead of writing past a buffer.
    """
    rng = np.random.default_rng(0)
    for _ in range(200):
        shape = tuple(rng.choice([1, 3, 8, 17, 64], 2))
        drawn = rng.random((rng.integers(1, 5), *shape)) < rng.choice([0, 0.02, 0.5, 0.98, 1])
        np.testing.assert_array_equal(masks.decode_many([masks.encode(mask) for mask in drawn]), drawn)
    odd = coco.frPyObjects({"size": [8, 8], "counts": [0, 0, 0, 10, 0, 4, 50, 0]}, 8, 8)
    np.testing.assert_array_equal(masks.decode_many([odd])[0], coco.decode(odd).astype(bool))
    for counts in (b"", b"000", b"abcdefghijkl", b"\xff", masks.encode(np.ones((8, 9), bool))["counts"]):
        with pytest.raises(ValueError, match="run lengths"):
            masks.decode_many([{"size": [8, 8], "counts": counts}])
