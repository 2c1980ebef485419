"""Boxes, polygons, run lengths → masks; mask → box, area, overlap, region weight (eq. 4), RGBA patch.

A mask is bool [H, W] of the EXIF-upright image, or its COCO run-length encoding (`RLE`, compressed). Alpha
is bool or float in [0, 1] everywhere, never 0..255 (PITFALLS 15). T = 0 regions is an ordinary case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
from pycocotools import mask as coco

from fovea.types import RLE, BoolArray, FloatArray, UInt8Array

_FAR = (
    1e6  # pixels; a coordinate beyond this is a fault of the file, and pycocotools' integers overflow on it
)


def encode(mask: BoolArray) -> RLE:
    """bool [H, W] → RLE."""
    if mask.ndim != 2 or mask.dtype != np.bool_:
        raise ValueError(f"a mask is bool [H, W]; got {mask.dtype} {list(mask.shape)}")
    rle: RLE = coco.encode(np.asfortranarray(mask.view(np.uint8)))
    return rle


def encode_labels(labels: np.ndarray[Any, np.dtype[np.int64]]) -> list[RLE]:
    """A segmentation int [H, W] with labels 0, 1, … → the RLE of each label, the largest included.

    Equal to `encode(labels == i)` for every i, at a cost of the number of runs instead of labels × pixels.
    """
    height, width = labels.shape
    size, count = labels.size, int(labels.max(initial=-1)) + 1
    columns = labels.T.ravel()
    starts = np.flatnonzero(np.diff(columns, prepend=-1))
    order = np.argsort(columns[starts], kind="stable")
    owner, starts, ends = columns[starts][order], starts[order], np.append(starts[1:], size)[order]
    first = np.searchsorted(owner, np.arange(count + 1))  # the runs of label i are first[i] … first[i + 1]
    before = np.where(np.diff(owner, prepend=-1) != 0, 0, np.roll(ends, 1))
    pairs = np.stack([starts - before, ends - starts], axis=1).ravel().tolist()  # gap, run, gap, run, …
    uncompressed = []
    for begin, end in zip(first[:-1], first[1:], strict=True):
        left = size - int(ends[end - 1]) if end > begin else size
        counts = pairs[2 * begin : 2 * end] + ([left] if left else [])
        uncompressed.append({"size": [height, width], "counts": counts})
    rles: list[RLE] = coco.frPyObjects(uncompressed, height, width) if uncompressed else []
    return rles


def decode(rle: RLE) -> BoolArray:
    """RLE → bool [H, W]."""
    mask: BoolArray = np.ascontiguousarray(coco.decode(rle)).view(np.bool_)  # its bytes are 0 and 1
    return mask


def decode_many(rles: Sequence[RLE], size: tuple[int, int] | None = None) -> BoolArray:
    """T RLEs of one image → bool [T, H, W], in about half of pycocotools' time for photographs.

    One bit is set where a run ends; the running parity of these bits, 64 at a time, is the mask.

    Args:
        rles: all of one size.
        size: (H, W) of the image; gives the result its shape when there is no region.

    Raises:
        ValueError: sizes differ, or run lengths are damaged (pycocotools would write past its buffer).
    """
    if not rles:
        return np.zeros((0, *(size or (0, 0))), np.bool_)
    sizes = {tuple(rle["size"]) for rle in rles} | ({size} if size else set())
    if len(sizes) > 1:
        raise ValueError(f"masks of one image have one size; got {sorted(sizes)}")
    height, width = sizes.pop()
    num_pixels, num_words = height * width, -(-height * width // 64)
    ends = []
    for t, runs in enumerate(_run_lengths([rle["counts"] for rle in rles])):
        if runs.min() < 0 or runs.sum() != num_pixels:
            raise ValueError(
                f"run lengths of mask {t} add up to {runs.sum()}, not to {height}×{width} pixels"
            )
        end = np.cumsum(runs)
        ends.append(end[end < num_pixels] + t * num_words * 64)
    bit = np.concatenate(ends)
    words = np.zeros((len(rles), num_words), np.uint64)
    if len(bit):
        word = bit >> 6
        first = np.concatenate([[0], np.flatnonzero(word[1:] != word[:-1]) + 1])
        ones = np.uint64(1) << (bit & 63).astype(np.uint64)
        words.reshape(-1)[word[first]] = np.bitwise_xor.reduceat(ones, first)
    for shift in (1, 2, 4, 8, 16, 32):
        words ^= words << np.uint64(shift)
    carry = np.bitwise_xor.accumulate((words >> np.uint64(63)).astype(np.bool_), axis=1)[:, :-1]
    words[:, 1:] ^= np.uint64(0) - carry.astype(np.uint64)
    little = words.astype("<u8", copy=False).view(np.uint8)
    pixels = np.unpackbits(little, axis=1, count=num_pixels, bitorder="little").view(np.bool_)
    columns = pixels.reshape(len(rles), width, height)
    masks = np.zeros((len(rles), height, width), np.bool_)
    # Turning columns into rows costs as much as decoding, so only what lies in a mask's box is turned.
    for mask, turned, box in zip(masks, columns, coco.toBbox(list(rles)).astype(int), strict=True):
        x, y, w, h = box
        mask[y : y + h, x : x + w] = turned[x : x + w, y : y + h].T
    return masks


def _run_lengths(counts: Sequence[bytes]) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """As `_uncompress`, of many strings at once."""
    chunks = np.frombuffer(b"".join(counts), np.uint8) - np.uint8(48)
    last = np.flatnonzero(chunks < 32)  # of each number
    ends = np.cumsum([len(text) for text in counts])
    if not all(counts) or (chunks > 63).any() or not np.isin(ends - 1, last, assume_unique=True).all():
        raise ValueError("damaged compressed run lengths")
    first = np.concatenate([[0], last[:-1] + 1])
    length = last - first + 1
    if length.max() > 7:  # 35 bits: more pixels than an image may have
        raise ValueError("damaged compressed run lengths")
    shift = 5 * (np.arange(len(chunks)) - np.repeat(first, length))
    values = np.add.reduceat((chunks & 31).astype(np.int64) << shift, first)
    values -= (chunks[last] >> 4 & 1).astype(np.int64) << 5 * length  # sign
    out = np.split(values, np.searchsorted(last, ends)[:-1])
    for runs in out:
        runs[1::2] = np.cumsum(runs[1::2])  # differences to the run two before
        runs[2::2] = np.cumsum(runs[2::2])
    return out


def from_polygons(polygons: Sequence[Sequence[float]], height: int, width: int) -> RLE:
    """Union of polygons [x0, y0, x1, y1, …] in pixels → RLE, as pycocotools draws them.

    A polygon of fewer than three points covers nothing and is left out: pycocotools would read one of two
    points as an x, y, width, height box.
    """
    drawn = []
    for polygon in polygons:
        if len(polygon) % 2 or not all(abs(value) < _FAR for value in polygon):
            raise ValueError(
                f"a polygon is an even number of finite coordinates in pixels; got {list(polygon)[:8]}…"
            )
        if len(polygon) >= 6:
            drawn.append(list(polygon))
    if not drawn:
        return encode(np.zeros((height, width), np.bool_))
    rle: RLE = coco.merge(coco.frPyObjects(drawn, height, width))
    return rle


def from_coco(segmentation: Any, height: int, width: int) -> RLE:
    """COCO's `segmentation` → RLE: polygons, uncompressed run lengths (crowds), or a compressed RLE."""
    if isinstance(segmentation, list):
        return from_polygons(segmentation, height, width)
    if not isinstance(segmentation, dict) or not {"size", "counts"} <= set(segmentation):
        raise ValueError(
            f"segmentation is a list of polygons or {{size, counts}}; got {str(segmentation)[:80]}"
        )
    if list(segmentation["size"]) != [height, width]:
        raise ValueError(
            f"segmentation of size {segmentation['size']} for an image of {[height, width]} (H, W)"
        )
    counts = segmentation["counts"]
    if isinstance(counts, list):
        runs = counts
    else:
        data = counts.encode() if isinstance(counts, str) else bytes(counts)
        runs = _uncompress(data)
    # pycocotools trusts the run lengths and writes past its buffer when they are wrong.
    if any(run < 0 for run in runs) or sum(runs) != height * width:
        pixels = f"{height}×{width} = {height * width}"
        told = f"add up to {sum(runs)} (smallest: {min(runs, default=0)})"
        raise ValueError(f"run lengths {told}; they must be at least 0 and cover {pixels} pixels")
    if isinstance(counts, list):
        rle: RLE = coco.frPyObjects({"size": [height, width], "counts": counts}, height, width)
        return rle
    return {"size": [height, width], "counts": data}


