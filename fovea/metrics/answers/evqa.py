"""Answer × references → Encyclopedic-VQA's exact match, and its full rule: exact match, else BEM.

Official (`encyclopedic_vqa/evaluation_utils.py` of google-research). Single answers: equality in a normal
form. multi_answer: the sets of list items (reference cut at "&&", answer at ",", " and ", " & ") have an IoU
of at least 0.5. The best over the references counts. Where the exact match fails, BEM (a BERT that judges
whether two answers are equivalent, arXiv:2202.07654) decides with a probability of at least 0.5.

Traps that are part of the rule: punctuation goes without leaving a space ("red-fox" ≠ "red fox"), so the
contraction table sees no apostrophes; "true" is "yes" and "false" is "no"; a reference that normalises to
nothing ("A") is a ValueError, for the whole question.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path

from fovea.metrics.answers.vqa import CONTRACTIONS, NUMBER_WORDS

QUESTION_TYPES = ("templated", "automatic", "multi_answer", "2_hop")
IOU = 0.5
BEM_THRESHOLD = 0.5
_PUNCTUATION = frozenset(string.punctuation + "‘’´`_")
_WORDS = (
    CONTRACTIONS | NUMBER_WORDS | {"entailment": "yes", "true": "yes", "contradiction": "no", "false": "no"}
)
_PREFIX = "<extra_id_0> "  # T5's first span mark
_DROPPED = re.compile(r"\b(the answer is|a|an|the)\b")
# (question, reference, candidate) → probability that the two answers are equivalent, [0, 1].
Judge = Callable[[str, str, str], float]


def evqa_normalise(text: str) -> str:
    """Encyclopedic-VQA's normal form: "The answer is William Menger." → "william menger"."""
    text = text.lower().replace("\n", " ").replace("\t", " ").strip()
    if text.startswith(_PREFIX):
        text = text.replace(_PREFIX, "")
    text = "".join(char for char in text if char not in _PUNCTUATION)
    return " ".join(_WORDS.get(word, word) for word in _DROPPED.sub(" ", text).split())


def _single(reference: str, candidate: str) -> bool:
    gold, guess = evqa_normalise(reference), evqa_normalise(candidate)
    if not gold:
        raise ValueError(f"the reference answer {reference!r} is empty after normalisation")
    return gold == guess


def _multiple(reference: str, candidate: str) -> bool:
    gold = {item for text in reference.split("&&") if (item := evqa_normalise(text))}
    if not gold:
        raise ValueError(f"the reference list {reference!r} is empty after normalisation")
    parts = candidate.replace(" and ", ",").replace(" & ", ",").split(",")
    items = {item for text in parts if (item := evqa_normalise(text))}
    return len(gold & items) / len(gold | items) >= IOU


def _exact(reference: str, candidate: str, question_type: str) -> bool:
    if not reference:
        raise ValueError("a reference answer is empty")
    if question_type not in QUESTION_TYPES:
        raise ValueError(f"unknown question type {question_type!r}; Encyclopedic-VQA has {QUESTION_TYPES}")
    return (_multiple if question_type == "multi_answer" else _single)(reference, candidate)


def evqa_exact_match(prediction: str, references: Sequence[str], *, question_type: str) -> float:
    """The string part of the official rule: 1.0 or 0.0, the best over the references.

    Args:
        prediction: the answer.
        references: alternatives (the file's "|" already split); "&&" separates the items of a multi_answer.
        question_type: one of `QUESTION_TYPES`.

    Raises:
        ValueError: no reference, one that is empty (after normalisation), or an unknown question type.
    """
    if not references:
        raise ValueError("Encyclopedic-VQA needs at least one reference answer")
    return float(max([_exact(reference, prediction, question_type) for reference in references]))


def evqa(
    prediction: str,
    references: Sequence[str],
    *,
    question_type: str,
    question: str,
    bem: Judge | str | Path | None,
) -> float:
    """The full official rule: exact match, else BEM at 0.5; the best over the references.

    Args:
        prediction: the answer.
        references: as for `evqa_exact_match`.
        question_type: one of `QUESTION_TYPES`.
        question: the question as asked, which BEM reads.
        bem: a judge, or the directory of a local BEM (see `fovea.metrics.answers.bem`).

    Raises:
        ValueError: as for `evqa_exact_match`, or no BEM: the exact match alone is another metric, so it never
            stands in; it has its own name.
    """
    if bem is None:
        raise ValueError(
            "the full Encyclopedic-VQA score needs BEM: pass the directory of a local copy (see "
            "fovea.metrics.answers.bem), or score evqa_exact_match, the string part alone"
        )
    if not references:
        raise ValueError("Encyclopedic-VQA needs at least one reference answer")
    exact = [_exact(reference, prediction, question_type) for reference in references]
    if any(exact):
        return 1.0
    if isinstance(bem, str | Path):
        from fovea.metrics.answers.bem import open_bem

        bem = open_bem(str(bem))
    texts = [text.replace("&&", ",") if question_type == "multi_answer" else text for text in references]
    return float(max(bem(question, text, prediction) for text in texts) >= BEM_THRESHOLD)
