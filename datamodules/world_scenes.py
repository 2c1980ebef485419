"""Seed → scenes: which things stand where, the pixels, the exact visible masks, and the texts about them.

A scene is planned first (names only: cheap, in one process) and drawn later from a seed of its own, so that
the bytes do not depend on how the drawing is spread over processes.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

from datamodules import world_art as art
from fovea.types import BoolArray, FloatArray, UInt8Array

# Questions name all but one of the things; the missing one is the answer. No other noun occurs in them:
# everything that a phrase finder finds is a thing in the picture.
QUESTIONS = (
    "what is next to {names} ?",
    "what do you see beside {names} ?",
    "what else is there with {names} ?",
    "what can be found near {names} ?",
)
_ATTEMPTS = 40


@dataclass(frozen=True)
class Thing:
    """One object: a noun of `world_art.NOUNS` in a colour of `world_art.COLOURS`."""

    noun: str
    colour: str

    @property
    def phrase(self) -> str:
        """`red pig`."""
        return f"{self.colour} {self.noun}"

    @property
    def with_article(self) -> str:
        """`a red pig`, `an orange pig`."""
        return f"{'an' if self.colour[0] in 'aeiou' else 'a'} {self.phrase}"


@dataclass(frozen=True)
class Scene:
    """What is drawn: image id, split, side in pixels, and the things from back to front."""

    id: str
    split: str
    side: int
    things: tuple[Thing, ...]
    seed: tuple[int, ...]


@dataclass(frozen=True)
class Look:
    """How scenes are drawn.

    Attributes:
        sizes: (low, high) bounds of each size class, side of the drawing as a share of the picture's side.
        max_overlap: share of a thing that later things may hide, [0, 1).
        grey: bounds of the share of grey in the background.
        rotation: largest rotation, degrees.
    """

    sizes: tuple[tuple[float, float], ...]
    max_overlap: float
    grey: tuple[float, float]
    rotation: float


@dataclass(frozen=True)
class Drawn:
    """One finished picture: PNG bytes, and each thing's visible mask (COCO counts) and xyxy box."""

    png: bytes
    counts: tuple[bytes, ...]
    boxes: tuple[tuple[float, float, float, float], ...]


def stream(seed: int, *names: str | int) -> tuple[int, ...]:
    """A seed for `numpy.random.default_rng` that is a function of `seed` and names alone."""
    return (seed, *(zlib.crc32(name.encode()) if isinstance(name, str) else name for name in names))


def png(image: UInt8Array) -> bytes:
    """Lossless bytes of uint8 [H, W, 3], at the fastest compression."""
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG", compress_level=1)
    return out.getvalue()


# ---------------------------------------------------------------------------------------------------- drawing
def _draw_thing(
    rng: np.random.Generator, thing: Thing, side: int, look: Look
) -> tuple[FloatArray, FloatArray]:
    """One sprite at a random size, mirrored or not, rotated, cut to its solid pixels.

    Returns:
        float32 RGB [h, w, 3], premultiplied by the alpha, and alpha [h, w, 1] in [0, 1].
    """
    low, high = look.sizes[rng.integers(len(look.sizes))]
    pixels = max(6, round(rng.uniform(low, high) * side * (72 + 2 * art.PAD) / 72))
    # Seven angles, not any angle: turned sprites come from a cache, and turning was half of the cost of a
    # scene.
    degrees = look.rotation * float(rng.integers(-3, 4)) / 3
    turned = art.sprite(thing.noun, thing.colour, degrees, bool(rng.random() < 0.5))
    rgba = np.asarray(turned.resize((pixels, pixels), Image.Resampling.BOX)).astype(np.float32)
    solid = rgba[..., 3] >= 128
    rows, columns = np.flatnonzero(solid.any(1)), np.flatnonzero(solid.any(0))
    rgba = rgba[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return rgba[..., :3], rgba[..., 3:] / np.float32(255)


def _try_scene(rng: np.random.Generator, scene: Scene, look: Look) -> tuple[FloatArray, BoolArray] | None:
    side = scene.side
    canvas = art.background(rng, side, look.grey)
    visible = np.zeros((len(scene.things), side, side), bool)
    full = np.zeros(len(scene.things))
    for k, thing in enumerate(scene.things):
        rgb, alpha = _draw_thing(rng, thing, side, look)
        solid = alpha[..., 0] >= 0.5
        height, width = solid.shape
        if height > side or width > side:
            return None
        for _ in range(_ATTEMPTS):
            y, x = rng.integers(side - height + 1), rng.integers(side - width + 1)
            window = visible[:k, y : y + height, x : x + width]
            left = visible[:k].sum((1, 2)) - (window & solid).sum((1, 2))
            if (left >= (1 - look.max_overlap) * full[:k]).all():
                break
        else:
            return None
        visible[:k, y : y + height, x : x + width] &= ~solid
        visible[k, y : y + height, x : x + width] = solid
        full[k] = solid.sum()
        place = canvas[y : y + height, x : x + width]
        place += rgb - place * alpha
    return canvas, visible


def draw(scene: Scene, look: Look) -> tuple[UInt8Array, BoolArray]:
    """Draw one scene: uint8 [S, S, 3] and the visible pixels of each thing, bool [T, S, S] (disjoint)."""
    rng = np.random.default_rng(scene.seed)
    for _ in range(_ATTEMPTS):
        result = _try_scene(rng, scene, look)
        if result is not None:
            canvas, visible = result
            return np.clip(np.rint(canvas), 0, 255).astype(np.uint8), visible
    raise RuntimeError(
        f"{scene.id}: no room for {len(scene.things)} things with at most {look.max_overlap:.0%} hidden; "
        f"make the sizes {look.sizes} smaller or allow more overlap"
    )


def render(scene: Scene, look: Look) -> Drawn:
    """Draw and encode one scene."""
    image, visible = draw(scene, look)
    codes = coco_mask.encode(np.asfortranarray(visible.transpose(1, 2, 0).astype(np.uint8)))
    boxes = []
    for mask in visible:
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        boxes.append((float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)))
    return Drawn(png(image), tuple(code["counts"] for code in codes), tuple(boxes))


