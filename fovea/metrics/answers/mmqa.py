"""Answer × gold list → MultimodalQA's EM and F1, and the lemma-based EM that RagVL reports instead.

Official (`baselines/evaluate.py` of allenai/multimodalqa, from the DROP scorer). An answer is a list of
spans; a string is a list of one. Spans are split at spaces and hyphens, and each token goes through: lower
case; no punctuation, unless Python reads the token as a float; a float or a number word becomes `str(float)`;
no article; what is left joins again. EM asks for the same set of spans *and* the same number of them. F1 is
over sets of tokens, for the one-to-one alignment of spans with the largest sum, divided by the longer list; a
pair counts 0 if the gold span has numbers and shares none; each question's F1 is rounded to two digits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fovea.metrics.answers.text import (
    LEMMA_MODEL,
    PUNCTUATION,
    is_float,
    number_of_words,
    remove_articles,
)
from fovea.metrics.answers.webqa import webqa_normalise

# Spans: one string, or a list of them. JSON decides, hence no narrower type.
Spans = Any


def normalise(span: str) -> str:
    """One span in MultimodalQA's normal form; "" for an article alone.

    Token by token: "twenty two" → "20.0 2.0", "1,000" → "1000.0", "3" = "three" = "3.0", "5%" → "5.0".
    """
    tokens = (_token(token) for token in re.split("[ -]", span))
    return " ".join(token for token in tokens if token)


def _token(token: str) -> str:
    token = token.lower()
    if not is_float(token):
        token = "".join(char for char in token if char not in PUNCTUATION)
    return " ".join(remove_articles(_number(token)).split())


def _number(token: str) -> str:
    if is_float(token):
        return str(float(token))
    try:
        return str(float(number_of_words(token)))
    except ValueError:
        return token


def _spans(answer: Spans) -> list[str]:
    return [normalise(span) for span in (answer if isinstance(answer, list | tuple) else [answer])]


def list_em(prediction: Spans, gold: Spans) -> float:
    """1.0 if both have the same set of normalised spans and the same number of spans, else 0.0."""
    ours, theirs = _spans(prediction), _spans(gold)
    return float(set(ours) == set(theirs) and len(ours) == len(theirs))


def list_f1(prediction: Spans, gold: Spans) -> float:
    """F1 of the best alignment, [0, 1] in steps of 0.01; NaN if both lists are empty, as upstream."""
    # scipy, not torch or numpy: the assignment problem is what it solves. It comes with scikit-learn anyway.
    from scipy.optimize import linear_sum_assignment

    ours = [set(span.split()) for span in _spans(prediction)]
    theirs = [set(span.split()) for span in _spans(gold)]
    longest = max(len(ours), len(theirs))
    if not longest:
        return float("nan")
    scores = np.array([[_f1(bag, gold_bag) for bag in ours] for gold_bag in theirs], np.float64)
    scores = scores.reshape(len(theirs), len(ours))
    best = np.zeros(longest)
    rows, columns = linear_sum_assignment(-scores)
    best[rows] = scores[rows, columns]
    # numpy's rounding (of 100 times the value) and not Python's: they differ on halves such as 0.285.
    return float(np.round(np.mean(best), 2))


def _f1(bag: set[str], gold: set[str]) -> float:
    numbers = {token for token in gold if is_float(token)}
    if numbers and not numbers & bag:
        return 0.0
    shared = len(gold & bag)
    precision = shared / len(bag) if bag else 1.0
    recall = shared / len(gold) if gold else 1.0
    return 2 * precision * recall / (precision + recall) if precision or recall else 0.0


def mmqa_list_em_f1(prediction: Spans, references: Sequence[Spans]) -> dict[str, float]:
    """The official EM and F1, each the best over the references.

    Args:
        prediction: a string, or the list of a list question.
        references: accepted answers, each a string or a whole list. The data set has one: all its `answers`.

    Raises:
        ValueError: there is no reference.
    """
    return {
        "list_em": max(list_em(prediction, reference) for reference in references),
        "list_f1": max(list_f1(prediction, reference) for reference in references),
    }


def mmqa_em_ragvl(
    prediction: str, references: Sequence[str], *, lemma_model: str = LEMMA_MODEL
) -> dict[str, float]:
    """What RagVL's MultimodalQA tables call EM: equality with the first answer in WebQA's normal form.

    It is not the official EM: "two dogs" equals "2 dog" here, and further gold answers are not looked at.

    Args:
        prediction: the generated answer.
        references: the gold answers; only the first counts.
        lemma_model: spaCy pipeline of the lemmas.
    """
    same = webqa_normalise(prediction, lemma_model=lemma_model) == webqa_normalise(
        references[0], lemma_model=lemma_model
    )
    return {"em": float(same)}
