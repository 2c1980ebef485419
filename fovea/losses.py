"""Losses as the papers print them: pure functions of tensors, fp32 inside, no collectives (the caller
gathers).

Shape letters as in `fovea.types`; `n` rows of this process, `N` rows of all processes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def positives(left_ids: Tensor, right_ids: Tensor) -> Tensor:
    """Which pairs (i, j) describe the same thing: any of i's ids equals the same-named id of j.

    Two rows of a batch with the same image, or with the same text, are not negatives of each other (PITFALLS
    4).

    Args:
        left_ids: int64 [n, A], A ids a row (for CLIP: image id and text id).
        right_ids: int64 [N, A].

    Returns:
        bool [n, N].
    """
    return (left_ids[:, None, :] == right_ids[None, :, :]).any(-1)


def nce_rows(anchors: Tensor, others: Tensor, logit_scale: Tensor, positive: Tensor) -> Tensor:
    """One direction of InfoNCE with several positives a row: cross-entropy against the uniform law over the
    positives.

    `ℓ_i = −(1/|P_i|) Σ_{j∈P_i} log softmax_j(s · cos(a_i, o_j))`, s = exp(logit_scale). With one positive it
    is the usual InfoNCE (HuLiRAG eq. 6; CLIP); with several, its optimum holds them at equal distance.

    Args:
        anchors: [n, D], any norm.
        others: [N, D], any norm.
        logit_scale: scalar, natural log of the inverse temperature.
        positive: bool [n, N]; every row needs at least one.

    Returns:
        float32 [n].
    """
    # Under autocast the product would be bf16, whose steps are 0.4 % of a logit of up to 100.
    with torch.autocast(anchors.device.type, enabled=False):
        anchors, others = F.normalize(anchors.float(), dim=-1), F.normalize(others.float(), dim=-1)
        log_p = F.log_softmax(logit_scale.float().exp() * anchors @ others.T, dim=-1)
    target = positive.to(log_p.dtype)
    return -(target * log_p).sum(-1) / target.sum(-1)


def weighted_info_nce(
    left: Tensor,
    right: Tensor,
    all_left: Tensor,
    all_right: Tensor,
    logit_scale: Tensor,
    positive: Tensor,
    weights: Tensor,
) -> Tensor:
    """Symmetric InfoNCE of this process's rows against all rows, as a weighted sum.

    With `weights` = 1/N and one process this is CLIP's loss. Over processes the results sum to the loss
    of the whole batch: nothing is computed twice.

    Args:
        left: [n, D] this process's images.
        right: [n, D] their partners.
        all_left: [N, D] images of all processes (carrying gradients).
        all_right: [N, D] partners of all processes.
        logit_scale: scalar, natural log of the inverse temperature.
        positive: bool [n, N], symmetric in its two sides (see `positives`).
        weights: float [n], weight of each row.

    Returns:
        float32 scalar.
    """
    forward = nce_rows(left, all_right, logit_scale, positive)
    backward = nce_rows(right, all_left, logit_scale, positive)
    total: Tensor = (weights * (forward + backward) / 2).sum()
    return total


def info_nce(left: Tensor, right: Tensor, logit_scale: Tensor, positive: Tensor | None = None) -> Tensor:
    """Symmetric InfoNCE of one batch in one process (the inner NCE of HuLiRAG eq. 6), mean over rows.

    Args:
        left: [N, D].
        right: [N, D]; row i belongs to row i of `left`.
        logit_scale: scalar, natural log of the inverse temperature.
        positive: bool [N, N], default the diagonal.
    """
    if positive is None:
        positive = torch.eye(len(left), dtype=torch.bool, device=left.device)
    weights = torch.full((len(left),), 1 / len(left), device=left.device)
    return weighted_info_nce(left, right, left, right, logit_scale, positive, weights)


def regional_weights(image_ids: Tensor) -> Tensor:
    """Weights that make a sum over regional pairs the mean over images of the mean over their T regions (eq.
    6).

    Args:
        image_ids: int64 [M], the image of each regional pair.

    Returns:
        float32 [M], `1 / (number of images · T of this image)`; empty for no pairs.
    """
    if len(image_ids) == 0:
        return torch.zeros(0, device=image_ids.device)
    unique, inverse, counts = torch.unique(image_ids, return_inverse=True, return_counts=True)
    weights: Tensor = 1.0 / (len(unique) * counts[inverse].float())
    return weights
