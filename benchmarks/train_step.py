"""Training step: AlphaClip in Lightning's loop against open_clip's loss and the same tower in a plain loop.

python benchmarks/train_step.py

Both train an open_clip ViT on the same ready batch of (image, text) pairs, with the same AdamW settings,
schedule, threads and clamp of the temperature; the first steps of both must agree in loss. They take turns
step by step: Lightning's loop runs in a thread of its own and waits for its turn where it asks for the next
batch, so that its turn holds all that it does from one batch to the next.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LR, WEIGHT_DECAY, BETAS = 1e-3, 0.05, (0.9, 0.98)
CHECKED = 3  # steps whose losses are compared first


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128, help="pairs (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of both towers (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of both towers (%(default)s)")
    parser.add_argument("--rounds", type=int, default=41, help="steps of each side (%(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="of torch (default: its own choice)")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread, CPU seconds: steadier on a busy machine"
    )
    options = parser.parse_args()
    comparison = measure(options)
    print(comparison.text())
    return 0 if comparison.ok else 1


def measure(options: argparse.Namespace) -> Any:
    """Both loops on one batch, turn about."""
    import numpy as np
    import torch
    from harness import compare

    from fovea.batches import PairBatch
    from fovea.models.encoders import open_clip_from_config

    warnings.filterwarnings("ignore")
    if options.threads or options.cpu_time:
        torch.set_num_threads(1 if options.cpu_time else options.threads)
    size = {"width": options.width, "layers": options.layers}
    config = {
        "embed_dim": options.width,
        "vision_cfg": {"image_size": 64, "patch_size": 16, "head_width": 32} | size,
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "heads": options.width // 32} | size,
    }
    encoders = []
    for _ in range(2):
        torch.manual_seed(0)
        encoders.append(open_clip_from_config(config))
    texts = [f"picture {i} of {options.batch}" for i in range(options.batch)]
    rows = torch.arange(options.batch)
    batch = PairBatch(
        pixels=torch.randint(0, 256, (options.batch, 64, 64, 3), dtype=torch.uint8),
        alpha=None,
        tokens=encoders[0].tokenizer(texts),
        partner_pixels=None,
        ids=torch.stack([rows, options.batch + rows], 1),
        image_ids=rows,
        num_global=options.batch,
        names=np.array(texts),
    )
    total = CHECKED + 1 + options.rounds  # one to warm up
    ours, plain = Ours(encoders[0], batch, total), Plain(encoders[1], batch, total)
    for _ in range(CHECKED):
        ours()
        plain()
    torch.testing.assert_close(ours.losses, plain.losses, rtol=1e-4, atol=1e-4)
    comparison = compare(
        f"training step: ViT {options.layers} × {options.width}, 64 px, batch {options.batch}, "
        f"{torch.get_num_threads()} threads{', CPU time' if options.cpu_time else ''}",
        ("fovea: AlphaClip, Lightning", ours),
        ("open_clip: ClipLoss, plain loop", plain),
        items=1,
        unit="steps",
        rounds=options.rounds,
        need=0.95,
        clock=time.process_time if options.cpu_time else time.perf_counter,
    )
    ours.close()
    return comparison


class Ours:
    """What `scripts/train.py fit` runs, without progress bar and log files; a call is one turn of it."""

    def __init__(self, encoder: Any, batch: Any, total: int) -> None:
        import lightning as L
        import torch
        from torch.utils.data import DataLoader, Dataset

        from lightning_modules.alpha_clip import AlphaClip

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        threads = torch.get_num_threads()
        go, done, losses = threading.Semaphore(0), threading.Semaphore(0), []

        class Turns(Dataset[Any]):
            def __len__(self) -> int:
                return total + 1  # the last one ends the fit, after `close`

            def __getitem__(self, _: int) -> Any:
                done.release()
                go.acquire()
                return batch

        class Losses(L.Callback):
            def on_train_batch_end(self, _: Any, __: Any, outputs: Any, *___: Any) -> None:
                losses.append(float(outputs["loss"]))
                if torch.get_num_threads() != threads:  # torch keeps the number for each thread
                    raise RuntimeError("the two loops run on different numbers of threads")

        module = AlphaClip(encoder, lr=LR, weight_decay=WEIGHT_DECAY, betas=BETAS)
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, callbacks=[Losses()],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )  # fmt: skip
        loader = DataLoader(Turns(), batch_size=None)
        self.losses, self.go, self.done = losses, go, done
        self.thread = threading.Thread(target=trainer.fit, args=(module, loader), daemon=True)
        self.thread.start()
        done.acquire()

    def __call__(self) -> None:
        self.go.release()
        self.done.acquire()

    def close(self) -> None:
        self.go.release()
        self.thread.join()


class Plain:
    """The same with nothing but open_clip and torch."""

    def __init__(self, encoder: Any, batch: Any, total: int) -> None:
        import torch
        from open_clip.loss import ClipLoss

        self.model, self.normalise, self.batch = encoder.clip.train(), encoder.transform.normalise, batch
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / (total + 1)))
        )
        self.loss, self.no_grad, self.losses = ClipLoss(), torch.no_grad, []

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        image, text, scale = self.model(self.normalise(self.batch.pixels), self.batch.tokens)
        loss = self.loss(image, text, scale)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        with self.no_grad():
            self.model.logit_scale.clamp_(0.0, math.log(100.0))
        self.losses.append(loss.item())


if __name__ == "__main__":
    sys.exit(main())
