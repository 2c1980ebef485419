"""Regions of many images → their embeddings, made once, independent of any query, and kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fovea.digests import Digests
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
from fovea.region_sources import GroundedRegions, Prompts, RegionSource, StoredRegions
from fovea.types import BoolArray, FloatArray, Region

__all__ = ["RegionBank", "RegionEmbeddings", "View", "pack", "partition", "region_masks"]

FORMAT = 2  # of the cache: 2 names rows by the bytes of the image and the regions
# What an embedding in memory belongs to: image id, prompt groups asked of it, digest of its bytes.
Key = tuple[str, tuple[Prompts, ...], str]


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
        self._memory: dict[Key, RegionEmbeddings] = {}
        self._stored: dict[str, tuple[pa.RecordBatch, int]] = {}
        self._opened: set[Path] = set()
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
        keys, names, regions, groups = self._unseen(by_id, asked)
        self._make(groups, by_id, keys, names, regions)
        for id_, own in regions.items():
            if keys[id_] not in self._memory:
                self._memory[keys[id_]] = self._load(names[id_], own)
        self.seconds += time.perf_counter() - start
        return {id_: self._memory[key] for id_, key in keys.items()}

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
        keys, names, regions, groups = self._unseen(by_id, asked)
        self._make(groups[rank::size], by_id, keys, names, regions)
        self.seconds += time.perf_counter() - start

    def _unseen(
        self, by_id: Mapping[str, Mapping[str, Any]], asked: Mapping[str, Sequence[Prompts]] | None
    ) -> tuple[dict[str, Key], dict[str, str], dict[str, list[Region]], list[list[str]]]:
        """By image id: key of each, cache name and regions of those not in memory; and the ids of each batch
        that nobody has embedded.
        """
        keys = {
            id_: (id_, tuple(dict.fromkeys((asked or {}).get(id_, ()))), self._digest(row))
            for id_, row in by_id.items()
        }
        unseen = [id_ for id_, key in keys.items() if key not in self._memory]
        self.source.require((by_id[id_], keys[id_][1]) for id_ in unseen)
        regions = {id_: self.source.regions(by_id[id_], keys[id_][1]) for id_ in unseen}
        names = {id_: _row_name(id_, keys[id_][2], own) for id_, own in regions.items()}
        new = [id_ for id_ in unseen if names[id_] not in self._stored]
        batches = pack([len(regions[id_]) + self.whole for id_ in new], self.batch_size)
        return keys, names, regions, [[new[position] for position in batch] for batch in batches]

    def _digest(self, row: Mapping[str, Any]) -> str:
        return "" if self._digests is None else self._digests(row)

    def _make(
        self,
        batches: Sequence[Sequence[str]],
        by_id: Mapping[str, Mapping[str, Any]],
        keys: Mapping[str, Key],
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
                [(by_id[id_], regions[id_]) for id_ in batch],
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
            self._memory[keys[id_]] = RegionEmbeddings(tuple(regions[id_]), vectors, cells, areas)
            shard.append((names[id_], vectors, cells, areas))
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
        self._opened.add(path)
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
