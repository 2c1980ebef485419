"""Two gloo processes (under torchrun), and one: losses and gradients of every option as JSON.

Run by test_contrastive_module.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from fovea.batches import PairBatch, RetrievalBatch
from fovea.models.encoders import open_clip_from_config, tiny_clip
from lightning_modules.alpha_clip import AlphaClip

torch.set_num_threads(1)


class Probe(AlphaClip):
    """Keeps the averaged gradients of its first step, and the gallery's recall."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}


def whole_batch(*, texts: int = 1, regions: int = 5, pictures: bool = False) -> PairBatch:
    """Seven images (two of them the same), five regions: uneven over two ranks."""
    g = torch.Generator().manual_seed(0)
    image = torch.tensor([0, 1, 1, 2, 3, 4, 5])
    region_of = torch.tensor([0, 0, 2, 4, 5])[:regions]
    said = torch.tensor([10, 11, 12, 13, 14, 14, 15])
    if texts > 1:  # further texts of an image, all different
        said = torch.stack([said, *(50 * t + torch.arange(7) for t in range(1, texts))], 1).flatten()
    of = torch.cat([image.repeat_interleave(texts), region_of])
    left = torch.cat([image.repeat_interleave(texts), 100 + torch.arange(regions)])
    right = torch.cat([said, torch.tensor([20, 21, 20, 22, 23])[:regions]])
    shown, rows = 7 + regions, 7 * texts + regions
    return PairBatch(
        pixels=torch.randint(0, 256, (shown, 16, 16, 3), generator=g, dtype=torch.uint8),
        alpha=torch.randint(0, 2, (shown, 16, 16), generator=g, dtype=torch.uint8) if regions else None,
        tokens=None if pictures else torch.randint(1, 6, (rows, 4), generator=g),
        partner_pixels=torch.randint(0, 256, (rows, 16, 16, 3), generator=g).byte() if pictures else None,
        ids=torch.stack([left, right], 1),
        image_ids=of,
        num_global=7 * texts,
        names=np.array([str(i) for i in range(rows)]),
        texts_per_image=texts,
    )


def share(batch: PairBatch, rank: int) -> PairBatch:
    """Rank 0: images 0–2 and all regions but the last; rank 1: the rest. A single region is rank 0's."""
    texts, num_images = batch.texts_per_image, 7
    num_regions = len(batch.ids) - batch.num_global
    images = [0, 1, 2] if rank == 0 else [3, 4, 5, 6]
    cut = min(num_regions, max(1, num_regions - 1))
    regions = list(range(cut) if rank == 0 else range(cut, num_regions))
    shown = torch.tensor(images + [num_images + r for r in regions])
    rows = torch.tensor(
        [i * texts + t for i in images for t in range(texts)] + [batch.num_global + r for r in regions]
    )

    def pick(tensor: Any, at: torch.Tensor) -> Any:
        return None if tensor is None else tensor[at]

    return PairBatch(
        batch.pixels[shown],
        pick(batch.alpha, shown),
        pick(batch.tokens, rows),
        pick(batch.partner_pixels, rows),
        batch.ids[rows],
        batch.image_ids[rows],
        len(images) * texts,
        batch.names[rows.numpy()],
        texts,
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


def fix_batch_norm(encoder: torch.nn.Module) -> None:
    """Batch statistics would differ between shares; everything else must not."""
    for module in encoder.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum, module.track_running_stats = 0.0, True
            module.forward = lambda x, m=module: torch.nn.functional.batch_norm(  # type: ignore[method-assign]
                x, m.running_mean, m.running_var, m.weight, m.bias, False
            )


def vit(alpha: bool) -> Any:
    """An open_clip tower, which has no batch norm."""
    size = {"layers": 1, "width": 32}
    vision = {"image_size": 16, "patch_size": 8, "head_width": 16} | size
    text = {"context_length": 4, "vocab_size": 8, "heads": 2} | size
    return open_clip_from_config({"embed_dim": 8, "vision_cfg": vision, "text_cfg": text}, alpha=alpha)


def tiny() -> Any:
    """The world's CLIP with its alpha branch."""
    encoder = tiny_clip(
        list("abcd"), image_size=16, widths=(8, 8), embed_dim=8, heads=2, text_width=8, alpha=True
    )
    fix_batch_norm(encoder)
    return encoder


VARIANTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "regions": (tiny, {}, {"region_weight": 0.7}),
    "texts, frozen text, one rank without regions": (tiny, {"texts": 2, "regions": 1}, {"freeze_text": True}),
    "chunks": (lambda: vit(True), {}, {"chunk_size": 2}),
    "chunks, texts": (lambda: vit(False), {"texts": 3, "regions": 0}, {"chunk_size": 2}),
    "pictures": (lambda: vit(False), {"pictures": True, "regions": 0}, {}),
}


def main() -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    found = {}
    for name, (encoder, rows, options) in VARIANTS.items():
        torch.manual_seed(0)
        module = Probe(encoder(), lr=1e-3, **options)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=world,
            # A frozen tower, or one that pictures do not need, has no gradient to wait for.
            strategy="auto" if world == 1 else "ddp_find_unused_parameters_true",
            max_steps=2,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
        )
        batch = whole_batch(**rows) if world == 1 else share(whole_batch(**rows), rank)
        sides = loaders(gallery(rank, world)) if batch.tokens is not None else None
        trainer.fit(module, DataLoader([batch], batch_size=None), sides)  # type: ignore[arg-type]
        figures = {k: float(v) for k, v in trainer.callback_metrics.items()}
        gradients = {n: g.flatten().double().tolist() for n, g in module.gradients.items()}
        found[name] = {"figures": figures, "gradients": gradients}
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
