"""Parse → Mentions: where the noun phrases of a question start and end, and what they say.

The rules 1–3 of `fovea.what`, which folds the mentions into phrases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Token = Any  # spacy.tokens.Token; spaCy is imported when a pipeline is first loaded


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FRONT_TAGS = _words("DT PDT WDT WP WP$ WRB PRP$ EX RB RBR RBS CC")
_FRONT_WORDS = _words(
    "how many much more less fewer most least than same such only both any either neither exactly"
)
_DEFINITE = _words("the this that these those")
_INDEFINITE = _words("a an some no")
_OTHER = _words("another other")
# Determiners that tell one mention from another of the same words.
_ORDINAL = re.compile(
    r"another|other|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|last|\d+(st|nd|rd|th)"
)
# Say nothing by themselves: the referent is what they are "of", if anything.
_EMPTY = _words(
    "kind type sort number amount lot thing something anything nothing everything someone anyone one way "
    "name time example case difference former latter"
)
_ATTRIBUTES = _words(
    "color colour shape size material style position orientation height length width direction gender age "
    "year date"
)
_PICTURE = _words("image picture photo photograph photography pic")
_SIDES = _words("left right")
_PARTS = _words(
    "top bottom side front back half middle center centre corner edge end interior inside outside exterior "
    "rear base part background foreground"
)
_PLACES = _SIDES | _PARTS
_DIRECTIONS = _words("above below under underneath beneath behind between over")
_RELATIVE = _words("upper lower inner outer leftmost rightmost topmost nearest farthest")
_SPATIAL = _PLACES | _DIRECTIONS | _RELATIVE
_WITHIN = _words("in with without")
_CLOTHED = _words("wear dress")
_HOLDERS = _words("feature show depict display include contain have portray picture")  # of several referents
# Verbs at the end of a question ("what is the pig holding ?") that small parsers take for nouns.
_MISREAD = _words(
    "holding wearing carrying doing sitting standing riding playing eating looking facing pointing touching "
    "using watching reading throwing pulling pushing drinking making flying walking running jumping hanging "
    "leaning lying"
)
_POSTURES = _words("seat dress park perch mount cover decorate cloth")
_CONTENT = _words("NOUN PROPN ADJ NUM")


@dataclass
class Mention:
    """Tokens [start, end) of a document that name a referent."""

    start: int
    end: int
    head: str
    plural: bool
    definite: bool
    own: str | None  # distinguishing determiner: "another", "other" or an ordinal
    content: frozenset[str]  # V(n): lemmas of nouns, adjectives, numerals, spatial words; without `own`
    index: int = 1


def mentions(doc: Any) -> Iterator[Mention]:
    """The mentions of a parsed question (a `spacy.tokens.Doc`) in order, not merged yet."""
    chunks = {chunk.root.i: chunk for chunk in _chunks(doc)}
    covered = 0  # end of the phrases so far
    free: set[int] = set()  # roots of complements that are mentions although a phrase covers them
    for chunk in chunks.values():
        if chunk.start < covered and chunk.root.i not in free:
            continue
        start, end = _core(chunk)
        if start < end == chunk.end:
            joined = _extent(chunk, chunks)
            end = joined.end
            free |= joined.free
        start, end = _trim(doc, start, end)
        if start < end:
            covered = max(covered, end)
            yield _mention(doc, chunk, start, end)


def _chunks(doc: Any) -> list[Any]:
    """spaCy's noun chunks, and the runs of nouns that it leaves out (in places where it expects no noun)."""
    chunks = list(doc.noun_chunks)
    covered = {i for chunk in chunks for i in range(chunk.start, chunk.end)}
    start = 0
    for token in doc:
        if token.i in covered or token.pos_ not in _CONTENT and not _is_hyphen(doc, token.i):
            start = token.i + 1
        elif token.pos_ in ("NOUN", "PROPN") and not _goes_on(doc, token.i, covered):
            chunks.append(doc[start : token.i + 1])
    return sorted(chunks, key=lambda chunk: chunk.start)


def _goes_on(doc: Any, i: int, covered: set[int]) -> bool:
    following = i + 1 < len(doc) and i + 1 not in covered
    return following and (doc[i + 1].pos_ in ("NOUN", "PROPN") or _is_hyphen(doc, i + 1))


