"""Settings → galleries that the cascade looked at: what `scripts/evaluate.py` does before it counts.

Under torchrun or SLURM the ranks share the work: each embeds its batches of the images, and of the regions
into the cache that they share; then rank 0 scores, and the others are done. With as many threads a process
the result is that of one process, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ranks import Ranks, own_device
from retrieval_results import Gallery
from retrieval_settings import Settings

if TYPE_CHECKING:  # torch and friends load after the arguments are read
    from fovea.images import ImageReader
    from fovea.models.encoders import Encoder
    from fovea.region_bank import RegionBank
    from fovea.region_sources import MissingMasks, RegionSource
    from fovea.retrieve import Retriever
    from fovea.reweight import Calibrations
    from fovea.tables import Tables
    from fovea.types import Query


class Coarse(NamedTuple):
    """One split after the coarse stage's preparation.

    Attributes:
        split: its name.
        queries: its questions; candidate lists cut to images that are there.
        retriever: encoder and index of the corpus.
        num_images: images of the corpus that could be read.
        absent: gold images that are not among them.
        unreadable: images of the corpus that could not.
    """

    split: str
    queries: list[Query]
    retriever: Retriever
    num_images: int
    absent: int
    unreadable: int


class Run:
    """Everything that the splits share: tables, encoders, reader, corpora."""

    def __init__(self, settings: Settings, seconds: dict[str, float]) -> None:
        from fovea.bad_images import BadImageLog
        from fovea.images import ImageReader
        from fovea.retrieve import corpus
        from fovea.tables import Tables

        self.settings, self.seconds, self.ranks = settings, seconds, Ranks()
        self.tables = Tables(settings.tables)
        splits = [name.strip() for name in settings.splits.split(",") if name.strip()]
        check(settings, self.tables, splits)
        with clock(seconds, "load"):
            self.coarse = self._open(settings.coarse)
        self.log = BadImageLog(settings.out)
        self.reader = ImageReader(self.tables.root, policy=settings.bad_images, log=self.log)
        self.corpora = {split: corpus(self.tables, settings.corpus, splits=[split]) for split in splits}
        self.images = {row["id"]: row for found in self.corpora.values() for row in found.rows}

    def _open(self, source: str) -> Encoder:
        import torch

        from fovea import bundle

        return bundle.open_encoder(source).to(
            own_device(self.settings.device), getattr(torch, self.settings.dtype)
        )

    def galleries(self) -> Iterator[Coarse]:
        """Embed each split's corpus; a split is a gallery of its own."""
        from fovea import bundle
        from fovea.index.dense import DenseIndex
        from fovea.retrieve import Retriever, embed_images

        settings = self.settings
        manifest = {"encoder": settings.coarse, "fingerprint": bundle.fingerprint(self.coarse)}
        manifest["corpus"] = settings.corpus
        for split, found in self.corpora.items():
            with clock(self.seconds, "embed images"):
                mine = self.ranks.share(found.rows, settings.batch_size)
                with self.ranks.together(f"embedding the images of {split}"):
                    ids, vectors = embed_images(
                        self.coarse, mine, self.reader, batch_size=settings.batch_size, progress=self.progress
                    )
                ids, vectors = self.ranks.join_rows(ids, vectors, order=[row["id"] for row in found.rows])
            there = set(ids)
            queries = self.tables.queries(split=split)
            if settings.among == "own":
                if not any(query.candidate_image_ids for query in queries):
                    raise ValueError(
                        f"--among own: no query of {split} has a candidate list; use --among corpus"
                    )
                # Candidates that were never downloaded cannot be ranked; a gold one stays gold, and is
                # missed.
                own = [tuple(id_ for id_ in query.candidate_image_ids if id_ in there) for query in queries]
                queries = [replace(q, candidate_image_ids=o) for q, o in zip(queries, own, strict=True)]
            golds = {id_ for query in queries for id_ in query.gold_image_ids}
            retriever = Retriever(self.coarse, DenseIndex.build(ids, vectors, manifest=manifest))
            yield Coarse(split, queries, retriever, len(ids), len(golds - there), len(found.rows) - len(ids))

    @property
    def progress(self) -> bool:
        """Whether to draw bars."""
        return sys.stderr.isatty() and self.ranks.rank == 0

    def bank(self) -> RegionBank | None:
        """Regions and their embeddings, or None for the coarse stage alone."""
        from fovea import bundle
        from fovea.region_bank import RegionBank, View

        settings = self.settings
        if settings.where == "none":
            return None
        with clock(self.seconds, "load"):
            local = self.coarse if settings.local is None else self._open(settings.local)
        source = region_source(settings, self.tables, self.images, self.reader)
        source.require((row, ()) for row in self.images.values())  # proposals: before anything is embedded
        return RegionBank(
            local,
            source,
            self.reader,
            view=View(settings.background, settings.crop, settings.margin, settings.fill),
            whole=settings.missing_phrase == "full_mask",
            cache=settings.cache or Path(settings.out) / "regions",
            fingerprint=bundle.fingerprint(local),
            tables_key=hashlib.sha256((self.tables.root / "manifest.json").read_bytes()).hexdigest(),
            batch_size=settings.batch_size,
            progress=self.progress,
        )


