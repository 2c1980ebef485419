"""Training step: AlphaClip in Lightning's loop against open_clip's loss and the same tower in a plain loop.

python benchmarks/train_step.py

Both train an open_clip ViT on the same ready batch of (image, text) pairs, with the same AdamW settings,
schedule, threads and clamp of the temperature; the first steps of both must agree in loss and temperature.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LR, WEIGHT_DECAY, BETAS = 1e-3, 0.05, (0.9, 0.98)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128, help="pairs (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of both towers (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of both towers (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="a round and side (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="of torch (default: its own choice)")
    options = parser.parse_args()
    comparison = measure(options)
    print(comparison.text())
    return 0 if comparison.ok else 1


def measure(options: argparse.Namespace) -> Any:
    """Both loops on one batch, turn about."""
    import lightning as L
    import numpy as np
    import torch
    from harness import compare
    from open_clip.loss import ClipLoss
    from torch.utils.data import DataLoader

    from fovea.batches import PairBatch
    from fovea.models.encoders import open_clip_from_config
    from lightning_modules.alpha_clip import MAX_LOGIT_SCALE, AlphaClip

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    config = {
        "embed_dim": options.width,
        "vision_cfg": {
            "image_size": 64, "patch_size": 16, "width": options.width, "layers": options.layers,
            "head_width": 32,
        },
        "text_cfg": {
            "context_length": 16, "vocab_size": 49408, "width": options.width, "heads": options.width // 32,
            "layers": options.layers,
        },
    }  # fmt: skip

    def encoder() -> Any:
        torch.manual_seed(0)
        return open_clip_from_config(config)

    first = encoder()
    texts = [f"picture {i} of {options.batch}" for i in range(options.batch)]
    rows = torch.arange(options.batch)
    batch = PairBatch(
        pixels=torch.randint(0, 256, (options.batch, 64, 64, 3), dtype=torch.uint8),
        alpha=None,
        tokens=first.tokenizer(texts),
        partner_pixels=None,
        ids=torch.stack([rows, options.batch + rows], 1),
        image_ids=rows,
        num_global=options.batch,
        names=np.array(texts),
    )

    class Losses(L.Callback):
        def __init__(self) -> None:
            self.values: list[float] = []

        def on_train_batch_end(self, _: Any, __: Any, outputs: Any, *___: Any) -> None:
            self.values.append(float(outputs["loss"]))

    def ours(module: AlphaClip, steps: int, *callbacks: L.Callback) -> None:
        """What `scripts/train.py fit` runs, with its progress bar and log to files off."""
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_steps=steps, max_epochs=1, logger=False,
            callbacks=list(callbacks), enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader([batch] * steps, batch_size=None))  # type: ignore[arg-type]

    def plain(model: Any, transform: Any, steps: int) -> list[float]:
        """The same with nothing but open_clip and torch."""
        named = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
            {"params": [p for p in named if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        ]
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        )
        loss_of = ClipLoss()
        model.train()
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            image, text, scale = model(transform.normalise(batch.pixels), batch.tokens)
            loss = loss_of(image, text, scale)
            loss.backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0.0, MAX_LOGIT_SCALE)
            losses.append(loss.item())
        return losses

    def module() -> AlphaClip:
        return AlphaClip(encoder(), lr=LR, weight_decay=WEIGHT_DECAY, betas=BETAS)

    trained, other, seen = module(), first, Losses()
    ours(trained, 3, seen)
    theirs = plain(other.clip, other.transform, 3)
    torch.testing.assert_close(torch.tensor(seen.values), torch.tensor(theirs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(trained.encoder.logit_scale, other.logit_scale, rtol=1e-4, atol=1e-5)
    return compare(
        f"training step: ViT {options.layers} × {options.width}, 64 px, batch {options.batch}, "
        f"{torch.get_num_threads()} threads, {options.steps} steps a round",
        ("fovea: AlphaClip, Lightning", lambda: ours(trained, options.steps)),
        ("open_clip: ClipLoss, plain loop", lambda: plain(other.clip, other.transform, options.steps)),
        items=options.steps,
        unit="steps",
        rounds=options.rounds,
        need=0.95,
    )


if __name__ == "__main__":
    sys.exit(main())
