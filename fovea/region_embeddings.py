"""Image + regions → an embedding of each region, and the cells that eq. 4 sums over.

Shapes: `R` regions of one image, `D` embedding width, `S` input side of the encoder, `C` cells of one image:
sets of pixels under the same regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fovea import masks
from fovea.images import ImageReader
from fovea.models.encoders import Encoder, embed_dtype
from fovea.types import BoolArray, FloatArray, Region, UInt8Array

Float64Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class View:
    """How a region is shown to the local encoder (METHOD.md 1.3); must be the view it was trained on.

    Attributes:
        background: `remove` takes away what is outside the mask, the paper's I ⊙ m; `keep` passes the mask
            as alpha only.
        crop: cut the square around the region, so that a small one fills the input.
        margin: the crop grows by this share of its side on every edge.
        fill: what a removed pixel becomes: the encoder's `mean`, 0 in its normalised input, or `black`. On
            the embedded world a CLIP that never saw black surroundings named 16 % of the exact regions on
            black, 96 % on the mean.
    """

    background: Literal["remove", "keep"] = "remove"
    crop: bool = False
    margin: float = 0.1
    fill: Literal["mean", "black"] = "mean"


@dataclass(frozen=True, eq=False)
class RegionEmbeddings:
    """Everything that grounding needs of one image.

    Attributes:
        regions: the R regions.
        vectors: float32 [R + 1, D], unit length; the last row is the whole image under a full mask, or zero
            where nobody asked for it.
        cells: bool [C, R + 1], which regions cover the pixels of each cell; the last column is True.
        areas: float64 [C], share of the image's pixels in each cell, summing to 1.
    """

    regions: tuple[Region, ...]
    vectors: FloatArray
    cells: BoolArray
    areas: Float64Array


def partition(masks_RHW: BoolArray) -> tuple[BoolArray, Float64Array]:
    """Split an image into cells of pixels that lie under the same masks.

    Eq. 4 for any choice of regions then costs a sum over cells instead of one over pixels, and is exact.

    Returns:
        bool [C, R] and float64 [C], the share of the pixels in each cell.
    """
    flat = masks_RHW.reshape(len(masks_RHW), int(np.prod(masks_RHW.shape[1:])))
    label = np.zeros(flat.shape[1], np.int64)
    for r, mask in enumerate(flat):
        label = 2 * label + mask
        if r % 32 == 31:  # renumber before 64 bits run out
            label = np.unique(label, return_inverse=True)[1]
    _, first, count = np.unique(label, return_index=True, return_counts=True)
    return np.ascontiguousarray(flat[:, first].T), count / flat.shape[1]


def region_masks(regions: Sequence[Region], height: int, width: int) -> BoolArray:
    """Masks bool [R, H, W]; a region known by its box alone is its box."""
    sizes = {tuple(region.mask["size"]) for region in regions if region.mask is not None}
    if sizes - {(height, width)}:
        raise ValueError(f"masks of size {sorted(sizes)} (H, W) for an upright image of {(height, width)}")
    out = np.zeros((len(regions), height, width), bool)
    for r, region in enumerate(regions):
        if region.mask is None:
            out[r] = masks.from_boxes(region.box[None], height, width)[0]
        else:
            out[r] = masks.decode(region.mask)
    return out


class _Work(NamedTuple):
    """One image on its way through the encoder."""

    id: str
    cells: BoolArray
    areas: Float64Array
    pixels: UInt8Array  # [R + 1, S, S, 3]
    alpha: UInt8Array  # [R + 1, 1, S, S]


def embed_regions(
    encoder: Encoder,
    images: Iterable[tuple[Mapping[str, Any], Sequence[Region]]],
    reader: ImageReader,
    *,
    view: View,
    whole: bool = True,
    batch_size: int = 256,
) -> Iterator[tuple[str, FloatArray, BoolArray, Float64Array]]:
    """Embed every region of some images, and each image under a full mask, all together.

    Args:
        encoder: in evaluation mode.
        images: rows of the images table with their regions; their crops are held at once (see `pack`).
        reader: gives the pixels; a bad image raises, since the coarse stage found it.
        view: how a region is shown.
        whole: embed the image under a full mask as well; else its row is zero.
        batch_size: crops a forward pass.

    Yields:
        image id, vectors [R + 1, D], cells [C, R + 1], areas [C] (see `RegionEmbeddings`).
    """
    work = [_prepare(encoder, row, regions, reader, view, whole) for row, regions in images]
    yield from _encode(encoder, work, batch_size, whole)


def _prepare(
    encoder: Encoder,
    row: Mapping[str, Any],
    regions: Sequence[Region],
    reader: ImageReader,
    view: View,
    whole: bool,
) -> _Work:
    """Cells and crops of one image."""
    image = reader.read(dict(row))
    height, width = image.shape[:2]
    region_mask = np.concatenate([region_masks(regions, height, width), np.ones((1, height, width), bool)])
    shown = [_show(encoder, image, mask, view) for mask in (region_mask if whole else region_mask[:-1])]
    side = encoder.transform.size
    return _Work(
        row["id"],
        *partition(region_mask),
        np.array([p for p, _ in shown], np.uint8).reshape(-1, side, side, 3),
        np.array([a for _, a in shown], np.uint8).reshape(-1, 1, side, side),
    )


def _show(encoder: Encoder, image: UInt8Array, mask: BoolArray, view: View) -> tuple[UInt8Array, UInt8Array]:
    # A full mask is the whole image, whatever the view: no margin around it.
    fill = encoder.transform.mean_pixel if view.fill == "mean" else (0, 0, 0)
    patch, alpha = masks.region_view(
        image,
        mask,
        background=view.background,
        crop=view.crop and not mask.all(),
        margin=view.margin,
        fill=fill,
    )
    return encoder.transform(patch, alpha[None])


def _encode(
    encoder: Encoder, work: Sequence[_Work], batch_size: int, whole: bool
) -> Iterator[tuple[str, FloatArray, BoolArray, Float64Array]]:
    import torch

    device, dtype = encoder.logit_scale.device, embed_dtype(encoder)
    pixels = np.concatenate([item.pixels for item in work])
    alpha = np.concatenate([item.alpha for item in work])
    parts = [np.zeros((0, encoder.embed_dim), np.float32)]
    with torch.inference_mode():
        for start in range(0, len(pixels), batch_size):
            shown = encoder.transform.normalise(
                torch.from_numpy(pixels[start : start + batch_size]).to(device)
            ).to(dtype)
            where = torch.from_numpy(alpha[start : start + batch_size]).to(device, dtype)
            parts.append(encoder.encode_image(shown, where).float().cpu().numpy())
    vectors = np.concatenate(parts)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    ends = np.cumsum([len(item.pixels) for item in work])
    for item, end in zip(work, ends, strict=True):
        own = slice(end - len(item.pixels), end)
        if not np.isfinite(lengths[own]).all() or not (lengths[own] > 0).all():
            raise ValueError(
                f"image {item.id}: a region's embedding is NaN, infinite or zero; check the weights"
            )
        unit = vectors[own] / lengths[own]
        if not whole:
            unit = np.concatenate([unit, np.zeros((1, encoder.embed_dim), np.float32)])
        yield item.id, unit, item.cells, item.areas
