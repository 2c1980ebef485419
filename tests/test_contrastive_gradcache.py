"""model.chunk_size: the loss and gradient of the big batch; no activations of what is frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contrastive import build, pairs, ready, tiny_vit, trainer
from torch import Tensor
from two_ranks import PICTURES, REGIONS, TEXTS, Probe

from lightning_modules import chunks
from lightning_modules.alpha_clip import AlphaClip


def one_step(batch: dict[str, Any], dropout: float = 0.0, **options: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a real trainer's first step."""
    module = Probe(tiny_vit(dropout), **options)
    torch.manual_seed(1)
    trainer(max_steps=1).fit(module, ready(pairs(**batch)))
    (step,) = module.steps
    return step["loss"], {name: torch.tensor(values) for name, values in step["gradients"].items()}


@pytest.mark.parametrize("size", [5, 100])
@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (REGIONS[0], {}),
        (TEXTS[0], {"region_weight": 0.5}),
        (REGIONS[0], {"freeze_text": True}),
        (PICTURES[0], {"freeze_text": True}),
        ({"regions": 0}, {}),
    ],
)
def test_gradcache_is_the_big_batch(batch: dict[str, Any], options: dict[str, Any], size: int) -> None:
    """12 rows in chunks of 5, 5 and 2, and in one chunk with room left: every gradient to float tolerance."""
    loss, gradients = one_step(batch, **options)
    again, chunked = one_step(batch, chunk_size=size, **options)
    assert again == pytest.approx(loss, rel=1e-6)
    assert gradients.keys() == chunked.keys()
    for name, gradient in gradients.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(chunked[name], gradient, rtol=1e-4, atol=1e-5 * max(largest, 1.0))


def test_dropout_falls_alike_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the patches are dropped at random: the gradient is that of the patches that the loss saw."""
    loss, gradients = one_step(REGIONS[0], 0.5, chunk_size=5)
    monkeypatch.setattr(chunks, "checkpoint", lambda tower, *rows, **_: tower(*rows))
    again, plain = one_step(REGIONS[0], 0.5, chunk_size=5)
    assert loss == again != one_step(REGIONS[0], 0.0, chunk_size=5)[0]
    for name, gradient in plain.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)


def saved_bytes(run: Any) -> int:
    """Bytes that autograd keeps for the backward of what `run` computes, inputs and weights included."""
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return total


def test_what_is_held_for_backward() -> None:
    """A chunked tower holds its inputs, which are there anyway; a frozen one holds nothing more."""
    batch = pairs(images=20)
    plain, chunked = AlphaClip(tiny_vit()), AlphaClip(tiny_vit(), chunk_size=4)
    for sides in ((batch.pixels, batch.alpha, None), (None, None, batch.tokens)):
        assert saved_bytes(lambda: plain.embed(*sides)) > 100_000  # noqa: B023
        inputs = sum(tensor.nbytes for tensor in sides if tensor is not None)
        assert saved_bytes(lambda: chunked.embed(*sides)) == inputs  # noqa: B023
    for size in (None, 4):
        frozen = AlphaClip(tiny_vit(), freeze_text=True, chunk_size=size)
        given = 0 if size is None else batch.tokens.nbytes
        assert saved_bytes(lambda: frozen.embed(None, None, batch.tokens)) <= given  # noqa: B023
        assert not frozen.embed(None, None, batch.tokens).requires_grad
        encoder = tiny_vit()
        encoder.clip.visual.requires_grad_(False)
        frozen = AlphaClip(encoder, chunk_size=size)
        given = 0 if size is None else batch.pixels.nbytes + batch.alpha.nbytes
        assert saved_bytes(lambda: frozen.embed(batch.pixels, batch.alpha, None)) <= given  # noqa: B023
        # Frozen all through: no dropout there, and statistics that stay.
        assert not any(layer.training for layer in encoder.clip.visual.modules())
        assert encoder.clip.transformer.training


def test_batch_norm_is_refused(tiny_world: Path) -> None:
    """Its statistics would be a chunk's: named, with the way out; frozen ones are constants and pass."""
    module, data = build(tiny_world, chunk_size=4)
    with pytest.raises(
        ValueError, match=r"chunk_size=4 .* encoder\.clip\.visual\.stem\.0, .*set model\.chunk_size=null"
    ):
        trainer(max_steps=1).fit(module, data)
    module, data = build(tiny_world)
    module.encoder.clip.visual.requires_grad_(False)
    before = {n: b.clone() for n, b in module.encoder.named_buffers()}
    trainer(max_steps=1).fit(AlphaClip(module.encoder, chunk_size=4), data)
    assert all(torch.equal(b, before[n]) for n, b in module.encoder.named_buffers())
