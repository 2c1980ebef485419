"""A big batch through a tower, a chunk at a time: memory of one chunk, gradient of the whole batch.

What GradCache (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021)
is for: InfoNCE needs the embeddings of all rows at once, but not their activations. Here each chunk is
checkpointed as one piece, so that the loss, autocast, the gradient scaler and DDP see an ordinary graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def in_chunks(tower: Callable[..., Tensor], rows: tuple[Tensor | None, ...], size: int | None) -> Tensor:
    """Apply a tower to rows; of each chunk only the embeddings stay, and backward computes the rest again.

    The random state of a chunk is kept, so that dropout is the same both times. A tower that nothing is
    trained in keeps no activations either way: autograd saves what a gradient needs, and none is needed.

    Args:
        tower: rows → [rows, D]; a row's embedding must not depend on the other rows (see `batch_norms`).
        rows: its arguments, tensors [n, …] or None, the same n for all.
        size: rows of a chunk; None takes all at once and keeps their activations.

    Returns:
        [n, D].
    """
    if size is None:
        return tower(*rows)
    num_rows = max(len(tensor) for tensor in rows if tensor is not None)
    out = []
    for start in range(0, max(num_rows, 1), size):  # one pass for no rows at all, which gives [0, D]
        chunk = [None if tensor is None else tensor[start : start + size] for tensor in rows]
        if torch.is_grad_enabled():
            out.append(checkpoint(tower, *chunk, use_reentrant=False, preserve_rng_state=True))
        else:
            out.append(tower(*chunk))
    return torch.cat(out)


def batch_norms(module: nn.Module) -> list[str]:
    """Names of the layers whose output for a row depends on the rows beside it, as the module stands now."""
    layers = module.named_modules()
    return [name for name, layer in layers if isinstance(layer, _BatchNorm) and layer.training]
