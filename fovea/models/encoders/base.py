"""Texts and images → one space: the interface of every dual encoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fovea.images import ImageTransform


class Encoder(nn.Module, ABC):
    """A dual encoder that owns its resolution, its pixel statistics and its tokenizer.

    Embeddings are not normalised (as upstream); the stages normalise.

    Attributes:
        embed_dim: width D of the embeddings.
        transform: the joint image + mask transform that makes its input.
        tokenizer: texts → int64 [B, L]; small and picklable, for data-loading workers.
        logit_scale: scalar parameter, natural log of the inverse temperature.
    """

    embed_dim: int
    transform: ImageTransform
    tokenizer: Callable[[Sequence[str]], Tensor]
    logit_scale: nn.Parameter

    @abstractmethod
    def encode_image(self, pixels: Tensor, alpha: Tensor | None = None) -> Tensor:
        """Embed images.

        Args:
            pixels: float [B, 3, S, S], normalised by `transform.normalise`.
            alpha: float [B, 1, S, S] in [0, 1], 1 where the image is to be looked at; None means 1
                everywhere. An encoder without an alpha branch ignores it (the background was already removed
                from `pixels`, or not, by the region view).

        Returns:
            float [B, D], not normalised.
        """

    def patch_tokens(self, pixels: Tensor, alpha: Tensor | None = None) -> Tensor:
        """What each patch says, in the space of the texts (Figure 4's heat maps; RoRA-VLM eq. 5).

        Args:
            pixels: float [B, 3, S, S], as for `encode_image`.
            alpha: float [B, 1, S, S] in [0, 1], or None, as for `encode_image`.

        Returns:
            float [B, P, D], not normalised, of a square grid of √P × √P patches, row by row.

        Raises:
            TypeError: the tower has no such tokens.
        """
        raise TypeError(f"{type(self).__name__} gives one embedding an image, no projected patch tokens")

    @abstractmethod
    def encode_text(self, tokens: Tensor) -> Tensor:
        """Embed token ids int64 [B, L] → float [B, D], not normalised."""

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Texts → int64 [B, L], cut to the context length, padded alike; query instructions included."""
        return self.tokenizer(texts)

    @abstractmethod
    def depth_of(self, name: str) -> int | None:
        """Depth of a parameter in the image tower, 0 = stem; None for text and shared parameters."""

    @abstractmethod
    def text_parameters(self) -> list[nn.Parameter]:
        """The parameters of the text tower (what "text encoder frozen" freezes)."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """`{"class_path", "init_args"}` that rebuilds the architecture without its weights (see `bundle`)."""


def embed_dtype(encoder: nn.Module) -> torch.dtype:
    """The floating type that an encoder's weights have."""
    return next(encoder.parameters()).dtype
