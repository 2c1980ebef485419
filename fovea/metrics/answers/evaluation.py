"""Prediction file × gold queries → means over the gold set, intervals, and the official figure beside ours.

The denominator is the gold set: a query without a prediction scores 0 and is named, a duplicate is refused
(or one of the two taken), and a question that the official code cannot score (it raises) scores 0 and is
named. Upstream differs: some scripts leave missing predictions out, which raises the score, some refuse the
file. Both figures come out under the same keys, in upstream's unit: `honest` is ours, `official` what the
upstream script says of the same rows, or None where it refuses. `fovea.metrics.answers.rules` says how a
query feeds each rule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fovea.metrics.answers.rules import RULES, Rule, Tools, compared
from fovea.metrics.retrieval import Interval, bootstrap_interval
from fovea.types import FloatArray, Query

Duplicates = Literal["refuse", "first", "last"]
Float64Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class AnswerResult:
    """What one prediction file scores against one gold set by one rule.

    Attributes:
        scorer: name of the rule.
        query_ids: the queries of the gold set, in its order (Q of them).
        per_query: value name → float32 [Q], each in [0, 1].
        mean: value name → mean over all Q queries and its bootstrap interval.
        by_kind: query kind → number of queries and means.
        honest: the figures over the gold set, in upstream's unit.
        official: the same keys as the upstream script would print them; None where it has no figure.
        missing: ids without a prediction (or with null); they count as 0.
        duplicates: id → how often it was predicted, if more than once.
        unknown: predicted ids that are not in the gold set, left out of both figures.
        faults: id → why the rule cannot score it (the official code raises there); it counts as 0.
    """

    scorer: str
    query_ids: list[str]
    per_query: dict[str, FloatArray]
    mean: dict[str, Interval]
    by_kind: dict[str, dict[str, float]]
    honest: dict[str, float]
    official: dict[str, float | None]
    missing: list[str]
    duplicates: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def coverage(self) -> float:
        """Share of the gold set's queries that have a prediction, [0, 1]."""
        return 1 - len(self.missing) / len(self.query_ids)

    def lines(self) -> list[str]:
        """The result as text: coverage, what is wrong with the file, both figures and the intervals."""
        total = len(self.query_ids)
        lines = [f"{self.scorer}: {total - len(self.missing):,} of {total:,} queries predicted"]
        for what, names in (
            ("without a prediction, scored 0", self.missing),
            ("predicted more than once", list(self.duplicates)),
            ("not in the gold set, left out", self.unknown),
        ):
            if names:
                more = ", …" if len(names) > 5 else ""
                lines.append(f"  {len(names):,} {what}: {', '.join(names[:5])}{more}")
        for name, told in list(self.faults.items())[:5]:
            lines.append(f"  {name} cannot be scored and counts as 0: {told}")
        if len(self.faults) > 5:
            lines.append(f"  … and {len(self.faults) - 5:,} more that cannot be scored")
        for name, ours in self.honest.items():
            theirs = self.official[name]
            figure = "none: the official script has none for this file" if theirs is None else f"{theirs:.4g}"
            lines.append(f"  {name}: {ours:.4g} over the gold set; official {figure}")
        for name, (mean, low, high) in self.mean.items():
            lines.append(f"  mean {name}: {mean:.4f} [{low:.4f}, {high:.4f}]")
        return lines


