"""Answer × ten human answers → VQA accuracy, A-OKVQA's direct-answer score, RAVQA's numeric exact match.

VQA accuracy (`vqaEval.py` of GT-Vision-Lab/VQA): for each human answer, min(1, matches among the *others* /
3), averaged over all of them. So 1, 2, 3, 4 matches of ten give 0.3, 0.6, 0.9, 1. The answers are normalised
only if the human answers are not all the same text: against ten times "orange", "Orange" scores 0.

Traps that are part of the rule: number words stop at ten; the flag `re.UNICODE` lands in the `count` argument
of the period rule, so at most 32 periods go; a comma between two digits anywhere makes every mark vanish
instead of turning into a space; contractions are looked up in lower case, so the table's "Im" never is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# The forms that the table restores: with any one of its apostrophes missing, a word becomes this form.
_RESTORED = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't "
    "haven't he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't "
    "mightn't've must've mustn't needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've "
    "shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll "
    "someone's something'd something'd've something'll that's there'd there'd've there're there's they'd "
    "they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've "
    "when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't "
    "would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've"
).split()
CONTRACTIONS = {
    form[:at] + form[at + 1 :]: form
    for form in _RESTORED
    for at in (match.start() for match in re.finditer("'", form))
} | {"somebody'd": "somebodyd"}  # the table's one entry that takes an apostrophe away
NUMBER_WORDS = {"none": "0"} | {
    word: str(number)
    for number, word in enumerate("zero one two three four five six seven eight nine ten".split())
}
_MARKS = ';/[]"{}()=+\\_-><@`,?!'  # in the table's order; apostrophe, colon, percent and dollar are not in it
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
_MOST_PERIODS = int(re.UNICODE)  # 32


def vqa_normalise(text: str) -> str:
    """VQA's normal form: "The dogs' 1,000 toys." → "dogs' 1000 toys"."""
    in_number = _COMMA_IN_NUMBER.search(text) is not None
    bare = text
    for mark in _MARKS:
        # The test is on the text as it came, the replacement on what earlier marks have left.
        vanishes = in_number or f"{mark} " in text or f" {mark}" in text
        bare = bare.replace(mark, "" if vanishes else " ")
    bare = _PERIOD.sub("", bare, count=_MOST_PERIODS)
    words = (NUMBER_WORDS.get(word, word) for word in bare.lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ("a", "an", "the"))


def _one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


def vqa_accuracy(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Leave-one-out VQA accuracy of one question.

    Args:
        prediction: the answer.
        references: the human answers, ten in VQA v2; a single one can never be matched (there is no other).

    Returns:
        `accuracy` in [0, 1] and `percent_rounded_2`, the form of the official per-question output.

    Raises:
        ZeroDivisionError: no references, as upstream.
    """
    answers, guess = [_one_line(text) for text in references], _one_line(prediction)
    if len(set(answers)) > 1:
        answers, guess = [vqa_normalise(text) for text in answers], vqa_normalise(guess)
    matches = answers.count(guess)
    # An answer that matches is not counted for itself.
    parts = [min(1.0, (matches - (answer == guess)) / 3) for answer in answers]
    accuracy = sum(parts) / len(parts)
    return {"accuracy": accuracy, "percent_rounded_2": round(100 * accuracy, 2)}


def aokvqa_direct_answer(prediction: str, references: Sequence[str]) -> float:
    """A-OKVQA's direct answer (`eval_predictions.py`): min(1, equal answers / 3), in percent, [0, 100].

    No normalisation at all and no leave-one-out: "Dog" is not "dog". The upstream script leaves questions
    marked `difficult_direct_answer` out of this score in its newest version; the version behind our oracles
    (0438d33) left them out of the multiple-choice score instead.
    """
    return min(1.0, sum(prediction == answer for answer in references) / 3.0) * 100


def ravqa_exact_match_numeric(
    prediction: Sequence[str], references: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """RAVQA's exact match with numeric ranges over a whole file, as it is and as it is meant.

    A prediction is right if its normal form is among those of the answers, or a number within the range. The
    upstream loop *ends* at the first number that is in its range: that question and all later ones are
    dropped from the mean. Three questions of which the second hits its range score over the first alone.

    Args:
        prediction: the answers, in the order of the file.
        references: for each `answers` (texts) and `numeric_range` ([low, high] or None).

    Returns:
        `accuracy` of the upstream loop (NaN if it ends at the first question) and `accuracy_all` over every
        question, the honest one.

    Raises:
        ValueError: the lengths differ.
    """
    upstream: list[bool] = []
    every: list[bool] = []
    ended = False
    for text, reference in zip(prediction, references, strict=True):
        guess = vqa_normalise(_one_line(text.lower()))
        answers = [vqa_normalise(_one_line(answer.lower())) for answer in reference["answers"]]
        hit = _within(guess, reference.get("numeric_range"))
        ended = ended or hit
        if not ended:
            upstream.append(guess in answers)
        every.append(hit or guess in answers)
    return {"accuracy": _mean(upstream), "accuracy_all": _mean(every)}


def _within(guess: str, bounds: Sequence[float] | None) -> bool:
    try:
        return bounds is not None and bounds[0] <= float(guess) <= bounds[1]
    except ValueError:
        return False


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else float("nan")
