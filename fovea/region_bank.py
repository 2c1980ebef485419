"""Image → region embeddings, made once, independent of any query, and kept on disk.

Shapes: `R` regions of one image, `D` embedding width, `C` cells of one image: sets of pixels under the same
regions.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from fovea import masks
from fovea.digests import Digests
from fovea.images import ImageReader
from fovea.models.encoders import Encoder
from fovea.region_sources import GroundedRegions, Prompts, RegionSource, StoredRegions
from fovea.types import BoolArray, FloatArray, Region, UInt8Array

Float64Array = np.ndarray[Any, np.dtype[np.float64]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


FORMAT = 2  # of the cache: 2 names rows by the bytes of the image and the regions


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
    """Embed every region of every image, and each image under a full mask; batches run across images.

    Args:
        encoder: in evaluation mode.
        images: rows of the images table with their regions.
        reader: gives the pixels; a bad image raises, since the coarse stage found it.
        view: how a region is shown.
        whole: embed the image under a full mask as well; else its row is zero.
        batch_size: crops a forward pass.

    Yields:
        image id, vectors [R + 1, D], cells [C, R + 1], areas [C] (see `RegionEmbeddings`).
    """
    pending: list[_Work] = []
    num = 0
    for row, regions in images:
        image = reader.read(dict(row))
        height, width = image.shape[:2]
        region_mask = np.concatenate(
            [region_masks(regions, height, width), np.ones((1, height, width), bool)]
        )
        shown = [_show(encoder, image, mask, view) for mask in (region_mask if whole else region_mask[:-1])]
        side = encoder.transform.size
        work = _Work(
            row["id"],
            *partition(region_mask),
            np.array([p for p, _ in shown], np.uint8).reshape(-1, side, side, 3),
            np.array([a for _, a in shown], np.uint8).reshape(-1, 1, side, side),
        )
        if pending and num + len(shown) > batch_size:
            yield from _encode(encoder, pending, batch_size, whole)
            pending, num = [], 0
        pending.append(work)
        num += len(shown)
    if pending:
        yield from _encode(encoder, pending, batch_size, whole)


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

    device = encoder.logit_scale.device
    pixels = np.concatenate([item.pixels for item in work])
    alpha = np.concatenate([item.alpha for item in work])
    parts = [np.zeros((0, encoder.embed_dim), np.float32)]
    with torch.inference_mode():
        for start in range(0, len(pixels), batch_size):
            shown = encoder.transform.normalise(
                torch.from_numpy(pixels[start : start + batch_size]).to(device)
            )
            where = torch.from_numpy(alpha[start : start + batch_size]).to(device).float()
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


class RegionBank:
    """Region embeddings of the images asked for, each made once and kept on disk.

    The cache is a directory a key: the encoder's weights, the source of the regions, the view, the tables.
    In it, a row is named by what it was made from: the bytes of the image and the regions. Its shards are
    written whole and renamed into place, so several processes may fill it and a killed one loses only its
    last shard; each carries a checksum in its name, and a damaged one is made again.
    """

    def __init__(
        self,
        encoder: Encoder,
        source: RegionSource,
        reader: ImageReader,
        *,
        view: View,
        whole: bool = True,
        cache: str | Path | None = None,
        fingerprint: str = "",
        tables_key: str = "",
        batch_size: int = 256,
        images_per_shard: int = 512,
        progress: bool = False,
    ) -> None:
        """Set up; nothing is computed yet.

        Args:
            encoder: the local encoder, in evaluation mode.
            source: where regions come from.
            reader: gives pixels.
            view: how a region is shown to the encoder.
            whole: embed each image under a full mask as well; only missing_phrase `full_mask` needs it.
            cache: directory for all caches, or None to keep nothing on disk.
            fingerprint: of the encoder's weights; needed for a cache.
            tables_key: hash of the tables' manifest, to keep the caches of different tables apart.
            batch_size: crops a forward pass.
            images_per_shard: images a cache file.
            progress: show a bar with rate and remaining time.
        """
        if encoder.training:
            raise ValueError("the local encoder is in training mode; call .eval() first")
        if cache is not None and not (fingerprint and tables_key):
            raise ValueError("a region cache needs the encoder's fingerprint and the tables' key")
        self.encoder = encoder
        self.source = source
        self.reader = reader
        self.view = view
        self.whole = whole
        self.batch_size = batch_size
        self.images_per_shard = images_per_shard
        self.progress = progress
        self.seconds = 0.0  # spent in `embed` so far
        self.key: dict[str, Any] = {
            "format": FORMAT,
            "encoder": fingerprint,
            "regions": source.key,
            "view": asdict(view),
            "tables": tables_key,
        }
        if not whole:
            self.key["whole"] = False
        self._memory: dict[tuple[str, tuple[Prompts, ...], str], RegionEmbeddings] = {}
        self._stored: dict[str, tuple[pa.RecordBatch, int]] = {}
        self._directory: Path | None = None
        self._digests: Digests | None = None
        if cache is not None:
            if isinstance(source, StoredRegions | GroundedRegions):
                self._digests = source.digests
            else:
                self._digests = Digests(reader, Path(cache) / "digests.txt")
            text = json.dumps(self.key, indent=1, sort_keys=True)
            self._directory = Path(cache) / hashlib.sha256(text.encode()).hexdigest()[:16]
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / "manifest.json").write_text(text + "\n")
            for path in sorted(self._directory.glob("part-*.arrow")):
                self._open(path)

    def embed(
        self, rows: Iterable[Mapping[str, Any]], asked: Mapping[str, Sequence[Prompts]] | None = None
    ) -> dict[str, RegionEmbeddings]:
        """Region embeddings of these rows of the images table, by image id.

        Args:
            rows: of the images table.
            asked: image id → prompt groups asked of it; only sources of phrases' regions look at it.

        Raises:
            MissingMasks: the source lacks regions; all of them are named.
        """
        from rich.progress import track

        start = time.perf_counter()
        by_id = {row["id"]: row for row in rows}
        keys = {
            id_: (id_, tuple(dict.fromkeys((asked or {}).get(id_, ()))), self._digest(row))
            for id_, row in by_id.items()
        }
        unseen = [id_ for id_, key in keys.items() if key not in self._memory]
        self.source.require((by_id[id_], keys[id_][1]) for id_ in unseen)
        regions = {id_: self.source.regions(by_id[id_], keys[id_][1]) for id_ in unseen}
        names = {id_: _row_name(id_, keys[id_][2], own) for id_, own in regions.items()}
        new = [id_ for id_ in unseen if names[id_] not in self._stored]
        made = embed_regions(
            self.encoder,
            ((by_id[id_], regions[id_]) for id_ in new),
            self.reader,
            view=self.view,
            whole=self.whole,
            batch_size=self.batch_size,
        )
        shard: list[tuple[str, FloatArray, BoolArray, Float64Array]] = []
        shown = track(
            made, f"embedding regions of {len(new)} images", len(new), disable=not (self.progress and new)
        )
        for id_, item in zip(new, shown, strict=True):
            self._memory[keys[id_]] = RegionEmbeddings(tuple(regions[id_]), *item[1:])
            shard.append((names[id_], *item[1:]))
            if len(shard) == self.images_per_shard:
                self._write(shard)
                shard = []
        self._write(shard)
        for id_ in unseen:
            if keys[id_] not in self._memory:
                self._memory[keys[id_]] = self._load(names[id_], regions[id_])
        self.seconds += time.perf_counter() - start
        return {id_: self._memory[key] for id_, key in keys.items()}

    def _digest(self, row: Mapping[str, Any]) -> str:
        return "" if self._digests is None else self._digests(row)

    def _write(self, shard: Sequence[tuple[str, FloatArray, BoolArray, Float64Array]]) -> None:
        if self._directory is None or not shard:
            return
        ids, vectors, cells, areas = zip(*shard, strict=True)
        batch = pa.record_batch(
            {
                "id": pa.array(ids, pa.string()),
                "vectors": pa.array([v.astype(np.float32).tobytes() for v in vectors], pa.large_binary()),
                "cells": pa.array([np.packbits(c).tobytes() for c in cells], pa.large_binary()),
                "areas": pa.array([a.tobytes() for a in areas], pa.large_binary()),
            }
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        content = sink.getvalue()
        path = self._directory / f"part-{uuid.uuid4().hex}-{zlib.crc32(content):08x}.arrow"
        writing = path.with_suffix(".writing")
        writing.write_bytes(content)
        os.replace(writing, path)
        self._open(path)

    def _open(self, path: Path) -> None:
        try:
            content = pa.memory_map(str(path)).read_buffer()
            if f"{zlib.crc32(content):08x}" != path.stem.rpartition("-")[2]:
                raise ValueError("its checksum does not fit")
            reader = pa.ipc.open_file(content)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (OSError, ValueError, pa.ArrowException) as error:
            warnings.warn(
                f"{path} is damaged ({error}); its images are embedded again, and it may be deleted",
                stacklevel=2,
            )
            return
        for batch in batches:
            for row, name in enumerate(batch.column("id").to_pylist()):
                self._stored[name] = (batch, row)

    def _load(self, name: str, regions: Sequence[Region]) -> RegionEmbeddings:
        batch, row = self._stored[name]
        width = len(regions) + 1
        vectors = np.frombuffer(batch.column("vectors")[row].as_buffer(), np.float32)
        areas = np.frombuffer(batch.column("areas")[row].as_buffer(), np.float64)
        packed = np.frombuffer(batch.column("cells")[row].as_buffer(), np.uint8)
        cells = np.unpackbits(packed, count=len(areas) * width).reshape(len(areas), width).astype(bool)
        return RegionEmbeddings(tuple(regions), vectors.reshape(width, -1), cells, areas)


def _row_name(image_id: str, digest: str, regions: Sequence[Region]) -> str:
    """Names what an image's embeddings are made from: its bytes and its regions; the id is for people."""
    parts = [digest.encode()]
    for region in regions:
        box = np.asarray(region.box, np.float32).tobytes()
        size, counts = (None, b"") if region.mask is None else (region.mask["size"], region.mask["counts"])
        parts += [f"{region.id} {size} {len(counts)}".encode(), box, counts]
    hashed = hashlib.blake2b(b"\0".join(parts), digest_size=16)
    return f"{image_id}#{hashed.hexdigest()}"