def _core(chunk: Any) -> tuple[int, int]:
    """Tokens of a chunk without what is in front of it, (0, 0) when only scaffolding is left."""
    root = chunk.root
    lemma = root.lemma_.lower()
    if root.pos_ == "PRON" or root.tag_ in _FRONT_TAGS or lemma in _EMPTY and not _modified(root):
        return 0, 0
    start = chunk.start
    asked = False
    while start <= root.i and _in_front(chunk.doc[start], asked):
        asked |= chunk.doc[start].tag_ in ("WDT", "WP")
        start += 1
    content = any(token.pos_ in _CONTENT for token in chunk.doc[start : root.i])
    if lemma in _ATTRIBUTES | _EMPTY:  # "hair color" → "hair", "what color", "one solid color" → nothing
        owner = any(token.pos_ in ("NOUN", "PROPN") for token in chunk.doc[start : root.i])
        return (start, root.i) if owner else (0, 0)
    if lemma in _PICTURE and not content and not _preposition(root, _words("on above over behind under")):
        return 0, 0
    if lemma in _PLACES and not content:
        if asked:  # "which part of the statue": the part is asked for
            return 0, 0
        of = _preposition(root, _words("of"))
        part = (of is not None or _possessed(root)) and lemma not in _SIDES and start > chunk.start
        if not part and lemma not in ("background", "foreground"):
            return 0, 0
    return start, chunk.end


def _modified(root: Token) -> bool:
    return any(child.dep_ in ("compound", "amod", "nmod") and child.pos_ in _CONTENT for child in root.lefts)


def _possessed(root: Token) -> bool:
    return any(child.tag_ == "PRP$" for child in root.lefts)


def _in_front(token: Token, asked: bool) -> bool:
    if token.lower_ in _OTHER or token.lower_ in _SPATIAL or _is_hyphen(token.doc, token.i + 1):
        return False
    scaffold = token.tag_ in _FRONT_TAGS or token.lower_ in _FRONT_WORDS or token.is_punct or token.is_space
    return scaffold or asked and token.lemma_.lower() in _ATTRIBUTES


def _preposition(token: Token, words: frozenset[str]) -> Token | None:
    return next((child for child in token.rights if child.dep_ == "prep" and child.lower_ in words), None)


@dataclass
class _Extent:
    """Where a phrase ends, and the roots in it that are referents of their own."""

    end: int
    free: set[int]


def _extent(chunk: Any, chunks: dict[int, Any]) -> _Extent:
    """The phrase of a chunk with all that follows and joins it."""
    out = _Extent(chunk.end, set())
    while (step := _next_part(chunk, out.end, chunks)) is not None:
        out.end = step.end
        out.free |= step.free
    return out


def _next_part(chunk: Any, end: int, chunks: dict[int, Any]) -> _Extent | None:
    """The part that starts at token `end` and belongs to the chunk, if any (rule 3)."""
    doc, root = chunk.doc, chunk.root
    if end >= len(doc):
        return None
    token = doc[end]
    if token.lower_ in _SIDES and end + 1 < len(doc) and doc[end + 1].lower_ == "of":
        door = next((other for other in chunks.values() if other.start == end + 2), None)
        return None if door is None else _own_region(door.root, _extent(door, chunks))
    if token.dep_ == "nummod" and token.head.i == root.i:  # "Super 9"
        return _Extent(end + 1, set())
    # After a complement ("the color of the car in front of the house", "the same shape as the windows on the
    # bottom") small parsers attach to the verb or to the attribute.
    loose = token.head.pos_ == "AUX" or token.head.lemma_.lower() in _ATTRIBUTES
    if token.dep_ == "prep" and (token.head.i == root.i or root.dep_ == "pobj" and loose):
        return _prepositional(token, chunks)
    if token.dep_ == "acl" and token.head.i == root.i and token.lemma_ not in _HOLDERS:
        return _participial(token, chunks) if token.tag_ == "VBG" or token.lemma_ in _POSTURES else None
    return None


def _prepositional(preposition: Token, chunks: dict[int, Any]) -> _Extent | None:
    complement = _object(preposition)
    if complement is None:
        return None
    word = preposition.lower_
    place = complement.lemma_.lower() in _PLACES and complement.pos_ != "PROPN"
    if place and _possessed(complement):  # "two spots on its back": of a body, not of the picture
        return None
    if place and word not in ("of", "with"):
        of = _preposition(complement, _words("of"))
        if any(child.dep_ == "conj" for child in complement.rights):
            return None  # "on the left or the right": that is asked, not told
        if of is None:
            return _whole(complement, chunks)
        # "in front of" is a direction; "on the front of" names a part, which is a mention itself.
        bare = complement.i == preposition.i + 1
        return _direction(of, chunks) if bare or complement.lemma_.lower() in _SIDES else None
    if word in _DIRECTIONS:
        return _direction(preposition, chunks)
    if word == "of":
        several = any(c.dep_ == "conj" for c in complement.rights) or complement.left_edge.lower_ == "both"
        return None if several else _whole(complement, chunks)
    if word in _WITHIN and _attributive(complement):
        whole = _whole(complement, chunks)
        thing = word == "with" and any(c.dep_ in ("det", "nummod") for c in complement.lefts)
        return _own_region(complement, whole) if thing else whole
    return None


