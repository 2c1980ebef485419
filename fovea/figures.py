"""Score tables and results → PNG figures: distributions before and after reweighting, recall over k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fovea.reweight import Calibrations, fuse
from fovea.score_table import ScoreTable

COLOURS = {
    "global": "#8b93a1", "local": "#3f8fd2", "local_eq5": "#8cc3ee", "add": "#d9822b", "multiply": "#b265c9",
    "eq9": "#cf4f5f", "ranking": "#7a9e3d", "learned": "#12998c",
}  # fmt: skip
GOLD, OTHERS = "#d39a12", "#8b93a1"


def score_distributions(
    table: ScoreTable, calibrations: Calibrations | None, path: str | Path, *, title: str = ""
) -> Path:
    """Histograms of gold and other kept candidates: S_global, S_local, and what calibrations make of them.

    Args:
        table: the scores.
        calibrations: adds a panel each for `eq9` and `learned`.
        path: the PNG.
        title: of the figure.
    """
    names = ["global", "local"] + (["eq9", "learned"] if calibrations is not None else [])
    kept = table.rank > 0
    figure, all_axes = _figure(len(names))
    for axes, name in zip(all_axes, names, strict=True):
        scores = fuse(name, table, calibrations)
        gold, others = scores[kept & table.is_gold], scores[kept & ~table.is_gold]
        both = np.concatenate([gold, others])
        if len(both):
            low, high = both.min(), both.max()
            bins = np.linspace(low, high if high > low else low + 1, 41)
            for values, label, colour in ((others, "others", OTHERS), (gold, "gold", GOLD)):
                if len(values):
                    axes.hist(values, bins=bins, density=True, alpha=0.55, label=label, color=colour)
        axes.set_title({"global": "before: S_global", "local": "S_local"}.get(name, f"after: {name}"))
        axes.set_yticks([])
        axes.set_xlabel("score")
    all_axes[0].legend(frameon=False)
    return _save(figure, path, title or "Scores of gold and other candidates, densities")


def recall_curves(
    retrieval: Mapping[str, Mapping[str, float]],
    intervals: Mapping[str, Mapping[str, Sequence[float]]],
    ks: Sequence[int],
    path: str | Path,
    *,
    title: str = "",
) -> Path:
    """Recall@k over k, a line a fusion with its interval.

    Args:
        retrieval: fusion → metric → mean in [0, 1].
        intervals: fusion → metric → (low, high); absent metrics have none.
        ks: cut-offs.
        path: the PNG.
        title: of the figure.
    """
    figure, (axes,) = _figure(1)
    for name, row in retrieval.items():
        colour = COLOURS.get(name)
        axes.plot(ks, [100 * row[f"recall@{k}"] for k in ks], marker="o", label=name, color=colour)
        bounds = [intervals.get(name, {}).get(f"recall@{k}") for k in ks]
        known = [(k, 100 * b[0], 100 * b[1]) for k, b in zip(ks, bounds, strict=True) if b is not None]
        if known:
            axes.fill_between(*zip(*known, strict=True), alpha=0.12, color=colour, linewidth=0)
    axes.set_xscale("log")
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set_xlabel("k")
    axes.set_ylabel("recall@k, %")
    axes.legend(frameon=False)
    return _save(figure, path, title or "Recall at k, 95 % intervals over queries")


def _figure(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(3.4 * panels if panels > 1 else 6, 3.4 if panels > 1 else 4.2), layout="constrained"
    )
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _save(figure: Any, path: str | Path, title: str) -> Path:
    figure.suptitle(title, fontsize=11)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
