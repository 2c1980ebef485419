"""Predicted entities × gold entities → OVEN's accuracy; and a generated answer → the entity that it names.

Official (`oven_eval.py` of edchengg/oven_eval): accuracy over the seen and the unseen split of each of the
two tasks (query, entity), harmonic mean of the two splits, harmonic mean of the two tasks.

Traps that are part of the rule: only predicted questions are counted; duplicates count twice; accuracies are
rounded to two digits *before* the harmonic means; a task without predictions for one of its splits is a
KeyError. `oven_full` is that rule; `oven_full_over_gold` counts every gold question.

A model that generates text must be linked to the knowledge base first. Upstream does it with BM25 (k1 = 1.5,
b = 0.75) over the titles of six million Wikipedia entities in BERT word pieces, and takes the first:
`EntityLinker`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fovea.metrics.answers.infoseek import harmonic_mean

Row = Mapping[str, Any]
_WORDS = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """BERT's uncased words without the word pieces: lower case, no accents, each punctuation mark alone."""
    plain = "".join(
        char for char in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(char) != "Mn"
    )
    return _WORDS.findall(plain)


class EntityLinker:
    """Links a generated answer to an entity by BM25 over entity titles.

    Args:
        titles: entity id → title, e.g. "Q31" → "Belgium".
        tokenize: text → tokens. For upstream's: `AutoTokenizer.from_pretrained(<bert-base-uncased>).tokenize`
            of a local copy; the default needs no file and cuts no word into pieces.
        method: `robertson` is upstream's weight, with 0 in place of its floor for a token that more than half
            of the titles have; `lucene` (the default) is always positive, so that it works in a small base
            too, and orders a large one alike.

    Raises:
        ValueError: no titles, or none with a token.
    """

    def __init__(
        self,
        titles: Mapping[str, str],
        *,
        tokenize: Callable[[str], list[str]] = words,
        method: Literal["lucene", "robertson"] = "lucene",
    ) -> None:
        import bm25s

        self._ids, self._tokenize = list(titles), tokenize
        tokens = [tokenize(title) for title in titles.values()]
        if not any(tokens):
            raise ValueError(f"cannot link to {len(titles)} entities: no title has a token")
        self._bm25 = bm25s.BM25(k1=1.5, b=0.75, method=method)
        self._bm25.index(tokens, show_progress=False)

    def link(self, answer: str) -> str | None:
        """The best entity's id, the first in `titles` among equals; None if no title shares a token."""
        known = [token for token in self._tokenize(answer) if token in self._bm25.vocab_dict]
        if not known:
            return None
        scores = self._bm25.get_scores(known)
        best = int(np.argmax(scores))
        return self._ids[best] if scores[best] > 0 else None


def oven_entity(prediction: str | None, references: Sequence[str]) -> float:
    """1.0 if the predicted entity id is the gold one, else 0.0; None (nothing linked) is wrong."""
    return float(prediction is not None and prediction in references)


def _report(results: Mapping[str, dict[str, float]]) -> dict[str, Any]:
    """Task → accuracy of its splits → the official report."""
    scores = {task: harmonic_mean(*splits.values()) for task, splits in results.items()}
    return (
        {f"{task}_score": round(score, 2) for task, score in scores.items()}
        | {"final_score": round(harmonic_mean(*scores.values()), 2)}
        | {f"{task}_result": splits for task, splits in results.items()}
    )


def _accuracies(rows: Iterable[tuple[str, float]]) -> dict[str, float]:
    """(data_split, 0 or 1) of the questions → accuracy of `seen` and `unseen`, in percent, rounded.

    Upstream keeps the last split name with "_seen" in it, and so do we: a file holds one of each.
    """
    scores: dict[str, list[float]] = {}
    for split, value in rows:
        scores.setdefault(split, []).append(value)
    result = {}
    for split, values in scores.items():
        percent = round(sum(values) / len(values) * 100, 2)
        if "_seen" in split:
            result["seen"] = percent
        elif "_unseen" in split:
            result["unseen"] = percent
    return result


def oven_full(
    prediction: Mapping[str, Sequence[Row]], references: Mapping[str, Sequence[Row]]
) -> dict[str, Any]:
    """The official report: only predicted questions count.

    Args:
        prediction: `query` and `entity` → rows with `data_id` and `pred_entity_id`.
        references: `query` and `entity` → rows with `data_id`, `entity_id`, `data_split`.

    Returns:
        `query_score`, `entity_score`, `final_score`, and `query_result` and `entity_result` with seen and
        unseen; in percent, two digits.

    Raises:
        ValueError: a prediction without `pred_entity_id`.
        KeyError: a `data_id` that is not in the references, or a task of which one split has no prediction.
    """
    for task in ("query", "entity"):
        for row in prediction[task]:
            if "pred_entity_id" not in row:
                raise ValueError(f"the {task} prediction {row['data_id']} has no pred_entity_id")
    results = {}
    for task in ("query", "entity"):
        gold = {row["data_id"]: row for row in references[task]}
        pairs = [(gold[row["data_id"]], row["pred_entity_id"]) for row in prediction[task]]
        results[task] = _accuracies(
            (example["data_split"], int(example["entity_id"] == guess)) for example, guess in pairs
        )
        if absent := {"seen", "unseen"} - set(results[task]):
            raise KeyError(f"no {task} prediction is of the {' and '.join(sorted(absent))} split")
    return _report(results)


def oven_full_over_gold(
    values: Mapping[str, float], references: Mapping[str, Sequence[Row]]
) -> dict[str, Any]:
    """The same report with the gold questions as denominators: a question without a value scores 0.

    Args:
        values: data_id → 1 or 0.
        references: `query` and `entity` → rows with `data_id` and `data_split`; every gold question.

    Returns:
        `oven_full`'s report without a task or a split that has no gold question.

    Raises:
        ValueError: no gold question is of a seen or unseen split.
    """
    results = {
        task: _accuracies((row["data_split"], values.get(row["data_id"], 0.0)) for row in rows)
        for task, rows in references.items()
    }
    results = {task: splits for task, splits in results.items() if splits}
    if not results:
        raise ValueError("OVEN's splits are named …_seen and …_unseen; the gold set has none such")
    return _report(results)
