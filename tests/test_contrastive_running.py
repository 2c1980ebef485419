"""What surrounds a training step: early stopping, averaged weights, precision, the temperature's clamp."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from contrastive import Recorder, StopAt, gallery, pairs, ready, tiny_vit, trainer
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from two_ranks import Probe

from fovea import bundle
from lightning_modules.alpha_clip import MAX_LOGIT_SCALE, AlphaClip

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_early_stopping_counts_validations() -> None:
    """Recall never moves, validated every second epoch: the first is the best, five more end the run."""
    module = AlphaClip(tiny_vit(), lr=1e-12)
    stop = EarlyStopping(monitor="val/recall@1", mode="max", patience=5)
    run = trainer(max_epochs=40, limit_val_batches=1.0, check_val_every_n_epoch=2, callbacks=[stop])
    run.fit(module, ready(pairs()), gallery())
    assert run.current_epoch == 12 and stop.stopped_epoch == 11


class Watch(L.Callback):
    """The weights after each step, and those that each validation sees."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.validated: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.steps.append(weights(pl_module))

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.validated.append(weights(pl_module))


def averaged(tmp_path: Path, steps: int) -> tuple[AlphaClip, Watch, Recorder]:
    """A run with averages, validated and saved after every third step."""
    module = AlphaClip(tiny_vit(), lr=1e-2)
    watch, record = Watch(), Recorder()
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=3, filename="{step}", save_top_k=-1)
    callbacks = [EMAWeightAveraging(decay=0.5, use_buffers=False), watch, record, keep]
    callbacks += [StopAt(steps)] if steps < 6 else []
    torch.manual_seed(3)
    run = trainer(
        max_steps=6, limit_val_batches=1.0, enable_checkpointing=True, callbacks=callbacks,
        val_check_interval=3, check_val_every_n_epoch=None,
    )  # fmt: skip
    run.fit(module, ready(*(pairs(seed=seed) for seed in range(3))), gallery())
    return module, watch, record


def test_averaged_weights(tmp_path: Path) -> None:
    """Validation, checkpoints, their export and the finished module hold the average that is worked out here;
    training goes on from its own weights.
    """
    from export import export

    module, watch, _ = averaged(tmp_path, 6)
    average = watch.steps[0]
    for number, after in enumerate(watch.steps[1:], 2):
        average = {name: (average[name] + value) / 2 for name, value in after.items()}
        if number == 3:
            for name, value in average.items():
                torch.testing.assert_close(watch.validated[0][name], value)
            assert all(p.isfinite().all() for p in watch.validated[0].values())
    saved = torch.load(tmp_path / "step=6.ckpt", weights_only=True)
    export(tmp_path / "step=6.ckpt", tmp_path / "bundle")
    exported = bundle.load_encoder(tmp_path / "bundle").state_dict()
    for name, value in average.items():
        torch.testing.assert_close(module.get_parameter(name).detach(), value)
        torch.testing.assert_close(saved["state_dict"][name], value)
        torch.testing.assert_close(exported[name.removeprefix("encoder.")], value)
        assert torch.equal(saved["current_model_state"][name], watch.steps[-1][name])
    moved = max((average[name] - watch.steps[-1][name]).abs().max() for name in average)
    assert moved > 1e-3


def test_the_overlay_averages_no_integers() -> None:
    """An average of integers is cut off, 0.9 · 7 + 0.1 · 7 to 6: `configs/trainer/ema.yaml` makes none."""
    overlay = yaml.safe_load((ROOT / "configs/trainer/ema.yaml").read_text())
    (callback,) = overlay["trainer"]["callbacks+"]
    module = AlphaClip(tiny_vit(), lr=1e-3)
    module.encoder.register_buffer("position_ids", torch.arange(600))
    average = EMAWeightAveraging(**(callback["init_args"] | {"decay": 0.9}))
    trainer(max_steps=4, callbacks=[average]).fit(module, ready(*(pairs(seed=seed) for seed in range(4))))
    assert torch.equal(module.encoder.get_buffer("position_ids"), torch.arange(600))


def test_three_and_three_averaged_steps_are_six(tmp_path: Path) -> None:
    """Resumed inside a run: losses, trained and averaged weights are those of one run, bit for bit."""
    whole, watch, record = averaged(tmp_path / "six", 6)
    _, _, first = averaged(tmp_path / "three", 3)
    module, halves, again = AlphaClip(tiny_vit(), lr=1e-2), Watch(), Recorder()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    average = EMAWeightAveraging(decay=0.5, use_buffers=False)
    trainer(max_steps=6, callbacks=[average, halves, again]).fit(
        module,
        ready(*(pairs(seed=seed) for seed in range(3))),
        ckpt_path=str(tmp_path / "three" / "step=3.ckpt"),
        weights_only=True,
    )
    assert len(first.losses) == len(again.losses) == 3
    assert first.losses + again.losses == record.losses
    for name, value in whole.named_parameters():
        assert torch.equal(halves.steps[-1][name], watch.steps[-1][name]), name
        assert torch.equal(module.get_parameter(name), value), name


