"""lightning_modules.reweight: the gradient run meets the closed form, resumes exactly, and fails by name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from PIL import Image
from score_tables import large_table, make_table, random_table

from datamodules.scores import ScoreData, score_batch
from fovea.reweight import Calibration, Calibrations, fit_eq9, fit_ranking
from lightning_modules.reweight import Reweight

ROOT = Path(__file__).resolve().parents[1]


def fit(path, out, *, objective, epochs=3, ckpt_path=None, max_iter=200):
    model = Reweight(objective=objective, max_iter=max_iter)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, default_root_dir=out, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=ScoreData(str(path)), ckpt_path=ckpt_path)
    return model, trainer


@pytest.mark.parametrize("separation", [(1.0, 2.0), (-1.0, 2.0), (2.0, -1.0)])
@pytest.mark.parametrize(("objective", "closed"), [("eq9", fit_eq9), ("ranking", fit_ranking)])
def test_gradient_run_meets_the_closed_form(tmp_path, objective, closed, separation):
    """W_g, W_l, B within 1e-3 of the exact solution, interior or at W = 0, written to calibration.json."""
    table = random_table(separation=separation)
    table.write(tmp_path / "scores.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = closed(table.grid())
    fit(tmp_path / "scores.parquet", tmp_path, objective=objective)
    got = Calibrations.read(tmp_path / "calibration.json")
    assert getattr(got, objective) == exact
    assert got.difference <= 1e-3
    with Image.open(tmp_path / "scores.png") as figure:
        assert figure.width > 2 * figure.height  # three panels
    got = got.learned
    assert (got.w_global, got.w_local, got.bias) == pytest.approx(
        (exact.w_global, exact.w_local, exact.bias), abs=1e-3
    )
    assert got.loss == pytest.approx(exact.loss, abs=1e-6)
    assert (got.objective, got.method) == (objective, "gradient")
    assert (got.num_queries, got.num_skipped) == (exact.num_queries, exact.num_skipped)


ILL = {
    "small spread": dict(std=1e-4),
    "nearly collinear": dict(rho=0.999999),
    "both": dict(rho=0.9999, std=1e-3),
    "another scale": dict(ratio=1e-3),
    "far from zero": dict(shift=30.0),
    "separable": dict(sep=(8.0, 8.0)),
    "useless": dict(sep=(0.0, 0.0), rho=0.99999),
}


@pytest.mark.parametrize("case", [*ILL, "copy", "nothing found"])
def test_ill_conditioned_scores_agree_too(tmp_path, case):
    """Tiny spreads, scores that nearly or exactly coincide, no local score at all: still within 1e-3."""
    table = large_table(500, **ILL.get(case, {}))
    if case in ("copy", "nothing found"):
        object.__setattr__(table, "local", table.global_ * (case == "copy"))
    for objective, closed in (("eq9", fit_eq9), ("ranking", fit_ranking)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exact = closed(table.grid())
        module = Reweight(objective)
        batch = score_batch(table)
        optimizer = module.configure_optimizers()

        def closure(module=module, optimizer=optimizer, batch=batch):
            optimizer.zero_grad()
            loss, ridge, _ = module.loss(batch)
            (loss + ridge).backward()
            return loss + ridge

        optimizer.step(closure)
        w_global, w_local = module.effective_weights().tolist()
        trained = Calibration(objective, w_global, w_local, module.bias.item())
        assert Calibrations(trained, exact, exact).difference <= 1e-3, (objective, trained, exact)


def test_too_short_a_training_is_told(tmp_path, monkeypatch):
    """One iteration is not enough: both solutions and their difference are named; W&B gets the figure."""
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    random_table().write(tmp_path / "scores.parquet")
    logger = WandbLogger(project="fovea", offline=True, save_dir=tmp_path)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=logger, default_root_dir=tmp_path, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, log_every_n_steps=1,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="the gradient run differs .*closed form .*raise model.max_iter"):
        trainer.fit(Reweight("eq9", max_iter=1), datamodule=ScoreData(str(tmp_path / "scores.parquet")))
    assert json.loads((tmp_path / "calibration.json").read_text())["difference"] > 1e-3
    wandb.finish()
    wandb.teardown()
    (media,) = tmp_path.glob("wandb/offline-run-*/files/media/images")
    assert len(list(media.rglob("scores_*.png"))) == 1


@pytest.mark.slow
def test_ten_thousand_queries_take_seconds(tmp_path):
    """The command, 10,000 queries × 20 candidates: under 60 s with start-up on a slow machine, and agreed."""
    large_table(10_000).write(tmp_path / "scores.parquet")
    command = [
        sys.executable, "scripts/train.py", "fit", "-c", "configs/quickstart/reweight.yaml",
        f"--data.scores={tmp_path}/scores.parquet", f"--trainer.default_root_dir={tmp_path}",
    ]  # fmt: skip
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    assert time.perf_counter() - start < 60
    assert Calibrations.read(tmp_path / "calibration.json").difference <= 1e-3


@pytest.mark.parametrize("objective", ["eq9", "ranking"])
def test_scores_that_hardly_differ(tmp_path, objective, capsys):
    """S_local = S_global up to 2 %, in a narrow band: still the closed form, and a picture of both."""
    table = random_table(separation=(1.0, 1.0))
    close = dataclasses.replace(table, local=table.global_ + 0.02 * (table.local - table.global_))
    close.write(tmp_path / "scores.parquet")
    fit(tmp_path / "scores.parquet", tmp_path, objective=objective)
    got = Calibrations.read(tmp_path / "calibration.json")
    exact = getattr(got, objective)
    for name in ("w_global", "w_local", "bias"):
        assert getattr(got.learned, name) == pytest.approx(getattr(exact, name), rel=1e-3, abs=1e-3), name
    assert "by gradient" in capsys.readouterr().out
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [{"lr": 0}, {"max_iter": 0}, {"l2": -1}])
def test_settings_out_of_range_are_named(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"model.{name}="):
        Reweight(**wrong)


def test_only_three_scalars_train():
    """Every trainable number is W_g, W_l or B, and each is in the optimiser once."""
    model = Reweight()
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in parameters) == 3
    (group,) = model.configure_optimizers().param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in parameters}


def test_three_and_three_epochs_equal_six(tmp_path):
    """Stopping after 3 epochs and resuming ends at the very same scalars as 6 in a row."""
    random_table().write(tmp_path / "scores.parquet")
    six, _ = fit(tmp_path / "scores.parquet", tmp_path / "six", objective="ranking", epochs=6, max_iter=2)
    _, trainer = fit(
        tmp_path / "scores.parquet", tmp_path / "half", objective="ranking", epochs=3, max_iter=2
    )
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit(
        tmp_path / "scores.parquet",
        tmp_path / "rest",
        objective="ranking",
        epochs=6,
        ckpt_path=tmp_path / "half.ckpt",
        max_iter=2,
    )
    assert torch.equal(resumed.weights, six.weights) and torch.equal(resumed.bias, six.bias)
    assert not torch.equal(six.weights, torch.ones(2, dtype=torch.float64))


def test_negative_weight_is_warned_of(tmp_path):
    """The paper's objective on a table whose negatives outscore its golds warns at the end of the run."""
    random_table(separation=(-1.0, 2.0)).write(tmp_path / "scores.parquet")
    model = Reweight(objective="eq9")
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, default_root_dir=tmp_path, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, log_every_n_steps=1,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="W_g = .* is negative"):
        trainer.fit(model, datamodule=ScoreData(str(tmp_path / "scores.parquet")))


