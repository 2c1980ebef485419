"""Question × Image → heat maps: CLIP's activation, and the regional relevance over it (HuLiRAG Figure 4).

Shapes: `T` phrases, `D` embedding width, `P` patches, `H`/`W` of the original image in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fovea import masks
from fovea.models.encoders import Encoder, embed_dtype
from fovea.region_bank import View
from fovea.types import BoolArray, FloatArray, UInt8Array

# Longest side of a painted map, pixels; the maps themselves have the image's resolution.
PAINTED_SIDE = 640
ACTIVATION_COLOURS, RELEVANCE_COLOURS = "viridis", "inferno"
# Of the phrases, in their order and again from the start: those of the pages' light theme.
PHRASE_COLOURS = ("#e4502a", "#2277d4", "#109a63", "#a445c9", "#c98a00", "#0f9aa8")


class Heat(NamedTuple):
    """One painted map.

    Attributes:
        picture: uint8 [h, w, 3], at most `PAINTED_SIDE` a side, the aspect ratio of the original.
        low: the value that the darkest colour stands for.
        high: the value that the lightest colour stands for.
    """

    picture: UInt8Array
    low: float
    high: float


class Maps(NamedTuple):
    """The two pictures of a question.

    Attributes:
        activation: cosine of each projected patch token and the question, over the photo in grey.
        relevance: Σ_k α_k cos(n_k, r_k) in the regions, over a paler activation.
    """

    activation: Heat
    relevance: Heat


def activation(encoder: Encoder, image: UInt8Array, text_D: Tensor) -> FloatArray:
    """CLIP's activation: cos(projected patch token, text), interpolated over the original image.

    Args:
        encoder: in evaluation mode, with `patch_tokens`.
        image: uint8 [H, W, 3].
        text_D: the question's embedding; its length does not matter.

    Returns:
        float32 [H, W] in [−1, 1]; NaN where the transform cuts the image off (`crop`).
    """
    pixels, _ = encoder.transform(image)
    with torch.inference_mode():
        shown = encoder.transform.normalise(torch.from_numpy(pixels[None]).to(text_D.device))
        patches_PD = encoder.patch_tokens(shown.to(embed_dtype(encoder)))[0]
        cosines_P = F.normalize(patches_PD.float(), dim=-1) @ F.normalize(text_D.float(), dim=-1)
    side = math.isqrt(len(cosines_P))
    if side * side != len(cosines_P):
        raise ValueError(f"{len(cosines_P)} patch tokens are no square grid")
    height, width = image.shape[:2]
    return encoder.transform.back(cosines_P.reshape(side, side).cpu().numpy(), height, width)


def relevance(masks_THW: BoolArray, weights_T: FloatArray, cosines_T: FloatArray) -> FloatArray:
    """Regional relevance: Σ_k α_k cos(n_k, r_k) m_k(p), the terms of the local score (eq. 5) where they lie.

    Args:
        masks_THW: the mask of each phrase; empty where it has no region.
        weights_T: α of eq. 4.
        cosines_T: of each phrase and its region; ignored (may be NaN) where the mask is empty.

    Returns:
        float32 [H, W]; 0 under no mask.
    """
    found = masks_THW.any(axis=(1, 2))
    terms = np.where(found, weights_T * np.nan_to_num(cosines_T), 0).astype(np.float32)
    out: FloatArray = np.einsum("t,thw->hw", terms, masks_THW, dtype=np.float32, casting="unsafe")
    return out


def region_cosines(
    encoder: Encoder, image: UInt8Array, phrases_TD: Tensor, masks_THW: BoolArray, view: View
) -> FloatArray:
    """cos(n_k, r_k) of each phrase and its own region, float32 [T]; NaN where the mask is empty.

    Args:
        encoder: the local (Alpha-CLIP) encoder, in evaluation mode.
        image: uint8 [H, W, 3].
        phrases_TD: embeddings of the phrases; their lengths do not matter.
        masks_THW: the mask of each phrase.
        view: how a region is shown to the encoder.
    """
    out = np.full(len(masks_THW), np.nan, np.float32)
    found = np.flatnonzero(masks_THW.any(axis=(1, 2)))
    if not len(found):
        return out
    fill = encoder.transform.mean_pixel if view.fill == "mean" else (0, 0, 0)
    patches, alphas = [], []
    for k in found:
        patch, alpha = masks.region_view(
            image,
            masks_THW[k],
            background=view.background,
            crop=view.crop,
            margin=view.margin,
            fill=fill,
        )
        pixels, small = encoder.transform(patch, alpha[None])
        patches.append(pixels)
        alphas.append(small)
    device = phrases_TD.device
    with torch.inference_mode():
        shown = encoder.transform.normalise(torch.from_numpy(np.stack(patches)).to(device))
        where = torch.from_numpy(np.stack(alphas)).to(device).float()
        regions = encoder.encode_image(shown.to(embed_dtype(encoder)), where)
        cosines = F.cosine_similarity(regions.float(), phrases_TD[torch.from_numpy(found).to(device)].float())
    out[found] = cosines.cpu().numpy()
    return out


def look(
    encoder: Encoder,
    image: UInt8Array,
    question: str,
    phrases: Sequence[str],
    masks_THW: BoolArray,
    *,
    weights_T: FloatArray,
    view: View,
) -> Maps:
    """Both pictures of one question and one image.

    Args:
        encoder: gives the activation (its patches against the question) and the regions' cosines.
        image: uint8 [H, W, 3].
        question: as asked.
        phrases: [T] texts.
        masks_THW: the mask of each phrase; empty where nothing was found.
        weights_T: α of eq. 4.
        view: how a region is shown to the encoder; the one that it was trained on.
    """
    if encoder.training:
        raise ValueError("the encoder is in training mode; call .eval() first")
    device = encoder.logit_scale.device
    with torch.inference_mode():
        texts = encoder.encode_text(encoder.tokenize([question, *phrases]).to(device))
    cosines = region_cosines(encoder, image, texts[1:], masks_THW, view)
    return paint(
        image, activation(encoder, image, texts[0]), relevance(masks_THW, weights_T, cosines), masks_THW
    )


def paint(
    image: UInt8Array, activation_HW: FloatArray, relevance_HW: FloatArray, masks_THW: BoolArray
) -> Maps:
    """Both maps over the image in grey, each with its own colours and its own range.

    Args:
        image: uint8 [H, W, 3].
        activation_HW: as `activation` makes it; its range is that of this image (CLIP's cosines all lie close
            together), and a pixel without a value stays grey.
        relevance_HW: as `relevance` makes it; its range begins at 0, or below when a term is negative.
        masks_THW: bool [T, H, W], where there is a relevance at all; T may be 0.
    """
    height, width = image.shape[:2]
    scale = min(1.0, PAINTED_SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    grey = np.asarray(Image.fromarray(image).convert("L").resize(size, Image.Resampling.BOX), np.float32)
    base = np.repeat(grey[..., None], 3, axis=2)
    seen = _resize(activation_HW, size)
    known = seen[np.isfinite(seen)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    colours = _colours(seen, low, high, ACTIVATION_COLOURS)
    strength = np.where(np.isfinite(seen), np.float32(0.6), np.float32(0))[..., None]
    first = Heat(_bytes(base * (1 - strength) + colours * strength), low, high)

    floor, top = min(0.0, float(relevance_HW.min())), max(0.0, float(relevance_HW.max()))
    colours_over = _colours(_resize(relevance_HW, size), floor, top, RELEVANCE_COLOURS)
    covered = np.asarray(masks_THW.any(axis=0), np.float32)
    over = _resize(covered, size)[..., None]
    pale = strength * 0.5
    under = (base * (1 - pale) + colours * pale) * 0.6 + 255 * 0.4  # paler: the regions stand out
    inside = base * 0.3 + colours_over * 0.7
    return Maps(first, Heat(_bytes(under * (1 - over) + inside * over), floor, top))


def _resize(field: FloatArray, size: tuple[int, int]) -> FloatArray:
    return np.asarray(Image.fromarray(field.astype(np.float32)).resize(size, Image.Resampling.BOX))


def _colours(field: FloatArray, low: float, high: float, name: str) -> FloatArray:
    from matplotlib import colormaps

    scaled = np.nan_to_num((field - low) / (high - low)) if high > low else np.zeros_like(field)
    painted: FloatArray = colormaps[name](np.clip(scaled, 0, 1))[..., :3].astype(np.float32) * 255
    return painted


def _bytes(picture: Any) -> UInt8Array:
    rounded: UInt8Array = np.clip(np.round(picture), 0, 255).astype(np.uint8)
    return rounded


def tint(image: UInt8Array, masks_THW: BoolArray, labels: Sequence[str]) -> UInt8Array:
    """The photo with the mask of each phrase in its colour, and the phrases listed below.

    Args:
        image: uint8 [H, W, 3].
        masks_THW: the mask of each phrase.
        labels: [T], what is written for each.

    Returns:
        uint8 [h, w, 3], w as in `Heat.picture`.
    """
    height, width = image.shape[:2]
    scale = min(1.0, PAINTED_SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    shown = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BOX), np.float32)
    for t, mask in enumerate(masks_THW):
        colour = np.array(_rgb(t), np.float32)
        soft = _resize(np.asarray(mask, np.float32), size)
        inside = soft >= 0.5
        padded = np.pad(inside, 1, mode="edge")
        edge = inside & ~(padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:])
        strength = np.where(edge, 1.0, 0.35 * soft)[..., None]
        shown = (shown * (1 - strength) + colour * strength).astype(np.float32)
    letter = 14
    below = Image.new("RGB", (size[0], (letter + 6) * len(labels) + 4 * bool(labels)), "white")
    draw = ImageDraw.Draw(below)
    for t, label in enumerate(labels):
        y = 4 + t * (letter + 6)
        draw.rectangle((4, y, 4 + letter, y + letter), fill=_rgb(t))
        draw.text((10 + letter, y - 1), label, fill=(30, 30, 30), font=ImageFont.load_default(letter))
    return np.concatenate([_bytes(shown), np.asarray(below)])


def _rgb(index: int) -> tuple[int, int, int]:
    code = PHRASE_COLOURS[index % len(PHRASE_COLOURS)]
    red, green, blue = (int(code[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def side_by_side(pictures: Sequence[UInt8Array]) -> UInt8Array:
    """Pictures beside each other on white, tops aligned."""
    height = max(len(picture) for picture in pictures)
    gap = np.full((height, 8, 3), 255, np.uint8)
    row: list[UInt8Array] = []
    for picture in pictures:
        filler = np.full((height - len(picture), *picture.shape[1:]), 255, np.uint8)
        row += [np.concatenate([picture, filler]), gap]
    return np.concatenate(row[:-1], axis=1)
