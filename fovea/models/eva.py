"""The image tower of EVA-02-CLIP: pixels → patch tokens; names of parameters as in the EVA-CLIP release.

Source: EVA-CLIP (Sun et al. 2023) with sub-LayerNorm, SwiGLU and 2D rotary positions. Only what
Visualized-BGE uses is here: the last block's tokens; the release's final norm and CLIP head come after that.
Shapes: `B` batch, `G` patches a side, `P` = G², `C` width.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_EPS = 1e-6
# Grid that the rotary frequencies were chosen for; other grids are stretched over it.
_ROTARY_GRID = 16
HEAD_WIDTH = 64  # in every released EVA-02-CLIP


@dataclass(frozen=True)
class EvaSizes:
    """The sizes of a tower.

    Attributes:
        image_size: side of the square input, pixels.
        patch_size: pixels.
        width: C, a multiple of 64.
        layers: blocks.
        mlp_width: hidden width of the SwiGLU.
    """

    image_size: int
    patch_size: int
    width: int
    layers: int
    mlp_width: int

    def as_dict(self) -> dict[str, Any]:
        """For a bundle's JSON."""
        return asdict(self)


def rotary(grid: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [G², head width] of the angle of each patch; neighbours 2i, 2i + 1 share an angle."""
    half = head_width // 2
    frequencies = 1 / 10000 ** (torch.arange(0, half, 2) / half)
    at = torch.arange(grid) / grid * _ROTARY_GRID
    angles = (at[:, None] * frequencies).repeat_interleave(2, -1)
    down, across = angles[:, None].expand(-1, grid, -1), angles[None].expand(grid, -1, -1)
    both = torch.cat([down, across], -1).flatten(0, 1)
    return both.cos(), both.sin()


def _rotated(tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the patches of [B, heads, 1 + P, 64]; the class token has no place."""
    first, patches = tokens[:, :, :1], tokens[:, :, 1:]
    even, odd = patches[..., 0::2], patches[..., 1::2]
    turned = torch.stack([-odd, even], -1).flatten(-2)
    return torch.cat([first, patches * cos + turned * sin], 2)


class EvaAttention(nn.Module):
    """Self-attention with rotary positions, no bias on the keys, and a norm before the output projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width))
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.inner_attn_ln = nn.LayerNorm(width, _EPS)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, 1 + P, C] → the same shape."""
        q, k, v = (
            projected.unflatten(-1, (self.heads, HEAD_WIDTH)).transpose(1, 2)
            for projected in (self.q_proj(x) + self.q_bias, self.k_proj(x), self.v_proj(x) + self.v_bias)
        )
        mixed = functional.scaled_dot_product_attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v)
        out: Tensor = self.proj(self.inner_attn_ln(mixed.transpose(1, 2).flatten(2)))
        return out


class EvaSwiGlu(nn.Module):
    """w3(norm(silu(w1 x) · w2 x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden)
        self.w2 = nn.Linear(width, hidden)
        self.ffn_ln = nn.LayerNorm(hidden, _EPS)
        self.w3 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[…, C] → the same shape."""
        out: Tensor = self.w3(self.ffn_ln(functional.silu(self.w1(x)) * self.w2(x)))
        return out


class EvaBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, _EPS)
        self.attn = EvaAttention(width)
        self.norm2 = nn.LayerNorm(width, _EPS)
        self.mlp = EvaSwiGlu(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, 1 + P, C] → the same shape."""
        x = x + self.attn(self.norm1(x), cos, sin)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class EvaPatches(nn.Module):
    """Pixels [B, 3, S, S] → [B, P, C]."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, pixels: Tensor) -> Tensor:
        """Row by row."""
        out: Tensor = self.proj(pixels).flatten(2).transpose(1, 2)
        return out


class EvaTower(nn.Module):
    """Pixels [B, 3, S, S] → tokens [B, 1 + P, C] after the last block, the class token first."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: EvaSizes) -> None:
        """Random weights.

        Raises:
            ValueError: sizes that do not divide.
        """
        super().__init__()
        if sizes.image_size % sizes.patch_size or sizes.width % HEAD_WIDTH:
            raise ValueError(
                f"{sizes}: image_size must be a multiple of patch_size, and width one of {HEAD_WIDTH}"
            )
        grid = sizes.image_size // sizes.patch_size
        self.sizes = sizes
        self.patch_embed = EvaPatches(sizes.width, sizes.patch_size)
        self.cls_token = nn.Parameter(torch.randn(1, 1, sizes.width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, grid * grid + 1, sizes.width) * 0.02)
        self.blocks = nn.ModuleList(EvaBlock(sizes.width, sizes.mlp_width) for _ in range(sizes.layers))
        cos, sin = rotary(grid, HEAD_WIDTH)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] → [B, 1 + P, C]."""
        if pixels.shape[2:] != (self.sizes.image_size,) * 2:
            raise ValueError(
                f"pixels of {tuple(pixels.shape)}: [B, 3, S, S], S = {self.sizes.image_size} needed"
            )
        x = self.patch_embed(pixels)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        tokens: Tensor = x
        return tokens