def look_at(
    settings: Settings, fusion: str, calibrations: Calibrations | None, seconds: dict[str, float]
) -> Iterator[Gallery]:
    """Run the cascade over each split; only rank 0 yields."""
    from fovea.pipeline import Cascade, whole_question
    from fovea.region_sources import MissingMasks
    from fovea.what import Phraser

    run = Run(settings, seconds)
    bank = run.bank()
    words = bank is not None and settings.what == "phrases"  # the coarse stage alone needs no parser
    what = Phraser(settings.spacy_model).batch if words else whole_question
    lacking: MissingMasks | None = None
    for found in run.galleries():
        cascade = Cascade(
            found.retriever,
            what,
            bank,
            run.images,
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
                with run.ranks.together(f"embedding the regions of {found.split}"):
                    plan = cascade.plan(found.queries)
                    if bank is not None and run.ranks.size > 1:
                        rows = [run.images[id_] for id_ in plan.asked]
                        bank.fill(rows, plan.asked, rank=run.ranks.rank, size=run.ranks.size)
                if bank is not None:
                    bank.refresh()
                if run.ranks.rank > 0:
                    continue
                look = cascade.look(found.queries, plan)
            except MissingMasks as missing:  # the other galleries' as well: one run fills them all
                lacking = missing if lacking is None else lacking.joined(missing)
                continue
            evidence = cascade.evidence(found.queries, look)
        if bank is not None:
            seconds["of which embedding regions"] = bank.seconds
        yield Gallery(
            found.split, found.queries, look, evidence, found.num_images, found.absent, found.unreadable
        )
    if lacking is not None:
        message = "masks are missing; rank 0 lists them"
        raise ValueError(message if run.ranks.rank else write_missing(lacking, settings)) from lacking
    if run.ranks.rank == 0 and (bad := run.log.merge()):
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
        if path is None or Path(path).suffix in (".yaml", ".yml") and Path(path).is_file():
            continue
        if not (Path(path) / "config.json").is_file():
            problems.append(
                f"--{name} {path}: neither a bundle (python scripts/export.py --ckpt … --out {path}) nor a "
                "YAML file that names a class of encoder"
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
    if Path(settings.out).exists() and not Path(settings.out).is_dir():
        problems.append(f"--out {settings.out}: a file is there; name a directory")
    if not 0 <= settings.margin <= 10:
        problems.append(f"--margin {settings.margin}: from 0 to 10 sides of the region")
    asked = Counter(tables.table("queries").filter(_in(tables, splits)).column("id").to_pylist())
    if twice := [id_ for id_, count in asked.items() if count > 1]:
        problems.append(f"{tables.root}: {len(twice)} query ids occur more than once, e.g. {twice[:5]}")
    for name in ("top_k", "batch_size"):
        if getattr(settings, name) < 1:
            problems.append(f"--{name} {getattr(settings, name)}: at least 1")
    try:
        own_device(settings.device)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))


def _in(tables: Tables, splits: Sequence[str]) -> Any:
    """Mask of the queries of these splits."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.is_in(tables.table("queries").column("split"), value_set=pa.array(splits, pa.string()))


def provenance(settings: Settings) -> dict[str, Any]:
    """What the tables say of themselves."""
    from fovea.tables import Tables

    manifest = Tables(settings.tables).manifest
    return {key: manifest[key] for key in ("reader", "config", "seed", "splits") if key in manifest}


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