def _object(preposition: Token) -> Token | None:
    """The noun of a prepositional phrase."""
    noun = next((c for c in preposition.rights if c.dep_ == "pobj" and _says_something(c)), None)
    if noun is None or noun.pos_ in ("PRON", "VERB"):
        return None
    # "is the man in blue taller", "the woman with long hair holding": read as "blue taller", "hair holding".
    if (noun.tag_ == "JJR" or noun.lower_ in _MISREAD) and noun.i > preposition.i + 1:
        return noun.nbor(-1)
    return noun


def _direction(preposition: Token, chunks: dict[int, Any]) -> _Extent | None:
    """A direction ("between the two men") joins, and its complements remain mentions."""
    complement = _object(preposition)
    if complement is None:
        return None
    return _own_region(complement, _whole(complement, chunks))


def _participial(participle: Token, chunks: dict[int, Any]) -> _Extent | None:
    complement = next((child for child in participle.rights if child.dep_ in ("dobj", "obj")), None)
    if complement is None:
        preposition = next((child for child in participle.rights if child.dep_ == "prep"), None)
        complement = None if preposition is None else _object(preposition)
    if complement is None or not _attributive(complement):
        return None
    whole = _whole(complement, chunks)
    return whole if participle.lemma_ in _CLOTHED else _own_region(complement, whole)


def _whole(complement: Token, chunks: dict[int, Any]) -> _Extent:
    """The complement with what joins it and what is coordinated with it."""
    chunk = chunks.get(complement.i)
    out = _Extent(complement.i + 1, set()) if chunk is None else _extent(chunk, chunks)
    for other in complement.rights:
        if other.dep_ == "conj" and other.i in range(out.end, out.end + 5) and other.pos_ in _CONTENT:
            more = _whole(other, chunks)
            out.end, out.free = more.end, out.free | more.free
    return out


def _own_region(complement: Token, whole: _Extent) -> _Extent:
    """The complement, and what is coordinated with it, stay mentions."""
    roots = {complement.i} | {other.i for other in complement.rights if other.dep_ == "conj"}
    return _Extent(whole.end, whole.free | roots)


def _attributive(complement: Token) -> bool:
    """Whether it describes rather than refers: no definite determiner, no name ("a red dress", "blue")."""
    if complement.pos_ not in ("NOUN", "ADJ"):
        return False
    return not any(
        child.dep_ == "poss"
        or child.pos_ == "PROPN"
        or child.dep_ in ("det", "predet")
        and child.lower_ not in _INDEFINITE
        for child in complement.lefts
    )


def _trim(doc: Any, start: int, end: int) -> tuple[int, int]:
    """Without punctuation at the ends, and with every bracket closed or cut off."""
    opened = None
    for i in range(start, end):
        if doc[i].text == "(":
            opened = i
        elif doc[i].text == ")":
            opened = None
    if opened is not None:
        end = end + 1 if end < len(doc) and doc[end].text == ")" else opened
    while start < end and not _says_something(doc[start]) and doc[start].text not in "([":
        start += 1
    while _is_hyphen(doc, end):
        end += 2
    while start < end and not _says_something(doc[end - 1]) and doc[end - 1].text not in ")]":
        end -= 1
    if end - start > 1 and doc[end - 1].lower_ in _MISREAD and (end == len(doc) or doc[end].is_punct):
        end -= 1
    return start, end


def _is_hyphen(doc: Any, i: int) -> bool:
    """Whether token i joins its neighbours ("2013-14", "C30-7"): the parser may see a boundary there."""
    inside = 0 < i < len(doc) - 1 and doc[i].text in ("-", "–")
    return inside and not doc[i - 1].whitespace_ and not doc[i].whitespace_


def _says_something(token: Token) -> bool:
    return any(character.isalnum() for character in token.text)


def _mention(doc: Any, chunk: Any, start: int, end: int) -> Mention:
    root = chunk.root if start <= chunk.root.i < end else doc[end - 1]
    heads = (root.i, chunk.root.i)
    own = None
    content = {root.lemma_.lower()}
    for token in doc[start:end]:
        if own is None and token.head.i in heads and _ORDINAL.fullmatch(token.lower_):
            own = token.lower_
        elif token.pos_ in _CONTENT or token.lower_ in _SPATIAL:
            content.add(token.lemma_.lower())
    definite = any(token.lower_ in _DEFINITE or token.tag_ == "PRP$" for token in doc[chunk.start : start])
    plural = "Plur" in root.morph.get("Number")
    return Mention(start, end, root.lemma_.lower(), plural, definite, own, frozenset(content))
