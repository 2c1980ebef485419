"""A CLIP small enough to train from scratch on two CPU cores: convolutional stem, few blocks, word tokens.

It has the attributes that the rest of the project touches on an open_clip model (`visual.conv1`,
`encode_image`, `encode_text`, `logit_scale`), so that everything built on it runs on the real towers
unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WordTokenizer:
    """Lower-case words → ids; 0 pads, 1 stands for any word outside the vocabulary."""

    def __init__(self, vocabulary: Sequence[str], context_length: int) -> None:
        self.vocabulary = list(vocabulary)
        self.context_length = context_length
        self._ids = {word: i + 2 for i, word in enumerate(self.vocabulary)}

    @staticmethod
    def words(text: str) -> list[str]:
        """The lower-case words of a text; punctuation is dropped."""
        return re.findall(r"[\w']+", text.lower())

    def __len__(self) -> int:
        return len(self.vocabulary) + 2

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Texts → int64 [B, context_length], cut at the end."""
        out = torch.zeros(len(texts), self.context_length, dtype=torch.int64)
        for row, text in enumerate(texts):
            words = self.words(text)[: self.context_length]
            # A text without a single word still needs one valid token to pool over.
            ids = [self._ids.get(word, 1) for word in words] or [1]
            out[row, : len(ids)] = torch.tensor(ids)
        return out


class Block(nn.Module):
    """Pre-norm transformer block whose residual branches start at zero."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for last in (self.out, self.mlp[2]):
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, L, width] → the same; `mask` bool [B, L] is true where a token counts."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attend = None if mask is None else mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attend)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class TinyVisual(nn.Module):
    """Image tower: stride-2 convolutions (stride 2^len(widths) in all), blocks on the grid, max over tokens.

    Any input side that is a multiple of the stride works; positions are not encoded, so that weights carry
    over from small single-object pictures to scenes.
    """

    def __init__(self, widths: Sequence[int], layers: int, heads: int, embed_dim: int) -> None:
        super().__init__()
        # Named as in ViT towers: it is where the alpha branch goes.
        self.conv1 = nn.Conv2d(3, widths[0], 3, stride=2, padding=1)
        convs: list[nn.Module] = []
        for narrow, wide in zip(widths[:-1], widths[1:], strict=True):
            convs += [nn.BatchNorm2d(narrow), nn.GELU(), nn.Conv2d(narrow, wide, 3, stride=2, padding=1)]
        self.stem = nn.Sequential(*convs, nn.BatchNorm2d(widths[-1]), nn.GELU())
        self.blocks = nn.ModuleList(Block(widths[-1], heads) for _ in range(layers))
        self.ln_post = nn.LayerNorm(widths[-1])
        self.proj = nn.Linear(widths[-1], embed_dim, bias=False)

    def tokens(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3 (or 4 with alpha), S, S] → projected patch tokens [B, P, D], row by row."""
        # Channels last: the convolutions' own order on CPUs, and what the blocks want; 10–15 % of a step.
        x = self.stem(self.conv1(pixels.contiguous(memory_format=torch.channels_last)))
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        projected: Tensor = self.proj(self.ln_post(x))
        return projected

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3 or 4, S, S] → [B, D]."""
        return self.tokens(pixels).amax(1)


class TinyText(nn.Module):
    """Text tower: words, learned positions, blocks, mean over the words."""

    def __init__(
        self, vocab_size: int, context_length: int, width: int, layers: int, heads: int, embed_dim: int
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.positional_embedding = nn.Parameter(torch.zeros(context_length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_final = nn.LayerNorm(width)
        self.proj = nn.Linear(width, embed_dim, bias=False)
        nn.init.normal_(self.token_embedding.weight, std=0.1)
        nn.init.normal_(self.positional_embedding, std=0.01)

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids int64 [B, L], 0 = padding → [B, D]."""
        length = int((tokens != 0).sum(1).max())
        tokens = tokens[:, :length]
        mask = tokens != 0
        x = self.token_embedding(tokens) + self.positional_embedding[:length]
        for block in self.blocks:
            x = block(x, mask)
        weight = mask[..., None].to(x.dtype)
        pooled: Tensor = self.proj((self.ln_final(x) * weight).sum(1) / weight.sum(1))
        return pooled


class TinyClip(nn.Module):
    """The two towers and the temperature; sizes are `fovea.models.encoders.tiny_clip`'s arguments."""

    def __init__(self, visual: TinyVisual, text: TinyText) -> None:
        super().__init__()
        self.visual = visual
        self.text = text
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def encode_image(self, pixels: Tensor) -> Tensor:
        """[B, 3 or 4, S, S] → [B, D]."""
        embedded: Tensor = self.visual(pixels)
        return embedded

    def encode_text(self, tokens: Tensor) -> Tensor:
        """[B, L] → [B, D]."""
        embedded: Tensor = self.text(tokens)
        return embedded
