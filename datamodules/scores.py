"""Score tables → one full batch: what the three scalars of eq. 8 are calibrated on."""

from __future__ import annotations

import lightning as L
import torch
from torch.utils.data import DataLoader

from fovea.batches import ScoreBatch
from fovea.score_table import ScoreTable


def score_batch(table: ScoreTable) -> ScoreBatch:
    """The whole table as tensors."""
    grid = table.grid()
    arrays = (torch.from_numpy(array) for array in (grid.scores, grid.gold, grid.top, grid.negative))
    return ScoreBatch(grid.query_ids, *arrays)


def _only(batches: list[ScoreBatch]) -> ScoreBatch:
    """A dataset row already is the batch."""
    return batches[0]


class ScoreData(L.LightningDataModule):
    """Score tables that `scripts/evaluate.py scores` wrote.

    An epoch is one batch of everything: 10,000 queries × 20 candidates are a few megabytes, and a
    full-batch optimiser converges in seconds. Every rank sees the same batch, so any number of ranks trains
    the same scalars.
    """

    def __init__(self, scores: str, val_scores: str | None = None) -> None:
        """Constructor arguments are the config.

        Args:
            scores: parquet of the calibration splits' scores.
            val_scores: parquet of another split's scores, or None.
        """
        super().__init__()
        self.save_hyperparameters()
        self.table = ScoreTable.read(scores)
        self._train = score_batch(self.table)
        self._val = None if val_scores is None else score_batch(ScoreTable.read(val_scores))

    def train_dataloader(self) -> DataLoader[ScoreBatch]:
        """One batch."""
        return DataLoader([self._train], batch_size=1, collate_fn=_only)  # type: ignore[arg-type]

    def val_dataloader(self) -> list[DataLoader[ScoreBatch]]:
        """One batch, or nothing."""
        return [] if self._val is None else [DataLoader([self._val], batch_size=1, collate_fn=_only)]  # type: ignore[arg-type]
