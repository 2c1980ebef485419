"""Images and masks → inline SVG: every picture embedded once, outlines over it in its own pixels."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from fovea import masks
from fovea.types import BoolArray, UInt8Array

# Pictures up to this side are kept as they are and shown with hard pixel edges; larger ones are scaled down.
CRISP_SIDE = 160
PHOTO_SIDE = 360
# Outlines are traced at no more than this side: finer ones only make the page larger.
OUTLINE_SIDE = 200


@dataclass(frozen=True)
class Picture:
    """One embedded image.

    Attributes:
        key: its id in the page.
        width: of the EXIF-upright original, pixels; the coordinate system of everything drawn over it.
        height: likewise.
        uri: `data:` URI.
        crisp: show hard pixel edges when enlarged.
    """

    key: str
    width: int
    height: int
    uri: str
    crisp: bool


@dataclass(frozen=True)
class Outline:
    """What a region looks like over its picture.

    Attributes:
        path: SVG path data; empty for an empty mask.
        scale: (x, y) factor from path units to the original's pixels.
        label: for screen readers and tooltips.
        colour: index of the phrase's colour.
        again: an earlier phrase chose the same region; drawn in dashes, so that both colours are seen.
    """

    path: str
    scale: tuple[float, float]
    label: str
    colour: int
    again: bool = False


def picture(key: str, pixels: UInt8Array, *, side: int = PHOTO_SIDE) -> Picture:
    """Embed uint8 [H, W, 3]: small ones as PNG without loss, photographs as JPEG of at most `side` pixels."""
    height, width = pixels.shape[:2]
    crisp = max(height, width) <= CRISP_SIDE
    image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    if crisp:
        image.save(buffer, "PNG", optimize=True)
    else:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        image.save(buffer, "JPEG", quality=82)
    kind = "png" if crisp else "jpeg"
    data = base64.b64encode(buffer.getvalue()).decode()
    return Picture(key, width, height, f"data:image/{kind};base64,{data}", crisp)


def outline(region: dict[str, Any], label: str, colour: int, *, side: int = OUTLINE_SIDE) -> Outline:
    """The outline of a region of queries.jsonl: its mask (`rle`), or its `box` when it has no mask.

    A mask is traced at no more than `side` pixels.
    """
    rle = region.get("rle")
    if rle is None:
        left, top, right, bottom = (float(value) for value in region["box"])
        path = f"M{left:.1f} {top:.1f}H{right:.1f}V{bottom:.1f}H{left:.1f}z"
        return Outline(path, (1.0, 1.0), label, colour)
    mask = masks.decode(rle)
    height, width = mask.shape
    factor = max(1.0, max(height, width) / side)
    if factor > 1:
        size = max(1, round(width / factor)), max(1, round(height / factor))
        grey = Image.fromarray(mask.astype(np.uint8) * 255).resize(size, Image.Resampling.BOX)
        mask = np.asarray(grey) >= 128
    return Outline(trace(mask), (width / mask.shape[1], height / mask.shape[0]), label, colour)


def mark_repeats(outlines: list[Outline]) -> list[Outline]:
    """The same outlines, `again` set on each whose path and place an earlier one has."""
    seen: set[tuple[str, tuple[float, float]]] = set()
    out = []
    for item in outlines:
        out.append(replace(item, again=(item.path, item.scale) in seen))
        seen.add((item.path, item.scale))
    return out


def trace(mask: BoolArray) -> str:
    """SVG path along the pixel edges of bool [H, W]; holes run the other way round, so that they stay empty.

    A 2×1 mask at the origin gives `M0 0h2v1h-2z`.
    """
    padded = np.pad(mask, 1)
    inside = padded[1:-1, 1:-1]
    # Directed edges with the mask on their right hand: start point → end points.
    following: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for neighbour, start, end in (
        (padded[:-2, 1:-1], (0, 0), (1, 0)),  # top, to the right
        (padded[1:-1, 2:], (1, 0), (1, 1)),  # right, down
        (padded[2:, 1:-1], (1, 1), (0, 1)),  # bottom, to the left
        (padded[1:-1, :-2], (0, 1), (0, 0)),  # left, up
    ):
        for y, x in np.argwhere(inside & ~neighbour).tolist():
            following.setdefault((x + start[0], y + start[1]), []).append((x + end[0], y + end[1]))
    loops = []
    for first in sorted(following):
        while following.get(first):
            loop, point = [first], following[first].pop()
            while point != first:
                loop.append(point)
                point = following[point].pop()
            loops.append(loop)
    return "".join(map(_path, loops))


def _path(loop: list[tuple[int, int]]) -> str:
    """One closed loop as relative moves, straight runs merged."""
    moves: list[list[int]] = []
    for (x0, y0), (x1, y1) in zip(loop, [*loop[1:], loop[0]], strict=True):
        step = [x1 - x0, y1 - y0]
        if moves and (moves[-1][0] == 0) == (step[0] == 0):
            moves[-1] = [moves[-1][0] + step[0], moves[-1][1] + step[1]]
        else:
            moves.append(step)
    # The last side is drawn by z when it is straight.
    parts = [f"h{dx}" if dx else f"v{dy}" for dx, dy in moves[:-1]]
    return f"M{loop[0][0]} {loop[0][1]}{''.join(parts)}z"
