"""Regions of many images → their embeddings, made once, independent of any query, and kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fovea.images import ImageReader
from fovea.models.encoders import Encoder
from fovea.region_embeddings import (
    Float64Array,
    RegionEmbeddings,
    View,
    embed_regions,
    partition,
    region_masks,
)
from fovea.region_sources import Prompts, RegionSource
from fovea.types import BoolArray, FloatArray, Region

__all__ = ["RegionBank", "RegionEmbeddings", "View", "pack", "partition", "region_masks"]


def pack(counts: Sequence[int], batch_size: int) -> list[list[int]]:
    """Positions of images, in order, in groups of at most `batch_size` crops; one image may exceed it alone.

    Args:
        counts: crops of each image.
        batch_size: crops a forward pass.
    """
    groups: list[list[int]] = []
    num = 0
    for position, count in enumerate(counts):
        if not groups or num + count > batch_size:
            groups.append([])
            num = 0
        groups[-1].append(position)
        num += count
    return groups


class RegionBank:
    """Region embeddings of the images asked for, each made once and kept on disk.

    The cache is a directory a key: the encoder's weights, the source of the regions, the view, the tables.
    Its shards are written whole and renamed into place, so several processes may fill it and a killed one
    loses only its last shard.
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
            tables_key: hash of the tables' manifest: other tables may use the same image ids.
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
            "encoder": fingerprint,
            "regions": source.key,
            "view": asdict(view),
            "tables": tables_key,
        }
        if not whole:
            self.key["whole"] = False
        self._memory: dict[str, RegionEmbeddings] = {}
        self._stored: dict[str, tuple[pa.RecordBatch, int]] = {}
        self._opened: set[Path] = set()
        self._directory: Path | None = None
        if cache is not None:
            text = json.dumps(self.key, indent=1, sort_keys=True)
            self._directory = Path(cache) / hashlib.sha256(text.encode()).hexdigest()[:16]
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / "manifest.json").write_text(text + "\n")
            self.refresh()

    def refresh(self) -> None:
        """Read what other processes have added to the cache since."""
        if self._directory is not None:
            for path in sorted(self._directory.glob("part-*.arrow")):
                if path not in self._opened:
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
        start = time.perf_counter()
        by_id = {row["id"]: row for row in rows}
        names, regions, groups = self._unseen(by_id, asked)
        self._make(groups, by_id, names, regions)
        for name in regions.keys() - self._memory.keys():
            self._memory[name] = self._load(name, regions[name])
        self.seconds += time.perf_counter() - start
        return {id_: self._memory[name] for id_, name in names.items()}

    def fill(
        self,
        rows: Iterable[Mapping[str, Any]],
        asked: Mapping[str, Sequence[Prompts]] | None = None,
        *,
        rank: int,
        size: int,
    ) -> None:
        """One rank's share of the embeddings that the cache lacks; the others read them after `refresh`.

        Every rank must be given the same rows, and find the same cache. The batches are those that one
        process would make, in turn, so that its embeddings are met bit for bit.

        Args:
            rows: of the images table.
            asked: as for `embed`.
            rank: of this process, from 0.
            size: number of processes.

        Raises:
            MissingMasks: the source lacks regions, this rank's or another's; all of them are named.
        """
        if self._directory is None:
            raise ValueError("ranks share a region cache; give the bank one")
        start = time.perf_counter()
        by_id = {row["id"]: row for row in rows}
        names, regions, groups = self._unseen(by_id, asked)
        self._make(groups[rank::size], by_id, names, regions)
        self.seconds += time.perf_counter() - start

    def _unseen(
        self, by_id: Mapping[str, Mapping[str, Any]], asked: Mapping[str, Sequence[Prompts]] | None
    ) -> tuple[dict[str, str], dict[str, list[Region]], list[list[str]]]:
        """Cache name of each image, regions by cache name of those not in memory, and the image ids of each
        batch that nobody has embedded.
        """
        groups = {id_: tuple(dict.fromkeys((asked or {}).get(id_, ()))) for id_ in by_id}
        names = {id_: _cache_name(id_, own) for id_, own in groups.items()}
        unseen = [id_ for id_, name in names.items() if name not in self._memory]
        self.source.require((by_id[id_], groups[id_]) for id_ in unseen)
        regions = {names[id_]: self.source.regions(by_id[id_], groups[id_]) for id_ in unseen}
        new = [id_ for id_ in unseen if names[id_] not in self._stored]
        batches = pack([len(regions[names[id_]]) + self.whole for id_ in new], self.batch_size)
        return names, regions, [[new[position] for position in batch] for batch in batches]

    def _make(
        self,
        batches: Sequence[Sequence[str]],
        by_id: Mapping[str, Mapping[str, Any]],
        names: Mapping[str, str],
        regions: Mapping[str, Sequence[Region]],
    ) -> None:
        """Embed these batches of images, into memory and the cache."""
        from rich.progress import track

        made = (
            item
            for batch in batches
            for item in embed_regions(
                self.encoder,
                [(by_id[id_], regions[names[id_]]) for id_ in batch],
                self.reader,
                view=self.view,
                whole=self.whole,
                batch_size=self.batch_size,
            )
        )
        num = sum(map(len, batches))
        shown = track(made, f"embedding regions of {num} images", num, disable=not (self.progress and num))
        shard: list[tuple[str, FloatArray, BoolArray, Float64Array]] = []
        for id_, vectors, cells, areas in shown:
            name = names[id_]
            self._memory[name] = RegionEmbeddings(tuple(regions[name]), vectors, cells, areas)
            shard.append((name, vectors, cells, areas))
            if len(shard) == self.images_per_shard:
                self._write(shard)
                shard = []
        self._write(shard)

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
        path = self._directory / f"part-{uuid.uuid4().hex}.arrow"
        writing = path.with_suffix(".writing")
        with pa.OSFile(str(writing), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        os.replace(writing, path)
        self._open(path)

    def _open(self, path: Path) -> None:
        self._opened.add(path)
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        for i in range(reader.num_record_batches):
            batch = reader.get_batch(i)
            for row, id_ in enumerate(batch.column("id").to_pylist()):
                self._stored[id_] = (batch, row)

    def _load(self, id_: str, regions: Sequence[Region]) -> RegionEmbeddings:
        batch, row = self._stored[id_]
        width = len(regions) + 1
        vectors = np.frombuffer(batch.column("vectors")[row].as_buffer(), np.float32)
        areas = np.frombuffer(batch.column("areas")[row].as_buffer(), np.float64)
        packed = np.frombuffer(batch.column("cells")[row].as_buffer(), np.uint8)
        if len(vectors) != width * self.encoder.embed_dim:
            raise ValueError(
                f"{self._directory}: image {id_} was embedded with another number of regions than "
                f"{self.source.key} holds now; delete this cache directory"
            )
        cells = np.unpackbits(packed, count=len(areas) * width).reshape(len(areas), width).astype(bool)
        return RegionEmbeddings(tuple(regions), vectors.reshape(width, -1), cells, areas)


def _cache_name(image_id: str, asked: Sequence[Prompts]) -> str:
    """Name of an image's embeddings: its id, and what was asked of it where that matters."""
    if not asked:
        return image_id
    return f"{image_id}#{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]}"
