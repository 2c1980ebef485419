"""A small AlphaClip, its data and a quiet trainer, for the tests of contrastive training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from datamodules.pairs import PairData
from fovea.batches import PairBatch, RetrievalBatch
from fovea.models.encoders import ClipEncoder, open_clip_from_config, tiny_clip
from lightning_modules.alpha_clip import AlphaClip

MODULE = ("lr", "freeze_text", "chunk_size")


def build(tables: Path, **options: Any) -> tuple[AlphaClip, PairData]:
    """A small module on the tiny world."""
    torch.manual_seed(0)
    alpha = options.get("max_regions", 0) > 0
    encoder = tiny_clip(
        str(tables),
        image_size=64,
        widths=(8, 8, 16, 16),
        layers=1,
        heads=2,
        embed_dim=16,
        text_width=16,
        alpha=alpha,
    )
    of_module = {"lr": 1e-3} | {key: options.pop(key) for key in MODULE if key in options}
    data = PairData(str(tables), **({"batch_size": 16, "cache_images": True} | options))
    return AlphaClip(encoder, **of_module), data


def trainer(**options: Any) -> L.Trainer:
    """A quiet trainer."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "use_distributed_sampler": False, "num_sanity_val_steps": 0,
        "limit_val_batches": 0, "max_epochs": -1,
    }  # fmt: skip
    return L.Trainer(**(defaults | options))


class Recorder(L.Callback):
    """Losses and row names of every training step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.names: list[list[str]] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        self.names.append(batch.names.tolist())


class StopAt(L.Callback):
    """Ends the run after n steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.step


def tiny_vit(dropout: float = 0.0, alpha: bool = True) -> ClipEncoder:
    """An open_clip ViT of 16 px without batch norm, in which a row never depends on the others."""
    torch.manual_seed(0)
    encoder = open_clip_from_config(
        {
            "embed_dim": 8,
            "vision_cfg": {
                "image_size": 16, "patch_size": 8, "width": 16, "head_width": 8, "layers": 2,
                "patch_dropout": dropout,
            },
            "text_cfg": {"context_length": 6, "vocab_size": 32, "width": 16, "heads": 2, "layers": 2},
        },
        alpha=alpha,
    )  # fmt: skip
    return encoder


def pairs(
    images: int = 7, regions: int = 5, texts: int = 1, partners: bool = False, seed: int = 0
) -> PairBatch:
    """Random pictures of 16 px; the second image is the first again, and two texts and two phrases are alike.

    The first regional row is a whole image with its question (`full_image_rate`).
    """
    g = torch.Generator().manual_seed(seed)
    image = torch.arange(images).clamp(min=1) + 1000 * seed
    region_of = image[torch.arange(regions) * 2 % images]
    whole = image.repeat_interleave(texts)
    said = 100 + torch.arange(images * texts)
    said[-1] = said[-2]  # different images, the same text
    phrases = 200 + torch.arange(regions)
    phrases[2:3] = phrases[:1]
    left, right = torch.cat([whole, 300 + torch.arange(regions)]), torch.cat([said, phrases])
    if regions:
        left[images * texts], right[images * texts] = region_of[0], said[0]
    tokens = torch.randint(1, 31, (len(right), 6), generator=g)
    tokens[:, -1] = 31  # open_clip pools where the largest id is

    def pictures(rows: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, 16, 16, 3), generator=g, dtype=torch.uint8)

    alpha = torch.randint(0, 2, (images + regions, 16, 16), generator=g, dtype=torch.uint8)
    alpha[: images + 1] = 1
    return PairBatch(
        pixels=pictures(images + regions),
        alpha=None if partners else alpha,
        tokens=None if partners else tokens,
        partner_pixels=pictures(images + regions) if partners else None,
        ids=torch.stack([left, right], 1) + 10_000 * seed,
        image_ids=torch.cat([whole, region_of]),
        num_global=images * texts,
        names=np.array([f"row-{i}" for i in range(len(right))]),
        texts_per_image=texts,
    )


def ready(*batches: Any) -> DataLoader[Any]:
    """Batches that are already made, as a DataLoader."""
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


def gallery(rank: int = 0, world: int = 1) -> list[DataLoader[Any]]:
    """Five images and five queries, split 2 + 3: what a padding sampler would count six times."""
    g = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (5, 16, 16, 3), generator=g, dtype=torch.uint8)
    tokens = torch.randint(1, 6, (5, 6), generator=g)
    rows = slice(0, 5) if world == 1 else (slice(0, 2) if rank == 0 else slice(2, 5))
    ids = torch.arange(5)[rows]
    return [
        ready(RetrievalBatch(pixels[rows], None, ids)), ready(RetrievalBatch(None, tokens[rows], ids))
    ]  # fmt: skip
