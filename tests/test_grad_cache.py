"""lightning_modules.alpha_clip with chunk_size (GradCache): the big batch's loss and gradient."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fovea.batches import PairBatch
from fovea.models.encoders import open_clip_from_config, tiny_clip
from lightning_modules.alpha_clip import AlphaClip

TOWER = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2},
}


def batch(*, regions: int = 0, texts: int = 1, pictures: bool = False, images: int = 7) -> PairBatch:
    """Random rows; two of the images are the same."""
    g = torch.Generator().manual_seed(0)
    num_global, shown = images * texts, images + regions
    image = torch.arange(images).clamp(max=images - 2).repeat_interleave(texts)
    of = torch.cat([image, torch.arange(regions) % images])
    rows = num_global + regions

    def draw(*shape: int, high: int = 256) -> Any:
        return torch.randint(0, high, shape, generator=g)

    return PairBatch(
        pixels=draw(shown, 32, 32, 3).byte(),
        alpha=draw(shown, 32, 32, high=2).byte() if regions else None,
        tokens=None if pictures else draw(rows, 8, high=64),
        partner_pixels=draw(rows, 32, 32, 3).byte() if pictures else None,
        ids=torch.stack([torch.cat([image, 100 + torch.arange(regions)]), 1000 + torch.arange(rows)], 1),
        image_ids=of,
        num_global=num_global,
        names=np.array([str(i) for i in range(rows)]),
        texts_per_image=texts,
    )


class Probe(AlphaClip):
    """Keeps the gradients of its step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}


def step(
    rows: PairBatch,
    precision: Any = "32-true",
    dropout: bool = False,
    against: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """One optimizer step, from weights moved by `-against` → loss and gradients."""
    torch.manual_seed(0)
    tower = TOWER | ({"vision_cfg": TOWER["vision_cfg"] | {"patch_dropout": 0.5}} if dropout else {})
    encoder = open_clip_from_config(tower, alpha=rows.alpha is not None)
    module = Probe(encoder, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter -= (against or {}).get(name, 0)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, precision=precision,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module, DataLoader([rows], batch_size=None))  # type: ignore[arg-type]
    return float(trainer.callback_metrics["train/loss"]), module.gradients


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ({}, {}),
        ({"regions": 6}, {"region_weight": 0.7}),
        ({"regions": 6, "texts": 3}, {}),
        ({"pictures": True}, {}),
        ({"regions": 6}, {"freeze_text": True}),
        ({"images": 4}, {}),  # no more rows than a chunk holds
    ],
)
def test_equals_the_big_batch(rows: dict[str, Any], options: dict[str, Any]) -> None:
    """Chunks of 4 rows, the last one smaller: loss and every gradient of the whole batch."""
    whole, gradients = step(batch(**rows), **options)
    chunked, others = step(batch(**rows), chunk_size=4, **options)
    assert chunked == pytest.approx(whole, abs=1e-6)
    assert gradients.keys() == others.keys()
    said = any("token_embedding" in name for name in gradients)
    assert said == (not options.get("freeze_text") and not rows.get("pictures"))
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            others[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_chunk_is_run_again_with_the_same_dropout() -> None:
    """Patches are dropped at random. The gradient belongs to the logged loss: one step against it, small
    enough to be linear, with the same draws, lowers the loss by lr · ‖g‖².
    """
    loss, gradients = step(batch(), chunk_size=3, dropout=True)
    assert loss != step(batch(), chunk_size=3)[0]
    lr = 1e-3 / sum(float((gradient**2).sum()) for gradient in gradients.values())
    moved = step(batch(), chunk_size=3, dropout=True, against={n: lr * g for n, g in gradients.items()})[0]
    assert loss - moved == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_steps_are_close(precision: str) -> None:
    """The loss is computed in float32, so bf16 towers move it by a little, with chunks and without."""
    exact, _ = step(batch(regions=4))
    for chunk_size in (None, 4):
        half, gradients = step(batch(regions=4), precision=precision, chunk_size=chunk_size)
        assert half == pytest.approx(exact, rel=0.05)
        assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def test_refuses_batch_norm_and_nonsense() -> None:
    """The tiny CLIP's stem has batch norm: chunks would see other statistics."""
    encoder = tiny_clip(list("ab"), image_size=32, widths=(8, 8), layers=1, heads=2, text_width=8)
    module = AlphaClip(encoder, chunk_size=4)
    trainer = L.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="chunk_size=4: .*stem.0 is a batch norm"):
        trainer.fit(module, DataLoader([batch()], batch_size=None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model.chunk_size=0 must be at least 1"):
        AlphaClip(encoder, chunk_size=0)
