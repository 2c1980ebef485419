"""Ids and vectors, block by block → checked chunks, unit vectors where wanted, and a sample to learn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from fovea.index.kind import CHUNK
from fovea.types import FloatArray


class Chunks:
    """Blocks → checked (ids, float32 [n, D]) of at most `CHUNK` rows, as often as wanted."""

    def __init__(
        self, blocks: Iterable[tuple[Sequence[str], FloatArray]], width: int, normalised: bool
    ) -> None:
        self._blocks = blocks
        self._width = width
        self._normalised = normalised

    def __iter__(self) -> Iterator[tuple[Sequence[str], FloatArray]]:
        for ids, vectors in self._blocks:
            if vectors.shape != (len(ids), self._width):
                raise ValueError(
                    f"a block of {len(ids)} ids with embeddings of shape {vectors.shape}; "
                    f"[{len(ids)}, {self._width}] wanted"
                )
            for start in range(0, len(ids), CHUNK):
                some = ids[start : start + CHUNK]
                check_ids(some)
                chunk = np.ascontiguousarray(vectors[start : start + CHUNK], np.float32)
                yield some, checked(chunk, "embeddings", some, self._normalised)

    def sample(self, size: int, seed: int) -> FloatArray:
        """`size` of the rows (all where there are fewer), each equally likely."""
        if iter(self._blocks) is self._blocks:
            raise TypeError(
                "blocks that can be gone through only once; an index that learns needs them twice"
            )
        # Each row draws a number, and the smallest remain: no need to know how many rows there are.
        draw = np.random.default_rng(seed)
        numbers, kept, count = np.empty(size), np.empty((size, self._width), np.float32), 0
        for ids, vectors in self:
            drawn = draw.random(len(ids))
            if room := min(size - count, len(ids)):
                numbers[count : count + room], kept[count : count + room] = drawn[:room], vectors[:room]
                drawn, vectors, count = drawn[room:], vectors[room:], count + room
            if len(drawn):
                among = np.argpartition(np.concatenate([numbers, drawn]), size - 1)
                leave, enter = np.sort(among[size:]), np.sort(among[:size])
                leave, enter = leave[leave < size], enter[enter >= size] - size
                numbers[leave], kept[leave] = drawn[enter], vectors[enter]
        return kept[:count]


def check_ids(ids: Sequence[str]) -> None:
    """Refuse ids that are no names."""
    if strange := [id_ for id_ in ids if not isinstance(id_, str) or not id_]:
        raise ValueError(f"ids must be non-empty strings; {len(strange)} are not, e.g. {strange[:5]}")


def check_distinct(ids: pa.Array, hashes: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Refuse ids that occur twice; their hashes take 16 bytes an id, a set of strings would take 200."""
    in_order = np.sort(hashes)
    again = in_order[1:][in_order[1:] == in_order[:-1]]
    if not len(again):
        return
    suspects = ids.take(pa.array(np.flatnonzero(np.isin(hashes, again)))).to_pylist()
    if twice := [id_ for id_, count in Counter(suspects).items() if count > 1]:
        raise ValueError(
            f"{len(twice)} ids occur more than once, e.g. {twice[:5]}; an index needs distinct ids"
        )


def checked(vectors: FloatArray, what: str, names: Sequence[Any], normalise: bool) -> FloatArray:
    """Refuse vectors without a score, by name; unit vectors where asked for."""
    bad = np.flatnonzero(~np.isfinite(vectors).all(1))
    if len(bad):
        raise ValueError(f"{len(bad)} {what} hold NaN or infinity, e.g. {[names[i] for i in bad[:5]]}")
    if not normalise:
        return vectors
    # In float64: squares of float32 values overflow and underflow in float32.
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64))[:, None]
    zero = np.flatnonzero(lengths[:, 0] == 0)
    if len(zero):
        raise ValueError(
            f"{len(zero)} {what} are zero vectors, which have no cosine, e.g. {[names[i] for i in zero[:5]]}"
        )
    unit: FloatArray = (vectors / lengths).astype(np.float32)
    return unit
