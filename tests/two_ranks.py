"""Two gloo processes, and one: the loss and the gradients as JSON. Run by test_contrastive_module."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from fovea.batches import PairBatch, RetrievalBatch
from fovea.models.encoders import tiny_clip
from lightning_modules.alpha_clip import AlphaClip

torch.set_num_threads(1)


class Probe(AlphaClip):
    """Keeps the averaged gradients of its first step, and the gallery's recall."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}


def whole_batch() -> PairBatch:
    """Seven images (two of them the same), five regions: uneven over two ranks."""
    g = torch.Generator().manual_seed(0)
    image = torch.tensor([0, 1, 1, 2, 3, 4, 5])
    region_of = torch.tensor([0, 0, 2, 4, 5])
    left = torch.cat([image, 100 + torch.arange(5)])
    right = torch.cat([torch.tensor([10, 11, 12, 13, 14, 14, 15]), torch.tensor([20, 21, 20, 22, 23])])
    return PairBatch(
        pixels=torch.randint(0, 256, (12, 16, 16, 3), generator=g, dtype=torch.uint8),
        alpha=torch.randint(0, 2, (12, 16, 16), generator=g, dtype=torch.uint8),
        tokens=torch.randint(1, 6, (12, 4), generator=g),
        partner_pixels=None,
        ids=torch.stack([left, right], 1),
        image_ids=torch.cat([image, region_of]),
        num_global=7,
        names=np.array([str(i) for i in range(12)]),
    )


def share(batch: PairBatch, rank: int) -> PairBatch:
    """Rank 0: images 0–2 and regions 0–3; rank 1: the rest."""
    rows = [0, 1, 2, 7, 8, 9, 10] if rank == 0 else [3, 4, 5, 6, 11]
    pick = torch.tensor(rows)
    assert batch.alpha is not None and batch.tokens is not None
    return PairBatch(
        batch.pixels[pick],
        batch.alpha[pick],
        batch.tokens[pick],
        None,
        batch.ids[pick],
        batch.image_ids[pick],
        3 if rank == 0 else 4,
        batch.names[rows],
    )


def gallery(rank: int, world: int) -> list[list[RetrievalBatch]]:
    """Five images and five queries, split 2 + 3: what a padding sampler would count six times."""
    g = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (5, 16, 16, 3), generator=g, dtype=torch.uint8)
    tokens = torch.randint(1, 6, (5, 4), generator=g)
    rows = slice(0, 5) if world == 1 else (slice(0, 2) if rank == 0 else slice(2, 5))
    ids = torch.arange(5)[rows]
    return [[RetrievalBatch(pixels[rows], None, ids)], [RetrievalBatch(None, tokens[rows], ids)]]


def loaders(sides: list[list[RetrievalBatch]]) -> list[DataLoader[RetrievalBatch]]:
    """Each list of ready batches as a DataLoader."""
    return [DataLoader(side, batch_size=None) for side in sides]  # type: ignore[arg-type]


def main(world: int) -> None:
    torch.manual_seed(0)
    encoder = tiny_clip(
        list("abcd"), image_size=16, widths=(8, 8), embed_dim=8, heads=2, text_width=8, alpha=True
    )
    # Batch statistics would differ between shares; everything else must not.
    for module in encoder.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum, module.track_running_stats = 0.0, True
            module.forward = lambda x, m=module: torch.nn.functional.batch_norm(  # type: ignore[method-assign]
                x, m.running_mean, m.running_var, m.weight, m.bias, False
            )
    module = Probe(encoder, lr=1e-3, region_weight=0.7)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if world == 1 else 2,
        strategy="auto" if world == 1 else "ddp",
        max_steps=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    rank = int(os.environ.get("LOCAL_RANK", 0))
    batch = whole_batch() if world == 1 else share(whole_batch(), rank)
    trainer.fit(module, DataLoader([batch], batch_size=None), loaders(gallery(rank, world)))
    if trainer.global_rank == 0:
        figures = {k: float(v) for k, v in trainer.callback_metrics.items()}
        norms = {n: g.flatten().double().tolist() for n, g in module.gradients.items()}
        Path(sys.argv[2]).write_text(json.dumps({"figures": figures, "gradients": norms}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
