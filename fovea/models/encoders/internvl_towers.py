"""The towers of InternVL 1.0 (arXiv:2312.14238): InternViT, QLLaMA, and the attention pool that ends them.

Modules are named as in the released state dict, so that it loads without a rename and an error names what is
in the file. B images or texts, L tokens, W width, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fovea.models.encoders.internvl_config import QLlamaConfig, VisionConfig


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, L, W] → [B, H, L, W / H]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of [B, H, L, W / H] → [B, L, W]; `mask` bool, true where a key may be seen."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class VisionAttention(nn.Module):
    """Self-attention whose queries and keys are normalised over all heads together."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias)
        self.proj = nn.Linear(width, width)
        normed = config.qk_normalization
        self.q_norm = nn.RMSNorm(width, eps) if normed else nn.Identity()
        self.k_norm = nn.RMSNorm(width, eps) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, W] → the same."""
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (_heads(each, self.heads) for each in (self.q_norm(q), self.k_norm(k), v))
        out: Tensor = self.proj(_attend(q, k, v))
        return out


class VisionMlp(nn.Module):
    """Two layers with the exact GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, W] → the same."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class VisionLayer(nn.Module):
    """Pre-norm block; `ls1` and `ls2` scale its two branches per channel."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attn, self.mlp = VisionAttention(config), VisionMlp(config)
        self.norm1, self.norm2 = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.ls1, self.ls2 = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, W] → the same."""
        x = x + self.ls1 * self.attn(self.norm1(x))
        out: Tensor = x + self.ls2 * self.mlp(self.norm2(x))
        return out


class VisionEmbeddings(nn.Module):
    """Patches, the class token before them, learned positions."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.class_embedding = nn.Parameter(torch.empty(1, 1, width))
        self.patch_embedding = nn.Conv2d(3, width, patch, stride=patch)
        self.position_embedding = nn.Parameter(torch.empty(1, 1 + (config.image_size // patch) ** 2, width))

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] → [B, 1 + P, W]."""
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        whole = torch.cat([self.class_embedding.expand(len(pixels), -1, -1), patches], 1)
        return whole + self.position_embedding


class VisionTower(nn.Module):
    """InternViT; its last block's tokens are not normalised."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(config)
        layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layers": layers})

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] → [B, 1 + P, W], the class token first."""
        x: Tensor = self.embeddings(pixels)
        for layer in self.encoder["layers"].children():
            x = layer(x)
        return x


class PoolAttention(nn.Module):
    """Attention whose biases stand beside its projections; `proj` goes to the space of the texts."""

    def __init__(self, width: int, heads: int, embed_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.q_bias, self.k_bias, self.v_bias = (nn.Parameter(torch.empty(width)) for _ in range(3))
        self.proj = nn.Linear(width, embed_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, 1, W] asks [B, L, W] → [B, 1, D]."""
        q, k = F.linear(q, self.q.weight, self.q_bias), F.linear(k, self.k.weight, self.k_bias)
        v = F.linear(v, self.v.weight, self.v_bias)
        q, k, v = (_heads(each, self.heads) for each in (q, k, v))
        out: Tensor = self.proj(_attend(q, k, v))
        return out


class AttentionPool(nn.Module):
    """Tokens → one embedding: the mean of the tokens attends to them."""

    def __init__(self, width: int, heads: int, embed_dim: int) -> None:
        super().__init__()
        self.norm1_q, self.norm1_k, self.norm1_v = (nn.LayerNorm(width) for _ in range(3))
        self.cross_attn = PoolAttention(width, heads, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, W] → [B, D]."""
        asking = self.norm1_q(x.mean(1, keepdim=True))
        pooled: Tensor = self.cross_attn(asking, self.norm1_k(x), self.norm1_v(x)).squeeze(1)
        return pooled

    def each(self, x: Tensor) -> Tensor:
        """[B, L, W] → [B, L, D]: what `forward` gives when all attention rests on one token."""
        inner = self.cross_attn
        out: Tensor = inner.proj(F.linear(self.norm1_v(x), inner.v.weight, inner.v_bias))
        return out


class LlamaAttention(nn.Module):
    """Self-attention with rotary positions."""

    def __init__(self, config: QLlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B, L, W] → the same."""
        q, k, v = (_heads(each(x), self.heads) for each in (self.q_proj, self.k_proj, self.v_proj))
        out: Tensor = self.o_proj(_attend(_rotate(q), _rotate(k), v, mask))
        return out


def _rotate(x: Tensor) -> Tensor:
    """Turn channel i and i + d / 2 of [B, H, L, d] by the angle of its position (RoPE, base 10,000).

    Angles in float32 whatever the weights are, and no buffer: nothing to load, nothing to keep in place.
    """
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class LlamaCrossAttention(nn.Module):
    """Query tokens attend to the image's tokens; both sides are normalised here."""

    def __init__(self, config: QLlamaConfig, image_width: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.heads = config.num_attention_heads
        self.q_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(image_width, width, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.RMSNorm(width, eps), nn.RMSNorm(image_width, eps)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        """Queries [B, L, W], image [B, 1 + P, W of the image tower] → [B, L, W]."""
        image = self.norm2(image)
        q, k, v = self.q_proj(self.norm1(x)), self.k_proj(image), self.v_proj(image)
        q, k, v = (_heads(each, self.heads) for each in (q, k, v))
        out: Tensor = self.o_proj(_attend(q, k, v))
        return out


class LlamaMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: QLlamaConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, W] → the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaLayer(nn.Module):
    """A LLaMA block, with cross-attention between its two halves if `image_width` is given."""

    def __init__(self, config: QLlamaConfig, image_width: int | None) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = LlamaAttention(config), LlamaMlp(config)
        self.cross_attn = None if image_width is None else LlamaCrossAttention(config, image_width)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)

    def forward(self, x: Tensor, mask: Tensor | None, image: Tensor | None) -> Tensor:
        """[B, L, W] → the same; without an image the cross-attention rests."""
        x = x + self.self_attn(self.input_layernorm(x), mask)
        if self.cross_attn is not None and image is not None:
            x = x + self.cross_attn(x, image)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class QLlama(nn.Module):
    """LLaMA's decoder without its head: texts causally, or query tokens that look at an image.

    With `image_width` every n-th block from the first has cross-attention (n: `cross_attention_frequency`);
    without, none has: texts never use it, and it is a billion parameters in the released model.
    """

    def __init__(self, config: QLlamaConfig, image_width: int | None) -> None:
        super().__init__()
        every = config.cross_attention_frequency
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LlamaLayer(config, None if depth % every else image_width)
            for depth in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, mask: Tensor | None = None, image: Tensor | None = None) -> Tensor:
        """Embedded tokens [B, L, W] → [B, L, W]; `mask` bool [B, 1, L, L], true where a key may be seen."""
        for layer in self.layers:
            x = layer(x, mask, image)
        out: Tensor = self.norm(x)
        return out
