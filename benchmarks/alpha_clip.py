"""AlphaClip: a training step, regions in one pass, and the memory of a big batch, against alternatives.

python benchmarks/alpha_clip.py                            # all parts: some minutes
python benchmarks/alpha_clip.py --parts step --cpu-time    # one thread, CPU seconds: for a busy machine
python benchmarks/alpha_clip.py --tiny                     # seconds: does it run; no demand is made

`step`: Lightning's loop against open_clip's loss and the same tower in a plain loop, on the same ready batch
of (image, text) pairs, with the same AdamW settings, schedule, threads and clamp of the temperature; the
first steps of both must agree in loss. They take turns step by step: Lightning's loop runs in a thread of its
own and waits for its turn where it asks for the next batch, so that its turn holds all that it does from one
batch to the next.
`regions`: forward and backward of the image tower on all regions of a batch at once, against one by one; both
must give the same gradient.
`memory`: the most bytes that forward and backward hold at once beyond the batch, the weights and their
gradients, with `chunk_size` and without, as the batch grows.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LR, WEIGHT_DECAY, BETAS = 1e-3, 0.05, (0.9, 0.98)
CHECKED = 3  # steps whose losses are compared first
PARTS = ("step", "regions", "memory")
FLAT = 1.1  # largest memory over smallest, with chunks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny model and batches")
    parser.add_argument("--batch", type=int, default=128, help="pairs of `step` (%(default)s)")
    parser.add_argument(
        "--images", type=int, default=16, help="of `regions`, three regions each (%(default)s)"
    )
    parser.add_argument("--chunk", type=int, default=32, help="rows of a chunk of `memory` (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of both towers (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of both towers (%(default)s)")
    parser.add_argument("--rounds", type=int, default=41, help="steps of each side (%(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="of torch (default: its own choice)")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread, CPU seconds: steadier on a busy machine"
    )
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: choose from {','.join(PARTS)}")
    if options.tiny:
        options.batch, options.images, options.chunk, options.rounds = 8, 2, 2, 1
        options.width, options.layers = 32, 1
    if options.threads or options.cpu_time:
        torch.set_num_threads(1 if options.cpu_time else options.threads)
    jobs = {"step": step, "regions": regions, "memory": memory}
    return int(not all([jobs[part](options) for part in parts]))


def tower(options: argparse.Namespace, alpha: bool = False, words: int = 16) -> Any:
    """An open_clip ViT of 64 px and a text transformer, random weights, the same at each call."""
    from fovea.models.encoders import open_clip_from_config

    size = {"width": options.width, "layers": options.layers}
    config = {
        "embed_dim": options.width,
        "vision_cfg": {"image_size": 64, "patch_size": 16, "head_width": 32} | size,
        "text_cfg": {"context_length": words, "vocab_size": 49408, "heads": options.width // 32} | size,
    }
    torch.manual_seed(0)
    return open_clip_from_config(config, alpha=alpha)


def pairs(encoder: Any, rows: int) -> Any:
    """Random pictures, each with a text of its own."""
    import numpy as np

    from fovea.batches import PairBatch

    texts = [f"picture {i} of {rows}" for i in range(rows)]
    numbers = torch.arange(rows)
    return PairBatch(
        pixels=torch.randint(0, 256, (rows, 64, 64, 3), dtype=torch.uint8),
        alpha=None,
        tokens=encoder.tokenizer(texts),
        partner_pixels=None,
        ids=torch.stack([numbers, rows + numbers], 1),
        image_ids=numbers,
        num_global=rows,
        names=np.array(texts),
    )


def about(options: argparse.Namespace) -> str:
    threads = f"{torch.get_num_threads()} threads{', CPU time' if options.cpu_time else ''}"
    return f"ViT {options.layers} × {options.width}, 64 px, {threads}"


def clock(options: argparse.Namespace) -> Any:
    return time.process_time if options.cpu_time else time.perf_counter


def step(options: argparse.Namespace) -> bool:
    """Both loops on one batch, turn about."""
    from harness import compare

    warnings.filterwarnings("ignore")
    encoders = [tower(options) for _ in range(2)]
    batch = pairs(encoders[0], options.batch)
    total = CHECKED + 1 + options.rounds  # one to warm up
    ours, plain = Ours(encoders[0], batch, total), Plain(encoders[1], batch, total)
    for _ in range(CHECKED):
        ours()
        plain()
    torch.testing.assert_close(ours.losses, plain.losses, rtol=1e-4, atol=1e-4)
    comparison = compare(
        f"training step: batch {options.batch}, {about(options)}",
        ("fovea: AlphaClip, Lightning", ours),
        ("open_clip: ClipLoss, plain loop", plain),
        items=1,
        unit="steps",
        rounds=options.rounds,
        need=None if options.tiny else 0.95,
        clock=clock(options),
    )
    ours.close()
    print(comparison.text(), flush=True)
    return comparison.ok


def regions(options: argparse.Namespace) -> bool:
    """Three masked regions of each image: one pass of all, against one pass each."""
    from harness import compare

    from lightning_modules.alpha_clip import AlphaClip

    count = 3 * options.images
    module = AlphaClip(tower(options, alpha=True))
    pixels = torch.randint(0, 256, (count, 64, 64, 3), dtype=torch.uint8)
    alpha = torch.randint(0, 2, (count, 64, 64), dtype=torch.uint8)
    into = torch.randn(count, options.width)  # stands for the gradient of the loss
    visual = [p for p in module.encoder.clip.visual.parameters()]

    def together() -> None:
        module.zero_grad()
        module.embed(pixels, alpha, None).backward(into)

    def apart() -> None:
        module.zero_grad()
        rows = [module.embed(pixels[i : i + 1], alpha[i : i + 1], None) for i in range(count)]
        torch.cat(rows).backward(into)

    together()
    gradients = [p.grad.clone() for p in visual]
    apart()
    for mine, theirs in zip(gradients, (p.grad for p in visual), strict=True):
        scale = float(mine.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * scale)
    comparison = compare(
        f"regions: {options.images} images × 3 regions, forward and backward, {about(options)}",
        (f"one pass of {count}", together),
        (f"{count} passes of one", apart),
        items=count,
        unit="regions",
        rounds=max(1, options.rounds // 4),
        need=None if options.tiny else 2,
        clock=clock(options),
    )
    print(comparison.text(), flush=True)
    return comparison.ok


class HeldBytes(TorchDispatchMode):
    """The most bytes of tensors made inside it that were alive at once, gradients of weights left out.

    These are told by their shapes, so no activation may have that of a weight.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.most = 0
        shapes = {tuple(parameter.shape) for parameter in module.parameters()}
        self._left_out = shapes | {shape[::-1] for shape in shapes}
        self._seen: set[int] = set()

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            key, storage = _key(tensor), tensor.untyped_storage()
            if key in self._seen or key in given or tuple(tensor.shape) in self._left_out:
                continue  # known (a view, or written in place), or of a weight
            self._seen.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._release, key, storage.nbytes())
        self.most = max(self.most, self.now)
        return out


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def memory(options: argparse.Namespace) -> bool:
    """What a step holds as the batch grows, with GradCache and without."""
    from fovea import losses
    from lightning_modules.alpha_clip import AlphaClip

    batches = [options.chunk * factor for factor in (1, 2, 4, 8)]
    held: dict[int | None, list[int]] = {None: [], options.chunk: []}
    for size, peaks in held.items():
        # With 16 words 32 rows of them would have the shape of a weight.
        module = AlphaClip(tower(options, words=15), chunk_size=size)
        for rows in batches:
            batch = pairs(module.encoder, rows)
            with HeldBytes(module) as bytes_:
                left, right = module.sides(batch)
                losses.info_nce(left, right, module.encoder.logit_scale).backward()
            peaks.append(bytes_.most)
            del left, right
    print(f"memory: most bytes of activations at once, ViT {options.layers} × {options.width}, 64 px")
    print(f"  {'batch':<24}{''.join(f'{rows:>12}' for rows in batches)}   largest / smallest")
    for size, peaks in held.items():
        name = "all at once" if size is None else f"chunk_size={size}"
        mib = "".join(f"{peak / 2**20:>8.1f} MiB" for peak in peaks)
        print(f"  {name:<24}{mib}   {max(peaks) / min(peaks):.2f}")
    ratio = max(held[options.chunk]) / min(held[options.chunk])
    ok = options.tiny or ratio <= FLAT
    print(f"  with chunks needed ≤ {FLAT}: {'ok' if ratio <= FLAT else 'MISSED'}", flush=True)
    return ok


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