def _uncompress(data: bytes) -> list[int]:
    """Run lengths of COCO's compressed string: 5 bits a character, difference to the run two before."""
    runs: list[int] = []
    position = 0
    while position < len(data):
        value, shift, more = 0, 0, True
        while more:
            if position >= len(data):
                raise ValueError("the compressed run lengths end in the middle of a number")
            chunk = data[position] - 48
            if not 0 <= chunk < 64:
                raise ValueError(f"byte {data[position]} at {position} is none of a compressed RLE's")
            value |= (chunk & 31) << shift
            more = bool(chunk & 32)
            position, shift = position + 1, shift + 5
        if chunk & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
    return runs


def from_boxes(boxes: FloatArray, height: int, width: int) -> BoolArray:
    """float [T, 4] xyxy pixels → bool [T, H, W]; a pixel belongs to a box that covers its centre."""
    x, y = np.arange(width) + 0.5, np.arange(height) + 0.5
    inside_x = (x >= boxes[:, :1]) & (x < boxes[:, 2:3])
    inside_y = (y >= boxes[:, 1:2]) & (y < boxes[:, 3:4])
    return inside_y[:, :, None] & inside_x[:, None, :]


def to_box(mask: BoolArray | RLE) -> FloatArray:
    """Tight box float32 [4], xyxy pixels, right and bottom edge exclusive; zeros for an empty mask."""
    x, y, width, height = coco.toBbox(mask if isinstance(mask, dict) else encode(mask))
    return np.array([x, y, x + width, y + height], np.float32)


