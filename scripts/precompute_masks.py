"""Tables → mask store: propose the regions of every image once, whatever will be asked about it.

python scripts/precompute_masks.py --tables TABLES --splits val,test --out STORE

Run it again after a kill or with more splits: only what is missing is done.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (
        ValueError,
        OSError,
    ) as error:  # a user's mistake: the message says what to do, a traceback does not
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Propose the regions of every image and store them.")
    parser.add_argument("--tables", type=Path, required=True, help="canonical tables")
    parser.add_argument("--splits", default="", help="comma-separated; default: all")
    parser.add_argument("--out", type=Path, required=True, help="directory of the mask store")
    parser.add_argument(
        "--detector",
        default="Felzenszwalb",
        help="a class of fovea.models.detectors, or any class with `key` and `propose` (%(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one argument of the detector, as YAML",
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    parser.add_argument(
        "--policy",
        choices=["fail", "skip"],
        default="fail",
        help="unreadable images: stop, or leave out and list in STORE/bad_images.jsonl (%(default)s)",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from datamodules.workers import ordered_map
    from fovea.images import ImageReader
    from fovea.mask_store import MaskStore
    from fovea.tables import Tables

    tables = Tables(options.tables)
    rows = _rows(tables, [name for name in options.splits.split(",") if name])
    detector = _detector(options.detector, options.set)
    store = MaskStore(options.out, detector.key)
    missing = set(store.missing(row["id"] for row in rows))
    todo = [row for row in rows if row["id"] in missing]
    print(f"{detector.key}: {len(rows) - len(todo):,} of {len(rows):,} images are in {store.directory}")
    if not todo:
        return 0
    # Workers share the cores; a detector's own threads must not multiply with them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max(1, options.workers))))
    workers = min(options.workers, max(1, len(todo) // 8))  # a process starts in about a second
    setup = (str(options.tables), str(options.out), options.detector, options.set, options.policy)
    regions, bad = 0, []
    results = ordered_map(_propose, todo, workers=workers, initializer=_start, initargs=setup)
    for image_id, count, reason in tqdm(results, total=len(todo), unit=" images", mininterval=0.5):
        regions += count
        if reason:
            bad.append((image_id, reason))
    if bad:
        reader = ImageReader(options.tables)
        reader.bad += bad
        reader.write_bad(options.out / "bad_images.jsonl")
    left = len(store.missing(row["id"] for row in rows))
    added = f"{regions:,} regions of {len(todo) - len(bad):,} images added"
    print(f"{added}, {len(bad):,} images unreadable, {left:,} missing")
    return 0 if left == len(bad) else 1


def _rows(tables: Any, splits: list[str]) -> list[dict[str, Any]]:
    """Rows of the images table, of the named splits."""
    rows = list(tables.rows("images"))
    present = {row["split"] for row in rows}
    if unknown := [name for name in splits if name not in present]:
        raise ValueError(f"--splits {','.join(unknown)}: not in {tables.root}; it has {sorted(present)}")
    return [row for row in rows if not splits or row["split"] in splits]


def _detector(name: str, settings: list[str]) -> Any:
    """The detector object; its class may live in any importable module."""
    import importlib

    import yaml

    module_name, _, class_name = name.rpartition(".")
    try:
        module = importlib.import_module(module_name or "fovea.models.detectors")
        kind = getattr(module, class_name)
    except (ImportError, AttributeError) as error:
        example = "give a class such as fovea.models.detectors.Felzenszwalb"
        raise ValueError(f"--detector {name}: {error}; {example}") from error
    arguments = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: NAME=VALUE")
        parsed = yaml.safe_load(value)
        arguments[key] = tuple(parsed) if isinstance(parsed, list) else parsed
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"--detector {name} --set {' --set '.join(settings)}: {error}") from error


class _Worker:
    """What one process needs: its detector, its reader and its own shard of the store."""

    def __init__(self, tables: str, out: str, detector: str, settings: list[str], policy: str) -> None:
        from fovea.images import ImageReader
        from fovea.mask_store import MaskStore

        self.detector = _detector(detector, settings)
        self.reader = ImageReader(tables, policy=policy)  # type: ignore[arg-type]
        self.store = MaskStore(out, self.detector.key)

    def propose(self, row: dict[str, Any]) -> tuple[str, int, str]:
        """Propose and store one image's regions: (id, number of regions, why it is unreadable or nothing)."""
        from fovea import masks
        from fovea.images import BadImage
        from fovea.types import Region

        try:
            image = self.reader.read(row)
        except BadImage as error:
            if self.reader.policy == "fail":
                raise ValueError(f"{error}; --policy skip leaves such images out") from error
            return row["id"], 0, error.reason
        regions = []
        for number, mask in enumerate(self.detector.propose(image)):
            regions.append(Region(f"r{number}", masks.to_box(mask), masks.encode(mask)))
        self.store.append(row["id"], regions)
        return row["id"], len(regions), ""


def _start(tables: str, out: str, detector: str, settings: list[str], policy: str) -> None:
    global _worker
    _worker = _Worker(tables, out, detector, settings, policy)


def _propose(row: dict[str, Any]) -> tuple[str, int, str]:
    return _worker.propose(row)


if __name__ == "__main__":
    sys.exit(main())
