"""Answer × references → relaxed accuracy (5 % on numbers), and RoRA-VLM's two scores of InfoSeek.

Relaxed accuracy (`relaxed_correctness` of google-research/pix2struct; Methani et al. 2020, ChartQA): if both
sides are numbers and the reference is not 0, right within 5 % of the reference, else equality in lower case.
Percent texts are divided by 100 ("50%" = "0.5"); nothing is stripped and no comma is read ("1,050" is text).
A year is a number: "2014" is right for "2010". Infinity is not within 5 % of itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from fovea.metrics.answers.text import squad_normalise

TOLERANCE = 0.05


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def _relaxed(guess: str, reference: str, tolerance: float) -> bool:
    number, target = _number(guess), _number(reference)
    if number is not None and target:
        return abs(number - target) / abs(target) <= tolerance
    return guess.lower() == reference.lower()


def relaxed_accuracy(
    prediction: str, references: Sequence[str], *, max_relative_change: float = TOLERANCE
) -> float:
    """1.0 or 0.0, the best over the references.

    Args:
        prediction: the answer, a text.
        references: accepted answers, texts.
        max_relative_change: share of the reference that a number may be off, inclusive.

    Raises:
        ValueError: no reference.
    """
    return float(max(_relaxed(prediction, reference, max_relative_change) for reference in references))


def rora_infoseek(prediction: str, references: Sequence[str], *, question_type: str) -> float:
    """InfoSeek as RoRA-VLM words it, which is not InfoSeek's own rule: 1.0 or 0.0.

    "VQA accuracy" for strings and times, which the paper explains as a match with any valid answer (here: in
    SQuAD's normal form, the paper names none), relaxed accuracy for numbers.

    Args:
        prediction: the answer.
        references: the data set's `answer`, values and not bounds.
        question_type: Numerical, or any other.

    Raises:
        ValueError: no reference.
    """
    if question_type.lower() == "numerical":
        return relaxed_accuracy(prediction, references)
    guess = squad_normalise(prediction)
    return float(max(guess == squad_normalise(reference) for reference in references))
