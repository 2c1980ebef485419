"""Canonical tables → report: which images are present, missing or unreadable, and what belongs to them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datamodules.workers import ordered_map
from fovea.bad_images import BAD_IMAGES
from fovea.images import BadImage, ImageReader
from fovea.tables import Tables

STATES = ("present", "missing", "unreadable")
# Wraps an iterable of known length, e.g. tqdm.
Progress = Callable[[Iterable[Any], int], Iterable[Any]]


def silent(items: Iterable[Any], _: int) -> Iterable[Any]:
    """No progress bar."""
    return items


@dataclass
class Report:
    """What is in the tables.

    Attributes:
        images: split → state (`present`, `missing`, `unreadable`) → number of images.
        queries: split → kind (`caption`, `question`, …) → number.
        regions: split → kind (the regions' `source`: `polygon`, `crowd_rle`, `panoptic`, …) → number.
        bad: one row for each missing or unreadable image: id, split, path, state, reason.
        notes: what a user should know.
        problems: contradictions inside the tables.
    """

    images: dict[str, Counter[str]] = field(default_factory=dict)
    queries: dict[str, Counter[str]] = field(default_factory=dict)
    regions: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every image is there and readable, and the tables agree with each other."""
        return not self.bad and not self.problems

    def add_bad(self, row: dict[str, str]) -> None:
        """Count a missing or unreadable image and keep its row."""
        self.images.setdefault(row["split"], Counter())[row["state"]] += 1
        self.bad.append(row)

    def to_json(self) -> dict[str, Any]:
        """Plain counts, for the manifest."""
        counts = {"images": self.images, "queries": self.queries, "regions": self.regions}
        plain = {name: {split: dict(by) for split, by in table.items()} for name, table in counts.items()}
        return plain | {"notes": self.notes}

    def text(self) -> str:
        """A table, one line a split, then what is wrong."""
        splits = [*dict.fromkeys([*self.images, *self.queries, *self.regions])]
        columns: list[tuple[str, dict[str, Counter[str]], str]] = [(s, self.images, s) for s in STATES]
        for noun, table in (("queries", self.queries), ("regions", self.regions)):
            kinds = sorted({kind for by in table.values() for kind in by})
            columns += [(f"{noun}: {kind}", table, kind) for kind in kinds]
        lines = [["split", *(title for title, _, _ in columns)]]
        for split in splits:
            lines.append([split, *(str(table.get(split, Counter())[kind]) for _, table, kind in columns)])
        totals = [sum(by[kind] for by in table.values()) for _, table, kind in columns]
        lines.append(["total", *map(str, totals)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        ]
        rows += [f"{row['state']}: {row['id']} ({row['path']}): {row['reason']}" for row in self.bad[:20]]
        if len(self.bad) > 20:
            rows.append(f"… and {len(self.bad) - 20:,} more bad images; all of them are in {BAD_IMAGES}")
        return "\n".join(
            [*rows, *(f"note: {n}" for n in self.notes), *(f"PROBLEM: {p}" for p in self.problems)]
        )


def write_bad(path: Path, bad: Iterable[dict[str, str]]) -> None:
    """JSONL, one row for each bad image; an empty file says that there was none."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in bad)
    path.write_text("".join(lines), encoding="utf-8")


def examine(root: str | Path, *, workers: int = 1, progress: Progress = silent) -> Report:
    """Read every image of the tables again, and check that the tables agree with each other.

    Args:
        root: directory of canonical tables.
        workers: processes that decode.
        progress: wraps the pass over the images.
    """
    tables = Tables(root)
    report = Report()
    total = tables.table("images").num_rows
    split_of: dict[str, str] = {}
    rows = ((str(root), row) for row in tables.rows("images"))
    results = ordered_map(_read, rows, workers=workers if total > 200 else 1, chunk=16)
    for row, state, reason in progress(results, total):
        image_id, split = row["id"], row["split"]
        if image_id in split_of:
            report.problems.append(f"images.parquet: id {image_id!r} occurs twice; ids must be unique")
        split_of[image_id] = split
        if state == "present":
            report.images.setdefault(split, Counter())["present"] += 1
        else:
            bad = {"id": image_id, "split": split, "path": row["path"], "state": state, "reason": reason}
            report.add_bad(bad)
    listed = tables.root / BAD_IMAGES
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    left_out = {json.loads(line)["id"] for line in lines}
    _count_queries(tables, split_of, left_out, report)
    _count_regions(tables, split_of, report)
    if left_out:
        report.notes.append(f"{len(left_out):,} images were left out when the tables were made; see {listed}")
    return report


def _read(item: tuple[str, dict[str, Any]]) -> tuple[dict[str, Any], str, str]:
    root, row = item
    try:
        height, width = ImageReader(root).read(row).shape[:2]
    except BadImage as error:
        return row, "missing" if error.missing else "unreadable", error.reason
    if (height, width) != (row["height"], row["width"]):
        told = f"{row['width']}×{row['height']}"
        return (
            row,
            "unreadable",
            f"the file has {width}×{height} pixels, the table says {told}: it was replaced",
        )
    return row, "present", ""


def _count_queries(tables: Tables, split_of: dict[str, str], left_out: set[str], report: Report) -> None:
    seen: set[str] = set()
    unknown, twice, lacking = [], [], 0
    for row in tables.rows("queries"):
        report.queries.setdefault(row["split"], Counter())[row["kind"]] += 1
        if row["id"] in seen:
            twice.append(row["id"])
        seen.add(row["id"])
        named = [*row["gold_image_ids"], *([row["image_id"]] if row["image_id"] else [])]
        absent = [image_id for image_id in named if image_id not in split_of]
        lacking += bool(absent) and left_out.issuperset(absent)
        unknown += [f"{row['id']} → {image_id}" for image_id in absent if image_id not in left_out]
    if twice:
        report.problems.append(f"queries.parquet: {len(twice):,} ids occur twice: {twice[:5]}")
    if lacking:
        report.notes.append(f"{lacking:,} queries name an image that was left out; they stay unanswered")
    if unknown:
        report.problems.append(f"queries.parquet: {len(unknown):,} image ids are unknown: {unknown[:5]}")


def _count_regions(tables: Tables, split_of: dict[str, str], report: Report) -> None:
    unknown = []
    for batch in tables.table("regions").select(["image_id", "source"]).to_batches():
        for row in batch.to_pylist():
            if row["image_id"] in split_of:
                report.regions.setdefault(split_of[row["image_id"]], Counter())[row["source"]] += 1
            else:
                unknown.append(row["image_id"])
    if unknown:
        report.problems.append(f"regions.parquet: {len(unknown):,} rows of unknown images: {unknown[:5]}")
