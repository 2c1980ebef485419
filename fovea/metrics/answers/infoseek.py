"""Answer × gold → InfoSeek's score for one question and for a prediction file.

Official (`infoseek_eval.py` of edchengg/infoseek_eval). Strings and times: equality in SQuAD's normal form
with any of `answer_eval`. Numbers: the first one or two numbers of the answer against the range [low, high]:
a single number must lie in it; two in ascending order are a range, which must lie in it or overlap it with an
IoU of at least 0.5; two in descending order are the first alone. A split's score is the mean over its
questions; the final score is the harmonic mean of the splits unseen_question and unseen_entity.

Traps that are part of the rule: only predicted questions are counted, so one right answer of two scores 100;
a question predicted twice counts twice; the code does not tolerate a year (its docstring says ±1), the list
of references does; "three" and "" are read as [0, 0], which a range around 0 accepts; ".5" is read as 5;
a "-" right after a digit is never a sign. `infoseek_full` is that rule; `infoseek_full_over_gold` is
the honest one, whose denominators are the gold questions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fovea.metrics.answers.text import squad_normalise

Number = float | list[float]
_NUMBER = re.compile(r"[-+]?\.?\d+(?:,\d\d\d)*\.?\d*(?:[eE][-+]?\d+)?")
# The keys of the official report, and the question type that each is about.
_TYPES = {"score_time": "time", "score_num": "numerical", "score_string": "string"}


def parse_number(text: str) -> Number:
    """What the official scorer reads in an answer: one number, an ascending pair, or [0, 0] for none.

    "95-105 cm" → [95, 105], "1,200 m" → 1200, "110-90" → 110, "3 to 4 or 5" → [3, 4], "unknown" → [0, 0].

    Raises:
        ValueError: a sign before two decimal points ("-.5.3"), as upstream.
    """
    # A hyphen after a digit separates: "9-10" is two positive numbers.
    parts = text.split("-")
    apart = parts[0] + "".join(
        (" - " if before[-1:].isdigit() else "-") + part for before, part in pairwise(parts)
    )
    found = [match.replace(",", "").strip(".") for match in _NUMBER.findall(apart)]
    numbers = [float(number.split(".")[0] if number.count(".") > 1 else number) for number in found][:2]
    if not numbers:
        return [0, 0]
    if len(numbers) == 2 and numbers[0] <= numbers[1]:
        return numbers
    return numbers[0]


def _in_range(guess: Number, bounds: Sequence[float]) -> bool:
    if not isinstance(guess, list):
        low, high = bounds
        return low <= guess <= high
    if bounds[0] <= guess[0] <= bounds[1] and bounds[0] <= guess[1] <= bounds[1]:
        return True
    overlap = max(0.0, min(max(guess), max(bounds)) - max(min(guess), min(bounds)))
    # The two epsilons keep the union of two points from being 0 and are upstream's, as is the one below.
    union = (max(guess) - min(guess) + 1e-12) + (max(bounds) - min(bounds) + 1e-12) - overlap
    return overlap / union >= 0.5 - 1e-12 if union else False


def infoseek_string(
    prediction: str, references: Sequence[str], *, question_type: str = "String"
) -> dict[str, int]:
    """Official score of a question about a string: {"score": 0 or 1}.

    Args:
        prediction: the answer.
        references: `answer_eval`, the accepted texts.
        question_type: any but Numerical; for InfoSeek what is neither time nor number is a string.

    Raises:
        ValueError: no reference, or a numerical question.
    """
    if question_type.lower() == "numerical":
        raise ValueError("a Numerical question of InfoSeek is scored by infoseek_numerical")
    matches = (squad_normalise(prediction) == squad_normalise(reference) for reference in references)
    return {"score": int(max(matches))}


def infoseek_time(
    prediction: str, references: Sequence[str], *, question_type: str = "Time"
) -> dict[str, int]:
    """Official score of a question about a time: that of a string. ±1 year is in the references or not."""
    return infoseek_string(prediction, references, question_type=question_type)


def infoseek_numerical(
    prediction: str, references: Sequence[str | float], *, question_type: str = "Numerical"
) -> dict[str, Any]:
    """Official score of a question about a number: {"score": 0 or 1, "parsed_prediction": number or pair}.

    Args:
        prediction: the answer, a text.
        references: the bounds [low, high] as numbers or their texts (`answer_eval[0]["range"]`).
        question_type: Numerical.

    Raises:
        ValueError: bounds that are not two numbers, or another question type.
    """
    if question_type.lower() != "numerical":
        raise ValueError(f"infoseek_numerical scores Numerical questions, not {question_type}")
    guess = parse_number(prediction)
    bounds = [float(bound) for bound in references]
    return {"score": int(_in_range(guess, bounds)), "parsed_prediction": guess}


def infoseek(prediction: str, references: Sequence[Any], *, question_type: str) -> dict[str, int]:
    """Official score of one question by its type (Time, Numerical, else String): {"score": 0 or 1}."""
    if question_type.lower() == "numerical":
        return {"score": infoseek_numerical(prediction, references)["score"]}
    return infoseek_string(prediction, references)


def _gold(example: Mapping[str, Any]) -> list[Any]:
    """The references of an example; a numerical one may be as in the file, `[{"wikidata", "range"}]`."""
    answers = example["answer_eval"]
    first = answers[0] if isinstance(answers, list) and answers else answers
    return list(first["range"])[:2] if isinstance(first, Mapping) else list(answers)


def _score(prediction: str, example: Mapping[str, Any]) -> tuple[str, int]:
    kind = str(example["question_type"]).lower()
    kind = kind if kind in ("time", "numerical") else "string"
    return kind, infoseek(prediction, _gold(example), question_type=kind)["score"]


def _percent(values: Sequence[float]) -> float:
    return round((sum(values) / len(values) if values else 0) * 100, 2)


def harmonic_mean(*values: float) -> float:
    """n / Σ 1/v, with 1e-12 for a 0, as in the official InfoSeek and OVEN code: one 0 makes nearly 0."""
    return len(values) / sum(1 / (value or 1e-12) for value in values)


def _report(scored: Mapping[str, Sequence[tuple[str, float]]]) -> dict[str, Any]:
    """Split → (question type, score) of its questions → the official report, in percent."""
    splits = {
        split: {"score": _percent([value for _, value in rows])}
        | {name: _percent([value for of, value in rows if of == kind]) for name, kind in _TYPES.items()}
        for split, rows in scored.items()
    }
    final = harmonic_mean(*(split["score"] for split in splits.values()))
    return {"final_score": round(final, 2)} | splits


def _split_of(example: Mapping[str, Any]) -> str:
    asked = str(example["data_split"]).endswith("unseen_question")
    return "unseen_question_score" if asked else "unseen_entity_score"


def infoseek_full(
    prediction: Iterable[Mapping[str, Any]], references: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The official report of a prediction file: only predicted questions count, duplicates count twice.

    Args:
        prediction: rows with `data_id` and `prediction` (a text); ids that are not in `references` are
            skipped.
        references: data_id → `answer_eval`, `question_type`, `data_split`.

    Returns:
        `final_score`, `unseen_question_score` and `unseen_entity_score` (each score, score_time, score_num,
        score_string), in percent with two digits; a type without questions has 0.
    """
    scored: dict[str, list[tuple[str, float]]] = {"unseen_question_score": [], "unseen_entity_score": []}
    for row in prediction:
        if row["data_id"] in references:
            example = references[row["data_id"]]
            scored[_split_of(example)].append(_score(row["prediction"], example))
    return _report(scored)


def infoseek_full_over_gold(
    values: Mapping[str, float], references: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The same report with the gold questions as denominators: a question without a value scores 0.

    Args:
        values: data_id → score of its prediction, [0, 1]; one value a question, so duplicates cannot count
            twice.
        references: data_id → `question_type`, `data_split`; every question of the gold set.

    Returns:
        `infoseek_full`'s report without a split that has no gold question.
    """
    scored: dict[str, list[tuple[str, float]]] = {"unseen_question_score": [], "unseen_entity_score": []}
    for name, example in references.items():
        kind = str(example["question_type"]).lower()
        kind = kind if kind in ("time", "numerical") else "string"
        scored[_split_of(example)].append((kind, values.get(name, 0.0)))
    # A gold set may hold one split only: the harmonic mean with an empty one would be 0.
    return _report({split: rows for split, rows in scored.items() if rows})
