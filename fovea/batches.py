"""Batches that DataModules make and LightningModules take: NamedTuples of tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor


class PairBatch(NamedTuple):
    """`B` whole-image pairs, then `M` regional pairs, in one set of rows (`n = B + M`).

    An image with several texts has a row for each of them, one after the other, but its pixels only once:
    row i < B belongs to image `i // texts_per_image`.

    Attributes:
        pixels: uint8 [n, S, S, 3] ([B / texts_per_image + M, S, S, 3] with several texts).
        alpha: uint8 [n, S, S] of 0/1 (as many as `pixels`); 1 everywhere for whole images; None when no row
            has a mask.
        tokens: int64 [n, L], the text of each row, or None when the partner is a picture.
        partner_pixels: uint8 [n, S, S, 3], the partner picture, or None when it is a text.
        ids: int64 [n, 2], hashes of what the left side shows and of what the right side says.
        image_ids: int64 [n], hash of the image that a row comes from (for eq. 6's mean over regions).
        num_global: B.
        texts_per_image: texts that go with one whole image.
        names: id of each row, for messages; an array, because Lightning walks through every string of a list.
    """

    pixels: Tensor
    alpha: Tensor | None
    tokens: Tensor | None
    partner_pixels: Tensor | None
    ids: Tensor
    image_ids: Tensor
    num_global: int
    names: npt.NDArray[np.str_]
    texts_per_image: int = 1


class RetrievalBatch(NamedTuple):
    """One side of a validation gallery; exactly one of `pixels` and `tokens` is set.

    Attributes:
        pixels: uint8 [B, S, S, 3] or None.
        tokens: int64 [B, L] or None.
        ids: int64 [B]: the image's id (gallery), or the gold image's id (queries).
    """

    pixels: Tensor | None
    tokens: Tensor | None
    ids: Tensor


class ScoreBatch(NamedTuple):
    """Scores of all (query, candidate) pairs of a calibration split, padded to `W` candidates a query.

    Attributes:
        query_ids: [Q], for messages.
        scores: float64 [Q, W, 2]: S_global and S_local.
        gold: bool [Q, W], the gold images, also those beyond the top K.
        top: bool [Q, W], the kept candidates; False where padded.
        negative: bool [Q, W], the one drawn negative of eq. 9.
    """

    query_ids: tuple[str, ...]
    scores: Tensor
    gold: Tensor
    top: Tensor
    negative: Tensor
