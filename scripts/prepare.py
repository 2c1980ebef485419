"""Public files, or nothing but a seed → canonical tables, and what is in them.

python scripts/prepare.py coco --images DIR --captions JSON --instances JSON --out TABLES
python scripts/prepare.py mmqa --images DIR --image-list JSONL --dev JSONL --train JSONL --out TABLES
python scripts/prepare.py webqa --tsv imgs.tsv --lineidx imgs.lineidx --train-val JSON --out TABLES
python scripts/prepare.py folder --images DIR --questions CSV --out TABLES
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
        _check_apart(options)
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
    _policy(coco)
    _out(coco)
    mmqa = command("mmqa", _mmqa, "MultimodalQA: image questions, their candidates and gold images")
    mmqa.add_argument("--images", type=Path, required=True, help="folder of the images")
    mmqa.add_argument("--image-list", type=Path, required=True, help="MMQA_images.jsonl, or .gz")
    for split in ("dev", "test", "train"):
        mmqa.add_argument(f"--{split}", type=Path, help=f"MMQA_{split}.jsonl, or .gz")
    mmqa.add_argument(
        "--types", default="ImageQ", help="comma-separated types of questions, or `all` (%(default)s)"
    )
    webqa = command("webqa", _webqa, "WebQA: questions with image and text facts, images inside imgs.tsv")
    webqa.add_argument("--tsv", type=Path, required=True, help="imgs.tsv; read in place, never unpacked")
    webqa.add_argument("--lineidx", type=Path, required=True, help="imgs.lineidx of that very file")
    webqa.add_argument("--train-val", type=Path, help="WebQA_train_val.json")
    webqa.add_argument("--test", type=Path, help="WebQA_test.json; its facts are not labelled")
    webqa.add_argument(
        "--questions",
        choices=["image", "text", "all"],
        default="image",
        help="those that images answer, the others, or both (%(default)s)",
    )
    webqa.add_argument(
        "--official-split", action="store_true", help="the files' own split, not a random 8:1:1"
    )
    webqa.add_argument("--split-seed", type=int, default=0, help="seed of the random split (%(default)s)")
    for sub in (mmqa, webqa):
        sub.add_argument(
            "--only-candidates",
            action="store_true",
            help="without the images that only questions left out here name: a smaller corpus `full`",
        )
        _policy(sub)
        _out(sub)
    folder = command("folder", _folder, "any folder of images, any file of questions")
    folder.add_argument("--images", type=Path, required=True, help="folder, read with all folders below it")
    folder.add_argument(
        "--questions",
        type=Path,
        help="JSONL, CSV or TSV: question, and id, image, answers where there are any",
    )
    folder.add_argument("--captions", type=Path, help="JSONL, CSV or TSV: image, caption")
    folder.add_argument("--split", default="test", help="name of the one split (%(default)s)")
    _policy(folder)
    _out(folder)
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


def _policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        choices=["skip", "fail"],
        default="skip",
        help="missing or unreadable images: leave out and list them, or stop (%(default)s)",
    )


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


def _check_apart(options: argparse.Namespace) -> None:
    """Refuse tables inside an input, and an input inside of them: `--overwrite` would take it along."""
    if not hasattr(options, "out"):
        return
    out = options.out.resolve()
    for name, value in vars(options).items():
        if name == "out" or not isinstance(value, Path):
            continue
        path, option = value.resolve(), f"--{name.replace('_', '-')} {value}"
        if path.is_relative_to(out):
            raise ValueError(
                f"{option} lies inside --out {options.out}, which is replaced; give another --out"
            )
        if path.is_dir() and out.is_relative_to(path):
            raise ValueError(f"--out {options.out} lies inside {option}; give a directory beside it")


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


def _mmqa(options: argparse.Namespace) -> int:
    from datamodules.readers import mmqa

    files = {"dev": options.dev, "test": options.test, "train": options.train}
    report = mmqa.read(
        options.images,
        options.image_list,
        {split: path for split, path in files.items() if path is not None},
        options.out,
        types=[name.strip() for name in options.types.split(",")],
        only_candidates=options.only_candidates,
        policy=options.policy,
        workers=options.workers,
        overwrite=options.overwrite,
        progress=_progress,
    )
    print(f"{options.out}\n{report.text()}")
    return 0


def _webqa(options: argparse.Namespace) -> int:
    from datamodules.readers import webqa

    report = webqa.read(
        options.tsv,
        options.lineidx,
        options.out,
        train_val=options.train_val,
        test=options.test,
        questions=options.questions,
        official_split=options.official_split,
        split_seed=options.split_seed,
        only_candidates=options.only_candidates,
        policy=options.policy,
        workers=options.workers,
        overwrite=options.overwrite,
        progress=_progress,
    )
    print(f"{options.out}\n{report.text()}")
    return 0


def _folder(options: argparse.Namespace) -> int:
    from datamodules.readers import folder

    report = folder.read(
        options.images,
        options.out,
        questions=options.questions,
        captions=options.captions,
        split=options.split,
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
