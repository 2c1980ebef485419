"""Rows of one rank → rows of all ranks, with gradients and uneven counts."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor


def gather_rows(module: L.LightningModule, *rows: Tensor) -> list[Tensor]:
    """Concatenate each tensor's rows over all ranks; gradients flow back to the rank that made a row.

    Ranks may hold different numbers of rows (the last batch): rows are padded to the largest count for the
    collective and cut again after it. Every rank must call this, with the same number of tensors.

    Args:
        module: gives the collective and the world size.
        rows: tensors [n, …], the same n for all on one rank.

    Returns:
        The same tensors as [N, …], rank by rank.
    """
    if module.trainer.world_size == 1:
        return list(rows)
    count = torch.tensor([len(rows[0])], device=rows[0].device)
    counts = [int(c) for c in module.all_gather(count).flatten()]
    largest = max(counts)
    out = []
    for tensor in rows:
        padding = [0, 0] * (tensor.ndim - 1) + [0, largest - len(tensor)]
        padded = F.pad(tensor, padding)
        # [world, largest, …]; a plain all_gather would drop the gradient and halve it with two ranks.
        gathered = module.all_gather(padded, sync_grads=tensor.requires_grad)
        assert isinstance(gathered, Tensor)
        out.append(torch.cat([part[:n] for part, n in zip(gathered, counts, strict=True)]))
    return out
