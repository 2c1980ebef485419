"""Answer × keywords → WebQA's accuracy by question category, and its two approximations.

Official (`vlp/eval_1022.py` of WebQnA/WebQA_Baseline). Both sides are normalised into a bag of words. For the
categories color, shape, YesNo and number only the words of the category's domain stay and accuracy is F1; for
choose, Others and text all stay and accuracy is recall of the keywords. The reference is one string, the
hidden `Keywords_A`. Fluency (BARTScore) is not part of this.

Traps that are part of the rule: the domain filter turns bags into sets; "yes" and "spot" are colours; a
number is a token that `int()` reads, so "3.5" is none; number words are read one at a time ("twenty five" →
"20 5"); F1 has 1e-5 in its denominator, so a perfect answer scores 0.999995.

The approximations stand in where `Keywords_A` is not to be had, and score against the whole answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fovea.metrics.answers.text import LEMMA_MODEL, PUNCTUATION, lemmatise, number_of_words, remove_articles

COLORS = frozenset(
    "aqua beige black blonde blue bluere bluewhite bronze brown chrome gold golden gray green grey ivory "
    "maroon orange orangebrown orangepurple pink purple rainbow red redorange rust silver spot tan teal "
    "transparent turquoise violet white yellow yes".split()
)
SHAPES = frozenset(
    "arch ball bell bellshaped bow circle circular concave cone conical convex corkscrew crescent crest "
    "cross crosse cube cuboid curl curve cylinder cylindrical diamond dome domeshape dot flat flower fold "
    "fork globe globular h heart hexagon hook hoop keyhole obelisk octagon octagonal octogon oval "
    "pentagon point pyramid pyramidal rectangle rectangular ring round rounded semicircle shamrock slope "
    "sphere spherical spiral square star step straight teardrop torus triangle triangular tube wavy "
    "xs".split()
)
YES_NO = frozenset({"yes", "no"})
# Qcate → the words that count, None for all; number is a test of each token instead.
DOMAINS: dict[str, frozenset[str] | None] = {
    "color": COLORS, "shape": SHAPES, "YesNo": YES_NO, "number": None, "choose": None, "Others": None,
    "text": None,
}  # fmt: skip
BY_F1 = frozenset({"color", "shape", "YesNo", "number"})  # the others score recall
VALUES = ("acc", "F1_avg", "F1_max", "EM", "RE_avg", "PR_avg")
_NOT_DECIMAL_POINT = re.compile(r"\.(?!\d)")


def webqa_normalise(text: str, *, lemma_model: str = LEMMA_MODEL) -> str:
    """WebQA's normal form: "The U.S. has 50 states." → "we have 50 state".

    Lower case; no ASCII punctuation but a period before a digit; no articles; each word that is a number word
    becomes digits; lemmas. A single word keeps its article, a single character is only lower-cased.
    """
    if len(text.strip()) == 1:
        return _digits(text.lower())
    single = len(text.split()) == 1
    text = "".join(char for char in text.lower() if char == "." or char not in PUNCTUATION)
    text = _NOT_DECIMAL_POINT.sub("", text)
    return lemmatise(_digits(text if single else remove_articles(text)), lemma_model)


def _digits(text: str) -> str:
    return " ".join(_digit(word) for word in text.split())


def _digit(word: str) -> str:
    if word == "point":
        return word
    try:
        return str(number_of_words(word))
    except ValueError:  # no number word, or a digit such as "²" that is no number
        return word


def _integers(words: Iterable[str]) -> list[str]:
    found = []
    for word in words:
        try:
            found.append(str(int(word)))
        except ValueError:
            continue
    return found


def _in_domain(words: list[str], category: str) -> list[str]:
    """The words that count; sorted, as a set has no order (upstream's depends on the hash seed)."""
    if category == "number":
        return _integers(words)
    domain = DOMAINS[category]
    return words if domain is None else sorted(domain.intersection(words))


def _overlap(words: list[str], gold: list[str]) -> tuple[float, float]:
    """Precision and recall of a bag of words; both 0 without a shared word."""
    shared = sum((Counter(gold) & Counter(words)).values())
    return (shared / len(words), shared / len(gold)) if shared else (0.0, 0.0)


def _only(references: Sequence[str]) -> str:
    if isinstance(references, str) or len(references) != 1:
        raise ValueError(
            f"WebQA scores against one reference text, got {references!r}; join several keywords with a space"
        )
    return references[0]


def webqa_keyword(
    prediction: str | Sequence[str],
    references: Sequence[str],
    *,
    Qcate: str,  # noqa: N803 (WebQA's own name)
    lemma_model: str = LEMMA_MODEL,
) -> dict[str, float]:
    """Official keyword accuracy of one question.

    Args:
        prediction: the answer, or several candidates (beams), over which the official code averages. A single
            candidate without overlap makes all values 0.
        references: one string, the keywords.
        Qcate: question category, a key of `DOMAINS`.
        lemma_model: spaCy pipeline of the lemmas.

    Returns:
        `acc` (F1_avg or RE_avg by category), F1_avg, F1_max, EM, RE_avg, PR_avg, each in [0, 1].

    Raises:
        KeyError: unknown category.
        ValueError: no candidate, or not exactly one reference.
    """
    if Qcate not in DOMAINS:
        raise KeyError(f"Qcate {Qcate!r}; WebQA has {sorted(DOMAINS)}")
    candidates: list[Any] = list(prediction) if isinstance(prediction, list | tuple) else [prediction]
    if not candidates:
        raise ValueError("webqa_keyword needs at least one candidate answer")
    gold = _in_domain(webqa_normalise(_only(references), lemma_model=lemma_model).split(), Qcate)
    bags = [_in_domain(webqa_normalise(text, lemma_model=lemma_model).split(), Qcate) for text in candidates]
    pairs = [_overlap(bag, gold) for bag in bags]
    if not all(precision for precision, _ in pairs):
        return dict.fromkeys(VALUES, 0.0)
    f1 = [2 * precision * recall / (precision + recall + 1e-5) for precision, recall in pairs]
    mean_f1 = sum(f1) / len(f1)
    mean_recall = sum(recall for _, recall in pairs) / len(pairs)
    mean_precision = sum(precision for precision, _ in pairs) / len(pairs)
    accuracy = mean_f1 if Qcate in BY_F1 else mean_recall
    exact = float(any(bag == gold for bag in bags))
    return dict(zip(VALUES, (accuracy, mean_f1, max(f1), exact, mean_recall, mean_precision), strict=True))


def webqa_acc_approx(
    prediction: str,
    references: Sequence[str],
    *,
    Qcate: str,  # noqa: N803 (WebQA's own name)
    lemma_model: str = LEMMA_MODEL,
) -> dict[str, float]:
    """Two approximations of the official accuracy against a whole answer, both without the 1e-5.

    `webqa_acc_approx` is that of WebQA's `eval_webqa.md`. `ragvl_acc_approx` is RagVL's: it keeps all words
    when the *reference* has none of the domain's (but not for number), so "It looks crimson" against
    "crimson" is 0 in the one and 0.5 in the other.

    Raises:
        KeyError: unknown category.
        ValueError: not exactly one reference.
    """
    if Qcate not in DOMAINS:
        raise KeyError(f"Qcate {Qcate!r}; WebQA has {sorted(DOMAINS)}")
    words = webqa_normalise(prediction, lemma_model=lemma_model).split()
    gold = webqa_normalise(_only(references), lemma_model=lemma_model).split()
    filtered = _overlap(_in_domain(words, Qcate), _in_domain(gold, Qcate))
    falls_back = Qcate != "number" and not _in_domain(gold, Qcate)
    pairs = {
        "webqa_acc_approx": filtered,
        "ragvl_acc_approx": _overlap(words, gold) if falls_back else filtered,
    }
    return {name: _accuracy(*pair, by_f1=Qcate in BY_F1) for name, pair in pairs.items()}


def _accuracy(precision: float, recall: float, *, by_f1: bool) -> float:
    if not by_f1 or not precision:
        return recall
    return 2 * precision * recall / (precision + recall)


def webqa_normalize_text(
    prediction: str, references: Sequence[str] = (), *, lemma_model: str = LEMMA_MODEL
) -> str:
    """`webqa_normalise` in the scorers' shape: the normal form of the prediction; references play no part."""
    del references
    return webqa_normalise(prediction, lemma_model=lemma_model)
