"""One question of a run → one picture: phrases, candidates before and after, the regions they rest on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fovea import masks
from fovea.images import ImageReader
from fovea.tables import Tables

COLOURS = ("#d1495b", "#2f6fdd", "#2a9d5c", "#b07d1c")


def draw(run_dir: str | Path, out: str | Path, *, tables: str | Path | None = None, shown: int = 5) -> str:
    """Write a PNG of the question whose right image reweighting moved furthest up to the first place.

    Args:
        run_dir: a run with results.json and queries.jsonl.
        out: the PNG to write.
        tables: canonical tables, where they are no longer where results.json says.
        shown: candidates in each row.

    Returns:
        The id of the question.

    Raises:
        ValueError: reweighting brought no question's image to the first place.
    """
    run_dir = Path(run_dir)
    rows = [json.loads(line) for line in (run_dir / "queries.jsonl").read_text().splitlines()]
    root = tables or json.loads((run_dir / "results.json").read_text())["settings"]["tables"]
    fixed = [
        (place, row)
        for row in rows
        if (place := _place(row["before"], row["gold_image_ids"])) is not None
        and place >= 2
        and _place(row["after"], row["gold_image_ids"]) == 0
        and len(row["phrases"]) > 1
    ]
    if not fixed:
        raise ValueError(
            f"{run_dir}: reweighting brought no question's image from place 3 or below to the first"
        )
    # Far enough down to show something, near enough for its old place to be visible.
    place, row = max(fixed, key=lambda item: (item[0] < shown, item[0], item[1]["query_id"]))
    _figure(row, Tables(root), shown).savefig(out, dpi=110, bbox_inches="tight", facecolor="white")
    return str(row["query_id"])


def _place(candidates: list[dict[str, Any]], gold: list[str]) -> int | None:
    return next((i for i, c in enumerate(candidates) if c["image_id"] in gold), None)


def _figure(row: dict[str, Any], tables: Tables, shown: int) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    images = {image["id"]: image for image in tables.rows("images")}
    reader = ImageReader(tables.root)
    figure = Figure(figsize=(1.9 * shown, 4.7))
    axes = figure.subplots(2, shown, gridspec_kw={"hspace": 0.2, "top": 0.88, "bottom": 0.05})
    colours = {p["id"]: COLOURS[i % len(COLOURS)] for i, p in enumerate(row["phrases"])}
    figure.suptitle(row["text"], fontsize=15, y=1.02)
    for i, phrase in enumerate(row["phrases"]):
        x = (i + 1) / (len(row["phrases"]) + 1)
        figure.text(
            x, 0.955, phrase["text"], color=colours[phrase["id"]], ha="center", fontsize=12, weight="bold"
        )
    for name, axis_row, candidates in (
        ("retrieve", axes[0], row["before"]),
        ("reweight", axes[1], row["after"]),
    ):
        for axis in axis_row:
            axis.set_axis_off()
        for k, (axis, candidate) in enumerate(zip(axis_row, candidates[:shown], strict=False)):
            pixels = reader.read(images[candidate["image_id"]])
            axis.imshow(pixels, interpolation="nearest")
            score = f"{candidate['global']:.2f}"
            if name == "reweight":
                score = f"{candidate['global']:.2f} | {candidate['local']:.2f}"
            axis.set_title(f"{k + 1}.  {score}", fontsize=9)
            for region in candidate.get("regions", []):
                if "rle" in region:
                    size, counts = region["rle"]["size"], region["rle"]["counts"].encode("ascii")
                    mask = masks.decode({"size": size, "counts": counts}).astype(np.float32)
                    axis.contour(mask, levels=[0.5], colors=[colours[region["phrase_id"]]], linewidths=2.2)
            if candidate["image_id"] in row["gold_image_ids"]:
                frame = Rectangle((0, 0), 1, 1, transform=axis.transAxes, fill=False, lw=6, ec="#2a9d5c")
                axis.add_patch(frame)
    figure.text(0.08, 0.69, "retrieve\nglobal score", rotation=90, va="center", ha="center", fontsize=11)
    figure.text(
        0.08,
        0.29,
        "what · where · reweight\nglobal | local",
        rotation=90,
        va="center",
        ha="center",
        fontsize=11,
    )
    return figure
