"""Answers × references → scores, each official rule and each known variant under its own name.

`SCORERS[name](prediction, references, **params)` scores one case: it returns what the official code returns
and raises where that raises. `evaluate` scores a prediction file against the gold queries of canonical
tables: the gold set is the denominator, and the official figure stands beside ours where the two differ.

    mmqa_list_em_f1            MultimodalQA, official EM and F1 over lists
    mmqa_em_ragvl              RagVL's EM for MultimodalQA: lemmas, first answer only
    webqa_keyword              WebQA, official accuracy (F1 or recall by category) against Keywords_A
    webqa_acc_approx           WebQA without Keywords_A: WebQA's own approximation and RagVL's
    webqa_normalize_text       WebQA's normal form
    exact_match, token_f1      SQuAD
    vqa_accuracy               VQA v2 and OK-VQA, leave-one-out over ten answers
    aokvqa_direct_answer       A-OKVQA, percent
    ravqa_exact_match_numeric  RAVQA, a whole file: with the loop that ends early, and without
    infoseek                   InfoSeek, one question by its type; infoseek_string, _time, _numerical
    infoseek_full              InfoSeek, a whole file; missing predictions are ignored
    rora_infoseek              InfoSeek as RoRA-VLM words it: any valid answer, relaxed accuracy
    oven_entity, oven_full     OVEN, one question; whole files, where missing predictions are ignored
    evqa_exact_match, evqa     Encyclopedic-VQA: the string part; the full rule with a local BEM
    relaxed_accuracy           ChartQA and PlotQA, 5 %
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fovea.metrics.answers import evqa, infoseek, mmqa, oven, relaxed, squad, vqa, webqa
from fovea.metrics.answers.evaluation import AnswerResult, evaluate
from fovea.metrics.answers.files import read_predictions
from fovea.metrics.answers.oven import EntityLinker
from fovea.metrics.answers.rules import RULES, Rule, Tools

__all__ = [
    "RULES",
    "SCORERS",
    "AnswerResult",
    "EntityLinker",
    "Rule",
    "Tools",
    "evaluate",
    "read_predictions",
]

SCORERS: dict[str, Callable[..., Any]] = {
    scorer.__name__: scorer
    for scorer in (
        mmqa.mmqa_list_em_f1,
        mmqa.mmqa_em_ragvl,
        webqa.webqa_keyword,
        webqa.webqa_acc_approx,
        webqa.webqa_normalize_text,
        squad.exact_match,
        squad.token_f1,
        vqa.vqa_accuracy,
        vqa.aokvqa_direct_answer,
        vqa.ravqa_exact_match_numeric,
        infoseek.infoseek_string,
        infoseek.infoseek_time,
        infoseek.infoseek_numerical,
        infoseek.infoseek,
        infoseek.infoseek_full,
        relaxed.rora_infoseek,
        oven.oven_entity,
        oven.oven_full,
        evqa.evqa_exact_match,
        evqa.evqa,
        relaxed.relaxed_accuracy,
    )
}
