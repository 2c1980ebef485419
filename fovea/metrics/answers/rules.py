"""Query × prediction → the values of one question, for each rule by name; and how upstream sums them up.

How a query of the canonical tables feeds a rule: `answers` are the references, `kind` is the question type or
WebQA's category, `split` the split's name, and `keywords`, where there are any, is what the official rule
compares with instead of the answers: WebQA's `Keywords_A`, InfoSeek's `answer_eval` (for a numerical question
the two bounds as texts), OVEN's entity id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fovea.metrics.answers import evqa, infoseek, mmqa, oven, relaxed, squad, vqa, webqa
from fovea.metrics.answers.text import LEMMA_MODEL
from fovea.types import Query


@dataclass(frozen=True)
class Tools:
    """What some rules need beside the texts.

    Attributes:
        lemma_model: spaCy pipeline of WebQA's and RagVL's lemmas.
        bem: Encyclopedic-VQA's judge, or the directory of a local BEM.
        linker: for OVEN: predictions are generated answers that it links; None: they are entity ids.
    """

    lemma_model: str = LEMMA_MODEL
    bem: evqa.Judge | str | Path | None = None
    linker: oven.EntityLinker | None = None


Score = Callable[[Any, Query, Tools], dict[str, float]]
# (id, prediction, value) of each predicted row, id → value that counts, gold → (official or None, honest).
Report = Callable[
    [Sequence[tuple[str, Any, float]], Mapping[str, float], Sequence[Query]],
    tuple[dict[str, Any] | None, dict[str, Any]],
]


@dataclass(frozen=True)
class Rule:
    """How a file is scored by one rule.

    Attributes:
        score: (prediction, query, tools) → named values of one question, in [0, 1].
        values: those names; the first is the one that a report is made of.
        missing: what the upstream script does with a missing prediction: counts 0 (`zero`), leaves it out and
            counts duplicates twice (`ignored`), or has no figure for such a file (`refused`).
        scale: upstream's unit: 100 for percent.
        digits: to how many digits upstream rounds the figure, None for not at all.
        kinds: the query kinds that the rule tells apart; empty where it does not look.
        report: for data sets whose figure is more than a mean.
    """

    score: Score
    values: tuple[str, ...]
    missing: Literal["zero", "ignored", "refused"]
    scale: float = 1.0
    digits: int | None = None
    kinds: frozenset[str] = frozenset()
    report: Report | None = None


def compared(query: Query) -> list[str]:
    """The texts that the official rule compares a prediction with."""
    return list(query.keywords or query.answers)


def _mmqa(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    return mmqa.mmqa_list_em_f1(prediction, [list(query.answers)])


def _mmqa_ragvl(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    return mmqa.mmqa_em_ragvl(prediction, query.answers, lemma_model=tools.lemma_model)


def _webqa(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    keywords = [" ".join(query.keywords)]
    return webqa.webqa_keyword(prediction, keywords, Qcate=query.kind, lemma_model=tools.lemma_model)


def _webqa_approx(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    answer = list(query.answers[:1])
    return webqa.webqa_acc_approx(prediction, answer, Qcate=query.kind, lemma_model=tools.lemma_model)


def _exact_match(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    return {"exact_match": squad.exact_match(prediction, query.answers)}


def _token_f1(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    return {"f1": squad.token_f1(prediction, query.answers)}


def _vqa(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    return {"accuracy": vqa.vqa_accuracy(prediction, query.answers)["accuracy"]}


def _aokvqa(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    return {"accuracy": vqa.aokvqa_direct_answer(prediction, query.answers) / 100}


def _infoseek(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    return dict(infoseek.infoseek(prediction, compared(query), question_type=query.kind))


def _infoseek_report(
    rows: Sequence[tuple[str, Any, float]], values: Mapping[str, float], gold: Sequence[Query]
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    references = {
        query.id: {
            "answer_eval": compared(query),
            "question_type": query.kind,
            "data_split": query.split,
        }
        for query in gold
    }
    predictions = [{"data_id": name, "prediction": text} for name, text, _ in rows]
    return infoseek.infoseek_full(predictions, references), infoseek.infoseek_full_over_gold(
        values, references
    )


def _rora(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    return {"accuracy": relaxed.rora_infoseek(prediction, query.answers, question_type=query.kind)}


def _oven(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    entity = tools.linker.link(prediction) if tools.linker else prediction
    return {"accuracy": oven.oven_entity(entity, compared(query))}


def _oven_report(
    rows: Sequence[tuple[str, Any, float]], values: Mapping[str, float], gold: Sequence[Query]
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    references: dict[str, list[dict[str, Any]]] = {"query": [], "entity": []}
    predictions: dict[str, list[dict[str, Any]]] = {"query": [], "entity": []}
    tasks = {query.id: query.kind for query in gold}
    for query in gold:
        references[query.kind].append({"data_id": query.id, "entity_id": "right", "data_split": query.split})
    for name, _, value in rows:  # the ids have been compared (and linked) already
        found = "right" if value else "wrong"
        predictions[tasks[name]].append({"data_id": name, "pred_entity_id": found})
    honest = oven.oven_full_over_gold(values, references)
    try:
        return oven.oven_full(predictions, references), honest
    except KeyError:  # a task without a prediction for one of its splits
        return None, honest


def _evqa_exact(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    return {"exact_match": evqa.evqa_exact_match(prediction, query.answers, question_type=query.kind)}


def _evqa(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    score = evqa.evqa(prediction, query.answers, question_type=query.kind, question=query.text, bem=tools.bem)
    return {"accuracy": score}


def _relaxed(prediction: Any, query: Query, tools: Tools) -> dict[str, float]:
    return {"accuracy": relaxed.relaxed_accuracy(prediction, query.answers)}


_WEBQA_KINDS = frozenset(webqa.DOMAINS)
_INFOSEEK_KINDS = frozenset({"String", "Time", "Numerical"})
_EVQA_KINDS = frozenset(evqa.QUESTION_TYPES)
RULES: dict[str, Rule] = {
    "mmqa_list_em_f1": Rule(_mmqa, ("list_em", "list_f1"), "zero", scale=100),
    "mmqa_em_ragvl": Rule(_mmqa_ragvl, ("em",), "refused"),
    "webqa_keyword": Rule(_webqa, webqa.VALUES, "ignored", kinds=_WEBQA_KINDS),
    "webqa_acc_approx": Rule(
        _webqa_approx, ("webqa_acc_approx", "ragvl_acc_approx"), "refused", kinds=_WEBQA_KINDS
    ),
    "exact_match": Rule(_exact_match, ("exact_match",), "zero", scale=100),
    "token_f1": Rule(_token_f1, ("f1",), "zero", scale=100),
    "vqa_accuracy": Rule(_vqa, ("accuracy",), "refused", scale=100, digits=2),
    "aokvqa_direct_answer": Rule(_aokvqa, ("accuracy",), "zero", scale=100),
    "infoseek": Rule(_infoseek, ("score",), "ignored", kinds=_INFOSEEK_KINDS, report=_infoseek_report),
    "rora_infoseek": Rule(_rora, ("accuracy",), "refused", scale=100, kinds=_INFOSEEK_KINDS),
    "oven": Rule(_oven, ("accuracy",), "ignored", kinds=frozenset({"query", "entity"}), report=_oven_report),
    "evqa_exact_match": Rule(_evqa_exact, ("exact_match",), "refused", kinds=_EVQA_KINDS),
    "evqa": Rule(_evqa, ("accuracy",), "refused", kinds=_EVQA_KINDS),
    "relaxed_accuracy": Rule(_relaxed, ("accuracy",), "refused", scale=100),
}
