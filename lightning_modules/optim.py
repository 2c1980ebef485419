"""Parameters → optimizer groups and schedule, with every trainable parameter in exactly one group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from fovea.models.encoders import Encoder

DepthOrder = Literal["deeper_smaller", "deeper_larger"]


def encoder_groups(
    encoder: Encoder,
    *,
    lr: float,
    weight_decay: float,
    depth_decay: float = 1.0,
    depth_order: DepthOrder = "deeper_smaller",
) -> list[dict[str, Any]]:
    """Optimizer groups of a dual encoder, each with the `name` under which `LearningRateMonitor` logs it.

    `visual` (or `visual.DEPTH`, 0 = stem), `text`, each with `.no_decay` for its vectors, and `logit_scale`.

    Args:
        encoder: the model; parameters without `requires_grad` are left out.
        lr: learning rate of the stem (`deeper_smaller`) or of the last layer (`deeper_larger`), and of the
            text tower.
        weight_decay: for matrices; vectors (biases, norms, logit scale) get none.
        depth_decay: factor from one image-tower layer to the next, in (0, 1]; 1 gives every layer the same
            rate.
        depth_order: HuLiRAG says that deeper layers have the smaller rate; the usual layer decay runs the
            other way.
    """
    named = [(name, p) for name, p in encoder.named_parameters() if p.requires_grad]
    depths = {name: encoder.depth_of(name) for name, _ in named}
    deepest = max((d for d in depths.values() if d is not None), default=0)
    groups: dict[tuple[float, float, str], dict[str, Any]] = {}
    for name, parameter in named:
        depth, label = depths[name], "text"
        scale = 1.0
        if depth is not None:
            steps = depth if depth_order == "deeper_smaller" else deepest - depth
            # One group of all layers when they share a rate: fewer, longer fused updates, one line in a plot.
            scale, label = depth_decay**steps, "visual" if depth_decay == 1 else f"visual.{depth}"
        if parameter is encoder.logit_scale:
            label = "logit_scale"
        decay = weight_decay if parameter.ndim >= 2 else 0.0
        key = (lr * scale, decay, label)
        unique = label if decay or label == "logit_scale" else f"{label}.no_decay"
        group = groups.setdefault(
            key, {"params": [], "lr": lr * scale, "weight_decay": decay, "name": unique}
        )
        group["params"].append(parameter)
    return list(groups.values())


def check_groups(module: nn.Module, groups: Iterable[dict[str, Any]]) -> None:
    """Raise unless each trainable parameter of `module` is in exactly one group (PITFALLS 3)."""
    seen: dict[int, int] = {}
    for group in groups:
        for parameter in group["params"]:
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    names = {name: seen.get(id(p), 0) for name, p in module.named_parameters() if p.requires_grad}
    wrong = [f"{name} is in {count} optimizer groups" for name, count in names.items() if count != 1]
    if wrong:
        raise ValueError(
            "every trainable parameter must be in exactly one optimizer group: " + "; ".join(wrong)
        )


def cosine_with_warmup(
    optimizer: torch.optim.Optimizer, *, total_steps: float, warmup_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then a half cosine to zero at `total_steps` (optimizer steps).

    Raises:
        ValueError: the run has no end (`max_steps` and `max_epochs` both unlimited), so that a cosine has
            none either.
    """
    if not math.isfinite(total_steps) or total_steps < 1:
        raise ValueError("the cosine schedule needs an end: set trainer.max_steps or trainer.max_epochs")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1.0, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
