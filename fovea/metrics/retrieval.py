"""Run × gold → recall@k, hit@k, precision@k, nDCG@k, MRR, MAP for each query, their means and intervals.

The numbers are those of trec_eval. `recall@k` divides by the number of gold images, `hit@k` only asks whether
one of them is there: with one gold image they coincide, with two they do not (PITFALLS 9). A query of the
gold set without a prediction scores 0 and is counted, so leaving queries out never helps (PITFALLS 10).

Ties. Scores compare as float32, as in trec_eval. Among equal scores:
    by_id: the larger document id comes first (trec_eval's rule, the default): arbitrary, but fixed.
    optimistic / pessimistic: gold images come first / last: the bounds of what any tie rule can give.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from fovea.types import FloatArray

Ties = Literal["by_id", "optimistic", "pessimistic"]
Float64Array = np.ndarray[Any, np.dtype[np.float64]]
KS = (1, 2, 5, 10, 20)
_CELLS = 4_000_000  # resampled values held at once by the bootstrap: 32 MB


@dataclass(frozen=True)
class RetrievalResult:
    """What one run scores against one gold set.

    Attributes:
        query_ids: the queries of the gold set, in its order (Q of them).
        per_query: metric name → float32 [Q], each in [0, 1].
        mean: metric name → mean over all Q queries.
        missing: ids of the queries without a prediction; they count as 0 in `mean`.
        ties: the tie rule used.
    """

    query_ids: list[str]
    per_query: dict[str, FloatArray]
    mean: dict[str, float]
    missing: list[str]
    ties: Ties
    ks: tuple[int, ...] = field(default=KS)

    @property
    def coverage(self) -> float:
        """Share of the gold set's queries that have a prediction, [0, 1]."""
        return 1 - len(self.missing) / len(self.query_ids)


def rank(
    scores: Mapping[str, float], *, ties: Ties = "by_id", gains: Mapping[str, int] | None = None
) -> list[str]:
    """Document ids in descending order of score under a tie rule (see the module).

    Args:
        scores: document id → score; larger is better.
        ties: the tie rule.
        gains: document id → gain, for the two bounds; absent ids have gain 0.
    """
    with np.errstate(over="ignore"):  # becomes infinite, which is refused below
        values = np.array(list(scores.values()), np.float64).astype(np.float32).tolist()
    single = dict(zip(scores, values, strict=True))
    if bad := [doc for doc, score in single.items() if not math.isfinite(score)]:
        few = {doc: scores[doc] for doc in bad[:5]}
        raise ValueError(f"scores must be finite in float32; not so for {len(bad)} documents, e.g. {few}")
    gains = gains or {}
    sign = {"by_id": 0, "optimistic": 1, "pessimistic": -1}[ties]
    return sorted(single, key=lambda doc: (single[doc], sign * gains.get(doc, 0), doc), reverse=True)


def evaluate(
    run: Mapping[str, Mapping[str, float]],
    gold: Mapping[str, Collection[str] | Mapping[str, int]],
    *,
    ks: Sequence[int] = KS,
    ties: Ties = "by_id",
) -> RetrievalResult:
    """Score a run.

    Args:
        run: query id → document id → score. The documents that are not there are not retrieved.
        gold: query id → gold document ids, or → their gains (whole numbers, 0 means judged irrelevant; only
            nDCG looks at more than the sign). Its queries are the denominator of every mean.
        ks: the cut-offs.
        ties: the tie rule.

    Returns:
        Per-query values, means and the queries that had no prediction.
    """
    gains_of = {query: _gains(docs) for query, docs in gold.items()}
    _check(run, gains_of, ks)
    order = tuple(sorted(set(ks)))
    names = [f"{metric}@{k}" for metric in ("recall", "hit", "precision", "ndcg") for k in order] + [
        "mrr",
        "map",
    ]
    rows: list[tuple[float, ...]] = []
    missing: list[str] = []
    for query, gains in gains_of.items():
        scores = run.get(query, {})
        if not scores:
            missing.append(query)
            rows.append((0.0,) * len(names))
            continue
        ranked = rank(scores, ties=ties, gains=gains)
        hits = tuple((place, gains[doc]) for place, doc in enumerate(ranked) if gains.get(doc, 0))
        lost = tuple(
            sorted((gain for doc, gain in gains.items() if gain and doc not in scores), reverse=True)
        )
        rows.append(_score(len(ranked), hits, lost, order))
    values = np.array(rows, np.float32).reshape(len(rows), len(names))
    per_query = {name: values[:, column] for column, name in enumerate(names)}
    mean = {name: float(column.mean(dtype=np.float64)) for name, column in per_query.items()}
    return RetrievalResult(list(gains_of), per_query, mean, missing, ties, order)