def evaluate(
    predictions: Mapping[str, Any] | Iterable[tuple[str, Any]],
    gold: Sequence[Query],
    *,
    scorer: str,
    tools: Tools | None = None,
    duplicates: Duplicates = "refuse",
    ignore_unknown: bool = False,
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> AnswerResult:
    """Score a prediction file.

    Args:
        predictions: query id → answer, or pairs of them in the file's order (so that duplicates can be
            seen); None is a missing prediction. `read_predictions` makes the pairs of a file.
        gold: the queries to answer, e.g. `Tables(root).queries(split="val")`; each is in the denominator.
        scorer: a key of `RULES`.
        tools: spaCy pipeline, BEM, entity linker; the defaults if None.
        duplicates: `refuse` raises; `first` and `last` say which of the predictions counts.
        ignore_unknown: leave predictions out whose id is not in the gold set, instead of refusing the file.
        n: resamples of the bootstrap.
        seed: of the bootstrap.
        level: covered share of the interval, in (0, 1).

    Returns:
        Values for each query, means, intervals, the honest and the official figures.

    Raises:
        ValueError: an unknown rule, an empty gold set, queries that the rule cannot score for what they lack,
            duplicates or unknown ids that were not allowed; all at once.
    """
    tools = tools or Tools()
    pairs = list(predictions.items()) if isinstance(predictions, Mapping) else list(predictions)
    pairs = [(name, text) for name, text in pairs if text is not None]
    counts = Counter(name for name, _ in pairs)
    repeated = {name: count for name, count in counts.items() if count > 1}
    wanted = {query.id: query for query in gold}
    unknown = [name for name in counts if name not in wanted]
    faults_of_input = _gold_faults(scorer, gold, tools)
    if repeated and duplicates == "refuse":
        faults_of_input.append(
            f"{len(repeated)} queries are predicted more than once, e.g. {list(repeated)[:5]}; mend the "
            'file, or pass duplicates="first" or "last"'
        )
    if unknown and not ignore_unknown:
        faults_of_input.append(
            f"{len(unknown)} predicted queries are not in the gold set, e.g. {unknown[:5]}: another split? "
            "(ignore_unknown leaves them out)"
        )
    if faults_of_input:
        raise ValueError("cannot score these answers: " + "; ".join(faults_of_input))

    rule = RULES[scorer]
    rows = [(name, text) for name, text in pairs if name in wanted]
    faults: dict[str, str] = {}
    scored = [_values(rule, text, wanted[name], tools, faults) for name, text in rows]
    ids = [name for name, _ in rows]
    columns = _columns(gold, _choose(ids, scored, "first" if duplicates == "first" else "last"), rule.values)
    missing = [query.id for query in gold if query.id not in counts]
    if rule.report:
        first = rule.values[0]
        values = {query.id: float(value) for query, value in zip(gold, columns[first], strict=True)}
        usable = [(*row, found[first]) for row, found in zip(rows, scored, strict=True) if found]
        theirs, ours = rule.report(usable, values, gold)
        honest = _flat(ours)
        known = {} if theirs is None or faults else _flat(theirs)
        official = {key: known.get(key) for key in honest}
    else:
        honest = {key: _figure(rule, column) for key, column in columns.items()}
        counted = _columns(gold, _choose(ids, scored, "last"), rule.values)  # a JSON object keeps the last
        if rule.missing == "ignored":
            counted = {key: np.array([row[key] for row in scored if row]) for key in rule.values}
        refused = bool(faults) or (rule.missing == "refused" and bool(missing or repeated))
        official = {
            key: None if refused or not len(column) else _figure(rule, column)
            for key, column in counted.items()
        }
    return AnswerResult(
        scorer=scorer,
        query_ids=[query.id for query in gold],
        per_query={key: column.astype(np.float32) for key, column in columns.items()},
        mean={
            key: bootstrap_interval(column.tolist(), n=n, seed=seed, level=level)
            for key, column in columns.items()
        },
        by_kind=_by_kind(gold, columns),
        honest=honest,
        official=official,
        missing=missing,
        duplicates=repeated,
        unknown=unknown,
        faults=faults,
    )


def _values(rule: Rule, text: Any, query: Query, tools: Tools, faults: dict[str, str]) -> dict[str, float]:
    """The values of one row; what the rule raises or leaves undefined becomes a fault, and no value."""
    try:
        values = rule.score(text, query, tools)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        faults[query.id] = f"{type(error).__name__}: {error} (prediction {text!r:.80})"
        return {}
    if not all(math.isfinite(value) for value in values.values()):
        faults[query.id] = f"the score is not a number (prediction {text!r:.80})"
        return {}
    return values


def _choose(
    ids: Sequence[str], scored: Sequence[Mapping[str, float]], which: Literal["first", "last"]
) -> dict[str, Mapping[str, float]]:
    """Id → the values that count for it."""
    rows = list(zip(ids, scored, strict=True))
    return dict(rows if which == "last" else reversed(rows))


def _columns(
    gold: Sequence[Query], chosen: Mapping[str, Mapping[str, float]], names: Sequence[str]
) -> dict[str, Float64Array]:
    """Value name → float64 [Q] in the order of the gold set, 0 where there is no value."""
    return {
        name: np.array([chosen.get(query.id, {}).get(name, 0.0) for query in gold], np.float64)
        for name in names
    }


def _figure(rule: Rule, values: Float64Array) -> float:
    figure = float(values.mean()) * rule.scale
    return figure if rule.digits is None else round(figure, rule.digits)


def _flat(report: Mapping[str, Any]) -> dict[str, float]:
    """A nested report with the keys "unseen_question_score/score_time", …"""
    flat: dict[str, float] = {}
    for key, value in report.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}/{inner}": figure for inner, figure in value.items()}
        else:
            flat[key] = value
    return flat


def _by_kind(gold: Sequence[Query], columns: Mapping[str, Float64Array]) -> dict[str, dict[str, float]]:
    kinds = np.array([query.kind for query in gold])
    return {
        kind: {"queries": float((kinds == kind).sum())}
        | {key: float(column[kinds == kind].mean()) for key, column in columns.items()}
        for kind in sorted(set(kinds.tolist()))
    }


def _gold_faults(scorer: str, gold: Sequence[Query], tools: Tools) -> list[str]:
    """What keeps this gold set from being scored by this rule, whatever the predictions are."""
    if scorer not in RULES:
        return [f"unknown rule {scorer!r}; there are {sorted(RULES)}"]
    faults = []
    kinds = RULES[scorer].kinds
    if not gold:
        faults.append("the gold set has no query")
    if scorer == "evqa" and tools.bem is None:
        faults.append("evqa needs BEM: pass Tools(bem=<directory>), or score evqa_exact_match")
    if twice := [name for name, count in Counter(query.id for query in gold).items() if count > 1]:
        faults.append(f"{len(twice)} gold ids occur more than once, e.g. {twice[:5]}")
    if bare := [query.id for query in gold if not compared(query)]:
        faults.append(f"{len(bare)} gold queries have no answer, e.g. {bare[:5]}: a test split?")
    elif scorer == "webqa_keyword" and (hidden := [query.id for query in gold if not query.keywords]):
        faults.append(
            f"{len(hidden)} gold queries have no keywords, e.g. {hidden[:5]} (WebQA hides Keywords_A); score "
            "webqa_acc_approx against the whole answer instead"
        )
    numbers = [query for query in gold if scorer == "infoseek" and query.kind == "Numerical"]
    if unbounded := [query.id for query in numbers if len(compared(query)) != 2]:
        faults.append(
            f"{len(unbounded)} numerical gold queries have no two bounds as keywords, e.g. {unbounded[:5]}"
        )
    if odd := sorted({query.kind for query in gold} - kinds) if kinds else []:
        faults.append(f"{scorer} tells the query kinds {sorted(kinds)} apart; the gold set has {odd[:5]}")
    return faults
