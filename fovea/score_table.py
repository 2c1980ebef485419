"""(Query, candidate) rows → one table: what calibration, every fusion and the report read.

Shapes: `Q` queries, `M` rows (query × candidate), `T` phrases of a query (padded), `W` rows of the longest
query.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fovea.types import BoolArray

Float64Array = np.ndarray[Any, np.dtype[np.float64]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]

# Rank of a gold image that the coarse stage did not keep: still the positive of eq. 9, but in no ranking.
BEYOND = -1


def draw_negatives(
    query_ids: Sequence[str], query: IntArray, rank: IntArray, is_gold: BoolArray, seed: int
) -> BoolArray:
    """Mark one hard negative a query, drawn from its five best non-gold candidates by S_global (eq. 9).

    The draw depends on the seed and the query's id alone, so that a subset or another order of queries
    keeps it.
    """
    negative = np.zeros(len(query), bool)
    kept = np.flatnonzero(~is_gold & (rank > 0))
    kept = kept[np.lexsort((rank[kept], query[kept]))]
    starts = np.searchsorted(query[kept], np.arange(len(query_ids) + 1))
    for q, query_id in enumerate(query_ids):
        pool = kept[starts[q] : starts[q + 1]][:5]
        if len(pool):
            digest = hashlib.blake2b(f"{seed}\0{query_id}".encode(), digest_size=8).digest()
            negative[pool[int.from_bytes(digest) % len(pool)]] = True
    return negative


class Grid(NamedTuple):
    """A score table as [Q, W] arrays, padded rows False everywhere; what calibration needs.

    `scores` holds (S_global, S_local); `top` marks kept candidates (rank ≥ 1), `gold` also golds beyond the
    top K.
    """

    query_ids: tuple[str, ...]
    scores: Float64Array  # [Q, W, 2]
    gold: BoolArray
    top: BoolArray
    negative: BoolArray


@dataclass(frozen=True, eq=False)
class ScoreTable:
    """Scores of every (query, candidate): what calibration, every fusion row and the report read.

    Rows of a query are contiguous, in the order of `query_ids`; kept candidates by rank, then golds beyond
    the top K.

    Attributes:
        query_ids: [Q], unique.
        splits: [Q], the gallery each query belongs to.
        num_gold: int64 [Q], size of the gold set, images missing from the corpus included: recall's
            denominator.
        phrase_ids: [Q] tuples, in question order.
        query: int64 [M], row → position in `query_ids`.
        rank: int64 [M], from 1 by S_global; `BEYOND` for a gold image outside the top K.
        image_ids: [M].
        is_gold: bool [M].
        negative: bool [M], the query's one drawn negative of eq. 9.
        global_: float64 [M], cosine of query and whole image by the coarse encoder, [-1, 1].
        local: float64 [M], the run's local score.
        local_eq5: float64 [M], eq. 5 verbatim: cos(question, region), eq. 4 as printed.
        region_ids: [M] tuples, the region of each phrase or None.
        similarity: float64 [M, T], cosine of phrase and its region, NaN where there is none.
        weight: float64 [M, T], α of the run's local score.
        settings: how the scores were made; travels with the file.
    """

    query_ids: tuple[str, ...]
    splits: tuple[str, ...]
    num_gold: IntArray
    phrase_ids: tuple[tuple[str, ...], ...]
    query: IntArray
    rank: IntArray
    image_ids: tuple[str, ...]
    is_gold: BoolArray
    negative: BoolArray
    global_: Float64Array
    local: Float64Array
    local_eq5: Float64Array
    region_ids: tuple[tuple[str | None, ...], ...]
    similarity: Float64Array
    weight: Float64Array
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = []
        if len(set(self.query_ids)) != len(self.query_ids):
            twice = sorted({q for q in self.query_ids if self.query_ids.count(q) > 1})
            problems.append(f"query ids occur twice: {twice[:5]}; ids must be unique over all splits")
        for name in ("global_", "local", "local_eq5"):
            bad = np.flatnonzero(~np.isfinite(getattr(self, name)))
            if len(bad):
                first = [(self.query_ids[self.query[i]], self.image_ids[i]) for i in bad[:3]]
                problems.append(f"{len(bad)} non-finite `{name}` scores, first (query, image): {first}")
        if np.any(np.diff(self.query) < 0):
            problems.append("rows of a query are not together, in the order of query_ids")
        if problems:
            raise ValueError("score table: " + "; ".join(problems))

    def __len__(self) -> int:
        return len(self.query)

    def starts(self) -> IntArray:
        """int64 [Q + 1]: rows of query q are `starts[q]:starts[q + 1]`."""
        return np.searchsorted(self.query, np.arange(len(self.query_ids) + 1)).astype(np.int64)

    def grid(self) -> Grid:
        """The padded [Q, W] view of the rows."""
        starts = self.starts()
        column = np.arange(len(self)) - starts[self.query]
        shape = (len(self.query_ids), int(np.diff(starts).max(initial=1)))
        scores = np.zeros((*shape, 2))
        scores[self.query, column] = np.stack([self.global_, self.local], 1)
        gold, top, negative = (np.zeros(shape, bool) for _ in range(3))
        gold[self.query, column] = self.is_gold
        top[self.query, column] = self.rank > 0
        negative[self.query, column] = self.negative
        return Grid(self.query_ids, scores, gold, top, negative)

    @classmethod
    def concat(cls, tables: Sequence[ScoreTable]) -> ScoreTable:
        """Several galleries' tables as one; they must have been made with the same settings."""
        first = tables[0]
        if any(table.settings != first.settings for table in tables):
            raise ValueError("score tables made with different settings cannot be pooled")
        width = max(table.similarity.shape[1] for table in tables)

        def stack(name: str) -> Any:
            return np.concatenate([getattr(table, name) for table in tables])

        def padded(name: str, fill: float) -> Float64Array:
            parts = [getattr(table, name) for table in tables]
            return np.concatenate(
                [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=fill) for part in parts]
            )

        def joined(name: str) -> Any:
            return tuple(item for table in tables for item in getattr(table, name))

        offsets = np.cumsum([0] + [len(table.query_ids) for table in tables])
        return cls(
            query=np.concatenate(
                [table.query + offset for table, offset in zip(tables, offsets, strict=False)]
            ),
            similarity=padded("similarity", np.nan),
            weight=padded("weight", 0.0),
            settings=first.settings,
            **{
                name: joined(name)
                for name in ("query_ids", "splits", "phrase_ids", "image_ids", "region_ids")
            },
            **{
                name: stack(name)
                for name in ("num_gold", "rank", "is_gold", "negative", "global_", "local", "local_eq5")
            },
        )

    def write(self, path: str | Path) -> None:
        """Write a parquet row a (query, candidate); lists are per phrase, null where it has no region."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        counts = [len(self.phrase_ids[q]) for q in self.query]

        def lists(values: Float64Array) -> list[list[float | None]]:
            rows = values.tolist()
            return [[v if v == v else None for v in row[:n]] for row, n in zip(rows, counts, strict=True)]

        text, integer, real = pa.string(), pa.int32(), pa.float64()
        columns = {
            "query_id": pa.array([self.query_ids[q] for q in self.query], text),
            "split": pa.array([self.splits[q] for q in self.query], text),
            "num_gold": pa.array(self.num_gold[self.query], integer),
            "rank": pa.array(self.rank, integer),
            "image_id": pa.array(self.image_ids, text),
            "is_gold": pa.array(self.is_gold),
            "negative": pa.array(self.negative),
            "global": pa.array(self.global_, real),
            "local": pa.array(self.local, real),
            "local_eq5": pa.array(self.local_eq5, real),
            "phrase_ids": pa.array([self.phrase_ids[q] for q in self.query], pa.list_(text)),
            "region_ids": pa.array(
                [row[:n] for row, n in zip(self.region_ids, counts, strict=True)], pa.list_(text)
            ),
            "similarities": pa.array(lists(self.similarity), pa.list_(real)),
            "weights": pa.array(lists(self.weight), pa.list_(real)),
        }
        table = pa.table(columns).replace_schema_metadata(
            {"fovea_scores": json.dumps(self.settings, sort_keys=True)}
        )
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)

    @classmethod
    def read(cls, path: str | Path) -> ScoreTable:
        """Read what `write` wrote; a file that is not a score table is refused by name."""
        import pyarrow.parquet as pq

        if not Path(path).is_file():
            raise FileNotFoundError(
                f"no score table at {path}; make it with: python scripts/evaluate.py scores …"
            )
        table = pq.read_table(path)
        metadata = table.schema.metadata or {}
        if b"fovea_scores" not in metadata:
            raise ValueError(f"{path}: not a score table; make one with: python scripts/evaluate.py scores …")
        data = table.to_pydict()
        place: dict[str, int] = {}
        query = np.array([place.setdefault(q, len(place)) for q in data["query_id"]], np.int64)
        _, first = np.unique(query, return_index=True)
        phrase_ids = tuple(tuple(data["phrase_ids"][i]) for i in first)
        width = max((len(ids) for ids in phrase_ids), default=0)

        def padded(name: str, fill: float) -> Float64Array:
            out = np.full((len(query), width), fill)
            for i, row in enumerate(data[name]):
                out[i, : len(row)] = [fill if value is None else value for value in row]
            return out

        return cls(
            query_ids=tuple(place),
            splits=tuple(data["split"][i] for i in first),
            num_gold=np.array([data["num_gold"][i] for i in first], np.int64),
            phrase_ids=phrase_ids,
            query=query,
            rank=np.array(data["rank"], np.int64),
            image_ids=tuple(data["image_id"]),
            is_gold=np.array(data["is_gold"], bool),
            negative=np.array(data["negative"], bool),
            global_=np.array(data["global"], np.float64),
            local=np.array(data["local"], np.float64),
            local_eq5=np.array(data["local_eq5"], np.float64),
            region_ids=tuple(map(tuple, data["region_ids"])),
            similarity=padded("similarities", np.nan),
            weight=padded("weights", 0.0),
            settings=json.loads(metadata[b"fovea_scores"]),
        )