# Queries whose gold images land on the same ranks score the same under any fusion; with one gold image there
# are K + 1 cases.
@lru_cache(maxsize=1 << 16)
def _score(
    num_ranked: int, hits: tuple[tuple[int, int], ...], lost: tuple[int, ...], ks: tuple[int, ...]
) -> tuple[float, ...]:
    """The metrics of one query, in the order recall, hit, precision, ndcg at each k, then MRR and MAP.

    Args:
        num_ranked: how many documents were retrieved.
        hits: (rank from 0, gain) of each gold document that was retrieved.
        lost: gains of the gold documents that were not.
        ks: cut-offs, ascending.
    """
    import torch
    from torchmetrics.functional import retrieval as tm

    # The list as torchmetrics must see it: what was retrieved, filled up with irrelevant documents to the
    # deepest cut-off, and behind that the gold documents that were not retrieved: no cut-off reaches them, so
    # they only count where they must, in the number of relevant documents and in the ideal order.
    depth = max(num_ranked, ks[-1])
    target = torch.zeros(depth + len(lost), dtype=torch.long)
    for place, gain in hits:
        target[place] = gain
    target[depth:] = torch.tensor(lost, dtype=torch.long)
    preds = torch.arange(len(target), 0, -1, dtype=torch.float32)
    binary = target > 0
    out = [float(tm.retrieval_recall(preds, binary, top_k=k)) for k in ks]
    out += [float(tm.retrieval_hit_rate(preds, binary, top_k=k)) for k in ks]
    out += [float(tm.retrieval_precision(preds, binary, top_k=k)) for k in ks]
    out += [float(tm.retrieval_normalized_dcg(preds, target, top_k=k)) for k in ks]
    out.append(float(tm.retrieval_reciprocal_rank(preds, binary, top_k=depth)))
    # torchmetrics averages over the gold documents within top_k; trec_eval over all of them.
    found = len(hits) / (len(hits) + len(lost))
    out.append(float(tm.retrieval_average_precision(preds, binary, top_k=depth)) * found)
    return tuple(out)


def recall_curve(
    run: Mapping[str, Mapping[str, float]],
    gold: Mapping[str, Collection[str] | Mapping[str, int]],
    depth: int,
) -> Float64Array:
    """recall@k at every k = 1 … depth, ties by id: float64 [Q, depth], in the order of `gold`'s queries."""
    out = np.zeros((len(gold), depth))
    for row, (query, docs) in enumerate(gold.items()):
        wanted = {doc for doc, gain in _gains(docs).items() if gain > 0}
        ranked = rank(run.get(query, {}))[:depth]
        out[row, [place for place, doc in enumerate(ranked) if doc in wanted]] = 1 / len(wanted)
    curve: Float64Array = out.cumsum(1)
    return curve


def _gains(docs: Collection[str] | Mapping[str, int]) -> dict[str, int]:
    if isinstance(docs, Mapping):
        return dict(docs)
    return dict.fromkeys([docs] if isinstance(docs, str) else docs, 1)


def _check(
    run: Mapping[str, Mapping[str, float]], gains: Mapping[str, Mapping[str, int]], ks: Sequence[int]
) -> None:
    """All that is wrong with the input, at once."""
    faults = []
    if not ks or any(not isinstance(k, int) or k < 1 for k in ks):
        faults.append(f"ks must be whole numbers from 1, not {list(ks)}")
    if not gains:
        faults.append("the gold set has no query")
    if unknown := [query for query in run if query not in gains]:
        faults.append(
            f"{len(unknown)} predicted queries are not in the gold set, e.g. {unknown[:5]}: another split?"
        )
    if negative := [query for query, docs in gains.items() if any(gain < 0 for gain in docs.values())]:
        faults.append(f"{len(negative)} queries have negative gains, e.g. {negative[:5]}; 0 is the least")
    if empty := [query for query, docs in gains.items() if not any(gain > 0 for gain in docs.values())]:
        faults.append(
            f"{len(empty)} queries have no gold image, e.g. {empty[:5]}; leave them out of the gold set"
        )
    if faults:
        raise ValueError("cannot score this run: " + "; ".join(faults))


class Interval(NamedTuple):
    """A mean and its percentile bootstrap interval."""

    mean: float
    low: float
    high: float


def bootstrap_interval(
    values: Sequence[float] | FloatArray, *, n: int = 1000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Percentile bootstrap of a mean over queries.

    Args:
        values: one value a query.
        n: number of resamples.
        seed: of the resampling; the same seed and values give the same interval.
        level: covered share, in (0, 1).
    """
    sample = np.asarray(values, np.float64)
    if sample.ndim != 1:
        raise ValueError(f"a bootstrap of one mean needs a list of values, not shape {sample.shape}")
    return bootstrap_intervals(sample[:, None], n=n, seed=seed, level=level)[0]


def bootstrap_intervals(
    values_QM: Float64Array, *, n: int = 1000, seed: int = 0, level: float = 0.95
) -> list[Interval]:
    """Percentile bootstrap of many means over the same queries, from the same resamples.

    Args:
        values_QM: [Q, M], one row a query, one column a mean.
        n: number of resamples.
        seed: of the resampling; the same seed and values give the same intervals.
        level: covered share, in (0, 1).

    Returns:
        M intervals.
    """
    sample = np.asarray(values_QM, np.float64)
    if sample.ndim != 2 or not len(sample) or not np.isfinite(sample).all():
        raise ValueError(
            f"a bootstrap needs a non-empty list of finite values, got {sample.shape}: {sample[:5]}"
        )
    rng = np.random.default_rng(seed)
    size = len(sample)
    step = max(1, _CELLS // size)
    means = []
    for at in range(0, n, step):
        drawn = rng.integers(0, size, (min(step, n - at), size))
        # How often each query was drawn: the sums of all columns are then one matrix product.
        row = np.arange(len(drawn))[:, None] * size
        counts = np.bincount((drawn + row).ravel(), minlength=drawn.size).reshape(drawn.shape)
        means.append(counts.astype(np.float64) @ sample / size)
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2], axis=0)
    return [Interval(*map(float, three)) for three in zip(sample.mean(0), low, high, strict=True)]


def paired_bootstrap(
    a: Sequence[float] | FloatArray,
    b: Sequence[float] | FloatArray,
    *,
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Percentile bootstrap of mean(a) − mean(b) over the same queries in the same order.

    `a` is not inferior to `b` by a margin m when `low > -m`; it is better when `low > 0`.
    """
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if first.shape != second.shape:
        raise ValueError(f"paired values need the same queries: {first.shape} against {second.shape}")
    return bootstrap_interval(list(first - second), n=n, seed=seed, level=level)
