"""Reweight (HuLiRAG eq. 8–9): trains W_g, W_l and B; the embeddings do not move."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor, nn

from fovea import figures
from fovea.batches import ScoreBatch
from fovea.reweight import (
    Calibration,
    Calibrations,
    Objective,
    eq9_loss,
    fit_eq9,
    fit_ranking,
    ranking_loss,
)
from fovea.score_table import Grid

TOLERANCE = 1e-3  # between the gradient run and the closed form, relative to weights above 1


class Reweight(L.LightningModule):
    """S = W_g · S_global + W_l · S_local + B under one of two objectives.

    `eq9` is the paper's regression, with free weights. `ranking` is cross-entropy over the top K with
    non-negative weights: the parameters are their square roots, so that a weight of exactly 0 is an
    ordinary minimum. B shifts all candidates of a query alike; `ranking` gives it no gradient.
    """

    def __init__(
        self, objective: Objective = "eq9", lr: float = 1.0, max_iter: int = 200, l2: float = 1e-6
    ) -> None:
        """Constructor arguments are the config.

        Args:
            objective: `eq9` or `ranking`.
            lr: L-BFGS step; its line search finds the length, so 1 is right.
            max_iter: L-BFGS iterations an epoch; with the full batch one epoch nearly always converges.
            l2: ridge on the weights under `ranking`, so that separable scores have a finite solution.
        """
        super().__init__()
        problems = []
        if not lr > 0:
            problems.append(f"model.lr={lr} must be positive")
        if max_iter < 1:
            problems.append(f"model.max_iter={max_iter} must be at least 1")
        if not l2 >= 0:
            problems.append(f"model.l2={l2} must be at least 0")
        if problems:
            raise ValueError("; ".join(problems))
        self.save_hyperparameters()
        self._seen: ScoreBatch | None = None
        # float64: the closed form is met to many digits only so, and three scalars cost nothing. From 0,
        # eq. 9 ends at the smallest of its solutions where there are many (S_local a copy of S_global, or 0),
        # as least squares does; a root cannot leave 0, and the ridge makes that of `ranking` unique.
        start = torch.zeros if objective == "eq9" else torch.ones
        self.weights = nn.Parameter(start(2, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def effective_weights(self) -> Tensor:
        """(W_g, W_l), float64 [2]."""
        return self.weights if self.hparams["objective"] == "eq9" else self.weights**2

    def forward(self, scores: Tensor) -> Tensor:
        """[..., 2] (S_global, S_local) → fused scores (eq. 8)."""
        return scores.double() @ self.effective_weights() + self.bias

    def loss(self, batch: ScoreBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The objective over the queries that it can use, its ridge, and which these are (bool [Q])."""
        fused = self(batch.scores)
        if self.hparams["objective"] == "eq9":
            usable = batch.gold.any(1) & batch.negative.any(1)
            return eq9_loss(fused, batch.gold, batch.negative), self.weights.new_zeros(()), usable
        ridge = self.hparams["l2"] / 2 * (self.effective_weights() ** 2).sum()
        return ranking_loss(fused, batch.gold, batch.top), ridge, (batch.gold & batch.top).any(1)

    def training_step(self, batch: ScoreBatch, _: int) -> Tensor:
        """Forward, loss, log."""
        loss, ridge, usable = self.loss(batch)
        if not torch.isfinite(loss):
            bad = [
                id_
                for id_, row in zip(batch.query_ids, batch.scores, strict=True)
                if not torch.isfinite(row).all()
            ]
            raise FloatingPointError(
                f"loss is {loss.item()} at step {self.global_step}, (W_g, W_l) = "
                f"{self.effective_weights().tolist()}; usable queries: {int(usable.sum())}; "
                f"queries with non-finite scores: {bad[:20] or 'none'}"
            )
        w_global, w_local = self.effective_weights().detach()
        figures = {"train/loss": loss, "W_g": w_global, "W_l": w_local, "B": self.bias.detach()}
        self.log_dict(figures, batch_size=len(batch.query_ids))
        self._seen = batch
        return loss + ridge

    def validation_step(self, batch: ScoreBatch, _: int) -> None:
        """Loss of the objective on another split."""
        self.log("val/loss", self.loss(batch)[0], batch_size=len(batch.query_ids))

    def on_fit_end(self) -> None:
        """Write the run's product, `calibration.json` and `scores.png`, at the top of its directory."""
        if self._seen is None or not self.trainer.is_global_zero:
            return
        with torch.no_grad():
            loss, _, usable = self.loss(self._seen)
        (w_global, w_local), used = self.effective_weights().tolist(), int(usable.sum())
        learned = Calibration(
            objective=self.hparams["objective"],
            w_global=w_global,
            w_local=w_local,
            bias=self.bias.item(),
            loss=loss.item(),
            num_queries=used,
            num_skipped=len(usable) - used,
            method="gradient",
        )
        grid = Grid(self._seen.query_ids, *(array.cpu().numpy() for array in self._seen[1:]))
        calibrations = Calibrations(learned, fit_eq9(grid), fit_ranking(grid, l2=self.hparams["l2"]))
        self._compare(calibrations)
        directory = Path(self.trainer.default_root_dir)
        calibrations.write(directory / "calibration.json")
        figure = figures.score_distributions(figures.calibration_panels(grid, calibrations))
        title = f"Calibration split, {used} queries: densities of gold and other candidates"
        path = figures.write_png(figure, directory / "scores.png", title)
        for logger in self.trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("calibration/scores", [str(path)])

    def _compare(self, calibrations: Calibrations) -> None:
        """Print both solutions; warn where the gradient run did not get there."""
        learned, largest = calibrations.learned, calibrations.difference
        exact = calibrations.eq9 if learned.objective == "eq9" else calibrations.ranking
        found, wanted = (", ".join(f"{value:.4f}" for value in fit.scalars) for fit in (learned, exact))
        both = f"W_g, W_l, B by gradient {found}, in closed form {wanted}"
        print(f"{learned.objective}: {both}; largest difference {largest:.1e}")  # noqa: T201
        if not largest <= TOLERANCE:  # NaN is no agreement either
            warnings.warn(
                f"{learned.objective}: the gradient run differs from the closed form by {largest:.1e} "
                f"({both}); raise model.max_iter or trainer.max_epochs, or use the closed form: "
                "calibration.json holds both",
                stacklevel=2,
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Full-batch L-BFGS with a line search."""
        return torch.optim.LBFGS(
            self.parameters(),
            lr=self.hparams["lr"],
            max_iter=self.hparams["max_iter"],
            tolerance_grad=1e-12,
            tolerance_change=1e-16,
            line_search_fn="strong_wolfe",
        )
