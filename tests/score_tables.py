"""Score tables made by hand or from noise, for the tests of what reads them."""

from __future__ import annotations

import numpy as np

from fovea.score_table import BEYOND, ScoreTable, draw_negatives


def make_table(queries, *, seed=0, split="cal"):
    """queries: id → [(image, rank, gold, global, local)], one phrase each."""
    rows = [(q, *row) for q, own in enumerate(queries.values()) for row in own]
    query, images, rank, gold, global_, local = (list(column) for column in zip(*rows, strict=True))
    query, rank, gold = np.array(query), np.array(rank), np.array(gold, bool)
    return ScoreTable(
        query_ids=tuple(queries),
        splits=(split,) * len(queries),
        num_gold=np.array([sum(r[2] for r in own) for own in queries.values()]),
        phrase_ids=(("p0",),) * len(queries),
        query=query,
        rank=rank,
        image_ids=tuple(images),
        is_gold=gold,
        negative=draw_negatives(tuple(queries), query, rank, gold, seed),
        global_=np.array(global_, float),
        local=np.array(local, float),
        local_eq5=np.array(local, float) / 2,
        region_ids=(("r0",),) * len(rows),
        similarity=np.array(local, float)[:, None],
        weight=np.ones((len(rows), 1)),
        settings={"k": 3},
    )


def random_table(num_queries=300, k=20, *, seed=0, separation=(1.0, 2.0)):
    """Noisy cosines: the gold image is `separation` standard deviations above the rest."""
    rng = np.random.default_rng(seed)
    queries = {}
    for q in range(num_queries):
        scores = 0.2 + 0.05 * rng.standard_normal((k + 5, 2))
        scores[0] += 0.05 * np.array(separation)
        order = np.argsort(-scores[:, 0])
        rows = [(f"i{i}", r + 1, i == 0, *scores[i]) for r, i in enumerate(order) if r < k]
        gold_rank = int(np.flatnonzero(order == 0)[0])
        if gold_rank >= k:
            rows.append(("i0", BEYOND, True, *scores[0]))
        queries[f"q{q}"] = rows
    return make_table(queries)


def large_table(num_queries=2000, k=20, *, seed=0, shift=0.2, std=0.05, rho=0.0, ratio=1.0, sep=(1.0, 1.5)):
    """As `random_table`, in one go: cosines `shift` ± `std` (local: times `ratio`), correlated by `rho`."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((num_queries, k, 2))
    noise[..., 1] = rho * noise[..., 0] + np.sqrt(1 - rho**2) * noise[..., 1]
    noise[:, 0] += sep
    scores = shift + std * noise * [1.0, ratio]
    order = np.argsort(-scores[..., 0], 1)
    scores = np.take_along_axis(scores, order[..., None], 1)
    ids = tuple(f"q{q}" for q in range(num_queries))
    query, rank = np.repeat(np.arange(num_queries), k), np.tile(np.arange(1, k + 1), num_queries)
    gold = (order == 0).ravel()
    return ScoreTable(
        query_ids=ids, splits=("cal",) * num_queries, num_gold=np.ones(num_queries, np.int64),
        phrase_ids=((),) * num_queries, query=query, rank=rank,
        image_ids=tuple(f"i{i}" for i in order.ravel()),
        is_gold=gold, negative=draw_negatives(ids, query, rank, gold, seed), global_=scores[..., 0].ravel(),
        local=scores[..., 1].ravel(), local_eq5=scores[..., 1].ravel(), region_ids=((),) * len(query),
        similarity=np.zeros((len(query), 0)), weight=np.zeros((len(query), 0)),
    )  # fmt: skip
