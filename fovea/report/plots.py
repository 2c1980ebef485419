"""Figures of a run → inline SVG that follows the page's light and dark colours."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from fovea import figures
from fovea.figures import Curve, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fovea.reweight import Calibrations
    from fovea.score_table import ScoreTable

_VARIABLES = dict(zip(figures.PAGE[:3], ("var(--ink)", "var(--muted)", "var(--line)"), strict=True))


def recall_curve(curves: dict[str, Curve], chance: dict[int, float | None]) -> Markup | None:
    """Recall@k over k, one line a fusion and one for a random order; None with fewer than two k."""
    if max((len(curve.ks) for curve in curves.values()), default=0) < 2:
        return None
    return _svg(figures.recall_curves(curves, chance, figures.PAGE), "Recall at k by fusion")


def score_distributions(
    rows: list[dict[str, Any]], table: ScoreTable | None, calibrations: Calibrations | None, fusion: str
) -> Markup | None:
    """Histograms of the scores of gold and other candidates, before and after reweighting.

    Args:
        rows: of queries.jsonl; their scores are shown where there is no table.
        table: the run's scores.
        calibrations: those of the run; add eq. 9 beside the run's fusion.
        fusion: the run's, shown as "after".

    Returns:
        None where there is nothing to compare.
    """
    if table is not None:
        names = dict.fromkeys(["global", fusion] + (["eq9"] if calibrations is not None else []))
        panels = figures.score_panels(table, calibrations, list(names))
    else:
        panels = [
            _panel(rows, "before", "global", figures.TITLES["global"]),
            _panel(rows, "after", "score", "after: reweighted"),
        ]
    if not all(len(panel.gold) and len(panel.others) for panel in panels):
        return None
    figure = figures.score_distributions(panels, figures.PAGE)
    return _svg(figure, "Scores of gold and other candidates before and after reweighting")


def _panel(rows: list[dict[str, Any]], order: str, score: str, title: str) -> Panel:
    found = [(c["image_id"] in row["gold_image_ids"], c.get(score)) for row in rows for c in row[order]]
    gold, others = (
        figures.finite([s for is_gold, s in found if is_gold == wanted]) for wanted in (True, False)
    )
    return Panel(title, gold, others)


def training_curves(run_dir: Path) -> list[tuple[str, Markup]]:
    """(stage, figure) for every `metrics.csv` below the run: losses, and recalls where there are any."""
    curves = []
    # Stages that runs share are links, which rglob does not follow.
    logs = [
        Path(at) / "metrics.csv"
        for at, _, names in os.walk(run_dir, followlinks=True)
        if "metrics.csv" in names
    ]
    for path in sorted(logs, key=lambda path: path.stat().st_mtime):
        series = read_log(path)
        groups = [
            {name: points for name, points in series.items() if kind in name} for kind in ("loss", "recall")
        ]
        groups = [group for group in groups if group]
        if not groups:
            continue
        figure, all_axes = figures.panels_of(len(groups), figures.PAGE)
        for axes, group in zip(all_axes, groups, strict=True):
            for index, (name, points) in enumerate(group.items()):
                colour = figures.CYCLE[(index * 3 + 1) % len(figures.CYCLE)]
                marker = "o" if len(points) < 30 else ""
                label = name.lstrip("_")
                axes.plot(
                    *zip(*points, strict=True),
                    label=label,
                    color=colour,
                    linewidth=1.6,
                    marker=marker,
                    markersize=3,
                )
            axes.set_xlabel("step")
        figures.legend(figure, figures.PAGE, columns=3)
        stage = path.relative_to(run_dir).parts[0]
        curves.append((stage, _svg(figure, f"Training curves of {stage}")))
    return curves


def read_log(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Lightning's CSV log → column → (step, finite value)."""
    series: dict[str, list[tuple[float, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if not row.get("step"):
                continue
            for name, text in row.items():
                if name not in ("step", "epoch") and text and math.isfinite(float(text)):
                    series.setdefault(name, []).append((float(row["step"]), float(text)))
    return series


def _svg(figure: Figure, label: str) -> Markup:
    """Draw, and cut the result down to what belongs inside a page."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fovea"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    # The first tag: drop the fixed size, say what the picture is.
    view = re.search(r'viewBox="([^"]+)"', text)
    assert view is not None
    head = f'<svg class="plot" role="img" aria-label="{escape(label)}" viewBox="{view[1]}">'
    text = head + text[text.index(">") + 1 :]
    text = re.sub(r"'DejaVu Sans'(, [^;\"]+)?", "system-ui, sans-serif", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return Markup(text)