def test_useless_table_stops_with_step_and_counts(tmp_path):
    """No query has a gold image: the loss is NaN; the error says the step and that no query is usable."""
    make_table({"q": [("a", 1, False, 0.1, 0.1), ("b", 2, False, 0.1, 0.2)]}).write(tmp_path / "s.parquet")
    with pytest.raises(FloatingPointError, match="loss is nan at step 0.*usable queries: 0"):
        fit(tmp_path / "s.parquet", tmp_path, objective="eq9")


def test_non_finite_scores_name_the_query(tmp_path):
    """A NaN that reaches the loss is traced to its query."""
    random_table(5).write(tmp_path / "s.parquet")
    data = ScoreData(str(tmp_path / "s.parquet"))
    (batch,) = data.train_dataloader()
    batch.scores[3, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="non-finite scores: .'q3'"):
        Reweight(objective="eq9").training_step(batch, 0)


def test_two_processes_train_what_one_trains(tmp_path):
    """Two gloo ranks through the launcher write the same calibration file as one process."""
    random_table().write(tmp_path / "scores.parquet")
    fit(tmp_path / "scores.parquet", tmp_path / "one", objective="ranking", epochs=2)
    command = [
        sys.executable, "scripts/train.py", "fit", "--model=lightning_modules.reweight.Reweight",
        "--model.objective=ranking", "--data=datamodules.scores.ScoreData",
        f"--data.scores={tmp_path}/scores.parquet", "--trainer.accelerator=cpu", "--trainer.devices=2",
        "--trainer.strategy=ddp", "--trainer.max_epochs=2", "--trainer.logger=false",
        "--trainer.enable_checkpointing=false", f"--trainer.default_root_dir={tmp_path}/two",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (Calibrations.read(tmp_path / name / "calibration.json") for name in ("one", "two"))
    assert (two.learned.w_global, two.learned.w_local) == pytest.approx(
        (one.learned.w_global, one.learned.w_local), rel=1e-9
    )
    assert two.learned.num_queries == one.learned.num_queries
