"""Texts and images → one space: the interface of every dual encoder, and those of Table 1 by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fovea.images import ImageTransform


class Encoder(nn.Module, ABC):
    """A dual encoder that owns its resolution, its pixel statistics and its tokenizer.

    Embeddings are not normalised (as upstream); the stages normalise.

    Attributes:
        embed_dim: width D of the embeddings.
        transform: the joint image + mask transform that makes its input.
        logit_scale: scalar parameter, natural log of the inverse temperature.
    """

    embed_dim: int
    transform: ImageTransform
    logit_scale: nn.Parameter

    @abstractmethod
    def encode_image(self, pixels: Tensor, alpha: Tensor | None = None) -> Tensor:
        """Embed images.

        Args:
            pixels: float [B, 3, S, S], normalised by `transform.normalise`.
            alpha: float [B, 1, S, S] in [0, 1], 1 where the image is to be looked at; None means 1 everywhere. An
                encoder without an alpha branch ignores it (the background was already removed from `pixels`, or not,
                by the region view).

        Returns:
            float [B, D], not normalised.
        """

    @abstractmethod
    def encode_text(self, tokens: Tensor) -> Tensor:
        """Embed token ids int64 [B, L] → float [B, D], not normalised."""

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Texts → int64 [B, L], cut and padded to the encoder's context length; query instructions included."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """`{"class_path": …, "init_args": …}` that rebuilds the architecture without its weights (see `bundle`)."""
