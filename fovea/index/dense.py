"""Embeddings → nearest neighbours: exact FAISS search in an index that knows what it was made of.

On disk, a directory: `vectors.faiss`, `ids.parquet` (row = position in the index), `manifest.json`.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fovea.types import FloatArray

VERSION = 1
CORPORA = ("gold", "candidates", "full")
_REQUIRED = ("encoder", "fingerprint", "corpus")

# faiss 1.15 only calls BLAS from 128,000 queries on: below, a batch costs as much as its queries one by one.
# With 20, a batch of 100 is 12 times faster.
faiss.cvar.distance_compute_blas_threshold = 20


class DenseIndex:
    """Inner-product search over all vectors, exact.

    Attributes:
        ids: N ids, in index order.
        manifest: `encoder` (name), `fingerprint` (of its weights), `corpus` (`gold`, `candidates`, `full`, or
            a name of its own), `normalised` (True: scores are cosines), `width` D, `count` N, `version`, and
            whatever the caller added (JSON).
    """

    def __init__(self, ids: Sequence[str], index: Any, manifest: dict[str, Any]) -> None:
        self.ids = list(ids)
        self.manifest = manifest
        self._index = index
        self._position = {id_: position for position, id_ in enumerate(self.ids)}

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def build(cls, ids: Sequence[str], embeddings: FloatArray, *, manifest: Mapping[str, Any]) -> DenseIndex:
        """Index N vectors.

        Args:
            ids: N distinct ids.
            embeddings: float [N, D]; normalised here unless the manifest says `"normalised": False`.
            manifest: at least `encoder`, `fingerprint`, `corpus`; `width`, `count` and `version` are filled
                in, and must agree when given.
        """
        if absent := [key for key in _REQUIRED if not manifest.get(key)]:
            raise ValueError(f"an index manifest needs {list(_REQUIRED)}; missing or empty: {absent}")
        vectors = np.ascontiguousarray(embeddings, np.float32)
        if vectors.ndim != 2 or len(vectors) != len(ids):
            raise ValueError(
                f"{len(ids)} ids for embeddings of shape {vectors.shape}; [N, D] with N = number of ids"
            )
        full = {"normalised": True} | dict(manifest)
        known = {"width": vectors.shape[1], "count": len(ids), "version": VERSION}
        _refuse_mismatch("these embeddings", known, {key: full[key] for key in known if key in full})
        _check_ids(ids)
        if full["normalised"]:
            vectors = _normalise(vectors, "embeddings", ids)
        else:
            _check_finite(vectors, "embeddings", ids)
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        return cls(ids, index, full | known)

    def search(self, queries: FloatArray, k: int) -> tuple[list[list[str | None]], FloatArray]:
        """The k nearest of each query, best first; equal scores in index order.

        (Which of several equal vectors makes it into the last place is faiss's choice.)

        Args:
            queries: float [Q, D]; normalised here when the index is.
            k: how many, from 1; may exceed the index.

        Returns:
            ids [Q][k], None where the index has no more; scores float32 [Q, k], -inf there.
        """
        scores, positions = self._index.search(self._queries(queries), _positive(k))
        gone = positions < 0  # faiss pads with -1: as a Python index it would be the last id
        scores = np.where(gone, -np.inf, scores).astype(np.float32)
        order = np.lexsort((np.where(gone, len(self.ids), positions), -scores), axis=1)
        scores = np.take_along_axis(scores, order, 1)
        positions = np.take_along_axis(positions, order, 1)
        return [[self.ids[p] if p >= 0 else None for p in row] for row in positions.tolist()], scores

    def search_among(
        self, queries: FloatArray, allowed: Sequence[Sequence[str]], k: int
    ) -> tuple[list[list[str | None]], FloatArray]:
        """As `search`, each query among its own ids only (a data set's candidate lists).

        Args:
            queries: float [Q, D].
            allowed: Q lists of ids; each must be in the index.
            k: how many, from 1.
        """
        vectors = self._queries(queries)
        k = _positive(k)
        if len(allowed) != len(vectors):
            raise ValueError(f"{len(vectors)} queries with {len(allowed)} lists of ids")
        if unknown := sorted({id_ for ids in allowed for id_ in ids if id_ not in self._position}):
            raise KeyError(
                f"{len(unknown)} ids are not in the index (corpus {self._corpus}), e.g. {unknown[:5]}"
            )
        found: list[list[str | None]] = []
        scores = np.full((len(vectors), k), -np.inf, np.float32)
        for row, ids in enumerate(allowed):
            positions = np.array(sorted({self._position[id_] for id_ in ids}), np.int64)
            among = self._index.reconstruct_batch(positions) @ vectors[row] if len(positions) else np.zeros(0)
            best = np.argsort(-among, kind="stable")[:k]
            scores[row, : len(best)] = among[best]
            found.append([self.ids[positions[place]] for place in best] + [None] * (k - len(best)))
        return found, scores

    def save(self, directory: str | Path, *, overwrite: bool = False) -> Path:
        """Write the index; a reader never sees half of it.

        Args:
            directory: where; must not hold anything unless `overwrite`, which replaces an index only.
            overwrite: replace the index that is there.
        """
        root = Path(directory)
        if root.exists() and any(root.iterdir()):
            if not overwrite:
                raise FileExistsError(f"{root} is not empty; pass --overwrite to replace the index in it")
            if not (root / "vectors.faiss").is_file():
                raise FileExistsError(f"{root} holds something that is no index; give another directory")
        writing, old = root.with_name(f".{root.name}.writing"), root.with_name(f".{root.name}.old")
        for left_over in (writing, old):
            shutil.rmtree(left_over, ignore_errors=True)
        writing.mkdir(parents=True)
        faiss.write_index(self._index, str(writing / "vectors.faiss"))
        pq.write_table(pa.table({"id": pa.array(self.ids, pa.string())}), writing / "ids.parquet")
        (writing / "manifest.json").write_text(json.dumps(self.manifest, indent=1, sort_keys=True) + "\n")
        if root.exists():
            root.rename(old)
        writing.rename(root)
        shutil.rmtree(old, ignore_errors=True)
        return root

    @classmethod
    def load(cls, directory: str | Path, *, expect: Mapping[str, Any] | None = None) -> DenseIndex:
        """Read an index.

        Args:
            directory: what `save` wrote.
            expect: manifest fields that must agree, e.g. the encoder's fingerprint and the corpus; a mismatch
                raises and lists every differing field with both values.
        """
        root = Path(directory)
        path = root / "manifest.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"no index at {root} (manifest.json is missing); make one with: "
                f"python scripts/build_index.py --tables … --encoder … --out {root}"
            )
        manifest: dict[str, Any] = json.loads(path.read_text())
        _refuse_mismatch(f"the index at {root}", manifest, {"version": VERSION} | dict(expect or {}))
        try:
            index = faiss.read_index(str(root / "vectors.faiss"))
            ids = pq.read_table(root / "ids.parquet").column("id").to_pylist()
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"{root} is damaged ({error}); build it again with scripts/build_index.py"
            ) from error
        _refuse_mismatch(
            f"the index file in {root}", {"width": index.d, "count": index.ntotal}, manifest, common=True
        )
        _refuse_mismatch(f"the id file in {root}", {"count": len(ids)}, manifest, common=True)
        return cls(ids, index, manifest)

    @staticmethod
    def estimate_bytes(count: int, width: int) -> int:
        """Memory of N float32 vectors of width D in the index; building holds them twice."""
        return 4 * count * width

    @property
    def _corpus(self) -> str:
        return str(self.manifest["corpus"])

    def _queries(self, queries: FloatArray) -> FloatArray:
        vectors = np.ascontiguousarray(queries, np.float32)
        width = self.manifest["width"]
        if vectors.ndim != 2 or vectors.shape[1] != width:
            raise ValueError(
                f"queries of shape {vectors.shape}; an index of {self.manifest['encoder']} takes [Q, {width}]"
            )
        numbers = range(len(vectors))
        if self.manifest["normalised"]:
            return _normalise(vectors, "queries", numbers)
        _check_finite(vectors, "queries", numbers)
        return vectors


def _positive(k: int) -> int:
    if k < 1:
        raise ValueError(f"k is the number of neighbours wanted, from 1; got {k}")
    return k


def _check_ids(ids: Sequence[str]) -> None:
    if strange := [id_ for id_ in ids if not isinstance(id_, str) or not id_]:
        raise ValueError(f"ids must be non-empty strings; {len(strange)} are not, e.g. {strange[:5]}")
    if twice := [id_ for id_, count in Counter(ids).items() if count > 1]:
        raise ValueError(
            f"{len(twice)} ids occur more than once, e.g. {twice[:5]}; an index needs distinct ids"
        )


def _check_finite(vectors: FloatArray, what: str, names: Sequence[Any]) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(1))
    if len(bad):
        raise ValueError(f"{len(bad)} {what} hold NaN or infinity, e.g. {[names[i] for i in bad[:5]]}")


def _normalise(vectors: FloatArray, what: str, names: Sequence[Any]) -> FloatArray:
    _check_finite(vectors, what, names)
    # In float64: squares of float32 values overflow and underflow in float32.
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64))[:, None]
    zero = np.flatnonzero(lengths[:, 0] == 0)
    if len(zero):
        raise ValueError(
            f"{len(zero)} {what} are zero vectors, which have no cosine, e.g. {[names[i] for i in zero[:5]]}"
        )
    unit: FloatArray = (vectors / lengths).astype(np.float32)
    return unit


def _refuse_mismatch(
    what: str, have: Mapping[str, Any], want: Mapping[str, Any], *, common: bool = False
) -> None:
    """Raise when `have` differs from `want`, listing every field that does.

    Args:
        what: the subject of the message.
        have: fields as they are.
        want: fields as they must be.
        common: look only at the fields that both have.
    """
    keys = [key for key in want if not common or key in have]
    differ = [f"{key}: {have.get(key)!r}, wanted {want[key]!r}" for key in keys if have.get(key) != want[key]]
    if differ:
        raise ValueError(f"{what} does not fit: " + "; ".join(differ))
