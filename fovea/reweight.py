"""Candidates + Regions → ScoredImages: local scores (eq. 5), fusion (eq. 7–8) and its calibration (eq. 9).

Shapes: `Q` queries, `M` rows (query × candidate), `T` phrases of a query (padded), `W` rows of the longest
query. One `ScoreTable` yields every row of the fusion table; nothing here runs a model.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fovea.score_table import Float64Array, Grid, IntArray, ScoreTable
from fovea.types import FUSIONS, BoolArray

if TYPE_CHECKING:
    from torch import Tensor

Weights = Literal["uniform", "eq4", "eq4_raw"]
MissingPhrase = Literal["zero", "ignore", "full_mask"]
Objective = Literal["eq9", "ranking"]

# The fusions of eq. 8; the others are static.
CALIBRATED = ("eq9", "ranking", "learned")


def local_score(
    similarity_MT: Float64Array,
    eq4_MT: Float64Array,
    num_phrases_M: IntArray,
    *,
    weights: Weights = "eq4",
    missing: MissingPhrase = "zero",
) -> tuple[Float64Array, Float64Array]:
    """S_local = Σ_k α_k cos_k (eq. 5) for every row, and the weights used.

    Args:
        similarity_MT: cosine of phrase (or question) k with its region; NaN where phrase k has no region
            and past the last phrase.
        eq4_MT: eq. 4 as printed over the chosen regions, summing to the covered fraction of the image; 0
            where missing.
        num_phrases_M: phrases of the row's query, found or not.
        weights: `uniform` = 1/T; `eq4` = eq. 4 divided by its sum; `eq4_raw` = as printed.
        missing: what a phrase without a region counts. `zero`: its share of the weight (1/T) at no
            evidence; `ignore`: nothing, the others share the whole weight. With `full_mask` the caller has
            grounded it in the whole image, so nothing is missing here. Under `eq4_raw` an absent mask has
            no weight, so `zero` = `ignore`.

    Returns:
        float64 [M] scores, 0 where nothing was found, and float64 [M, T] weights, 0 where missing; never NaN.
    """
    found = np.isfinite(similarity_MT)
    num_found = found.sum(1)
    if weights == "eq4_raw":
        alpha = np.where(found, eq4_MT, 0.0)
    else:
        share = found / np.maximum(num_found, 1)[:, None]
        if weights == "eq4":
            raw = np.where(found, eq4_MT, 0.0)
            total = raw.sum(1, keepdims=True)
            # All chosen masks empty: eq. 4 says nothing, the phrases share equally.
            share = np.where(total > 0, raw / np.where(total > 0, total, 1.0), share)
        kept = num_found / np.maximum(num_phrases_M, 1) if missing == "zero" else np.ones(len(found))
        alpha = share * kept[:, None]
    return (alpha * np.where(found, similarity_MT, 0.0)).sum(1), alpha


@dataclass(frozen=True)
class Calibration:
    """The three scalars of eq. 8.

    Attributes:
        objective: `eq9` or `ranking`.
        w_global: W_g.
        w_local: W_l.
        bias: B; shifts all candidates of a query alike, so it never changes an order. `ranking` leaves it
            0.
        loss: mean of the objective over the queries used.
        num_queries: queries used.
        num_skipped: queries left out (`eq9`: no gold or no negative; `ranking`: no gold image within the
            top K).
        method: `closed_form` (least squares, or Newton for `ranking`) or `gradient`.
    """

    objective: Objective
    w_global: float
    w_local: float
    bias: float = 0.0
    loss: float = float("nan")
    num_queries: int = 0
    num_skipped: int = 0
    method: Literal["closed_form", "gradient"] = "closed_form"

    @property
    def scalars(self) -> tuple[float, float, float]:
        """(W_g, W_l, B)."""
        return self.w_global, self.w_local, self.bias

    def warn_if_negative(self) -> None:
        """Tell the user when a higher similarity would lower the fused score."""
        for name, value in (("W_g", self.w_global), ("W_l", self.w_local)):
            if value < 0:
                warnings.warn(
                    f"{self.objective}: {name} = {value:.3g} is negative, so a higher similarity lowers the "
                    "fused score. Eq. 9 draws its negatives by S_global and can invert when the coarse stage "
                    "is weak; compare with the `ranking` objective, whose weights are non-negative.",
                    stacklevel=3,
                )


@dataclass(frozen=True)
class Calibrations:
    """What one calibration run yields: its own scalars, and the exact solutions of both objectives.

    Attributes:
        learned: the run's default, trained by gradient on the objective that it names.
        eq9: closed form of the paper's objective.
        ranking: exact solution of the ranking objective.
    """

    learned: Calibration
    eq9: Calibration
    ranking: Calibration

    @property
    def difference(self) -> float:
        """How far the trained scalars are from the exact ones of their objective: the largest of the three,
        absolute, and relative to the exact one where that is above 1.
        """
        exact = (self.eq9 if self.learned.objective == "eq9" else self.ranking).scalars
        pairs = zip(self.learned.scalars, exact, strict=True)
        return max(abs(trained - solved) / max(1.0, abs(solved)) for trained, solved in pairs)

    def write(self, path: str | Path) -> None:
        """Write as JSON, with `difference`, which is there for the reader."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        fields = asdict(self) | {"difference": self.difference}
        Path(path).write_text(json.dumps(fields, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Calibrations:
        """Read what `write` wrote."""
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"no calibration at {path}; make it with: python scripts/train.py fit -c <reweight>.yaml"
            )
        try:
            data = json.loads(Path(path).read_text())
            data.pop("difference", None)
            read = cls(**{name: Calibration(**fields) for name, fields in data.items()})
            scalars = [
                v
                for fit in (read.learned, read.eq9, read.ranking)
                for v in (fit.w_global, fit.w_local, fit.bias)
            ]
            if not all(isinstance(v, int | float) and math.isfinite(v) for v in scalars):
                raise TypeError(f"weights that are not finite: {scalars}")
            return read
        except (TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a calibration that a Reweight run wrote ({error})") from error


def fuse(name: str, table: ScoreTable, calibrations: Calibrations | None = None) -> Float64Array:
    """One row of the fusion table: the score of every row (eq. 7–8).

    Args:
        name: one of `FUSIONS`.
        table: the scores.
        calibrations: the scalars of `eq9`, `ranking` and `learned`; needed for those names only.
    """
    if name not in FUSIONS:
        raise ValueError(f"unknown fusion `{name}`; one of {', '.join(FUSIONS)}")
    if name in CALIBRATED:
        if calibrations is None:
            raise ValueError(
                f"fusion `{name}` needs a calibration; give one, or choose a static fusion such as `add`"
            )
        fit: Calibration = getattr(calibrations, name)
        return fit.w_global * table.global_ + fit.w_local * table.local + fit.bias
    static = {
        "global": table.global_,
        "local": table.local,
        "local_eq5": table.local_eq5,
        "add": table.global_ + table.local,
        "multiply": table.global_ * table.local,
    }
    return static[name]


def eq9_loss(scores_QW: Tensor, gold_QW: Tensor, negative_QW: Tensor) -> Tensor:
    """L = (1 − S⁺)² + (S⁻)² (HuLiRAG eq. 9), mean over queries that have both: gold to 1, negative to 0.

    A query with several gold images takes the mean of their terms. Gold images beyond the top K count.
    """
    used = gold_QW.any(1) & negative_QW.any(1)
    scores, gold, negative = scores_QW[used], gold_QW[used], negative_QW[used]
    positive = ((1 - scores) ** 2 * gold).sum(1) / gold.sum(1)
    return (positive + (scores**2 * negative).sum(1)).mean()


def ranking_loss(scores_QW: Tensor, gold_QW: Tensor, top_QW: Tensor) -> Tensor:
    """−log softmax of the gold image over the top K, mean over queries whose gold image is there.

    A query with several takes the mean of their terms (convex in the scores, unlike the log of their sum).
    """
    gold = gold_QW & top_QW
    used = gold.any(1)
    scores, gold, top = scores_QW[used], gold[used], top_QW[used]
    log_p = scores - scores.masked_fill(~top, float("-inf")).logsumexp(1, keepdim=True)
    return -((log_p * gold).sum(1) / gold.sum(1)).mean()


def fit_eq9(grid: Grid) -> Calibration:
    """The scalars that minimise eq. 9, by least squares on (S_global, S_local, 1); warns when negative."""
    used = np.asarray(grid.gold.any(1) & grid.negative.any(1))
    if not used.any():
        raise ValueError(f"eq9: none of {len(used)} queries has a gold image and a negative to calibrate on")
    gold, negative = grid.gold[used], grid.negative[used]
    share = (
        gold / gold.sum(1, keepdims=True) + negative
    )  # weight of each squared term; the two never share a row
    rows = share > 0
    x = np.concatenate([grid.scores[used][rows], np.ones((int(rows.sum()), 1))], 1)
    root, target = np.sqrt(share[rows]), gold[rows].astype(np.float64)
    solution = np.linalg.lstsq(x * root[:, None], target * root, rcond=None)[0]
    loss = float((((x @ solution - target) * root) ** 2).sum() / used.sum())
    w_global, w_local, bias = map(float, solution)
    fit = Calibration("eq9", w_global, w_local, bias, loss, int(used.sum()), int((~used).sum()))
    fit.warn_if_negative()
    return fit


def fit_ranking(grid: Grid, *, l2: float = 1e-6) -> Calibration:
    """The non-negative scalars that minimise `ranking_loss`, to machine precision.

    The loss is convex in two weights, so the best of the solutions with each set of free weights is the
    constrained one.

    Args:
        grid: the calibration split's scores.
        l2: ridge on the weights (`l2/2 · ‖W‖²`), so that perfectly separable scores have a finite solution.
    """
    gold = grid.gold & grid.top
    used = np.asarray(gold.any(1))
    if not used.any():
        raise ValueError(f"ranking: none of {len(used)} queries has its gold image within the top K")
    x, gold, top = grid.scores[used], gold[used], grid.top[used]
    target = gold / gold.sum(1, keepdims=True)
    solutions = [
        _newton(x, target, top, np.array(free), l2)
        for free in ([True, True], [False, True], [True, False], [False, False])
    ]
    # The ridge is part of what is minimised: without it the larger weights would win.
    loss, w = min(
        ((loss, w) for loss, w in solutions if (w >= 0).all()),
        key=lambda item: item[0] + l2 / 2 * float(item[1] @ item[1]),
    )
    return Calibration("ranking", float(w[0]), float(w[1]), 0.0, loss, int(used.sum()), int((~used).sum()))


def _newton(
    x: Float64Array, target: Float64Array, top: BoolArray, free: BoolArray, l2: float
) -> tuple[float, Float64Array]:
    """Damped Newton on the free weights, the others 0 → (loss without the ridge, weights)."""

    def value(w: Float64Array) -> tuple[float, Float64Array]:
        logits = np.where(top, x @ w, -np.inf)
        peak = logits.max(1, keepdims=True)
        log_z = peak + np.log(np.exp(logits - peak).sum(1, keepdims=True))
        loss = float((log_z[:, 0] - (target * np.where(top, logits, 0.0)).sum(1)).mean())
        return loss, np.exp(logits - log_z)

    w = np.zeros(2)
    loss, p = value(w)
    for _ in range(100):
        mean = np.einsum("qk,qkd->qd", p, x)
        gradient = (mean - np.einsum("qk,qkd->qd", target, x)).mean(0) + l2 * w
        if not free.any() or np.abs(gradient[free]).max() < 1e-12:
            break
        centred = x - mean[:, None]
        hessian = np.einsum("qk,qkd,qke->de", p, centred, centred) / len(x) + l2 * np.eye(2)
        step = np.zeros(2)
        step[free] = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
        size, slope = 1.0, float(gradient @ step)
        for _ in range(40):
            trial = w - size * step
            trial_loss, trial_p = value(trial)
            gain = loss + l2 / 2 * float(w @ w) - trial_loss - l2 / 2 * float(trial @ trial)
            if gain >= 1e-4 * size * slope or size * slope < 1e-14:
                break
            size /= 2
        w, loss, p = trial, trial_loss, trial_p
    return loss, w
