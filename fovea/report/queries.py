"""queries.jsonl → which questions the page shows, and how each one went."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

# In the order of the page's buttons.
OUTCOMES = {
    "fixed": "fixed by reweighting",
    "broken": "broken by reweighting",
    "failed": "failed",
    "kept": "right both times",
}


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of queries.jsonl; a damaged line is named."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not JSON ({error}); run the evaluation again"
            ) from error
    return rows


def gold_rank(row: dict[str, Any], order: str) -> int | None:
    """Rank (from 1) of the best gold image in `before` or `after`; None when no gold image was retrieved."""
    gold = set(row["gold_image_ids"])
    ranks = [rank for rank, found in enumerate(row[order], start=1) if found["image_id"] in gold]
    return ranks[0] if ranks else None


def outcome(row: dict[str, Any]) -> str:
    """Key of `OUTCOMES`: is a gold image first before and after reweighting?"""
    before, after = (gold_rank(row, order) == 1 for order in ("before", "after"))
    return {(False, True): "fixed", (True, False): "broken", (False, False): "failed", (True, True): "kept"}[
        before, after
    ]


def choose(rows: list[dict[str, Any]], limit: int, seed: int) -> list[dict[str, Any]]:
    """At most `limit` rows: an equal share of each outcome at random, unused places given to the others.

    The order is fixed, broken, failed, kept, and within each the order of the file.
    """
    pools: dict[str, list[int]] = {name: [] for name in OUTCOMES}
    for index, row in enumerate(rows):
        pools[outcome(row)].append(index)
    rng = random.Random(seed)
    for pool in pools.values():
        rng.shuffle(pool)
    chosen: dict[str, list[int]] = {name: [] for name in OUTCOMES}
    if limit < 0:
        raise ValueError(f"--limit {limit}: at least 0 questions")
    places = min(limit, len(rows))
    while places:
        for name, pool in pools.items():
            if pool and places:
                chosen[name].append(pool.pop())
                places -= 1
    return [rows[index] for name in OUTCOMES for index in sorted(chosen[name])]


def count(rows: list[dict[str, Any]]) -> Counter[str]:
    """How often each outcome occurred."""
    return Counter(map(outcome, rows))


def highlight(text: str, phrases: list[dict[str, Any]]) -> list[tuple[str, int | None]]:
    """Cut a question into (piece, index of its phrase or None).

    A phrase's `span` is used where there is one; else its first unused occurrence. A phrase whose words
    are not in the question in one piece stays without a mark.
    """
    spans: list[tuple[int, int, int]] = []
    for index, phrase in enumerate(phrases):
        start, end = phrase.get("span") or (-1, -1)
        at = text.lower().find(phrase["text"].lower()) if start < 0 else start
        while start < 0 and at >= 0 and any(at < e and at + len(phrase["text"]) > s for s, e, _ in spans):
            at = text.lower().find(phrase["text"].lower(), at + 1)
        end = at + len(phrase["text"]) if start < 0 else end
        if at >= 0 and not any(at < e and end > s for s, e, _ in spans):
            spans.append((at, end, index))
    pieces: list[tuple[str, int | None]] = []
    position = 0
    for start, end, index in sorted(spans):
        pieces += [(text[position:start], None), (text[start:end], index)]
        position = end
    pieces.append((text[position:], None))
    return [piece for piece in pieces if piece[0]]
