"""Image bytes × prompt → regions on disk: what a detector and a segmenter found, computed once, resumably.

A store is a directory; each key (what made the regions: detector, segmenter, thresholds, weights) has a
folder of its own in it, so a changed setting never mixes with old rows. In the folder: `manifest.json` and
append-only shards, one for every process that ever wrote. A row is one line, `<crc32> <header><tab><body>`:
all that one pass over an image found. A row cut short by a kill, or damaged later, is ignored and counts as
missing, so `kill -9` costs the image in flight and nothing else (a power cut may cost what the system had
not written yet). A reader may look while writers write.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fovea import masks
from fovea.replace import replace_text
from fovea.types import Region

VERSION = 2
_MAX_OPEN = 64  # shards kept open for reading


class Entry(NamedTuple):
    """What a stored result belongs to.

    Attributes:
        digest: of the image file's bytes (`ImageReader.digest`): a replaced file has no regions yet.
        prompts: the phrases that shared one prompt; one phrase as a rule, none for query-free proposals.
    """

    digest: str
    prompts: tuple[str, ...] = ()


class _Place(NamedTuple):
    shard: Path
    offset: int
    size: int
    position: int  # among the row's prompt groups
    image_id: str


class MaskStore:
    """The regions of many images under one key.

    Args:
        path: directory of the store; it need not exist before the first `append`.
        key: what made the regions. Two stores with the same key hold the same regions.
        made_by: options of scripts/precompute_masks.py that add to it; kept in the manifest for messages.

    Raises:
        ValueError: the folder of this key was written by another version of the format.
    """

    def __init__(self, path: str | Path, key: str, made_by: str = "") -> None:
        self.path = Path(path)
        self.key = key
        self.made_by = made_by
        self.directory = self.path / _folder(key)
        self._where: dict[Entry, _Place] = {}
        self._read_up_to: dict[Path, int] = {}
        self._damaged: dict[Path, int] = {}
        self._shard: tuple[int, int] | None = None  # (process id, file descriptor)
        self._shard_path = self.directory
        self._open: dict[Path, BinaryIO] = {}
        if self.directory.is_dir():
            self._take_in_manifest()
        self.refresh()

    def _take_in_manifest(self) -> None:
        """Check it; a maker writes one anew that is damaged or gone, for the key's hash names the folder."""
        manifest = self.directory / "manifest.json"
        try:
            if manifest.is_file():
                self.made_by = _read_manifest(manifest).get("made_by") or self.made_by
            elif self.made_by and any(self.directory.glob("*.rows")):
                self._write_manifest()
        except Damaged:
            if not self.made_by:
                raise
            self._write_manifest()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}, "_shard": None}  # descriptors mean nothing in another process

    @staticmethod
    def keys(path: str | Path) -> list[str]:
        """The keys that the store at `path` holds, sorted."""
        return sorted(_read_manifest(file)["key"] for file in Path(path).glob("*/manifest.json"))

    @classmethod
    def open(cls, path: str | Path, key: str | None = None) -> MaskStore:
        """The store at `path`; without a key it must hold a single one.

        Raises:
            ValueError: it does not hold the key, or holds none or several and none is named.
        """
        keys = cls.keys(path)
        if not keys:
            command = f"python scripts/precompute_masks.py --tables TABLES --out {path}"
            raise ValueError(f"{path} holds no mask store; run: {command}")
        if key is None and len(keys) != 1:
            raise ValueError(
                f"mask store {path} holds {len(keys)} keys; name the one that is meant (--masks_key, "
                f"data.masks_key): {keys}"
            )
        if key is not None and key not in keys:
            raise ValueError(f"mask store {path} has no key {key!r}; it holds {keys}")
        return cls(path, key or keys[0])

    @property
    def num_damaged(self) -> int:
        """Complete rows that failed their checksum and are ignored."""
        return sum(self._damaged.values())

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._where

    def entries(self) -> list[Entry]:
        """What is stored, sorted."""
        return sorted(self._where)

    def image_id(self, entry: Entry) -> str:
        """The id under which the image was looked at."""
        return self._where[entry].image_id

    def refresh(self) -> None:
        """Take in the rows that were written since the last look."""
        for shard in sorted(self.directory.glob("*.rows")):
            offset = self._read_up_to.get(shard, 0)
            if shard.stat().st_size == offset:
                continue
            for line, start, end in _lines(shard, offset):
                if _intact(line):
                    header = json.loads(line[9 : line.index(b"\t")])
                    for position, prompts in enumerate(header["prompts"]):
                        place = _Place(shard, start, len(line), position, header["id"])
                        self._where.setdefault(Entry(header["digest"], tuple(prompts)), place)
                else:
                    self._damaged[shard] = self._damaged.get(shard, 0) + 1
                self._read_up_to[shard] = end

    def command(self, tables: str | Path = "TABLES") -> str:
        """The command that adds to this store."""
        made_by = self.made_by or "--detector … --segmenter …"
        return f"python scripts/precompute_masks.py --tables {tables} --out {self.path} {made_by}"

    def missing(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those of `entries` that have no row yet, in order, each once."""
        self.refresh()
        return [entry for entry in dict.fromkeys(entries) if entry not in self._where]

    def append(
        self, digest: str, found: Mapping[tuple[str, ...], Sequence[Region]], *, image_id: str = ""
    ) -> None:
        """Store what one pass over an image found, all of it or (when killed) nothing.

        Args:
            digest: of the image's bytes.
            found: prompt group → its regions; none is a result too. What has a row already keeps it.
            image_id: for people who look into the store.
        """
        new = {prompts: regions for prompts, regions in found.items() if Entry(digest, prompts) not in self}
        if not new:
            return
        header = {"digest": digest, "id": image_id, "prompts": list(new)}
        body = [[_to_json(region) for region in regions] for regions in new.values()]
        text = b"\t".join(json.dumps(part, separators=(",", ":")).encode() for part in (header, body))
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        descriptor = self._descriptor()
        offset, left = os.lseek(descriptor, 0, os.SEEK_END), line
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except (
            OSError
        ) as error:  # a full disk as a rule; what is stored stays, and this row counts as missing
            raise OSError(error.errno, error.strerror, str(self._shard_path)) from error
        for position, prompts in enumerate(new):
            place = _Place(self._shard_path, offset, len(line), position, image_id)
            self._where[Entry(digest, prompts)] = place

    def get(self, entry: Entry) -> list[Region]:
        """The regions of one image and prompt group, in the order they were stored.

        Raises:
            KeyError: there is no row; the message says how to make it.
        """
        if entry not in self._where:
            self.refresh()
        if entry not in self._where:
            others = [key for key in self.keys(self.path) if key != self.key]
            hint = f"; other keys of this store: {others}" if others else ""
            asked = f" and {list(entry.prompts)}" if entry.prompts else ""
            raise KeyError(
                f"no masks for the image {entry.digest!r}{asked} in {self.path} under key {self.key!r} "
                f"({len(self)} results stored{hint}); run: {self.command()}"
            )
        place = self._where[entry]
        line = os.pread(self._reading(place.shard).fileno(), place.size, place.offset)
        if not _intact(line):
            raise ValueError(
                f"{place.shard}: the row of {place.image_id!r} at byte {place.offset} changed while in use"
            )
        return [_from_json(row) for row in json.loads(line[line.index(b"\t") :])[place.position]]

    def items(self) -> Iterator[tuple[Entry, list[Region]]]:
        """(entry, regions) of everything stored, sorted."""
        for entry in self.entries():
            yield entry, self.get(entry)

    def verify(self) -> Iterator[str]:
        """Read every row of every shard again; one message for each that is damaged or says nonsense.

        A last line without its end is no damage (a writer was killed, or is writing).
        """
        for shard in sorted(self.directory.glob("*.rows")):
            for line, offset, _ in _lines(shard, 0):
                where = f"{shard} at byte {offset}"
                if not _intact(line):
                    yield f"{where}: the checksum does not fit; the row counts as missing"
                    continue
                tab = line.index(b"\t")
                name = json.loads(line[9:tab])["id"]
                for rows in json.loads(line[tab:]):
                    yield from (f"{where}, image {name!r}: {fault}" for row in rows for fault in _faults(row))

    def close(self) -> None:
        """Close this process's shards; a later `append` opens another."""
        for file in self._open.values():
            file.close()
        self._open = {}
        if self._shard and self._shard[0] == os.getpid():
            os.close(self._shard[1])
        self._shard = None

    def _reading(self, shard: Path) -> BinaryIO:
        if shard not in self._open:
            if len(self._open) >= _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[shard] = open(shard, "rb", buffering=0)  # pread only: forked readers share the place
        return self._open[shard]

    def _descriptor(self) -> int:
        """This process's shard: a new file each time, for nothing may follow a row that a kill cut short."""
        if self._shard is None or self._shard[0] != os.getpid():
            self.directory.mkdir(parents=True, exist_ok=True)
            if not (self.directory / "manifest.json").exists():
                self._write_manifest()
            name = f"{time.time_ns():020d}-{os.uname().nodename}-{os.getpid()}.rows"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._shard_path = self.directory / name
            self._shard = os.getpid(), os.open(self._shard_path, flags, 0o644)
        return self._shard[1]

    def _write_manifest(self) -> None:
        content = {"version": VERSION, "key": self.key, "made_by": self.made_by}
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        replace_text(self.directory / "manifest.json", text)


class Damaged(ValueError):
    """A manifest that cannot be read; the rows beside it are whole."""


def _read_manifest(manifest: Path) -> dict[str, Any]:
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}, where an object should be")
        if absent := [name for name in ("version", "key") if name not in content]:
            raise ValueError(f"no {' and no '.join(absent)}")
        version, key = content["version"], content["key"]
        if version == VERSION and _folder(str(key)) != manifest.parent.name:
            raise ValueError(f"its key {key!r} belongs to the folder {_folder(str(key))}")
    except ValueError as error:
        raise Damaged(
            f"{manifest} is damaged ({error}); run the scripts/precompute_masks.py command that made it: "
            "it writes the manifest anew and keeps all rows"
        ) from error
    if version != VERSION:
        raise ValueError(
            f"{manifest.parent}: a mask store of version {version}, this code reads "
            f"{VERSION}; delete it and run scripts/precompute_masks.py again"
        )
    return content


def _folder(key: str) -> str:
    return sha256(key.encode()).hexdigest()[:16]


def _lines(shard: Path, start: int) -> Iterator[tuple[bytes, int, int]]:
    """Whole lines from byte `start` on, with their first byte and the one behind them."""
    with open(shard, "rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):  # being written, or cut short by a kill
                return
            yield line, start, start + len(line)
            start += len(line)


def _intact(line: bytes) -> bool:
    return line[8:9] == b" " and b"\t" in line and line[:8] == b"%08x" % zlib.crc32(line[9:-1])


def _faults(row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a stored region."""
    try:
        region = _from_json(row)
        box = region.box
        if box.shape != (4,) or not np.isfinite(box).all() or (box[2:] < box[:2]).any() or (box < 0).any():
            yield f"region {region.id}: box {box.tolist()} is no xyxy box inside the image"
        elif region.mask is not None:
            height, width = region.mask["size"]
            if (box[2:] > (width, height)).any():
                yield f"region {region.id}: box {box.tolist()} leaves the image of {height}×{width} (H×W)"
        if region.mask is not None:
            masks.decode_many([region.mask])
    except (KeyError, TypeError, ValueError) as error:
        yield f"region {row.get('id')}: {error!r}"


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