def test_checkpoints_hold_the_clamped_temperature(tmp_path: Path) -> None:
    """A callback saves right after the step; a resumed run would start with a value above the clamp."""
    module = AlphaClip(tiny_vit(), lr=1e-6)
    with torch.no_grad():
        module.encoder.logit_scale.fill_(MAX_LOGIT_SCALE + 1)
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="one")
    trainer(max_steps=1, callbacks=[keep], enable_checkpointing=True).fit(module, ready(pairs()))
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]["encoder.clip.logit_scale"]
    assert saved.item() == pytest.approx(MAX_LOGIT_SCALE)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(precision: Any) -> None:
    """Towers in 16 bits, chunks too; the loss is float32 and, with its gradient, close to that of float32."""
    steps = {}
    for name, plugins in (("32-true", []), (precision, [_mixed(precision)])):
        module = Probe(tiny_vit(), chunk_size=5)
        torch.manual_seed(1)
        trainer(max_steps=1, plugins=plugins).fit(module, ready(pairs()))
        (steps[name],) = module.steps
    exact, rounded = steps["32-true"], steps[precision]
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=0.03) and rounded["loss"] != exact["loss"]
    flat = [torch.cat([torch.tensor(g) for g in each["gradients"].values()]) for each in (exact, rounded)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.99


def _mixed(precision: Any, **scaler: Any) -> MixedPrecision:
    """Lightning itself would replace float16 on CPUs by bfloat16."""
    if precision == "bf16-mixed":
        return MixedPrecision(precision, "cpu")
    return MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", **({"init_scale": 1.0} | scaler)))


def test_overflowing_gradients_do_not_stop_the_run() -> None:
    """A finite loss, a scaled gradient that is not: the scaler leaves the step out and lowers the scale."""
    module, record, watch = AlphaClip(tiny_vit(), lr=1e-2), Recorder(), Watch()
    before = weights(module)
    plugin = _mixed("16-mixed", init_scale=2.0**30, backoff_factor=2.0**-30)
    run = trainer(max_steps=2, max_epochs=2, plugins=[plugin], callbacks=[record, watch])
    run.fit(module, ready(pairs()))
    assert len(record.losses) == 2 and plugin.scaler.get_scale() == 1
    assert all(torch.equal(value, before[name]) for name, value in watch.steps[0].items())
    assert any(not torch.equal(value, before[name]) for name, value in watch.steps[1].items())


def test_weights_in_half_precision_are_refused() -> None:
    """A step of 1e-5 is lost in a weight of eight bits; the message says what to set."""
    with pytest.raises(ValueError, match=r"bfloat16 \(trainer\.precision=bf16-true\).*bf16-mixed"):
        trainer(max_steps=1, precision="bf16-true").fit(AlphaClip(tiny_vit()), ready(pairs()))


def test_non_finite_rows_are_named() -> None:
    """One text's token is NaN: the message names the rows that hold it, and no other."""
    batch = pairs()
    tokens = batch.tokens.clamp(max=29)
    tokens[:, -1] = 31
    tokens[2, 0] = tokens[9, 0] = 30
    module = AlphaClip(tiny_vit())
    with torch.no_grad():
        module.encoder.clip.token_embedding.weight[30] = torch.nan
    with pytest.raises(
        FloatingPointError, match=r"at step 0, .*rows with non-finite embeddings: row-2, row-9$"
    ):
        trainer(max_steps=1).fit(module, ready(batch._replace(tokens=tokens)))


def test_pictures_on_several_ranks_need_a_frozen_text_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP would stop with a page about unused parameters; this says which switch it is."""
    run = trainer(max_steps=1)
    monkeypatch.setattr(L.Trainer, "world_size", property(lambda _: 2))
    run.datamodule = type("Pictures", (), {"partner": "picture"})()
    module = AlphaClip(tiny_vit())
    module.trainer = run
    with pytest.raises(ValueError, match=r"set model\.freeze_text=true"):
        module.on_fit_start()
    frozen = AlphaClip(tiny_vit(), freeze_text=True)
    frozen.trainer = run
    frozen.on_fit_start()
