"""Galleries that the cascade looked at → results.json, queries.jsonl and the table that is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import numpy as np

    from fovea.metrics.retrieval import RetrievalResult
    from fovea.pipeline import Look
    from fovea.reweight import Calibrations
    from fovea.score_table import ScoreTable
    from fovea.types import Evidence, Query, Region

STATIC = ("global", "local", "add", "multiply")
NUM_MASKS = 5  # queries.jsonl holds the masks of this many candidates, and of the gold images
MARGIN = 0.03  # non-inferiority margin of the calibrated rule, in recall@1


@dataclass
class Gallery:
    """One split, looked at."""

    split: str
    queries: list[Query]
    look: Look
    evidence: list[Evidence]
    num_images: int
    absent: int
    unreadable: int = 0


def pool(galleries: Sequence[Gallery]) -> ScoreTable:
    """All galleries' rows as one table."""
    from fovea.score_table import ScoreTable

    return ScoreTable.concat([gallery.look.table for gallery in galleries])


def spans(table: ScoreTable) -> list[tuple[int, int]]:
    """(start, end) of each query's rows."""
    starts = table.starts().tolist()
    return list(zip(starts[:-1], starts[1:], strict=True))


def runs(table: ScoreTable, fused: np.ndarray, gold: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Query → kept candidate → score; beyond the top K nothing counts as retrieved, whatever the fusion."""
    return {
        query_id: {table.image_ids[row]: float(fused[row]) for row in range(a, b) if table.rank[row] > 0}
        for query_id, (a, b) in zip(table.query_ids, spans(table), strict=True)
        if query_id in gold
    }


def summarise(
    table: ScoreTable, results: dict[str, RetrievalResult], splits: Sequence[str], bootstrap: int
) -> dict[str, Any]:
    """Means over galleries, their spread, intervals over pooled queries, and the paired comparisons.

    Intervals and comparisons are those of recall (and, where a query has several positives, of hit), and of
    MRR and nDCG at the largest cut-off.
    """
    import numpy as np

    from fovea.metrics.retrieval import bootstrap_intervals, paired_bootstrap

    split_of = dict(zip(table.query_ids, table.splits, strict=True))
    members = np.array([split_of[query_id] for query_id in next(iter(results.values())).query_ids])
    scored = [split for split in splits if (members == split).any()]
    galleries: dict[str, Any] = {
        split: {
            name: {
                metric: float(values[members == split].mean()) for metric, values in result.per_query.items()
            }
            for name, result in results.items()
        }
        for split in scored
    }

    def over(statistic: Callable[[list[float]], float]) -> dict[str, dict[str, float]]:
        return {
            name: {
                metric: float(statistic([galleries[s][name][metric] for s in scored]))
                for metric in result.per_query
            }
            for name, result in results.items()
        }

    ks = next(iter(results.values())).ks
    metrics = [f"recall@{k}" for k in ks] + ["mrr", f"ndcg@{ks[-1]}"]
    if (table.num_gold > 1).any():
        metrics += [f"hit@{k}" for k in ks]
    metric = f"recall@{ks[0]}"
    # One draw of queries for all columns.
    columns = [result.per_query[m] for result in results.values() for m in metrics]
    intervals = iter(bootstrap_intervals(np.stack(columns, 1), n=bootstrap))
    first = {name: result.per_query[metric] for name, result in results.items()}
    best = max((name for name in STATIC if name in first), key=lambda name: first[name].mean())
    comparisons = []
    for a, b in dict.fromkeys([("local", "global"), ("learned", "global"), ("learned", best)]):
        if a in first:
            interval = paired_bootstrap(first[a], first[b], n=bootstrap)
            row = {
                "metric": metric,
                "a": a,
                "b": b,
                "difference": interval.mean,
                "low": interval.low,
                "high": interval.high,
            }
            if (a, b) == ("learned", best):
                row |= {"margin": MARGIN, "not_inferior": interval.low > -MARGIN}
            comparisons.append(row)
    return {
        "retrieval": over(np.mean),
        "spread": over(lambda values: np.std(values, ddof=1)) if len(scored) > 1 else None,
        "intervals": {name: {m: list(next(intervals)[1:]) for m in metrics} for name in results},
        "galleries": galleries,
        "best_static": best,
        "comparisons": comparisons,
    }


def curves(
    table: ScoreTable,
    found: Mapping[str, Mapping[str, Mapping[str, float]]],
    gold: Mapping[str, Any],
    depth: int,
    bootstrap: int,
) -> dict[str, Any]:
    """recall@k at every k up to the kept candidates: means over galleries, intervals over pooled queries."""
    import numpy as np

    from fovea.metrics.retrieval import bootstrap_intervals, recall_curve

    split_of = dict(zip(table.query_ids, table.splits, strict=True))
    members = np.array([split_of[query_id] for query_id in gold])
    values = [recall_curve(run, gold, depth) for run in found.values()]
    ends = bootstrap_intervals(np.concatenate(values, 1), n=bootstrap)
    recall = {}
    for number, (name, own) in enumerate(zip(found, values, strict=True)):
        means = np.mean([own[members == split].mean(0) for split in dict.fromkeys(members.tolist())], 0)
        mine = ends[number * depth : (number + 1) * depth]
        recall[name] = {
            "mean": means.tolist(),
            "low": [end.low for end in mine],
            "high": [end.high for end in mine],
        }
    return {"k": list(range(1, depth + 1)), "recall": recall}


def tie_bounds(
    found: Mapping[str, Mapping[str, Mapping[str, float]]],
    results: Mapping[str, RetrievalResult],
    gold: Mapping[str, Any],
) -> dict[str, Any]:
    """The tie rule, and how far any other could move recall: fusion → metric → (pessimistic, optimistic).

    Only what ties move is listed.
    """
    from fovea.metrics.retrieval import evaluate

    bounds: dict[str, dict[str, tuple[float, float]]] = {}
    for name, run in found.items():
        if all(len(set(scores.values())) == len(scores) for scores in run.values()):
            continue
        low, high = (
            evaluate(run, gold, ks=results[name].ks, ties=rule).mean for rule in ("pessimistic", "optimistic")
        )
        moved = {m: (low[m], high[m]) for m in low if m.startswith("recall@") and low[m] != high[m]}
        if moved:
            bounds[name] = moved
    return {
        "rule": "by_id",
        "about": "equal scores: the larger document id first, as trec_eval",
        "bounds": bounds,
    }


def coverage(galleries: Sequence[Gallery], table: ScoreTable, gold: dict[str, Any]) -> dict[str, int]:
    """What the figures rest on, in counts."""
    kept = table.is_gold & (table.rank > 0)
    return {
        "queries": len(table.query_ids),
        "queries_evaluated": len(gold),
        "queries_without_gold": len(table.query_ids) - len(gold),
        "queries_with_several_gold": int((table.num_gold > 1).sum()),
        "queries_with_gold_in_top_k": sum(bool(kept[a:b].any()) for a, b in spans(table)),
        "gold_images_absent": sum(gallery.absent for gallery in galleries),
        "phrases": sum(map(len, table.phrase_ids)),
        "candidates_without_region": sum(all(r is None for r in own) for own in table.region_ids),
    }


def write_queries(path: Path, galleries: Sequence[Gallery], calibrations: Calibrations | None) -> None:
    """One JSON line a query: phrases, and candidates before and after reweighting with their regions."""
    from fovea.reweight import fuse

    with replacing(path) as file:
        for gallery in galleries:
            table = gallery.look.table
            learned = None if calibrations is None else fuse("learned", table, calibrations)
            for q, (a, b) in enumerate(spans(table)):
                query, evidence = gallery.queries[q], gallery.evidence[q]
                place = {table.image_ids[row]: row for row in range(a, b)}
                before = sorted(
                    (row for row in range(a, b) if table.rank[row] > 0), key=lambda row: table.rank[row]
                )
                after = []
                for image in evidence.images:
                    row = place[image.candidate.image_id]
                    entry: dict[str, Any] = {
                        "image_id": image.candidate.image_id,
                        "global": image.global_score,
                        "local": image.local_score,
                        "score": image.score,
                        "regions": [
                            region_json(region, mask=len(after) < NUM_MASKS or bool(table.is_gold[row]))
                            for region in image.regions
                        ],
                    }
                    after.append(entry if learned is None else entry | {"learned": float(learned[row])})
                line = {
                    "query_id": query.id,
                    "split": query.split,
                    "text": query.text,
                    "phrases": [{"id": p.id, "text": p.text, "span": list(p.span)} for p in evidence.phrases],
                    "gold_image_ids": list(query.gold_image_ids),
                    "before": [
                        {"image_id": table.image_ids[row], "global": float(table.global_[row])}
                        for row in before
                    ],
                    "after": after,
                }
                file.write(json.dumps(line) + "\n")


def write_per_query(path: Path, table: ScoreTable, results: Mapping[str, RetrievalResult]) -> None:
    """One JSON line a query and fusion: every metric."""
    split_of = dict(zip(table.query_ids, table.splits, strict=True))
    with replacing(path) as file:
        for name, result in results.items():
            for i, query_id in enumerate(result.query_ids):
                row = {"query_id": query_id, "split": split_of[query_id], "fusion": name}
                row |= {metric: round(float(values[i]), 6) for metric, values in result.per_query.items()}
                file.write(json.dumps(row) + "\n")


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Write a file beside and rename it when it is whole: a kill leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = path.with_name(f".{path.name}.writing")
    with writing.open("w") as file:
        yield file
    writing.replace(path)


def write_text(path: Path, text: str) -> None:
    """`replacing`, for what is at hand."""
    with replacing(path) as file:
        file.write(text)


def region_json(region: Region, *, mask: bool) -> dict[str, Any]:
    """A region as queries.jsonl holds it."""
    row = {"phrase_id": region.phrase_id, "box": region.box.tolist()} | region.scores
    if region.label:
        row["label"] = region.label
    if mask and region.mask is not None:
        row["rle"] = {"size": list(region.mask["size"]), "counts": region.mask["counts"].decode("ascii")}
    return row


def show(report: dict[str, Any], out: Path) -> None:
    """The figures as a table, and what they rest on."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)  # a pipe has no width of its own
    ks = report["settings"]["ks"]
    several = report["coverage"]["queries_with_several_gold"]
    metrics = [f"recall@{k}" for k in ks] + ([f"hit@{k}" for k in ks] if several else []) + ["mrr"]
    galleries = report["galleries"]
    table = Table(
        title=f"retrieval in the corpus `{report['corpus']['name']}`"
        + (", each query among its own candidates" if report["corpus"]["among"] == "own" else "")
        + f", mean ± spread over {len(galleries)} galleries [95 % interval over queries], %; "
        f"{report['ties']['about']}"
    )
    table.add_column("fusion")
    for metric in metrics:
        table.add_column(metric, justify="right")
    for name, row in report["retrieval"].items():
        cells = []
        for metric in metrics:
            spread = "" if report["spread"] is None else f" ± {100 * report['spread'][name][metric]:.1f}"
            low, high = report["intervals"][name][metric]
            cells.append(f"{100 * row[metric]:.1f}{spread} \\[{100 * low:.0f}–{100 * high:.0f}]")
        table.add_row(name, *cells)
    console.print(table)
    for name, fit in (report["calibration"] or {}).items():
        console.print(
            f"{name}: {fit['objective']} by {fit['method']}: W_g {fit['w_global']:.3f}, "
            f"W_l {fit['w_local']:.3f}, B {fit['bias']:.3f}; {fit['num_queries']} queries, "
            f"{fit['num_skipped']} skipped"
            + (", a negative weight!" if min(fit["w_global"], fit["w_local"]) < 0 else "")
        )
    for c in report["comparisons"]:
        verdict = (
            ""
            if "not_inferior" not in c
            else f"; margin {100 * c['margin']:.0f}: {'not inferior' if c['not_inferior'] else 'not shown'}"
        )
        console.print(
            f"{c['a']} − {c['b']}: {100 * c['difference']:+.1f} points of {c['metric']} "
            f"\\[{100 * c['low']:+.1f}, {100 * c['high']:+.1f}]{verdict}"
        )
    for name, moved in report["ties"]["bounds"].items():
        ends = ", ".join(f"{m} {100 * low:.1f}–{100 * high:.1f}" for m, (low, high) in moved.items())
        console.print(f"{name}: by other rules for ties, {ends}")
    counts = report["coverage"]
    if counts["queries_with_several_gold"]:
        console.print(f"{counts['queries_with_several_gold']} queries have several gold images")
    console.print(
        f"{counts['queries_evaluated']} of {counts['queries']} queries evaluated, gold image within the top "
        f"{report['settings']['top_k']} for {counts['queries_with_gold_in_top_k']}. Files: {out}"
    )
