"""lightning_modules.recovery: a fit that is stopped goes on bit for bit, and the end of a fit is kept."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from datamodules.pairs import PairData
from fovea.models.encoders import tiny_clip
from lightning_modules.alpha_clip import AlphaClip
from lightning_modules.checkpoints import RECOVERY
from lightning_modules.recovery import Recovery

EPOCHS, BATCHES = 3, 3  # 400 single objects in batches of 128
VALIDATED = "val/recall@1"


class Log(L.Callback):
    """Losses, row names and validations of a run, and the exact places where it is stopped."""

    def __init__(self, stop: tuple[str, int] | None = None, how: Any = signal.SIGTERM) -> None:
        self.rows: list[Any] = []
        self.stop, self.how = stop, how

    def _maybe(self, hook: str, trainer: L.Trainer) -> None:
        if self.stop == (hook, trainer.global_step):
            self.stop = None
            if self.how is signal.SIGTERM:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise self.how

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._maybe("start", trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append((float(outputs["loss"]), batch.names.tolist()))
        self._maybe("step", trainer)

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        self._maybe("validation", trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        figures = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        self.rows.append((trainer.global_step, figures))


def fit(
    tables: Path, out: Path, *callbacks: Any, ckpt: Path | None = None, num_workers: int = 0, **options: Any
) -> Any:
    """Nine steps of a very small CLIP in `out`; validation after every second epoch."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"widths": (8, 8), "layers": 1, "heads": 2, "embed_dim": 8, "text_width": 8}
    module = AlphaClip(tiny_clip(str(tables), image_size=16, **sizes, text_layers=1), lr=1e-2)
    own: dict[str, Any] = {"train_split": "singles", "batch_size": 128, "num_workers": num_workers}
    data = PairData(str(tables), **own, cache_images=True, seed=0)
    settings: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "use_distributed_sampler": False, "num_sanity_val_steps": 0, "max_epochs": EPOCHS,
        "check_val_every_n_epoch": 2,
    }  # fmt: skip
    trainer = L.Trainer(default_root_dir=out, callbacks=list(callbacks), **settings | options)
    trainer.fit(module, data, ckpt_path=ckpt, weights_only=True)
    return module, trainer


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def whole(tiny_world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """A run that nobody stopped."""
    log = Log()
    module, _ = fit(tiny_world, tmp_path_factory.mktemp("whole"), Recovery(), log)
    assert len(log.rows) == EPOCHS * BATCHES + 2
    return module, log.rows


@pytest.mark.parametrize(
    "stop",
    [
        ("start", 0), ("step", 1), ("start", 1),  # inside an epoch
        ("step", 3), ("start", 3),  # at the end of an epoch without validation, and behind it
        ("step", 6), ("validation", 6),  # at the end of one with validation, and in the middle of that
        ("step", 9),  # after the very last step
    ],
)  # fmt: skip
def test_terminated_and_resumed(
    tiny_world: Path, tmp_path: Path, whole: tuple[Any, list[Any]], stop: tuple[str, int]
) -> None:
    """SIGTERM anywhere: batches, losses, validations and weights of both halves are those of one run."""
    first, second = Log(stop), Log()
    with pytest.raises(SIGTERMException):
        fit(tiny_world, tmp_path, Recovery(), first)
    module, _ = fit(tiny_world, tmp_path, Recovery(), second, ckpt=tmp_path / RECOVERY)
    assert first.rows + second.rows == whole[1]
    assert same(module, whole[0])
    assert not (tmp_path / RECOVERY).exists() and list(tmp_path.glob("checkpoints/*.ckpt"))


@pytest.mark.parametrize(("step", "saved", "workers"), [(2, 2, 0), (4, 4, 1), (6, 6, 0)])
def test_killed_and_resumed(
    tiny_world: Path, tmp_path: Path, whole: tuple[Any, list[Any]], step: int, saved: int, workers: int
) -> None:
    """What was saved on the way (here after every step) goes on exactly, with loading processes too.

    A fault stands for `kill -9`: nothing is saved when it comes. After the last batch of an epoch the file
    is written behind the validation.
    """
    first, second = Log(("start", step), RuntimeError("killed")), Log()
    with pytest.raises(RuntimeError, match="killed"):
        fit(tiny_world, tmp_path, Recovery(every_minutes=0), first)
    state = torch.load(tmp_path / RECOVERY, weights_only=True)
    assert state["global_step"] == saved
    module, _ = fit(tiny_world, tmp_path, Recovery(), second, ckpt=tmp_path / RECOVERY, num_workers=workers)
    assert first.rows + second.rows == whole[1]
    assert same(module, whole[0])


def kept(directory: Path) -> dict[str, int]:
    """Checkpoint → the step that it holds."""
    found = sorted(directory.rglob("*.ckpt"))
    return {path.name: torch.load(path, weights_only=True)["global_step"] for path in found}


NO_VAL = {"limit_val_batches": 0, "check_val_every_n_epoch": 1}
BEST = {"monitor": VALIDATED, "mode": "max"}


@pytest.mark.parametrize(
    ("keep", "options", "expected"),
    [
        # 3 epochs, validated every second: the third is validated too, and kept.
        ({"save_last": True}, {}, {"epoch=2-step=9.ckpt": 9, "last.ckpt": 9}),
        # The same where the third is not the best: `last.ckpt` is the last all the same.
        (BEST | {"save_last": True}, {}, {"epoch=1-step=6.ckpt": 6, "last.ckpt": 9}),
        # Only the best is wanted, and the last was compared with it.
        (BEST, {}, {"epoch=1-step=6.ckpt": 6}),
        # Steps that end inside an epoch, and epochs between two of `every_n_epochs`.
        (BEST, {"max_steps": 8}, {"epoch=1-step=6.ckpt": 6, "last.ckpt": 8}),
        ({"every_n_epochs": 2}, NO_VAL, {"epoch=1-step=6.ckpt": 6, "last.ckpt": 9}),
        # Nothing is wanted.
        ({"save_top_k": 0}, {}, {}),
    ],
)  # fmt: skip
def test_the_end_is_kept(
    tiny_world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keep: dict[str, Any],
    options: dict[str, Any],
    expected: dict[str, int],
) -> None:
    """Whatever `check_val_every_n_epoch` and the ModelCheckpoint divide, the last epochs are not lost."""
    figures = iter([0.5, 0.25])
    monkeypatch.setattr(
        AlphaClip, "on_validation_epoch_end", lambda self: self.log(VALIDATED, torch.tensor(next(figures)))
    )
    log = Log()
    fit(tiny_world, tmp_path, ModelCheckpoint(tmp_path / "kept", **keep), Recovery(0), log, **options)
    assert kept(tmp_path) == expected
    steps = [row[0] for row in log.rows if isinstance(row[1], dict)]
    assert steps == (
        [] if options.get("limit_val_batches") == 0 else [6] if "max_steps" in options else [6, 9]
    )


def test_no_checkpoints_at_all(tiny_world: Path, tmp_path: Path) -> None:
    """`enable_checkpointing: false` holds for the recovery checkpoint as well."""
    with pytest.raises(SIGTERMException):
        fit(tiny_world, tmp_path, Recovery(0), Log(("step", 1)), enable_checkpointing=False)
    assert not list(tmp_path.rglob("*.ckpt"))
