"""Tables → mask store: regions of every image, or of every phrase in every image, computed once.

python scripts/precompute_masks.py --tables TABLES --splits val,test --out STORE
python scripts/precompute_masks.py --tables TABLES --out STORE --segmenter sam_vit_b_01ec64.pth \\
    --detector fovea.models.grounding_dino.GroundingDino --set path=IDEA-Research/grounding-dino-tiny
torchrun --nproc_per_node 8 scripts/precompute_masks.py …      # or under srun: each rank takes its share

Run it again after a kill or with more splits: only what is missing is done.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPTS = ("none", "gold", "candidates")


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
    parser = argparse.ArgumentParser(description="Find the regions of every image and store them.")
    parser.add_argument("--tables", type=Path, help="canonical tables (needed, but for --verify)")
    parser.add_argument("--splits", default="", help="comma-separated; default: all")
    parser.add_argument("--out", type=Path, required=True, help="directory of the mask store")
    parser.add_argument(
        "--detector",
        default="Felzenszwalb",
        help="a class of fovea.models.detectors, or any class with `key` and `rles` (proposals) or `detect` "
        "(boxes of phrases), e.g. fovea.models.grounding_dino.GroundingDino (%(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one argument of the detector, as YAML",
    )
    parser.add_argument(
        "--segmenter", help="SAM checkpoint (.pth), or directory or hub name of SAM or SAM 2: boxes → masks"
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="where torch runs; under torchrun or srun `cuda` is each process's own (%(default)s)",
    )
    parser.add_argument(
        "--prompts",
        help="what a detector is asked: `gold`, each question's phrases in its gold images (default); "
        "`candidates`, in its candidate images; or a JSONL or parquet file of image_id and query_id "
        "(or prompts). A proposer is asked nothing (`none`)",
    )
    parser.add_argument("--spacy_model", help="pipeline that splits questions into phrases")
    parser.add_argument(
        "--workers", type=int, help="processes (default: all cores for proposers, 1 for detectors)"
    )
    parser.add_argument(
        "--policy",
        choices=["fail", "skip"],
        default="fail",
        help="unreadable images: stop, or leave out and list in STORE/bad_images.jsonl (%(default)s)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="only read everything that --out holds again, under every key"
    )
    parser.add_argument(
        "--preview", type=int, default=0, metavar="N", help="draw N of the images to STORE/preview.html"
    )
    parser.add_argument("--preview_encoder", help="bundle whose heat maps the preview shows")
    return parser


def _run(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from datamodules import fill_masks
    from datamodules.workers import ordered_map
    from fovea.bad_images import BadImageLog
    from fovea.digests import Digests
    from fovea.images import ImageReader
    from fovea.mask_store import MaskStore
    from fovea.ranks import rank_and_size
    from fovea.tables import Tables

    if options.verify:
        return _verify(options.out)
    if options.tables is None:
        raise ValueError("--tables DIR is needed: canonical tables, as scripts/prepare.py makes them")
    if options.preview < 0 or (options.workers is not None and options.workers < 1):
        raise ValueError(f"--preview {options.preview}, --workers {options.workers}: 0 and 1 are the least")
    rank, world_size = rank_and_size()
    tables = Tables(options.tables)
    rows = _rows(tables, [name for name in options.splits.split(",") if name])
    maker = _maker(options)
    everything = _asked(options, tables, rows, maker)
    asked = everything[rank::world_size]  # before looking at what is there: other ranks are adding to it
    store = MaskStore(options.out, maker.key, fill_masks.made_by(maker))
    log = BadImageLog(options.out)
    reader = ImageReader(options.tables, policy=options.policy, log=log)
    remembered = options.out / fill_masks.DIGESTS
    todo = fill_masks.todo(asked, store, Digests(reader, remembered), read=False)
    print(
        f"{maker.key}: {todo.num_asked - todo.num_missing:,} of {todo.num_asked:,} results for "
        f"{len(asked):,} images are in {store.directory}; {len(todo.asked):,} images to look at"
    )
    if todo.bad and options.policy == "fail":
        image_id, reason = todo.bad[0]
        raise ValueError(
            f"image {image_id}: {reason} ({len(todo.bad):,} such images); --policy skip leaves such images "
            "out"
        )
    mine = todo.asked
    proposing = not hasattr(maker, "locate")
    workers = options.workers or ((os.cpu_count() or 1) if proposing else 1)
    workers = min(
        workers, max(1, len(mine) // 8 if proposing else len(mine))
    )  # a process takes a second to start
    if workers > 1:  # workers share the cores; a model's own threads must not multiply with them
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    done = [0, 0, 0]
    results = ordered_map(_look, mine, workers=workers, initializer=_start, initargs=(options,))
    name = "images" if world_size == 1 else f"images (rank {rank} of {world_size})"
    bad = {image_id for image_id, _ in todo.bad}
    for one in tqdm(results, total=len(mine), unit=f" {name}", mininterval=0.5):
        done = [a + b for a, b in zip(done, one[1:4], strict=True)]
        if one[4]:
            bad.add(one[0])
    for image_id, reason in todo.bad:
        log.add(image_id, reason)
    if options.out.is_dir():
        log.merge(good={item.row["id"] for item in asked} - bad)
    readable = [item for item in mine if item.row["id"] not in bad]
    left = fill_masks.todo(readable, store, Digests(reader, remembered)).num_missing
    print(
        f"{done[0]:,} results with {done[1]:,} regions added for {len(mine):,} images ({done[2]:,} without "
        f"any region), {len(bad):,} images unreadable, {left:,} results missing"
    )
    if options.preview and rank == 0:
        _preview(options, everything, maker, store, reader)
    return 1 if left else 0


def _rows(tables: Any, splits: list[str]) -> dict[str, dict[str, Any]]:
    """Rows of the images table that the named splits need, by id: their own, and those their queries name."""
    from fovea.retrieve import corpus

    present = sorted(set(tables.table("images").column("split").to_pylist()))
    asked = sorted({*present, *tables.table("queries").column("split").to_pylist()})
    if unknown := [name for name in splits if name not in asked]:
        raise ValueError(f"--splits {','.join(unknown)}: not in {tables.root}; it has {asked}")
    if not splits:
        return {row["id"]: row for row in tables.rows("images")}
    return {row["id"]: row for row in corpus(tables, "full", splits=splits).rows}


def _maker(options: argparse.Namespace) -> Any:
    """What finds regions; its class may live in any importable module."""
    from datamodules.fill_masks import make
    from fovea.ranks import own_device

    segmenter = None
    if options.segmenter:
        from fovea.models.segmenters import load

        segmenter = load(options.segmenter, own_device(options.device))
    return make(_detector(options.detector, options.set, options.device), segmenter)


def _detector(name: str, settings: list[str], device: str) -> Any:
    import importlib
    import inspect
    import typing

    import yaml

    from fovea.ranks import own_device

    module_name, _, class_name = name.rpartition(".")
    try:
        module = importlib.import_module(module_name or "fovea.models.detectors")
        kind = getattr(module, class_name)
    except (ImportError, AttributeError) as error:
        example = "give a class such as fovea.models.detectors.Felzenszwalb"
        raise ValueError(f"--detector {name}: {error}; {example}") from error
    arguments = {}
    hints = typing.get_type_hints(kind.__init__) if inspect.isclass(kind) else {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: NAME=VALUE")
        parsed = yaml.safe_load(value)
        wanted = hints.get(key)
        fits = {int: int, float: (int, float), str: str, bool: bool}.get(wanted, object)
        if not isinstance(parsed, fits):
            raise ValueError(f"--set {text}: {key} of {name} must be of type {wanted.__name__}")
        arguments[key] = tuple(parsed) if isinstance(parsed, list) else parsed
    if "device" in inspect.signature(kind).parameters:
        arguments.setdefault("device", own_device(device))
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"--detector {name} --set {' --set '.join(settings)}: {error}") from error


def _asked(options: argparse.Namespace, tables: Any, rows: dict[str, Any], maker: Any) -> list[Any]:
    """What shall be known of which image."""
    from datamodules import fill_masks

    if not hasattr(maker, "locate"):
        if options.prompts not in (None, "none"):
            raise ValueError(
                f"--prompts {options.prompts}: {options.detector} is asked nothing; leave it out"
            )
        return fill_masks.ask_nothing(rows.values())
    prompts = options.prompts or "gold"
    if prompts == "none":
        raise ValueError(
            f"--prompts none: {options.detector} finds what phrases name; `gold` or `candidates`"
        )
    texts = fill_masks.phrase_texts(options.spacy_model)
    if prompts not in PROMPTS:
        path = Path(prompts)
        if not path.is_file():
            raise ValueError(f"--prompts {prompts}: one of {', '.join(PROMPTS)}, or a JSONL file")
        return fill_masks.ask_file(path, rows, tables.queries(), texts, joint=maker.joint)
    splits = [name for name in options.splits.split(",") if name] or None
    queries = [query for query in tables.queries() if splits is None or query.split in splits]
    field = "gold_image_ids" if prompts == "gold" else "candidate_image_ids"
    named = {image_id for query in queries for image_id in getattr(query, field)}
    if absent := sorted(named - rows.keys()):
        print(
            f"{len(absent):,} of {len(named):,} images that the questions name are not in {tables.root} "
            f"(e.g. {', '.join(absent[:3])}): missing or unreadable when made; see its bad_images.jsonl"
        )
    asked = fill_masks.ask_phrases(
        rows, queries, lambda query: getattr(query, field), texts, joint=maker.joint
    )
    if not asked:
        raise ValueError(
            f"--prompts {prompts}: no query of {options.splits or 'any split'} names such an image"
        )
    return asked


def _verify(path: Path) -> int:
    """Print every fault of the stores in a directory."""
    from fovea.mask_store import MaskStore

    keys = MaskStore.keys(path)
    if not keys:
        raise ValueError(f"--out {path} holds no mask store: there is nothing to verify")
    total = 0
    for key in keys:
        store, faults = MaskStore(path, key), 0
        for fault in store.verify():
            faults += 1
            print(f"PROBLEM: {fault}")
        print(f"{key}: {len(store):,} results in {store.directory} read again, {faults:,} faults")
        total += faults
    return 1 if total else 0


def _preview(options: argparse.Namespace, asked: Sequence[Any], maker: Any, store: Any, reader: Any) -> None:
    """A page of the first images: boxes, masks, weights, and heat maps where an encoder is given."""
    from fovea.digests import Digests
    from fovea.mask_store import Entry
    from fovea.region_sources import prompt_groups
    from fovea.report import preview
    from fovea.tables import Tables
    from fovea.what import DEFAULT_MODEL, Phraser

    store.refresh()
    digests = Digests(reader)
    question_of: dict[str, Any] = {}
    if hasattr(maker, "locate"):
        rows = {item.row["id"]: item.row for item in asked}
        phraser = Phraser(options.spacy_model or DEFAULT_MODEL)
        for query in Tables(options.tables).queries():
            images = [*query.gold_image_ids, *query.candidate_image_ids]
            for image_id in (i for i in images if i in rows and i not in question_of):
                if len(question_of) == options.preview:
                    break
                phrases = phraser(query.text)
                groups = prompt_groups([phrase.text for phrase in phrases], joint=maker.joint)
                if all(Entry(digests(rows[image_id]), group) in store for group in groups):
                    question_of[image_id] = query.text, phrases

    def regions_of(row: Any, texts: Sequence[str]) -> list[Any]:
        if not texts:
            return [store.get(Entry(digests(row)))]
        if not maker.joint:
            return [store.get(Entry(digests(row), (text,))) for text in texts]
        found = store.get(Entry(digests(row), tuple(dict.fromkeys(texts))))
        return [[region for region in found if region.label == text] for text in texts]

    encoder = None
    if options.preview_encoder:
        from fovea.bundle import load_encoder

        encoder = load_encoder(options.preview_encoder).eval()
    first = [item.row for item in asked if not question_of or item.row["id"] in question_of]
    samples = list(
        preview.collect(
            first[: options.preview],
            reader,
            regions_of,
            lambda row: question_of.get(row["id"]),
            encoder=encoder,
        )
    )
    out = options.out / "preview.html"
    preview.build(out, samples, title=f"Regions of {options.tables}", made_by=maker.key)
    print(f"{len(samples)} images → {out}")


def _start(options: argparse.Namespace) -> None:
    """What one process needs: its models, its reader and its own shard of the store."""
    global _filler
    from datamodules.fill_masks import DIGESTS, Filler, made_by
    from fovea.bad_images import BadImageLog
    from fovea.digests import Digests
    from fovea.images import ImageReader
    from fovea.mask_store import MaskStore

    maker = _maker(options)
    reader = ImageReader(options.tables, policy=options.policy, log=BadImageLog(options.out))
    digests = Digests(reader, options.out / DIGESTS)
    store = MaskStore(options.out, maker.key, made_by(maker))
    _filler = Filler(maker, reader, store, digests)


def _look(item: Any) -> tuple[Any, ...]:
    from fovea.images import BadImage

    try:
        done: tuple[Any, ...] = _filler(item)
    except BadImage as error:
        raise ValueError(f"{error}; --policy skip leaves such images out") from error
    return done


if __name__ == "__main__":
    sys.exit(main())
