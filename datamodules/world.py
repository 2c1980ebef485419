"""Seed → canonical tables of the embedded world's scenes: pictures, captions, questions and exact masks.

Splits, each with a stream of random numbers of its own:

- `singles`: one thing at 32 px, the first stage of training; `train`: scenes of two or three things at 64 px;
- `val`: one gallery for early stopping and tuning; `cal-0`, `cal-1`: galleries for calibrating the fusion;
- `test-0` … : galleries that no choice has seen.

Texts of `singles` and `train` are queries of kind `caption` whose gold image is their own picture (another
picture may happen to fit a short one too). Their forms cover the test texts on purpose: a full list, a pair,
and a question in the wording of the test; the question's answer, the thing that it does not name, stands in
`answers`. A gallery's questions are of kind `question`: two of an image's three things are named, and the
image is the only one of its gallery that shows both. Every split has one region row a thing, with the exact
visible mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from datamodules import world_art as art
from datamodules import world_scenes as scenes
from datamodules.world_shards import TarShards, render_in_order
from fovea.tables import TableWriter

FORMS = ("list", "pair", "one", "question")


@dataclass(frozen=True)
class WorldConfig:
    """What world to generate. Every field is written to the tables' manifest.

    Attributes:
        seed: seed of everything.
        num_nouns: kinds of things, from 4 on: the first of `world_art.NOUNS`. More nouns are harder to learn.
        num_colours: colours, from 3 on: the first of `world_art.COLOURS`.
        num_singles: pictures of one thing.
        num_scenes: training scenes.
        single_side: side of a single's picture, pixels.
        scene_side: side of a scene, pixels.
        objects: least and greatest number of things in a training scene (a gallery's scenes have three).
        captions_per_single: texts for each single.
        captions_per_scene: texts for each training scene; their forms cycle through `caption_forms`.
        caption_forms: of `list`, `pair`, `one`, `question` (see `world_scenes.caption`).
        num_cal: galleries for calibration.
        num_test: galleries for testing.
        gallery_size: images in each gallery; with the same retriever, more images mean a lower R@1.
        sibling_share: share of a gallery's images that have a sibling with the same nouns and colours
            permuted.
        sizes: (low, high) of each size class: side of a thing as a share of the scene's side.
        single_size: the same for singles; in pixels it covers the sizes in scenes.
        max_overlap: largest share of a thing that others hide.
        grey: least and greatest share of grey in the background.
        rotation: greatest rotation of a thing, degrees; at 15 nothing of a drawing is cut off.
    """

    seed: int = 0
    num_nouns: int = 24
    num_colours: int = 6
    num_singles: int = 12_000
    num_scenes: int = 12_000
    single_side: int = 32
    scene_side: int = 64
    objects: tuple[int, int] = (2, 3)
    captions_per_single: int = 1
    captions_per_scene: int = 3
    caption_forms: tuple[str, ...] = ("list", "question", "pair")
    num_cal: int = 2
    num_test: int = 4
    gallery_size: int = 200
    sibling_share: float = 0.3
    sizes: tuple[tuple[float, float], ...] = ((0.16, 0.20), (0.24, 0.29), (0.34, 0.42))
    single_size: tuple[float, float] = (0.35, 0.85)
    max_overlap: float = 0.25
    grey: tuple[float, float] = (0.3, 0.7)
    rotation: float = 15.0

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError("WorldConfig: " + "; ".join(problems))

    def _problems(self) -> Iterator[str]:
        def between(name: str, low: float, high: float) -> Iterator[str]:
            value = getattr(self, name)
            if not low <= value <= high:
                yield f"{name}={value!r} must lie in [{low}, {high}]"

        yield from between("seed", 0, 2**63 - 1)
        yield from between("num_nouns", 4, len(art.NOUNS))
        yield from between("num_colours", 3, len(art.COLOURS))
        yield from between("single_side", 16, 96)
        yield from between("scene_side", 32, 96)
        yield from between("sibling_share", 0, 1)
        yield from between("max_overlap", 0, 0.9)
        yield from between("rotation", 0, 15)
        for name in ("num_singles", "num_scenes", "num_cal", "num_test"):
            yield from between(name, 0, 10**7)
        for name in ("captions_per_single", "captions_per_scene"):
            yield from between(name, 1, 100)
        # A gallery uses a set of three nouns for one family only; half of all sets leaves the drawing quick.
        sets = self.num_nouns * (self.num_nouns - 1) * (self.num_nouns - 2) // 6
        families = self.gallery_size * (1 - self.sibling_share / 2)
        if self.gallery_size < 2 or families > sets / 2:
            yield (
                f"gallery_size={self.gallery_size} must be at least 2 and need at most {sets // 2} sets of "
                f"three out of num_nouns={self.num_nouns}; raise num_nouns or shrink the gallery"
            )
        low, high = self.objects
        if not 1 <= low <= high <= min(5, self.num_colours):
            most = min(5, self.num_colours)
            yield f"objects={self.objects} must be increasing, within 1 and {most} (colours differ)"
        unknown = sorted(set(self.caption_forms) - set(FORMS))
        if unknown or not self.caption_forms:
            yield f"caption_forms={self.caption_forms} must be one or more of {', '.join(FORMS)}"
        if not self.sizes:
            yield "sizes must name at least one size class"
        for name, bounds in [*(("sizes", pair) for pair in self.sizes), ("single_size", self.single_size)]:
            if not 0.1 <= bounds[0] <= bounds[1] <= 0.95:
                yield f"{name}: {bounds} must be increasing, within 0.1 and 0.95 of the side"
        if not 0 <= self.grey[0] <= self.grey[1] <= 1:
            yield f"grey={self.grey} must be increasing, within 0 and 1"

    @staticmethod
    def smoke(seed: int = 0) -> WorldConfig:
        """A world in miniature, for tests of the whole chain: too small to learn much from."""
        return WorldConfig(
            seed=seed,
            num_nouns=8,
            num_colours=4,
            num_singles=400,
            num_scenes=400,
            num_cal=1,
            num_test=1,
            gallery_size=20,
        )

    @property
    def nouns(self) -> tuple[str, ...]:
        """The nouns of this world."""
        return tuple(art.NOUNS)[: self.num_nouns]

    @property
    def colours(self) -> tuple[str, ...]:
        """The colours of this world."""
        return tuple(art.COLOURS)[: self.num_colours]

    @property
    def galleries(self) -> tuple[str, ...]:
        """Names of the gallery splits."""
        return (
            "val",
            *(f"cal-{i}" for i in range(self.num_cal)),
            *(f"test-{i}" for i in range(self.num_test)),
        )


def plan(config: WorldConfig) -> dict[str, list[scenes.Scene]]:
    """Split → its scenes, not drawn yet."""
    names: dict[str, Any] = {"nouns": config.nouns, "colours": config.colours, "seed": config.seed}
    out = {
        "singles": scenes.plan_train(
            "singles", config.num_singles, side=config.single_side, objects=(1, 1), **names
        ),
        "train": scenes.plan_train(
            "train", config.num_scenes, side=config.scene_side, objects=config.objects, **names
        ),
    }
    for split in config.galleries:
        out[split] = scenes.plan_gallery(
            split, config.gallery_size, side=config.scene_side, sibling_share=config.sibling_share, **names
        )
    return out


def texts(config: WorldConfig, split: str, planned: list[scenes.Scene]) -> Iterator[dict[str, Any]]:
    """The rows of the queries table for one split."""
    rng = np.random.default_rng(scenes.stream(config.seed, split, "texts"))
    if split in ("singles", "train"):
        number = config.captions_per_single if split == "singles" else config.captions_per_scene
        for scene in planned:
            for j in range(number):
                text, answers = scenes.caption(
                    rng, config.caption_forms[j % len(config.caption_forms)], scene.things
                )
                yield {"id": f"{scene.id}-t{j}", "text": text, "answers": answers,
                       "gold_image_ids": [scene.id], "split": split, "kind": "caption"}  # fmt: skip
        return
    for scene, pairs in zip(planned, scenes.unique_pairs(planned), strict=True):
        if not pairs:  # counted in the manifest: fewer questions than images
            continue
        named = pairs[rng.integers(len(pairs))]
        (rest,) = (thing for thing in scene.things if thing not in named)
        yield {"id": f"{scene.id}-q", "text": scenes.question(rng, named), "answers": [rest.phrase],
               "gold_image_ids": [scene.id], "split": split, "kind": "question"}  # fmt: skip


def build(out: str | Path, *, config: WorldConfig, workers: int = 2, overwrite: bool = False) -> Path:
    """Write the canonical tables of a world of scenes.

    Args:
        out: directory of the tables.
        config: what to generate.
        workers: processes that draw; the result does not depend on it.
        overwrite: replace tables that are already there.

    Returns:
        `out`.
    """
    counts: dict[str, dict[str, int]] = {}
    with TableWriter(out, overwrite=overwrite) as writer:
        for split, planned in plan(config).items():
            counts[split] = {"images": len(planned), "queries": 0}
            for row in texts(config, split, planned):
                writer.add("queries", **row)
                counts[split]["queries"] += 1
            _write_pictures(writer, config, split, planned, workers)
        return writer.finish(
            {
                "reader": "world",
                "config": dataclasses.asdict(config),
                "seed": config.seed,
                "nouns": config.nouns,
                "colours": config.colours,
                "splits": counts,
                "art": art.manifest(),
            }
        )


def _write_pictures(
    writer: TableWriter, config: WorldConfig, split: str, planned: list[scenes.Scene], workers: int
) -> None:
    sizes = (config.single_size,) if split == "singles" else config.sizes
    look = scenes.Look(sizes, config.max_overlap, config.grey, config.rotation)
    drawn = render_in_order(partial(scenes.render, look=look), planned, workers=workers)
    with TarShards(writer.directory, split) as shards:
        for scene, picture in zip(planned, drawn, strict=True):
            place = shards.add(f"{scene.id}.png", picture.png)
            writer.add(
                "images", id=scene.id, width=scene.side, height=scene.side, source="world", split=split,
                caption=scenes.listing(scene.things), **place,
            )  # fmt: skip
            for k, thing in enumerate(scene.things):
                writer.add(
                    "regions", id=f"{scene.id}-r{k}", image_id=scene.id, label=thing.noun,
                    phrase=thing.phrase, box=picture.boxes[k], height=scene.side, width=scene.side,
                    rle=picture.counts[k], source="world",
                )  # fmt: skip
