"""Every option of contrastive training on one gloo process or two: losses, gradients, averages as JSON.

`python two_ranks.py OUT` runs it on two. Run by test_contrastive_ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from contrastive import gallery, pairs, ready, tiny_vit, trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from fovea.batches import PairBatch
from lightning_modules.alpha_clip import AlphaClip


class Case(NamedTuple):
    """What is switched on.

    Attributes:
        batch: arguments of `pairs`.
        last: those of the last batch, which is smaller and leaves the first rank without a region.
        module: arguments of `AlphaClip`.
    """

    batch: dict[str, Any]
    last: dict[str, Any]
    module: dict[str, Any] = {}


REGIONS = {"images": 7, "regions": 5}, {"images": 3, "regions": 2, "seed": 1}
TEXTS = {"images": 7, "regions": 5, "texts": 2}, {"images": 3, "regions": 2, "texts": 2, "seed": 1}
PICTURES = {"regions": 0, "partners": True}, {"images": 3, "regions": 0, "partners": True, "seed": 1}
CASES = {
    "regions": Case(*REGIONS),
    "a last batch without regions": Case(REGIONS[0], {"images": 3, "regions": 0, "seed": 1}),
    "several texts": Case(*TEXTS, {"region_weight": 0.7}),
    "frozen text": Case(*REGIONS, {"freeze_text": True}),
    "pictures as partners": Case(*PICTURES, {"freeze_text": True}),
    "gradcache": Case(*TEXTS, {"chunk_size": 2}),
    "gradcache, frozen text": Case(*REGIONS, {"chunk_size": 3, "freeze_text": True}),
    "gradcache, pictures": Case(*PICTURES, {"chunk_size": 4, "freeze_text": True}),
}


class Probe(AlphaClip):
    """Keeps what each step was made of: the loss of all ranks, the averaged gradients."""

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.steps: list[dict[str, Any]] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = {n: p.grad.flatten().tolist() for n, p in self.named_parameters() if p.grad is not None}
        self.steps.append({"gradients": grads})

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.steps[-1]["loss"] = float(self.all_gather(outputs["loss"]).mean())  # type: ignore[union-attr]


class Poisoned(Probe):
    """The second rank's regions come out as NaN: the first has none and sees nothing of it."""

    def sides(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        left, right = super().sides(batch)
        if self.global_rank == 1:
            left = torch.cat([left[: batch.num_global], left[batch.num_global :] * torch.nan])
        return left, right


def share(batch: PairBatch, rank: int) -> PairBatch:
    """Of 7 images 3 and 4, of 5 regions 4 and 1; of 3 images 2 and 1, of its regions none and all."""
    texts = batch.texts_per_image
    images, rows = batch.num_global // texts, len(batch.ids)
    regions = rows - batch.num_global
    cut = {7: 3, 3: 2}[images]
    own_images = range(cut) if rank == 0 else range(cut, images)
    cut = {5: 4}.get(regions, 0)
    own_regions = range(cut) if rank == 0 else range(cut, regions)
    shown = [*own_images, *(images + r for r in own_regions)]
    said = [*(i * texts + t for i in own_images for t in range(texts))]
    said += [batch.num_global + r for r in own_regions]
    return PairBatch(
        pixels=batch.pixels[shown],
        alpha=None if batch.alpha is None else batch.alpha[shown],
        tokens=None if batch.tokens is None else batch.tokens[said],
        partner_pixels=None if batch.partner_pixels is None else batch.partner_pixels[said],
        ids=batch.ids[said],
        image_ids=batch.image_ids[said],
        num_global=len(own_images) * texts,
        names=batch.names[said],
        texts_per_image=texts,
    )


def fit(module: Probe, case: Case, world: int, **options: Any) -> Any:
    """A batch and the last, smaller one, then the gallery, with the real trainer."""
    spread: dict[str, Any] = {} if world == 1 else {"devices": 2, "strategy": "ddp"}
    run = trainer(max_epochs=1, limit_val_batches=1.0, **spread, **options)
    batches = [pairs(**case.batch), pairs(**case.last)]
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if world == 2:
        batches = [share(batch, rank) for batch in batches]
    run.fit(module, ready(*batches), gallery(rank, world))
    return run


def run_all(world: int) -> dict[str, Any]:
    """Case → losses, gradients, figures; and the weights that the last one averaged."""
    out: dict[str, Any] = {}
    for name, case in CASES.items():
        # Adam turns rounding into steps: a small rate keeps the second batch's gradient comparable.
        module = Probe(tiny_vit(), lr=1e-6, **case.module)
        run = fit(module, case, world)
        out[name] = {"steps": module.steps, "figures": {k: float(v) for k, v in run.callback_metrics.items()}}
    module = Probe(tiny_vit(), lr=1e-3)
    fit(module, CASES["regions"], world, callbacks=[EMAWeightAveraging(use_buffers=False, decay=0.5)])
    # Training has ended, so the module holds the averages.
    out["average"] = {n: p.detach().flatten().tolist() for n, p in module.named_parameters()}
    return out


def main(out: Path) -> None:
    """On two ranks: all cases, and a loss that is NaN on the second one only."""
    torch.set_num_threads(1)
    results = run_all(2)
    try:
        fit(Poisoned(tiny_vit()), Case(REGIONS[1], REGIONS[1]), 2)
    except FloatingPointError as error:
        results["error"] = str(error)
    out.with_name(f"rank-{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(results))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
