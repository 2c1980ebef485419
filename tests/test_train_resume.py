"""scripts/train.py and scripts/export.py around a checkpoint: stops, flags beside it, unsuitable ones."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from score_tables import random_table
from test_train_cli import ROOT, refusal, run

from fovea import bundle
from lightning_modules.alpha_clip import AlphaClip
from lightning_modules.checkpoints import RECOVERY
from scripts import train
from scripts.export import export, find_checkpoint

pytestmark = pytest.mark.usefixtures("own_process")


@pytest.fixture(scope="module")
def trained(train_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps, with other cut-offs than the class's."""
    out = tmp_path_factory.mktemp("run")
    command = [sys.executable, "scripts/train.py", "fit", "-c", str(train_config)]
    command += [f"--trainer.default_root_dir={out}", "--model.recall_at=[1, 3]", "--trainer.logger=false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def ckpt(trained: Path) -> Path:
    return find_checkpoint(trained)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_does_not_look_finished(
    train_config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    status: int,
) -> None:
    """A signal's exit status, what resumes the run, and no bundle of it until that is done."""
    step = AlphaClip.training_step

    def stopped(self: Any, batch: Any, batch_idx: int) -> Any:
        signal.raise_signal(number)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(AlphaClip, "training_step", stopped)
        run("fit", train_config, tmp_path)
    assert end.value.code == status
    resume = ["fit", "-c", str(tmp_path / "config.yaml"), "--ckpt_path", str(tmp_path / RECOVERY)]
    told = capsys.readouterr().err
    assert f"after step 1; go on with: python scripts/train.py {' '.join(resume)}" in told
    with pytest.raises(ValueError, match="was stopped before its end; go on with it"):
        export(tmp_path, tmp_path / "bundle")
    assert train.main(resume).trainer.global_step == 2
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["ckpt_path"] is None
    export(tmp_path, tmp_path / "bundle")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_flags_win_over_a_checkpoint(train_config: Path, tmp_path: Path, ckpt: Path) -> None:
    """validate and test: a flag, even of the default, wins over the checkpoint, that over defaults."""
    flags = [f"--ckpt_path={ckpt}", "--trainer.limit_val_batches=1.0", "--trainer.logger=false"]
    for cutoffs, flag in (([1, 3], []), ([1, 7], ["--model.recall_at=[1, 7]"])):
        cli = run("validate", train_config, tmp_path, *flags, *flag)
        assert set(cli.trainer.callback_metrics) == {f"val/recall@{k}" for k in cutoffs}
    run("test", train_config, tmp_path, *flags, "--model.recall_at=[1, 5, 20]", "--data.test_splits=[test-0]")
    results = json.loads((tmp_path / "results.json").read_text())["retrieval"]["test-0"]
    assert set(results) == {"recall@1", "recall@5", "recall@20", "images", "queries"}
    saved = yaml.safe_load((tmp_path / "config.test.yaml").read_text())
    assert saved["model"]["init_args"]["recall_at"] == [1, 5, 20]


def test_a_resumed_fit_keeps_its_settings(
    train_config: Path, tmp_path: Path, ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """fit: what belongs to the run is refused by name; what no weight depends on may change."""
    command = ["fit", "-c", str(train_config), f"--ckpt_path={ckpt}"]
    message = refusal(capsys, *command, "--model.lr=0.5", "--model.betas=[0.9, 0.99]")
    assert "model.lr=0.5 (there 0.001), model.betas=(0.9, 0.99) (there [0.9, 0.98])" in message
    more = [
        "--trainer.max_steps=3",
        "--trainer.max_epochs=2",
        "--model.recall_at=[1, 7]",
        "--trainer.logger=false",
    ]
    cli = run("fit", train_config, tmp_path, f"--ckpt_path={ckpt}", *more)
    assert cli.trainer.global_step == 3 and list(cli.model.hparams["recall_at"]) == [1, 7]


def altered(path: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    content = torch.load(path, weights_only=True)
    torch.save(change(content) or content, to)
    return to


def test_unsuitable_checkpoints(
    train_config: Path, tmp_path: Path, ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another module's, one without a tensor, weights of elsewhere, a list, a NaN: named, no traceback."""
    random_table(20).write(tmp_path / "scores.parquet")
    scores = f"--data.scores={tmp_path / 'scores.parquet'}"
    reweight = run("fit", ROOT / "configs/quickstart/reweight.yaml", tmp_path / "reweight", scores)
    other = Path(reweight.trainer.checkpoint_callback.best_model_path)
    first = next(iter(torch.load(ckpt, weights_only=True)["state_dict"]))

    def lose(content: dict[str, Any]) -> None:
        del content["state_dict"][first]

    cases = [
        (other, "is of lightning_modules.reweight.Reweight; the config's model is lightning_modules.alpha"),
        (altered(ckpt, tmp_path / "less.ckpt", lose), f"lacks {first}"),
        (altered(ckpt, tmp_path / "foreign.pt", lambda c: c["state_dict"]), "is no checkpoint of scripts"),
        (altered(ckpt, tmp_path / "list.pt", lambda c: [1, 2]), "a list without pytorch-lightning_version"),
    ]  # fmt: skip
    for path, told in cases:
        message = refusal(capsys, "fit", "-c", str(train_config), f"--ckpt_path={path}")
        assert str(path) in message and told in message, message
    message = refusal(
        capsys, "fit", "-c", str(train_config), f"--ckpt_path={ckpt}", "--model.encoder.vocabulary=[a, b]"
    )
    assert "does not fit the model of this config" in message and "shapes" in message
    for path, _ in cases[2:]:
        with pytest.raises(ValueError, match="is no checkpoint of scripts/train"):
            export(path, tmp_path / "bundle")

    def diverge(content: dict[str, Any]) -> None:
        content["state_dict"][first].fill_(float("nan"))

    with pytest.raises(ValueError, match=f"1 of .* hold NaN or infinite values, e.g. {first[8:]}"):
        export(altered(ckpt, tmp_path / "nan.ckpt", diverge), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_the_best_is_exported(ckpt: Path, tmp_path: Path) -> None:
    """Of a run that monitors, the best checkpoint, although `last.ckpt` is newer; wherever the run lies."""
    state = {"monitor": "val/recall@1", "best_model_path": "/elsewhere/best.ckpt"}
    for name, step in (("best", 6), ("last", 9)):
        altered(
            ckpt,
            tmp_path / f"{name}.ckpt",
            lambda c, step=step: c.update(global_step=step, callbacks={"M": state}),
        )
    assert export(tmp_path, tmp_path / "bundle").name == "best.ckpt"
    assert bundle.read_config(tmp_path / "bundle")["provenance"]["step"] == 6


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--seed_everything=-1",), ["seed_everything: -1 is not in bounds"]),
        (("--trainer.precision=16-true",), ["trainer.precision=16-true", "float16", "CPU", "bf16-mixed"]),
        (("--data.margin=1e9",), ["data.margin=1000000000.0", "at most"]),
        (("--model.encoder.image_size=0",), ["image_size=0", "at least 1"]),
        (("--model.encoder.image_size=-64",), ["image_size=-64", "at least 1"]),
        (("--recovery.every_minutes=-1",), ["recovery.every_minutes=-1"]),
    ],
)  # fmt: skip
def test_impossible_settings(
    train_config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    told: list[str],
) -> None:
    """Refused with the key's name, before anything is trained."""
    root = f"--trainer.default_root_dir={tmp_path}"
    message = refusal(capsys, "fit", "-c", str(train_config), root, *flags)
    assert all(part in message for part in told), message
