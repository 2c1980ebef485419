"""Score tables and recall curves → matplotlib figures, for PNG files, for the page and for loggers.

A caller that shows a figure on the page passes `PAGE`: colours that are replaced by those of the page.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fovea.reweight import Calibrations, fuse
from fovea.score_table import Float64Array, Grid, ScoreTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "global": "#8b93a1", "local": "#3f8fd2", "local_eq5": "#8cc3ee", "add": "#d9822b", "multiply": "#b265c9",
    "eq9": "#cf4f5f", "ranking": "#7a9e3d", "learned": "#12998c",
}  # fmt: skip
CYCLE = list(COLOURS.values())
GOLD, OTHERS = "#d39a12", "#8b93a1"
TITLES = {"global": "before: whole image", "local": "local", "eq9": "eq. 9, closed form"}


class Palette(NamedTuple):
    """Colours of text, of what is secondary, of grid lines, and of the paper (None is transparent)."""

    ink: str
    muted: str
    line: str
    paper: str | None


PRINT = Palette("#1d2430", "#5d6673", "#e4e7eb", "#ffffff")
# Stand-ins that the page replaces by its own colours.
PAGE = Palette("#010203", "#040506", "#070809", None)


@dataclass(frozen=True)
class Curve:
    """recall@k of one fusion over k.

    Attributes:
        ks: ascending, from 1.
        mean: in [0, 1], a value a k.
        low: lower ends of the intervals, or None where they are not known.
        high: upper ends.
    """

    ks: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


class Panel(NamedTuple):
    """Scores under one fusion, gold candidates apart from the others; float64 [n] each."""

    title: str
    gold: Float64Array
    others: Float64Array


def score_panels(table: ScoreTable, calibrations: Calibrations | None, names: Sequence[str]) -> list[Panel]:
    """The kept candidates' scores under each fusion; golds beyond the top K are in no ranking, and not here.

    Args:
        table: the scores.
        calibrations: for the fusions of eq. 8.
        names: fusions, one panel each.
    """
    kept = table.rank > 0
    panels = []
    for name in names:
        scores = fuse(name, table, calibrations)
        title = TITLES.get(name, f"after: {name}")
        panels.append(Panel(title, scores[kept & table.is_gold], scores[kept & ~table.is_gold]))
    return panels


def calibration_panels(grid: Grid, calibrations: Calibrations) -> list[Panel]:
    """The calibration split before and after: S_global, the trained fusion, and eq. 9 beside it.

    Args:
        grid: the split's scores; only the kept candidates are shown.
        calibrations: the trained scalars and the exact ones.
    """
    fits = {
        TITLES["global"]: (1.0, 0.0, 0.0),
        f"after: learned ({calibrations.learned.objective})": calibrations.learned.scalars,
        TITLES["eq9"]: calibrations.eq9.scalars,
    }
    panels = []
    for title, (w_global, w_local, bias) in fits.items():
        scores = grid.scores @ np.array([w_global, w_local]) + bias
        panels.append(Panel(title, scores[grid.top & grid.gold], scores[grid.top & ~grid.gold]))
    return panels


def score_distributions(panels: Sequence[Panel], palette: Palette = PRINT) -> Figure:
    """Density histograms of the scores of gold and other candidates."""
    figure, all_axes = panels_of(len(panels), palette, wide=palette.paper is not None)
    for axes, panel in zip(all_axes, panels, strict=True):
        both = np.concatenate([panel.gold, panel.others])
        if len(both):
            low, high = float(both.min()), float(both.max())
            width = (high - low) / 32 or 1.0
            bins = [low + width * i for i in range(34)]
            for values, label, colour in ((panel.others, "others", OTHERS), (panel.gold, "gold", GOLD)):
                if len(values):
                    axes.hist(
                        values, bins=bins, density=True, histtype="stepfilled", alpha=0.5, color=colour,
                        label=label, edgecolor=colour, linewidth=1.4,
                    )  # fmt: skip
        axes.set_title(panel.title, color=palette.ink, fontsize=10, parse_math=False)
        axes.set_yticks([])
        axes.set_xlabel("score")
    legend(figure, palette, columns=2)
    return figure


def recall_curves(
    curves: Mapping[str, Curve],
    chance: Mapping[int, float | None] | None = None,
    palette: Palette = PRINT,
) -> Figure:
    """Recall@k over k, one line a fusion with its interval, and one for a random order.

    Args:
        curves: by fusion.
        chance: k → recall@k of a random order; None where it is not known.
        palette: colours.
    """
    figure, (axes,) = panels_of(1, palette, wide=palette.paper is not None)
    for index, (name, curve) in enumerate(curves.items()):
        main = name in ("global", "learned")
        colour = COLOURS.get(name, CYCLE[index % len(CYCLE)])
        dots = len(curve.ks) <= 10
        axes.plot(
            curve.ks, [100 * value for value in curve.mean], label=name, marker="o" if dots else "",
            markersize=4 if main else 3, color=colour, linewidth=2.6 if main else 1.4,
            linestyle="-" if main else "--", zorder=3 if main else 2,
        )  # fmt: skip
        if curve.low is not None and curve.high is not None:
            axes.fill_between(
                curve.ks, [100 * v for v in curve.low], [100 * v for v in curve.high],
                color=colour, alpha=0.16 if main else 0.08, linewidth=0,
            )  # fmt: skip
    by_chance = [(k, 100 * value) for k, value in (chance or {}).items() if value is not None]
    if by_chance:
        axes.plot(
            *zip(*by_chance, strict=True),
            label="chance",
            color=palette.muted,
            linewidth=1.2,
            linestyle=":",
            zorder=1,
        )
    last = max((max(curve.ks) for curve in curves.values()), default=1)
    ticks = sorted({k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k < last} | {last})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(k) for k in ticks])
    axes.minorticks_off()
    axes.set_xlabel("k")
    axes.set_ylabel("recall@k, %")
    axes.set_ylim(top=101)
    legend(figure, palette, columns=4)
    return figure


def curves_of(results: Mapping[str, Any]) -> dict[str, Curve]:
    """What a results.json holds of recall over k: every k, or in older ones the cut-offs."""
    if "curves" in results:
        ks = results["curves"]["k"]
        recall = results["curves"]["recall"]
        return {name: Curve(ks, row["mean"], row["low"], row["high"]) for name, row in recall.items()}
    curves = {}
    for name, row in results["retrieval"].items():
        ks = sorted(int(metric.partition("@")[2]) for metric in row if metric.startswith("recall@"))
        known = (results.get("intervals") or {}).get(name, {})
        ends = [known.get(f"recall@{k}") for k in ks]
        whole = ks and all(ends)
        curves[name] = Curve(
            ks,
            [row[f"recall@{k}"] for k in ks],
            [end[0] for end in ends] if whole else None,
            [end[1] for end in ends] if whole else None,
        )
    return curves


def png(figure: Figure, title: str = "") -> bytes:
    """The figure as a PNG file's bytes."""
    if title:
        figure.suptitle(title, fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()


def write_png(figure: Figure, path: str | Path, title: str = "") -> Path:
    """Write a PNG, whole or not at all; its directory is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = path.with_name(f".{path.name}.writing")
    writing.write_bytes(png(figure, title))
    writing.replace(path)
    return path


def panels_of(panels: int, palette: Palette, *, wide: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side, in the page's manner.

    Args:
        panels: how many.
        palette: colours.
        wide: a size for a file of its own instead of one for the page's column.
    """
    from matplotlib.figure import Figure

    size = (max(6.4, 3.4 * panels), 4.0) if wide else (4.7, 3.0)
    figure = Figure(figsize=size, layout="constrained")
    if palette.paper is None:
        figure.patch.set_alpha(0)
    else:
        figure.patch.set_facecolor(palette.paper)
    all_axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in all_axes:
        axes.patch.set_alpha(0)
        axes.grid(color=palette.line, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=palette.muted, labelsize=9, length=0)
        axes.xaxis.label.set_color(palette.muted)
        axes.yaxis.label.set_color(palette.muted)
        axes.xaxis.label.set_fontsize(9)
        axes.yaxis.label.set_fontsize(9)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(palette.muted)
    return figure, all_axes


def legend(figure: Figure, palette: Palette, *, columns: int) -> None:
    """One legend below the panels, where it hides nothing; a label that several panels use is named once."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    made = figure.legend(
        list(entries.values()), list(entries), frameon=False, labelcolor=palette.ink, fontsize=9,
        ncols=columns, loc="outside lower center", columnspacing=1.4, handlelength=1.6,
    )  # fmt: skip
    for text in made.get_texts():
        text.set_parse_math(False)


def finite(values: Sequence[float | None]) -> Float64Array:
    """The finite ones among scores that a file may lack."""
    return np.array([v for v in values if v is not None and math.isfinite(v)], np.float64)
