"""Embeddings → nearest neighbours: FAISS search in an index that knows what it was made of.

On disk, a directory: `vectors.faiss`, `ids.arrow` (row = position in the index; Arrow IPC, memory-mapped),
`manifest.json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa

from fovea.index.blocks import Chunks, check_distinct, checked
from fovea.index.kind import FLAT, IndexKind, inverted_file
from fovea.types import FloatArray

VERSION = 2  # 2: kinds of index; ids in Arrow IPC
CORPORA = ("gold", "candidates", "full")
_REQUIRED = ("encoder", "fingerprint", "corpus")
_METRIC = "inner_product"

# faiss 1.15 only calls BLAS from 128,000 queries on: below, a batch costs as much as its queries one by one.
# With 20, a batch of 100 is 12 times faster.
faiss.cvar.distance_compute_blas_threshold = 20


class DenseIndex:
    """Inner-product search over all vectors: exact (`flat`), or over compressed ones (see `IndexKind`).

    Attributes:
        manifest: `encoder` (name), `fingerprint` (of its weights), `corpus` (`gold`, `candidates`, `full`, or
            a name of its own), `normalised` (True: scores are cosines), `metric`, `kind` (`flat` or a FAISS
            factory string), for kinds with cells or codes `nprobe`, `train_size` and `seed`, `width` D,
            `count` N, `version`, and whatever the caller added (JSON).
    """

    def __init__(self, ids: pa.Array, index: Any, manifest: dict[str, Any], *, gpu: bool = False) -> None:
        self.manifest = manifest
        self._ids = ids
        self._index = index
        self._searched = _on_gpus(index) if gpu else index

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[str]:
        """N ids, in index order; a new list each time, to be avoided for millions."""
        found: list[str] = self._ids.to_pylist()
        return found

    @classmethod
    def build(
        cls,
        ids: Sequence[str],
        embeddings: FloatArray,
        *,
        manifest: Mapping[str, Any],
        kind: IndexKind | None = None,
        gpu: bool = False,
    ) -> DenseIndex:
        """Index N vectors that are in memory.

        Args:
            ids: N distinct ids.
            embeddings: float [N, D]; normalised here unless the manifest says `"normalised": False`.
            manifest: at least `encoder`, `fingerprint`, `corpus`; the fields that are known here are filled
                in, and must agree when given.
            kind: which FAISS index; `flat` by default.
            gpu: see `stream`.
        """
        vectors = np.asarray(embeddings)
        if vectors.ndim != 2 or len(vectors) != len(ids):
            raise ValueError(
                f"{len(ids)} ids for embeddings of shape {vectors.shape}; [N, D] with N = number of ids"
            )
        known = {"width": vectors.shape[1], "count": len(ids)}
        _refuse_mismatch("these embeddings", known, manifest, common=True)
        blocks = [(ids, vectors)]
        return cls.stream(blocks, vectors.shape[1], manifest=manifest, kind=kind, count=len(ids), gpu=gpu)

    @classmethod
    def stream(
        cls,
        blocks: Iterable[tuple[Sequence[str], FloatArray]],
        width: int,
        *,
        manifest: Mapping[str, Any],
        kind: IndexKind | None = None,
        count: int | None = None,
        gpu: bool = False,
    ) -> DenseIndex:
        """Index vectors that come block by block: all of them are never held at once, but for `flat`.

        Args:
            blocks: (ids, float [n, D]) one after the other. A kind that learns from a sample goes through
                them twice, so they must start anew with each `iter`, as a list does and a generator does not.
            width: D.
            manifest: see `build`.
            kind: which FAISS index; `flat` by default.
            count: N, or a little more, where it is known; `flat` then takes memory for so many vectors,
                and not for up to three times N while it grows.
            gpu: learn cells on, and search on, all GPUs (needs faiss-gpu).

        Raises:
            ValueError: duplicate ids, NaN, infinity or zero vectors (by id), too few to learn from, a
                manifest that does not fit.
        """
        kind = kind or IndexKind()
        if gpu:
            require_gpus()
        if absent := [key for key in _REQUIRED if not manifest.get(key)]:
            raise ValueError(f"an index manifest needs {list(_REQUIRED)}; missing or empty: {absent}")
        full = {"normalised": True} | dict(manifest)
        chunks = Chunks(blocks, width, bool(full["normalised"]))
        index = kind.make(width)
        known = {"kind": kind.factory, "metric": _METRIC, "width": width, "version": VERSION}
        if wanted := kind.num_training(index):
            sample = chunks.sample(wanted, kind.seed)
            kind.require_enough(index, len(sample))
            known |= {"train_size": len(sample), "seed": kind.seed}
            _train(index, sample, gpu)
            del sample
        if (cells := inverted_file(index)) is not None:
            known["nprobe"] = cells.nprobe
        if kind.factory == FLAT and count is not None:
            index.codes.resize(4 * width * count)  # faiss keeps what was reserved
            index.codes.resize(0)
        names = [pa.array([], pa.large_string())]
        hashes = [np.zeros(0, np.int64)]
        for ids, vectors in chunks:
            index.add(vectors)
            names.append(pa.array(ids, pa.large_string()))
            hashes.append(np.fromiter(map(hash, ids), np.int64, len(ids)))
        every = pa.concat_arrays(names)
        check_distinct(every, np.concatenate(hashes))
        known["count"] = len(every)
        _refuse_mismatch("these embeddings", known, {key: full[key] for key in known if key in full})
        return cls(every, index, full | known, gpu=gpu)

    @property
    def nprobe(self) -> int | None:
        """Cells that a search looks into; None for a kind without cells. May be set; the manifest keeps what
        the index was built with.
        """
        cells = inverted_file(self._index)
        return None if cells is None else int(cells.nprobe)

    @nprobe.setter
    def nprobe(self, value: int) -> None:
        cells = inverted_file(self._index)
        if cells is None or not 1 <= value <= cells.nlist:
            there = "no cells" if cells is None else f"{cells.nlist} cells"
            raise ValueError(f"nprobe={value}: an index of kind {self.manifest['kind']} has {there}")
        cells.nprobe = value
        if self._searched is not self._index:
            faiss.GpuParameterSpace().set_index_parameter(self._searched, "nprobe", value)

    def search(self, queries: FloatArray, k: int) -> tuple[list[list[str | None]], FloatArray]:
        """The k nearest of each query, best first; equal scores in index order.

        (Which of several equal vectors makes it into the last place is faiss's choice.)

        Args:
            queries: float [Q, D]; normalised here when the index is.
            k: how many, from 1; may exceed the index.

        Returns:
            ids [Q][k], None where the index (or the cells that were looked into) has no more; scores float32
            [Q, k], -inf there.
        """
        scores, positions = self._searched.search(self._queries(queries), _positive(k))
        gone = positions < 0  # faiss pads with -1: as a Python index it would be the last id
        scores = np.where(gone, -np.inf, scores).astype(np.float32)
        order = np.lexsort((np.where(gone, len(self), positions), -scores), axis=1)
        scores = np.take_along_axis(scores, order, 1)
        return self._names(np.take_along_axis(positions, order, 1)), scores

    def search_among(
        self, queries: FloatArray, allowed: Sequence[Sequence[str]], k: int
    ) -> tuple[list[list[str | None]], FloatArray]:
        """As `search`, each query among its own ids only (a data set's candidate lists); all are compared.

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
        best = np.full((len(vectors), k), -1, np.int64)
        scores = np.full((len(vectors), k), -np.inf, np.float32)
        for row, ids in enumerate(allowed):
            positions = np.array(sorted({self._position[id_] for id_ in ids}), np.int64)
            among = self._vectors(positions) @ vectors[row] if len(positions) else np.zeros(0)
            order = np.argsort(-among, kind="stable")[:k]
            scores[row, : len(order)], best[row, : len(order)] = among[order], positions[order]
        return self._names(best), scores

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
        if (cells := inverted_file(self._index)) is not None:
            cells.make_direct_map(False)  # `search_among` may have made one
        faiss.write_index(self._index, str(writing / "vectors.faiss"))
        batch = pa.record_batch([self._ids], names=["id"])
        with pa.OSFile(str(writing / "ids.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as out:
            out.write_batch(batch)
        (writing / "manifest.json").write_text(json.dumps(self.manifest, indent=1, sort_keys=True) + "\n")
        if root.exists():
            root.rename(old)
        writing.rename(root)
        shutil.rmtree(old, ignore_errors=True)
        return root

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        expect: Mapping[str, Any] | None = None,
        mmap: bool = False,
        gpu: bool = False,
    ) -> DenseIndex:
        """Read an index.

        Args:
            directory: what `save` wrote.
            expect: manifest fields that must agree, e.g. the encoder's fingerprint and the corpus; a mismatch
                raises and lists every differing field with both values.
            mmap: leave the vectors on disk and read what searches touch: for an index beyond memory.
            gpu: search on all GPUs (needs faiss-gpu).
        """
        root = Path(directory)
        path = root / "manifest.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"no index at {root} (manifest.json is missing); make one with: "
                f"python scripts/build_index.py --tables … --encoder … --out {root}"
            )
        manifest = _read_manifest(path)
        _refuse_mismatch(f"the index at {root}", manifest, expect or {})
        try:
            index = faiss.read_index(str(root / "vectors.faiss"), _mapping(manifest["kind"]) if mmap else 0)
            ids = pa.ipc.open_file(pa.memory_map(str(root / "ids.arrow"))).get_batch(0).column("id")
        except (RuntimeError, OSError, KeyError, pa.ArrowException) as error:
            raise ValueError(
                f"{root} is damaged ({error}); build it again with scripts/build_index.py"
            ) from error
        have = {"width": index.d, "count": index.ntotal}
        _refuse_mismatch(f"the index file in {root}", have, manifest, common=True)
        _refuse_mismatch(f"the id file in {root}", {"count": len(ids)}, manifest, common=True)
        return cls(ids, index, manifest, gpu=gpu)

    @property
    def _corpus(self) -> str:
        return str(self.manifest["corpus"])

    @cached_property
    def _position(self) -> dict[str, int]:
        return {id_: position for position, id_ in enumerate(self.ids)}

    def _names(self, positions: np.ndarray[Any, np.dtype[np.int64]]) -> list[list[str | None]]:
        """Ids of positions [Q, k], None for -1."""
        flat = pa.array(positions.ravel(), mask=(positions < 0).ravel())
        names = self._ids.take(flat).to_pylist()
        k = positions.shape[1]
        return [names[start : start + k] for start in range(0, len(names), k)]

    def _vectors(self, positions: np.ndarray[Any, np.dtype[np.int64]]) -> FloatArray:
        """The vectors at some positions, as the index keeps them."""
        cells = inverted_file(self._index)
        if cells is not None and cells.direct_map.no():
            cells.make_direct_map()  # where each vector lies: 8 bytes for each, and once through all cells
        vectors: FloatArray = self._index.reconstruct_batch(positions)
        return vectors

    def _queries(self, queries: FloatArray) -> FloatArray:
        vectors = np.ascontiguousarray(queries, np.float32)
        width = self.manifest["width"]
        if vectors.ndim != 2 or vectors.shape[1] != width:
            raise ValueError(
                f"queries of shape {vectors.shape}; an index of {self.manifest['encoder']} takes [Q, {width}]"
            )
        return checked(vectors, "queries", range(len(vectors)), bool(self.manifest["normalised"]))


def _train(index: Any, sample: FloatArray, gpu: bool) -> None:
    """Learn cells and codes; with `gpu` the cells, which are nearly all of the work, on the GPUs."""
    cells = inverted_file(index)
    for part in (cells, getattr(cells, "pq", None), getattr(index, "pq", None)):
        if part is not None:  # faiss would write a line for each sub-quantiser
            part.cp.min_points_per_centroid = 1
    if gpu:
        on_gpus = _on_gpus(faiss.IndexFlatIP(index.d if cells is None else cells.d))
        if cells is not None:
            cells.clustering_index = on_gpus
    index.train(sample)
    if gpu and cells is not None:
        cells.clustering_index = None


def require_gpus() -> None:
    """Refuse `gpu` where faiss has none."""
    if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() == 0:
        raise ValueError(
            "gpu: this faiss sees no GPU; install faiss-gpu on a machine that has one, or leave it out"
        )


def _on_gpus(index: Any) -> Any:
    """A copy for searching on all GPUs."""
    require_gpus()
    return faiss.index_cpu_to_all_gpus(index)


def _mapping(kind: str) -> int:
    """How faiss maps a file: inverted files and other indexes have a way each."""
    return int(faiss.IO_FLAG_MMAP if "IVF" in kind else faiss.IO_FLAG_MMAP_IFC)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}); build it again with scripts/build_index.py"
        ) from error
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{path.parent}: an index of version {manifest.get('version')}, this code reads {VERSION}; build "
            f"it again with scripts/build_index.py (encoder {manifest.get('encoder')}, corpus "
            f"{manifest.get('corpus')})"
        )
    return manifest


def _positive(k: int) -> int:
    if k < 1:
        raise ValueError(f"k is the number of neighbours wanted, from 1; got {k}")
    return k


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