# --------------------------------------------------------------------------------------------------- planning
def _things(
    rng: np.random.Generator, number: int, nouns: Sequence[str], colours: Sequence[str]
) -> tuple[Thing, ...]:
    """`number` things of different nouns and different colours."""
    picked = rng.permutation(len(nouns))[:number], rng.permutation(len(colours))[:number]
    return tuple(Thing(nouns[n], colours[c]) for n, c in zip(*picked, strict=True))


def plan_train(
    split: str,
    count: int,
    *,
    side: int,
    objects: tuple[int, int],
    nouns: Sequence[str],
    colours: Sequence[str],
    seed: int,
) -> list[Scene]:
    """Independent scenes of `objects[0]` to `objects[1]` things; the first n do not depend on `count`."""
    rng = np.random.default_rng(stream(seed, split, "plan"))
    scenes = []
    for i in range(count):
        things = _things(rng, int(rng.integers(objects[0], objects[1] + 1)), nouns, colours)
        scenes.append(Scene(f"{split}-{i:05d}", split, side, things, stream(seed, split, "draw", i)))
    return scenes


def plan_gallery(
    split: str,
    count: int,
    *,
    side: int,
    sibling_share: float,
    nouns: Sequence[str],
    colours: Sequence[str],
    seed: int,
) -> list[Scene]:
    """`count` scenes of three things, no two with the same contents; `sibling_share` of them come in pairs.

    The two siblings of a pair show the same three nouns and the same three colours, otherwise distributed: a
    retriever that reads words but not which colour belongs to which noun cannot tell them apart. Places are
    drawn independently. The order in the gallery is shuffled.
    """
    rng = np.random.default_rng(stream(seed, split, "plan"))
    contents: list[tuple[Thing, ...]] = []
    used: set[frozenset[str]] = set()
    pairs = round(count * sibling_share / 2)
    while len(contents) < count:
        first = _things(rng, 3, nouns, colours)
        names = frozenset(thing.noun for thing in first)
        # A set of nouns is used by one family, or images would have more siblings than the share says.
        if names in used:
            continue
        used.add(names)
        contents.append(first)
        if len(contents) < 2 * pairs:
            order = [(1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1)][rng.integers(5)]
            contents.append(tuple(Thing(first[k].noun, first[order[k]].colour) for k in range(3)))
    shuffled = [contents[i] for i in rng.permutation(count)]
    return [
        Scene(
            f"{split}-{i:05d}",
            split,
            side,
            tuple(things[k] for k in rng.permutation(3)),
            stream(seed, split, "draw", i),
        )
        for i, things in enumerate(shuffled)
    ]


# ------------------------------------------------------------------------------------------------------ texts
def listing(things: Sequence[Thing]) -> str:
    """`a red pig, a blue drum and a green car`."""
    names = [thing.with_article for thing in things]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def question(rng: np.random.Generator, named: Sequence[Thing]) -> str:
    """A question that names `named`: `what is next to the red pig and the blue drum ?` or another wording."""
    order = rng.permutation(len(named))
    joint = (" and ", " with ")[rng.integers(2)]
    names = joint.join(f"the {named[k].phrase}" for k in order)
    return QUESTIONS[rng.integers(len(QUESTIONS))].format(names=names)


def caption(rng: np.random.Generator, form: str, things: Sequence[Thing]) -> tuple[str, tuple[str, ...]]:
    """A training text about `things` and, for a question, its answer.

    Args:
        rng: source of every choice.
        form: `list` names everything; `pair` two things; `one` a single thing, with `a`, `the` or no article
            (the texts of region phrases); `question` all but one of at least two, in the wording of the test
            questions.
        things: what the picture shows.
    """
    order = [things[k] for k in rng.permutation(len(things))]
    if form == "question" and len(order) > 1:
        return question(rng, order[:-1]), (order[-1].phrase,)
    if form == "one" or len(order) == 1:
        return (order[0].with_article, f"the {order[0].phrase}", order[0].phrase)[rng.integers(3)], ()
    if form == "pair":
        return (" and ", " next to ", " with ")[rng.integers(3)].join(t.with_article for t in order[:2]), ()
    return listing(order), ()


def unique_pairs(scenes: Sequence[Scene]) -> list[list[tuple[Thing, Thing]]]:
    """For each scene of a gallery, the pairs of its things that no other scene of it shows both of."""
    count: dict[frozenset[Thing], int] = {}
    pairs = [[(a, b) for k, a in enumerate(s.things) for b in s.things[k + 1 :]] for s in scenes]
    for pair in (frozenset(pair) for row in pairs for pair in row):
        count[pair] = count.get(pair, 0) + 1
    return [[pair for pair in row if count[frozenset(pair)] == 1] for row in pairs]
