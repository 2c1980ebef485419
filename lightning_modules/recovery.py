"""A fit that is killed, stopped or done → a checkpoint that holds what it trained."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_modules.checkpoints import RECOVERY

_RANKS_LOOK_EVERY = 10  # steps between the ranks' agreements on the clock


class Recovery(L.Callback):
    """Keeps `RUN/recovery.ckpt` while a fit runs, and sees that the end of a fit is validated and kept.

    - Every `every_minutes` and when SIGTERM or Ctrl-C stops the run (after the step in flight), the whole
      state is saved; resuming from it goes on bit for bit. A fit that reaches its end removes the file.
    - The last epoch is validated although `check_val_every_n_epoch` does not divide the number of epochs:
      a ModelCheckpoint that monitors would never see it.
    - A last step that no ModelCheckpoint kept (`max_steps` inside an epoch, `every_n_epochs`, `save_last` of
      a run whose last validation was not its best) is saved as `last.ckpt`; only where every ModelCheckpoint
      keeps the best alone, and has compared the last step, it is not.

    With `trainer.enable_checkpointing=false` nothing is saved.
    """

    def __init__(self, every_minutes: float = 10.0) -> None:
        """`every_minutes`: time between two recovery checkpoints; the last one is overwritten."""
        if not every_minutes >= 0:
            raise ValueError(f"recovery.every_minutes={every_minutes} must be at least 0")
        self.every_minutes = every_minutes
        self.interrupted = False  # by Ctrl-C
        self._path = Path(RECOVERY)
        self._saves = False
        self._saved_at = 0.0  # time.monotonic
        self._kept_step = self._validated_step = -1
        self._cut_validation = self._ended = False
        self._previous: Callable[..., Any] | int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Know the place of the file."""
        self._path = Path(trainer.default_root_dir) / RECOVERY
        self._saves = stage == "fit" and bool(trainer.checkpoint_callbacks)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock; Ctrl-C stops after the step in flight from here on."""
        self._saved_at = time.monotonic()
        self._validate_last_epoch(trainer)  # a run that resumes inside an epoch does not start that one
        # With several ranks, their handlers would run at different steps and leave each other waiting.
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See whether this is the last epoch."""
        self._validate_last_epoch(trainer)

    def _validate_last_epoch(self, trainer: L.Trainer) -> None:
        last = trainer.current_epoch + 1 == trainer.max_epochs
        if trainer.max_steps > 0:
            steps = -(-trainer.num_training_batches // trainer.accumulate_grad_batches)
            last |= trainer.global_step + steps >= trainer.max_steps
        if last and trainer.check_val_every_n_epoch is not None:
            trainer.check_val_every_n_epoch = 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is time; after the last batch of an epoch its validation comes first."""
        if not trainer.is_last_batch and (trainer.world_size == 1 or batch_idx % _RANKS_LOOK_EVERY == 0):
            self._save_when_due(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save when it is time."""
        self._save_when_due(trainer)

    def _save_when_due(self, trainer: L.Trainer) -> None:
        due = time.monotonic() - self._saved_at >= 60 * self.every_minutes
        if self._saves and trainer.strategy.broadcast(due):
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        kept = self._kept_step
        trainer.save_checkpoint(self._path)
        self._kept_step, self._saved_at = kept, time.monotonic()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember which step a ModelCheckpoint kept; a validation that was cut short begins again."""
        self._kept_step = trainer.global_step
        if self._cut_validation:
            # Resumed, Lightning takes what follows a step (validation) for done, unless a batch of it is
            # under way; and it would count the batches before that as seen, but their embeddings are gone.
            place = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
            place["total"] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            place["current"] = dict.fromkeys(place["current"], 0)
            place["is_last_batch"] = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember which step was compared with the others."""
        if not trainer.sanity_checking:
            self._validated_step = trainer.global_step

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Lightning lets a terminated run finish its step and then raises: save there."""
        self._restore_handler()
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if isinstance(exception, SIGTERMException) and fitting and self._saves:
            self._cut_validation = trainer.validating
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the last step, and remove what was only for a run cut short."""
        self._restore_handler()
        self._finish(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The same for a run that was stopped after its last step, and had nothing left to train."""
        if not self._ended:
            self._finish(trainer)

    def _finish(self, trainer: L.Trainer) -> None:
        self._ended = True
        if not self._saves:
            return
        keepers = [item for item in trainer.checkpoint_callbacks if isinstance(item, ModelCheckpoint)]
        wanted = [item for item in keepers if item.save_last or item.save_top_k != 0]
        if trainer.global_step > 0 and self._kept_step != trainer.global_step:
            compared = self._validated_step == trainer.global_step
            wanted = [item for item in wanted if not (compared and item.monitor and not item.save_last)]
            for keeper in sorted(wanted, key=lambda item: not item.save_last)[:1]:
                trainer.save_checkpoint(trainer.strategy.broadcast(_last(keeper)), keeper.save_weights_only)
        if self._path.is_file():
            trainer.strategy.remove_checkpoint(self._path)

    def _on_interrupt(self, *_: Any) -> None:
        self.interrupted = True
        self._restore_handler()
        sys.stderr.write("\nstopping after this step; Ctrl-C again stops at once\n")
        signal.raise_signal(signal.SIGTERM)

    def _restore_handler(self) -> None:
        if self._previous is not None:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGINT, self._previous)
            self._previous = None


def _last(keeper: ModelCheckpoint) -> Path:
    """Where this run's `last.ckpt` belongs; that of another run in the same directory is left alone."""
    if keeper.last_model_path:
        return Path(keeper.last_model_path)
    path = Path(str(keeper.dirpath), f"last{keeper.FILE_EXTENSION}")
    version = 0
    while path.exists():
        version += 1
        path = path.with_name(f"last-v{version}{keeper.FILE_EXTENSION}")
    return path
