"""Public files, or nothing but a seed → canonical tables, and what is in them.

python scripts/prepare.py coco --images DIR --captions JSON --instances JSON --out TABLES
python scripts/prepare.py world --out TABLES
python scripts/prepare.py doctor TABLES
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (
        ValueError,
        OSError,
    ) as error:  # a user's mistake: the message says what to do, a traceback does not
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write canonical tables, or check them.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(run=run)
        sub.add_argument(
            "--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)"
        )
        return sub

    coco = command("coco", _coco, "COCO layout: captions, instances, panoptic")
    coco.add_argument("--images", type=Path, required=True, help="folder of the photos")
    coco.add_argument("--captions", type=Path, help="captions JSON: each caption becomes a query")
    coco.add_argument("--instances", type=Path, help="instances JSON: each annotation becomes a region")
    coco.add_argument("--panoptic", type=Path, help="panoptic JSON: each segment becomes a region")
    coco.add_argument("--panoptic-images", type=Path, help="folder of the panoptic PNGs")
    coco.add_argument(
        "--splits", type=_splits, default="train=.6,val=.2,test=.2", help="name=share,… (%(default)s)"
    )
    coco.add_argument("--split-seed", type=int, default=0, help="seed of the division (%(default)s)")
    coco.add_argument(
        "--annotated-on",
        choices=["auto", "upright", "stored"],
        default="auto",
        help="pixels that were annotated in EXIF-turned photos whose size does not tell",
    )
    coco.add_argument(
        "--policy",
        choices=["skip", "fail"],
        default="skip",
        help="missing or unreadable photos: leave out and list them, or stop (%(default)s)",
    )
    _out(coco)
    for name, about in (
        ("world", "the embedded world's scenes"),
        ("entities", "the embedded world's entities"),
    ):
        world = command(name, _world if name == "world" else _entities, about)
        world.add_argument("--config", type=Path, help="YAML file of settings")
        world.add_argument(
            "--set", action="append", default=[], metavar="NAME=VALUE", help="one setting, as YAML"
        )
        _out(world)
    doctor = command("doctor", _doctor, "read every image of canonical tables and report")
    doctor.add_argument("tables", type=Path)
    return parser


def _out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="directory of the tables")
    parser.add_argument("--overwrite", action="store_true", help="replace tables that are already there")


def _splits(text: str) -> dict[str, float]:
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {name.strip(): float(share) for name, share in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: name=share,name=share,… e.g. train=.6,val=.2,test=.2"
        ) from None


def _progress(items: Iterable[Any], total: int) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(items, total=total, unit=" images", mininterval=0.5)


def _coco(options: argparse.Namespace) -> int:
    from datamodules.readers import coco

    report = coco.read(
        options.images,
        options.out,
        captions=options.captions,
        instances=options.instances,
        panoptic=options.panoptic,
        panoptic_images=options.panoptic_images,
        splits=options.splits,
        split_seed=options.split_seed,
        annotated_on=options.annotated_on,
        policy=options.policy,
        workers=options.workers,
        overwrite=options.overwrite,
        progress=_progress,
    )
    print(f"{options.out}\n{report.text()}")
    return 0


def _world(options: argparse.Namespace) -> int:
    from datamodules import world

    config = _settings(world.WorldConfig, options)
    world.build(options.out, config=config, workers=options.workers, overwrite=options.overwrite)
    return _doctor(argparse.Namespace(tables=options.out, workers=options.workers))


def _entities(options: argparse.Namespace) -> int:
    from datamodules import world_entities

    config = _settings(world_entities.EntityConfig, options)
    world_entities.build(options.out, config=config, workers=options.workers, overwrite=options.overwrite)
    return _doctor(argparse.Namespace(tables=options.out, workers=options.workers))


def _settings(kind: Any, options: argparse.Namespace) -> Any:
    """An instance of the config dataclass `kind` from --config and --set; the latter win."""
    import jsonargparse
    import yaml

    values: dict[str, Any] = yaml.safe_load(options.config.read_text()) if options.config else {}
    for text in options.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: NAME=VALUE")
        values[name] = yaml.safe_load(value)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "config")
    try:
        checked = parser.parse_object({"config": values}).config
    except jsonargparse.ArgumentError as error:
        raise ValueError(f"settings of {options.config or '--set'}: {error}") from error
    return kind(**vars(checked))


def _doctor(options: argparse.Namespace) -> int:
    from datamodules.doctor import examine

    report = examine(options.tables, workers=options.workers, progress=_progress)
    print(f"{options.tables}\n{report.text()}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
