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

from fovea.figures import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stand-ins that matplotlib draws with and the page replaces by its own colours.
_INK, _MUTED, _LINE = "#010203", "#040506", "#070809"
_VARIABLES = {_INK: "var(--ink)", _MUTED: "var(--muted)", _LINE: "var(--line)"}
_CYCLE = list(COLOURS.values())


def recall_curve(
    retrieval: dict[str, dict[str, float]], ks: list[int], chance: dict[int, float | None]
) -> Markup | None:
    """Recall@k over k, one line a fusion and one for a random order; None with fewer than two k."""
    if len(ks) < 2:
        return None
    figure, (axes,) = _figure(1)
    for index, (name, row) in enumerate(retrieval.items()):
        points = [(k, 100 * row[f"recall@{k}"]) for k in ks if f"recall@{k}" in row]
        main = name in ("global", "learned")
        axes.plot(
            *zip(*points, strict=True), label=name, marker="o", markersize=4 if main else 3,
            color=COLOURS.get(name, _CYCLE[index % len(_CYCLE)]), linewidth=2.6 if main else 1.4,
            linestyle="-" if main else "--", zorder=3 if main else 2,
        )  # fmt: skip
    by_chance = [(k, 100 * value) for k in ks if (value := chance.get(k)) is not None]
    if by_chance:
        axes.plot(
            *zip(*by_chance, strict=True),
            label="chance",
            color=_MUTED,
            linewidth=1.2,
            linestyle=":",
            zorder=1,
        )
    axes.set_xscale("log")
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set_xlabel("k")
    axes.set_ylabel("recall@k, %")
    axes.set_ylim(top=101)
    _legend(figure, columns=4)
    return _svg(figure, "Recall at k by fusion")


def score_distributions(rows: list[dict[str, Any]]) -> Markup | None:
    """Histograms of the scores of gold and other candidates, before and after reweighting."""
    panels = []
    for order, score, title in (
        ("before", "global", "before: whole image"),
        ("after", "score", "after: reweighted"),
    ):
        values: dict[bool, list[float]] = {True: [], False: []}
        for row in rows:
            gold = set(row["gold_image_ids"])
            for found in row[order]:
                if found.get(score) is not None and math.isfinite(found[score]):
                    values[found["image_id"] in gold].append(found[score])
        panels.append((title, values))
    if not all(values[True] and values[False] for _, values in panels):
        return None
    figure, all_axes = _figure(2)
    for axes, (title, values) in zip(all_axes, panels, strict=True):
        low, high = min(min(v) for v in values.values()), max(max(v) for v in values.values())
        width = (high - low) / 32 or 1.0
        bins = [low + width * i for i in range(34)]
        for is_gold, name, colour in ((False, "others", COLOURS["global"]), (True, "gold", "#d39a12")):
            axes.hist(
                values[is_gold], bins=bins, density=True, histtype="stepfilled", alpha=0.5, color=colour,
                label=name, edgecolor=colour, linewidth=1.4,
            )  # fmt: skip
        axes.set_title(title, color=_INK, fontsize=10, parse_math=False)
        axes.set_yticks([])
        axes.set_xlabel("score")
    _legend(figure, columns=2)
    return _svg(figure, "Scores of gold and other candidates before and after reweighting")


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
        figure, all_axes = _figure(len(groups))
        for axes, group in zip(all_axes, groups, strict=True):
            for index, (name, points) in enumerate(group.items()):
                colour = _CYCLE[(index * 3 + 1) % len(_CYCLE)]
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
        _legend(figure, columns=3)
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


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.7, 3.0), layout="constrained")
    figure.patch.set_alpha(0)
    all_axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in all_axes:
        axes.patch.set_alpha(0)
        axes.grid(color=_LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_MUTED, labelsize=9, length=0)
        axes.xaxis.label.set_color(_MUTED)
        axes.yaxis.label.set_color(_MUTED)
        axes.xaxis.label.set_fontsize(9)
        axes.yaxis.label.set_fontsize(9)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_MUTED)
    return figure, all_axes


def _legend(figure: Figure, *, columns: int) -> None:
    """One legend below the panels, where it hides nothing; a label that several panels use is named once."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    legend = figure.legend(
        list(entries.values()), list(entries), frameon=False, labelcolor=_INK, fontsize=9, ncols=columns,
        loc="outside lower center", columnspacing=1.4, handlelength=1.6,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


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