def area(rle: RLE) -> int:
    """Number of pixels of the mask."""
    return int(coco.area(rle))


def iou(left: Sequence[RLE], right: Sequence[RLE], *, iscrowd: Sequence[bool] | None = None) -> FloatArray:
    """Intersection over union, float32 [len(left), len(right)].

    Args:
        left: masks of one image.
        right: masks of the same image.
        iscrowd: per mask of `right`: divide by the area of `left` alone, COCO's rule for crowds.
    """
    if not left or not right:
        return np.zeros((len(left), len(right)), np.float32)
    flags = [int(flag) for flag in (iscrowd or [False] * len(right))]
    return np.asarray(coco.iou(list(left), list(right), flags), np.float32)


@overload
def union(masks: BoolArray) -> BoolArray: ...
@overload
def union(masks: Sequence[RLE]) -> RLE: ...
def union(masks: BoolArray | Sequence[RLE]) -> BoolArray | RLE:
    """bool [T, H, W] → bool [H, W], or several RLEs → one: the mask of a phrase that has several boxes."""
    if isinstance(masks, np.ndarray):
        merged: BoolArray = np.logical_or.reduce(masks, axis=0)
        return merged
    if not masks:
        raise ValueError("union of no RLE has no size; pass bool [0, H, W] or handle the case of no region")
    rle: RLE = coco.merge(list(masks))
    return rle


def region_weights(masks: BoolArray | FloatArray, *, normalise: bool = True, eps: float = 1e-6) -> FloatArray:
    """HuLiRAG eq. 4: α_k = mean_p [ m_k(p) / (Σ_l m_l(p) + ε) ], p over all pixels of the image.

    Every covered pixel gives one vote, shared by the masks that cover it. As printed the weights add up to
    the covered fraction of the image.

    Args:
        masks: bool or float in [0, 1], [T, H, W].
        normalise: divide by the sum, so that the weights add up to 1 as the paper claims.
        eps: ε.

    Returns:
        float32 [T]; empty for T = 0, all zeros when no mask has a pixel.
    """
    if len(masks) == 0:
        return np.zeros(0, np.float32)
    flat = masks.reshape(len(masks), -1).astype(np.float32)
    if not flat.shape[1]:
        return np.zeros(len(masks), np.float32)
    share = 1.0 / (flat.sum(axis=0, dtype=np.float64) + eps)
    alpha = flat @ share / flat.shape[1]
    total = alpha.sum()
    if normalise and total > 0:
        alpha = alpha / total
    weights: FloatArray = alpha.astype(np.float32)
    return weights


