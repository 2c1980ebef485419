"""Bytes → pixels: one decoder, one policy, and the joint image + mask transform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fovea.types import BoolArray, UInt8Array

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ImageTransform:
    """The one geometric transform that image and masks go through together (PITFALLS 14).

    Attributes:
        size: side S of the square output, pixels.
        mode: `squash` resizes both sides to S (the paper's "resized to 336×336"; nothing is cut off); `pad` keeps the
            aspect ratio and pads with zeros; `crop` resizes the shorter side and cuts the centre (CLIP's own).
        mean: per-channel mean of [0, 1] pixels.
        std: per-channel standard deviation of [0, 1] pixels.
    """

    size: int
    mode: Literal["squash", "pad", "crop"] = "squash"
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD

    def __call__(self, image: UInt8Array, masks: BoolArray | None = None) -> tuple[UInt8Array, UInt8Array]:
        """Resize one image and its masks alike.

        Args:
            image: uint8 [H, W, 3].
            masks: bool [T, H, W], or None for no mask.

        Returns:
            uint8 [S, S, 3] and uint8 [T, S, S] of 0/1 ([0, S, S] when `masks` is None).
        """
        height, width = image.shape[:2]
        count = 0 if masks is None else len(masks)
        if masks is not None and masks.shape[1:] != (height, width):
            raise ValueError(f"masks of {masks.shape[1:]} pixels for an image of {(height, width)}: same size needed")
        if (height, width) == (self.size, self.size):
            same = np.zeros((0, height, width), np.uint8) if masks is None else masks.astype(np.uint8)
            return image, same
        box, target, offset = self._geometry(width, height)
        pixels = np.zeros((self.size, self.size, 3), np.uint8)
        out = np.zeros((count, self.size, self.size), np.uint8)
        x, y = offset
        resized = Image.fromarray(image).resize(target, Image.Resampling.BICUBIC, box=box)
        pixels[y : y + target[1], x : x + target[0]] = np.asarray(resized)
        for t in range(count):
            assert masks is not None
            # Box filter on 0..255 and a threshold at half cover: a thin object keeps its pixels, none is invented.
            soft = Image.fromarray(masks[t].astype(np.uint8) * 255).resize(target, Image.Resampling.BOX, box=box)
            out[t, y : y + target[1], x : x + target[0]] = np.asarray(soft) >= 128
        return pixels, out

    def _geometry(
        self, width: int, height: int
    ) -> tuple[tuple[float, float, float, float], tuple[int, int], tuple[int, int]]:
        """Source box (pixels of the original), target size (w, h) and its offset (x, y) in the output."""
        side = self.size
        if self.mode == "squash":
            return (0, 0, width, height), (side, side), (0, 0)
        if self.mode == "pad":
            scale = side / max(width, height)
            w, h = max(1, round(width * scale)), max(1, round(height * scale))
            return (0, 0, width, height), (w, h), ((side - w) // 2, (side - h) // 2)
        short = min(width, height)
        left, top = (width - short) / 2, (height - short) / 2
        return (left, top, left + short, top + short), (side, side), (0, 0)

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 [B, S, S, 3] → float32 [B, 3, S, S], mean and standard deviation applied."""
        mean = torch.tensor(self.mean, device=pixels.device) * 255
        std = torch.tensor(self.std, device=pixels.device) * 255
        return ((pixels.float() - mean) / std).permute(0, 3, 1, 2).contiguous()
