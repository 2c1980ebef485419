"""Emoji and country data → entities: things that two artists drew, with facts about them.

The facts come from `countryinfo`; an emoji has its name alone, from `emoji`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import emoji
import numpy as np
from PIL import Image

from datamodules import world_art as art
from fovea.types import FloatArray

# Emoji whose name holds one of these words are left out: signs and shapes that two artists cannot draw apart,
# people in variants, and series of near copies (24 clocks, moon phases).
_NO_WORDS = frozenset(
    "adult arrow arrows banknote blood boy bust busts button check checked child circle circled clock "
    "cloud copyright couple curly dash diamond divide exclamation family finger fist folded girl hand "
    "hands heart hearts index infinity Japanese mailbox man mark men minus moon multiply older "
    "o’clock people person plus question registered restroom room sign skin speaker square squares "
    "star suit sun symbol triangle umbrella wavy woman women".split()
)
_NO_NAMES = frozenset(
    "Aries Taurus Gemini Cancer Leo Virgo Libra Scorpio Sagittarius Capricorn Aquarius Pisces "
    "Ophiuchus".split()
)


@dataclass(frozen=True)
class Fact:
    """One relation of an entity: the passage that states it, and the question about it with its answers."""

    relation: str
    sentence: str
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Entity:
    """A thing with two drawings.

    Attributes:
        key: lower-case ISO code or code point; part of every id.
        name: as in the answers.
        kind: `country` or `emoji`.
        text: the emoji.
        code: Twemoji's file name.
        facts: at least the name.
    """

    key: str
    name: str
    kind: str
    text: str
    code: str
    facts: tuple[Fact, ...]


def _country_facts(row: dict[str, Any]) -> Iterator[Fact]:
    name = row["name"]
    yield Fact("name", f"This is the flag of {name} .", "which country has this flag ?", (name,))
    for relation, words, value in (
        ("capital", "capital", row.get("capital")),
        ("currency", "currency code", next(iter(row.get("currencies") or []), None)),
        ("demonym", "demonym", row.get("demonym")),
        ("subregion", "subregion", row.get("subregion")),
        ("domain", "internet domain", next(iter(row.get("tld") or []), None)),
        ("population", "population", row.get("population")),
    ):
        if value:
            answers = (str(value),) if relation != "population" else (str(value), f"{value:,}")
            sentence = f"The {words} of {name} is {answers[-1]} ."
            yield Fact(relation, sentence, f"what is the {words} of the country with this flag ?", answers)


@cache
def countries() -> tuple[Entity, ...]:
    """Every country with both flags, ordered by ISO code.

    Of countries whose flags look alike in either rendition (Norway and Bouvet Island, Indonesia and Monaco,
    Chad and Romania) the one with the most inhabitants stays: nothing in a picture tells the others apart.
    """
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted((art.package("countryinfo") / "data").glob("*.json")):
        row = json.loads(path.read_text("utf-8"))
        rows.setdefault(row["ISO"]["alpha2"], row)
    kept: list[Entity] = []
    looks: list[FloatArray] = []
    for code in sorted(rows, key=lambda code: (-(rows[code].get("population") or 0), code)):
        points = [0x1F1E6 + ord(letter) - ord("A") for letter in code]
        entity = Entity(
            code.lower(), rows[code]["name"], "country", "".join(map(chr, points)),
            "-".join(f"{point:x}" for point in points), tuple(_country_facts(rows[code])),
        )  # fmt: skip
        second = art.openmoji(entity.text)
        if second is None or not art.twemoji_path(entity.code).exists():
            continue
        look = np.stack([_small(art.twemoji(entity.code)), _small(second)])
        if not any((np.abs(look - other).mean((1, 2, 3)) < 1).any() for other in looks):
            kept.append(entity)
            looks.append(look)
    return tuple(sorted(kept, key=lambda entity: entity.key))


def _small(drawing: Image.Image) -> FloatArray:
    """A flag at 24 px, for comparison: premultiplied colours in [0, 255], float32 [24, 24, 3]."""
    small = drawing.convert("RGBa").resize((24, 24), Image.Resampling.BOX)
    return np.asarray(small).astype(np.float32)[..., :3]


@cache
def emoji_pairs() -> tuple[Entity, ...]:
    """Emoji of one code point that both artists drew and that pictures tell apart, by code point."""
    found = []
    for text, data in emoji.EMOJI_DATA.items():
        points = [ord(letter) for letter in text if letter != "\ufe0f"]
        name = data["en"].strip(":").replace("_", " ")
        if data["status"] != emoji.STATUS["fully_qualified"] or len(points) != 1:
            continue
        if name in _NO_NAMES or _NO_WORDS & set(name.replace("-", " ").replace(")", "").split()):
            continue
        code = f"{points[0]:x}"
        if art.twemoji_path(code).exists() and art.openmoji(text) is not None:
            fact = Fact("name", f"This picture shows : {name} .", "what is this ?", (name,))
            found.append(Entity(code, name, "emoji", text, code, (fact,)))
    return tuple(sorted(found, key=lambda entity: int(entity.code, 16)))
