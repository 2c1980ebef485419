"""Image id → regions, kept on disk: what a detector or segmenter found, computed once and resumably.

A store is a directory; each key (what made the regions: detector, thresholds) has a folder of its own in it,
so a changed setting never mixes with old rows. In the folder: `manifest.json` and append-only shards, one for
every process that ever wrote. A row is one line, `<crc32> <json>`; a row cut short by a kill, or damaged
later, is ignored and its image counts as missing. A reader may look while writers write.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from fovea.types import Region

VERSION = 1
_FIRST_STRING = json.JSONDecoder()


class MaskStore:
    """The regions of many images under one key.

    Args:
        path: directory of the store; it need not exist before the first `append`.
        key: what made the regions. Two stores with the same key hold the same regions.
    """

    def __init__(self, path: str | Path, key: str) -> None:
        self.path = Path(path)
        self.key = key
        self.directory = self.path / sha256(key.encode()).hexdigest()[:16]
        self._where: dict[str, tuple[Path, int, int]] = {}
        self._read_up_to: dict[Path, int] = {}
        self._damaged: dict[Path, int] = {}
        self._shard: tuple[int, int] | None = None  # (process id, file descriptor)
        self.refresh()

    @staticmethod
    def keys(path: str | Path) -> list[str]:
        """The keys that the store at `path` holds, sorted."""
        return sorted(json.loads(file.read_text())["key"] for file in Path(path).glob("*/manifest.json"))

    @classmethod
    def open(cls, path: str | Path) -> MaskStore:
        """The store at `path` when it holds a single key.

        Raises:
            ValueError: it holds none or several.
        """
        keys = cls.keys(path)
        if len(keys) != 1:
            raise ValueError(f"mask store {path} holds {len(keys)} keys, one is needed here: {keys}")
        return cls(path, keys[0])

    @property
    def num_damaged(self) -> int:
        """Complete rows that failed their checksum and are ignored."""
        return sum(self._damaged.values())

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, image_id: str) -> bool:
        return image_id in self._where

    def ids(self) -> list[str]:
        """Ids of the stored images, sorted."""
        return sorted(self._where)

    def refresh(self) -> None:
        """Take in the rows that were written since the last look."""
        for shard in sorted(self.directory.glob("*.rows")):
            offset = self._read_up_to.get(shard, 0)
            if shard.stat().st_size == offset:
                continue
            with open(shard, "rb") as file:
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n"):  # being written, or cut short by a kill
                        break
                    if _intact(line):
                        image_id, _ = _FIRST_STRING.raw_decode(line[10:].decode())
                        self._where.setdefault(image_id, (shard, offset, len(line)))
                    else:
                        self._damaged[shard] = self._damaged.get(shard, 0) + 1
                    offset += len(line)
            self._read_up_to[shard] = offset

    def missing(self, ids: Iterable[str]) -> list[str]:
        """Those of `ids` that have no row yet, in order, each once."""
        self.refresh()
        return [image_id for image_id in dict.fromkeys(ids) if image_id not in self._where]

    def append(self, image_id: str, regions: Sequence[Region]) -> None:
        """Store the regions of one image; none is a result too. An image that has a row keeps it."""
        if image_id in self._where:
            return
        row = [image_id, [_to_json(region) for region in regions]]
        body = json.dumps(row, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        descriptor = self._descriptor()
        while line:
            line = line[os.write(descriptor, line) :]

    def get(self, image_id: str) -> list[Region]:
        """The regions of one image, in the order they were stored.

        Raises:
            KeyError: the image has no row; the message says how to make it.
        """
        if image_id not in self._where:
            self.refresh()
        if image_id not in self._where:
            others = [key for key in self.keys(self.path) if key != self.key]
            hint = f"; other keys of this store: {others}" if others else ""
            raise KeyError(
                f"no masks for image {image_id!r} in {self.path} under key {self.key!r} ({len(self)} images "
                f"stored{hint}); run: python scripts/precompute_masks.py --tables TABLES --out {self.path}"
            )
        shard, offset, size = self._where[image_id]
        with open(shard, "rb") as file:
            file.seek(offset)
            line = file.read(size)
        if not _intact(line):
            raise ValueError(f"{shard}: the row of {image_id!r} at byte {offset} changed while in use")
        return [_from_json(region) for region in json.loads(line[9:])[1]]

    def items(self) -> Iterator[tuple[str, list[Region]]]:
        """(image id, regions) of every stored image, by id."""
        for image_id in self.ids():
            yield image_id, self.get(image_id)

    def close(self) -> None:
        """Close this process's shard; a later `append` opens another."""
        if self._shard and self._shard[0] == os.getpid():
            os.close(self._shard[1])
        self._shard = None

    def _descriptor(self) -> int:
        """This process's shard: a new file each time, for nothing may follow a row that a kill cut short."""
        if self._shard is None or self._shard[0] != os.getpid():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._write_manifest()
            name = f"{time.time_ns():020d}-{os.getpid()}.rows"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._shard = os.getpid(), os.open(self.directory / name, flags, 0o644)
        return self._shard[1]

    def _write_manifest(self) -> None:
        manifest = self.directory / "manifest.json"
        if not manifest.exists():
            half = manifest.with_name(f".manifest-{os.getpid()}")
            half.write_text(json.dumps({"version": VERSION, "key": self.key}, indent=1) + "\n")
            half.replace(manifest)


def _intact(line: bytes) -> bool:
    return line[8:9] == b" " and line[:8] == b"%08x" % zlib.crc32(line[9:-1])


def _to_json(region: Region) -> dict[str, Any]:
    row: dict[str, Any] = {"id": region.id, "box": [float(value) for value in region.box]}
    if region.mask is not None:
        row["size"], row["rle"] = list(region.mask["size"]), region.mask["counts"].decode("ascii")
    optional = {"phrase": region.phrase_id, "label": region.label, "scores": region.scores}
    return row | {name: value for name, value in optional.items() if value}


def _from_json(row: dict[str, Any]) -> Region:
    return Region(
        id=row["id"],
        box=np.array(row["box"], np.float32),
        mask={"size": row["size"], "counts": row["rle"].encode("ascii")} if "rle" in row else None,
        phrase_id=row.get("phrase"),
        label=row.get("label", ""),
        scores=row.get("scores", {}),
    )
