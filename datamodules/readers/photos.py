"""Named image files → rows of the images table; what is missing or unreadable is counted and listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from datamodules.doctor import Progress, Report, write_bad
from datamodules.readers.problems import Problems
from datamodules.workers import ordered_map
from fovea.bad_images import BAD_IMAGES
from fovea.images import BadImage, ImageReader
from fovea.tables import TableWriter

Policy = Literal["fail", "skip"]


def add_images(
    writer: TableWriter,
    rows: Iterable[dict[str, Any]],
    total: int,
    report: Report,
    problems: Problems,
    *,
    where: str,
    policy: Policy,
    workers: int,
    progress: Progress,
) -> None:
    """Decode every image once and write the rows of those that are good, in the order given.

    Args:
        writer: of the tables.
        rows: images rows without width and height, paths absolute; `state` and `reason` in a row say that a
            reader already knows the image to be `missing` or `unreadable`.
        total: number of rows, for the progress bar.
        report: gets the counts and the bad images; `bad_images.jsonl` is written from it.
        problems: gets the bad images under the policy `fail`, and the case that no image is good.
        where: the option and folder that the images should be in, for errors.
        policy: `skip` leaves bad images out of the table.
        workers: processes that decode; the tables do not depend on it.
        progress: wraps the pass.
    """
    for row, state, reason, height, width in progress(
        ordered_map(_examine, rows, workers=workers if total > 50 else 1, chunk=8), total
    ):
        if state == "present":
            writer.add("images", **row, height=height, width=width)
            report.images.setdefault(row["split"], Counter())["present"] += 1
            continue
        bad = {"id": row["id"], "split": row["split"], "path": row["path"]}
        report.add_bad(bad | {"state": state, "reason": reason})
        if policy == "fail":
            rule = f"{where}: images must be there and readable (--policy skip leaves others out)"
            problems.add(rule, f"{row['id']} ({row['path']}): {reason}")
    if not writer.counts["images"]:
        first = report.bad[0] if report.bad else None
        told = f", e.g. {first['path'] or first['id']}: {first['reason']}" if first else ""
        problems.add(f"{where}: none of the {total:,} images can be read{told}")
    write_bad(writer.directory / BAD_IMAGES, report.bad)


def _examine(row: dict[str, Any]) -> tuple[dict[str, Any], str, str, int, int]:
    """(row, state, reason, height, width)."""
    state, reason = row.pop("state", "present"), row.pop("reason", "")
    if state != "present":
        return row, state, reason, 0, 0
    try:
        height, width = ImageReader(Path(row["path"]).anchor).read(row).shape[:2]
    except BadImage as error:
        return row, "missing" if error.missing else "unreadable", error.reason, 0, 0
    return row, state, reason, height, width


def note_absent(report: Report, golds: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    """Say how many queries lost a gold image: they stay in the tables, and count as not retrieved.

    Args:
        report: its bad images are those left out.
        golds: split → query id → gold image ids.
    """
    absent = {row["id"] for row in report.bad}
    for split, queries in golds.items():
        named = [ids for ids in queries.values() if ids]
        if lost := sum(not absent.isdisjoint(ids) for ids in named):
            report.notes.append(f"{split}: {lost:,} of {len(named):,} queries lack a gold image")


def inside(name: Any) -> bool:
    """Whether a file name of a data set stays inside its images folder."""
    return (
        isinstance(name, str) and name != "" and not Path(name).is_absolute() and ".." not in Path(name).parts
    )


class Folder:
    """A folder of images, whose files are found under another case of their name too.

    Attributes:
        root: absolute.
        other_case: how many were found so.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.other_case = 0
        self._names: dict[str, list[str]] | None = None

    def find(self, name: str) -> str:
        """Path of the file; where only one of another case exists (`.JPG`, `.jpg`), that one."""
        path = self.root / name
        if path.exists():
            return str(path)
        if self._names is None:  # listed once, and only when a file is not where it should be
            self._names = {}
            for entry in self.root.iterdir():
                self._names.setdefault(entry.name.casefold(), []).append(entry.name)
        others = self._names.get(name.casefold(), [])
        if len(others) != 1:
            return str(path)
        self.other_case += 1
        return str(self.root / others[0])