def region_view(
    image: UInt8Array,
    mask: BoolArray,
    *,
    background: Literal["remove", "keep"] = "remove",
    crop: bool = False,
    margin: float = 0.0,
    fill: tuple[int, int, int] = (0, 0, 0),
) -> tuple[UInt8Array, BoolArray]:
    """The RGBA patch Ĩ_k = I ⊙ m_k of METHOD.md 1.3, before the resize to the model's input.

    Args:
        image: uint8 [H, W, 3].
        mask: bool [H, W], the alpha.
        background: `remove` sets pixels outside the mask to `fill`; `keep` leaves them (Alpha-CLIP's habit).
        crop: cut the smallest square around the mask; what lies outside the image is `fill`, 0 in the mask.
        margin: the square grows by this fraction of its side on each edge.
        fill: RGB of removed pixels; the encoder's `transform.mean_pixel` makes them 0 after normalisation.

    Returns:
        image and mask of one size. An empty mask is not cropped.
    """
    if mask.shape != image.shape[:2]:
        raise ValueError(f"mask of {mask.shape} pixels for an image of {image.shape[:2]}: same size needed")
    colour = np.array(fill, np.uint8)
    if not crop or not mask.any():
        return (np.where(mask[..., None], image, colour) if background == "remove" else image), mask
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
    longest = max(bottom - top, right - left)
    side = longest + 2 * math.ceil(longest * margin)
    y, x = top - (side - (bottom - top)) // 2, left - (side - (right - left)) // 2
    y0, x0 = max(y, 0), max(x, 0)
    y1, x1 = min(y + side, mask.shape[0]), min(x + side, mask.shape[1])
    patch, alpha = np.broadcast_to(colour, (side, side, 3)).copy(), np.zeros((side, side), np.bool_)
    patch[y0 - y : y1 - y, x0 - x : x1 - x] = image[y0:y1, x0:x1]
    alpha[y0 - y : y1 - y, x0 - x : x1 - x] = mask[y0:y1, x0:x1]
    if background == "remove":  # after the cut: a photograph has far more pixels than its regions
        patch[~alpha] = colour
    return patch, alpha


def orient_masks(masks: BoolArray, exif_orientation: int) -> BoolArray:
    """Masks drawn on the pixels as stored → masks of the upright image.

    Args:
        masks: bool [..., H, W].
        exif_orientation: 1–8, as `images.decode_with_orientation` reports it.
    """
    if exif_orientation not in range(1, 9):
        raise ValueError(f"exif_orientation={exif_orientation}: 1 to 8")
    if exif_orientation >= 5:
        masks = masks.swapaxes(-1, -2)
    if exif_orientation in (2, 3, 6, 7):
        masks = masks[..., ::-1]
    if exif_orientation in (3, 4, 7, 8):
        masks = masks[..., ::-1, :]
    return np.ascontiguousarray(masks)


def orient_boxes(boxes: FloatArray, exif_orientation: int, height: int, width: int) -> FloatArray:
    """Boxes on the pixels as stored → boxes of the upright image.

    Args:
        boxes: float [T, 4], xyxy pixels of the stored image.
        exif_orientation: 1–8.
        height: of the stored image, pixels.
        width: of the stored image, pixels.
    """
    if exif_orientation not in range(1, 9):
        raise ValueError(f"exif_orientation={exif_orientation}: 1 to 8")
    x0, y0, x1, y1 = boxes.T
    if exif_orientation >= 5:
        x0, y0, x1, y1, height, width = y0, x0, y1, x1, width, height
    if exif_orientation in (2, 3, 6, 7):
        x0, x1 = width - x1, width - x0
    if exif_orientation in (3, 4, 7, 8):
        y0, y1 = height - y1, height - y0
    return np.stack([x0, y0, x1, y1], axis=1).astype(np.float32)
