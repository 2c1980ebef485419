"""Embeddings on disk, block by block: a corpus that many processes embed, and that survives a kill.

A store is a directory that belongs to one encoder: `manifest.json`, and a file `<number>.npz` for each block
of the corpus. A block's number and length depend on the corpus alone, so any number of processes may share
them out, and another number may go on after a kill. A file appears whole or not at all; it holds the block's
key (what was embedded), and its parts carry checksums: a damaged or outdated one counts as missing.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fovea.types import FloatArray

VERSION = 1
DTYPES = ("float32", "float16")


class Block(NamedTuple):
    """What became of one block of the corpus.

    Attributes:
        ids: n ids, in the corpus's order.
        vectors: float32 or float16 [n, D].
        left_out: (id, reason) of those that could not be embedded.
    """

    ids: list[str]
    vectors: FloatArray
    left_out: list[tuple[str, str]]


class EmbeddingStore:
    """Blocks of embeddings by one encoder.

    Args:
        directory: of the store; it need not exist before the first `write`.
        made_by: what decides the embeddings (encoder, fingerprint, …; JSON).
        width: D.
        dtype: as which they are kept: `float32`, or `float16`, which takes half and rounds at 1e-3.

    Raises:
        ValueError: the directory holds embeddings that were made otherwise.
    """

    def __init__(
        self, directory: str | Path, made_by: Mapping[str, Any], *, width: int, dtype: str = "float32"
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"embeddings as {dtype!r}: one of {', '.join(DTYPES)}")
        self.directory = Path(directory)
        full = {"version": VERSION, **made_by, "width": width, "dtype": dtype}
        self.manifest: dict[str, Any] = json.loads(json.dumps(full))  # as it is read again
        # number → key, and what was left out, of blocks that were read and found whole
        self._good: dict[int, tuple[str, list[tuple[str, str]]]] = {}
        path = self.directory / "manifest.json"
        if path.is_file():
            self._require_same(path)

    def path(self, number: int) -> Path:
        """The file of a block."""
        return self.directory / f"{number:08d}.npz"

    def has(self, number: int, key: str) -> bool:
        """Whether the block is there, whole, and made of what the key says."""
        if self._good.get(number, ("",))[0] == key:
            return True
        block = self.read(number, key)
        if block is not None:
            self._good[number] = key, block.left_out
        return block is not None

    def left_out(self, keys: Sequence[str]) -> list[tuple[str, str]]:
        """(id, reason) of what could not be embedded, in the order of the blocks 0, 1, …

        Raises:
            ValueError: a block is missing.
        """
        for number, key in enumerate(keys):
            if not self.has(number, key):
                raise ValueError(f"{self.path(number)} is missing or damaged; run the same command again")
        return [bad for number in range(len(keys)) for bad in self._good[number][1]]

    def read(self, number: int, key: str) -> Block | None:
        """The block, or None when it is missing, damaged, or was made of something else."""
        try:
            with np.load(self.path(number), allow_pickle=False) as parts:
                said = json.loads(parts["said"].tobytes())
                vectors = parts["vectors"]
        except Exception:  # zipfile and numpy raise a dozen types on damaged bytes: not there
            return None
        made = said["key"], said["fingerprint"], list(vectors.shape)
        if made != (key, self.manifest.get("fingerprint"), [len(said["ids"]), self.manifest["width"]]):
            return None
        return Block(said["ids"], vectors, [(id_, reason) for id_, reason in said["left_out"]])

    def write(
        self,
        number: int,
        key: str,
        ids: Sequence[str],
        vectors: FloatArray,
        left_out: Sequence[tuple[str, str]],
    ) -> None:
        """Add a block, or replace it.

        Args:
            number: its place in the corpus, from 0.
            key: says what it was made of, so that a change is noticed.
            ids: n ids.
            vectors: float [n, D].
            left_out: (id, reason) of those that could not be embedded.

        Raises:
            ValueError: a value is beyond float16, or the shapes do not fit.
        """
        if vectors.shape != (len(ids), self.manifest["width"]):
            raise ValueError(
                f"{len(ids)} ids of block {number} with vectors of shape {vectors.shape}; "
                f"[{len(ids)}, {self.manifest['width']}] wanted"
            )
        with np.errstate(over="ignore"):
            kept = vectors.astype(self.manifest["dtype"])
        if not np.isfinite(kept).all():
            raise ValueError(f"block {number}: values that {self.manifest['dtype']} cannot hold (or NaN)")
        self._write_manifest()
        fingerprint = self.manifest.get("fingerprint")
        said = {"key": key, "fingerprint": fingerprint, "ids": list(ids), "left_out": list(left_out)}
        text = json.dumps(said, ensure_ascii=False).encode()
        half = self.directory / f".{number:08d}-{uuid.uuid4().hex}"
        try:
            with open(half, "wb") as file:
                np.savez(file, said=np.frombuffer(text, np.uint8), vectors=kept)
            os.replace(half, self.path(number))
        except OSError as error:  # a full disk as a rule
            half.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self.path(number))) from error
        self._good[number] = key, list(left_out)

    def blocks(self, keys: Sequence[str]) -> Blocks:
        """All blocks of a corpus, in order, as often as they are iterated over.

        Args:
            keys: of blocks 0, 1, …
        """
        return Blocks(self, keys)

    def estimate_bytes(self, count: int) -> int:
        """Disk that N embeddings take."""
        each = int(self.manifest["width"]) * np.dtype(self.manifest["dtype"]).itemsize
        total: int = count * (each + 32)  # 32: the id
        return total

    def bytes_there(self) -> int:
        """Disk that blocks take so far."""
        return sum(path.stat().st_size for path in self.directory.glob("*.npz"))

    def clean(self) -> None:
        """Remove what killed processes left half-written; only while none is writing."""
        for path in self.directory.glob(".????????-*"):
            path.unlink(missing_ok=True)

    def _require_same(self, path: Path) -> None:
        try:
            there: dict[str, Any] = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged ({error}); delete {self.directory} and start again"
            ) from error
        differ = [
            f"{name}: {there.get(name)!r}, now {self.manifest.get(name)!r}"
            for name in {**there, **self.manifest}
            if there.get(name) != self.manifest.get(name)
        ]
        if differ:
            raise ValueError(
                f"the embeddings in {self.directory} were made otherwise: {'; '.join(differ)}; delete that "
                "directory, or name another one with --embeddings"
            )

    def _write_manifest(self) -> None:
        path = self.directory / "manifest.json"
        if path.exists():
            return self._require_same(path)  # it may have been another command's
        self.directory.mkdir(parents=True, exist_ok=True)
        half = self.directory / f".manifest-{uuid.uuid4().hex}"
        half.write_text(json.dumps(self.manifest, indent=1, ensure_ascii=False) + "\n")
        half.replace(path)


class Blocks:
    """The blocks of a corpus in a store, for `DenseIndex.stream`: in order, as often as they are iterated."""

    def __init__(self, store: EmbeddingStore, keys: Sequence[str]) -> None:
        self._store = store
        self._keys = keys

    def __iter__(self) -> Iterator[tuple[list[str], FloatArray]]:
        for number, key in enumerate(self._keys):
            block = self._store.read(number, key)
            if block is None:
                path = self._store.path(number)
                raise ValueError(f"{path} is missing or damaged; run the same command again")
            yield block.ids, block.vectors
