"""Canonical tables → contrastive batches: (image, text), (region, phrase) and (picture, picture) pairs."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from datamodules import fill_masks
from datamodules.pair_batches import PairDataset, Pictures, Side
from datamodules.sampling import EpochSampler, ResumableLoader, ShardSampler
from fovea.bad_images import BAD_IMAGES, BadImageLog
from fovea.batches import PairBatch
from fovea.digests import Digests
from fovea.images import BadImage
from fovea.mask_store import MaskStore
from fovea.region_sources import GroundedRegions, open_store
from fovea.retrieve import CorpusName, corpus
from fovea.tables import Tables
from fovea.types import Query
from fovea.where import Locator

Partner = Literal["text", "picture"]
MAX_MARGIN = 10.0  # sides of the region


def _as_is(batch: Any) -> Any:
    """The dataset already made the batch."""
    return batch


class PairData(L.LightningDataModule):
    """Pairs from canonical tables. The transform and the tokenizer are those of the module being trained."""

    def __init__(
        self,
        tables: str,
        train_split: str = "train",
        val_split: str = "val",
        val_image_split: str | None = None,
        test_splits: tuple[str, ...] = (),
        test_image_split: str | None = None,
        corpus: CorpusName = "full",
        batch_size: int = 128,
        seed: int | None = None,
        partner: Partner = "text",
        texts_per_image: int = 1,
        max_regions: int = 0,
        masks: str | None = None,
        masks_key: str | None = None,
        locator: Locator | None = None,
        max_build: int = 256,
        region_text: Literal["phrase", "query"] = "phrase",
        full_image_rate: float = 0.1,
        background: Literal["remove", "keep"] = "remove",
        crop: bool = False,
        margin: float = 0.1,
        fill: Literal["mean", "black"] = "mean",
        min_crop: float = 1.0,
        cache_images: bool = False,
        bad_images: Literal["fail", "skip"] = "fail",
        num_workers: int = 0,
    ) -> None:
        """Constructor arguments are the config.

        Args:
            tables: directory of canonical tables (`scripts/prepare.py`).
            train_split: split whose images are trained on.
            val_split: split whose queries are validated on (`val/recall@1`).
            val_image_split: split of the gallery's images, default `val_split`.
            test_splits: splits that `train.py test` evaluates, each by itself (`test/SPLIT/recall@1`).
            test_image_split: split of the images of every test gallery, default each test split's own.
            corpus: of a gallery without an image split of its own: `gold`, `candidates` or `full` (see
                `fovea.retrieve.corpus`).
            batch_size: images a rank and step; 1024 (CLIP) and 512 (Alpha-CLIP) over all ranks in the paper.
            seed: of the order and of every random choice; None takes the run's `seed_everything`.
            partner: `text` pairs an image with its queries' texts, `picture` with the query's own picture.
            texts_per_image: texts of an image in a batch; several share one pass of the image tower and are
                all its positives (pays where the text tower is the cheaper one).
            max_regions: regions of an image in a batch (T of eq. 6 is at most this); 0 trains plain CLIP.
            masks: directory of a mask store of phrases' regions (`scripts/precompute_masks.py` with a
                detector); regions come from it instead of the regions table, each with its phrase.
            masks_key: key in a store that holds several; a `locator` has its own.
            locator: fills what the store lacks, before training, when that is little.
            max_build: images that `locator` may look at; when more are missing, the error has the command.
            region_text: pair a region with its phrase or with the whole question.
            full_image_rate: share of regional pairs replaced by whole images with alpha 1 (the paper: 10 %).
            background: `remove` takes away what is outside the mask, `keep` leaves it to the alpha channel.
            crop: cut a region out of the image (else the region stays in its place in the full frame).
            margin: of the cut, in sides of the region.
            fill: colour of a removed background: the encoder's mean (0 after normalisation), or black.
            min_crop: random crops keep at least this share of each side; 1 turns them off.
            cache_images: keep decoded images in memory.
            bad_images: stop at an unreadable image, or leave it out (they are counted and listed either way).
            num_workers: data-loading processes.
        """
        super().__init__()
        self.save_hyperparameters(ignore=["locator"])
        least = {"batch_size": 1, "texts_per_image": 1, "max_regions": 0, "max_build": 0, "num_workers": 0}
        problems = [
            f"data.{name}={self.hparams[name]} must be at least {low}"
            for name, low in (least | {"margin": 0}).items()
            if self.hparams[name] < low
        ]
        if not 0 <= full_image_rate <= 1:
            problems.append(f"data.full_image_rate={full_image_rate} must lie in [0, 1]")
        if margin > MAX_MARGIN:  # a cut of 1e9 sides would be an array of that size
            problems.append(f"data.margin={margin} must be at most {MAX_MARGIN}")
        if not 0 < min_crop <= 1:
            problems.append(f"data.min_crop={min_crop} must lie in (0, 1]")
        if problems:
            raise ValueError("; ".join(problems))
        self.tables = Tables(tables)
        self.tables.check_ids("images")
        self.train_split, self.val_split = train_split, val_split
        self.val_image_split, self.corpus = val_image_split, corpus
        self.test_splits, self.test_image_split = list(test_splits), test_image_split
        self.batch_size, self.partner = batch_size, partner
        # Lightning leaves the run's seed here for its own workers.
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self.texts_per_image = texts_per_image
        self.max_regions, self.region_text, self.full_image_rate = max_regions, region_text, full_image_rate
        self.background, self.crop, self.margin, self.min_crop = background, crop, margin, min_crop
        self.fill = fill
        self.cache_images, self.bad_images, self.num_workers = cache_images, bad_images, num_workers
        self._check_splits(
            "queries", {"train_split": train_split, "val_split": val_split, "test_splits": self.test_splits}
        )
        self._check_splits(
            "images", {"val_image_split": self.val_image_split, "test_image_split": test_image_split}
        )
        if max_regions and partner == "picture":
            raise ValueError("data.max_regions > 0 pairs regions with phrases; it needs data.partner=text")
        if texts_per_image > 1 and partner == "picture":
            raise ValueError(f"data.texts_per_image={texts_per_image} needs data.partner=text")
        self.masks, self.masks_key, self.locator, self.max_build = masks, masks_key, locator, max_build
        if masks is None and (locator is not None or masks_key is not None):
            raise ValueError(
                "data.locator and data.masks_key belong to a mask store; name it: data.masks=DIR"
            )
        self._training_phrases: list[fill_masks.Asked] | None = None
        self._log: BadImageLog | None = None
        self._train: PairDataset | None = None
        self._val: list[Side] = []
        self._test: list[Side] = []

    def _check_splits(self, table: str, asked: dict[str, str | list[str] | None]) -> None:
        """Name every split that `table` lacks."""
        present = set(self.tables.table(table).column("split").to_pylist())
        absent = [
            f"data.{key}={split!r}"
            for key, value in asked.items()
            for split in ([value] if isinstance(value, str) else value or [])
            if split not in present
        ]
        if absent:
            raise ValueError(
                f"{', '.join(absent)}: no such split among the {table} of {self.tables.root}; it has "
                f"{sorted(present)}"
            )

    def prepare_data(self) -> None:
        """Fill what the mask store lacks of the training split, on one rank; refuse when it is much."""
        if self.masks is None or not self.max_regions:
            return
        fill_masks.fill(
            self.tables,
            self._asked(),
            self.masks,
            self.locator,
            key=self.masks_key,
            max_build=self.max_build,
            splits=self.train_split,
        )

    def _asked(self) -> list[fill_masks.Asked]:
        """The phrases of the training questions, in their gold images."""
        if self._training_phrases is None:
            rows = {row["id"]: row for row in self.tables.rows("images")}
            queries = self.tables.queries(split=self.train_split)
            joint = self.locator.joint if self.locator is not None else self._store_is_joint()
            self._training_phrases = fill_masks.ask_phrases(
                rows, queries, lambda q: q.gold_image_ids, fill_masks.phrase_texts(), joint=joint
            )
        return self._training_phrases

    def _store_is_joint(self) -> bool:
        store = MaskStore.open(str(self.masks), self.masks_key)
        return any(len(entry.prompts) > 1 for entry in store.entries())

    def _stored_regions(self) -> dict[str, list[dict[str, Any]]]:
        """Image id → rows like those of the regions table, one for each phrase that was found."""
        assert self.masks is not None
        key = self.masks_key if self.locator is None else self.locator.key
        pictures = Pictures(self.tables, "skip", cache=False)
        digests = Digests(pictures.reader, os.path.join(self.masks, fill_masks.DIGESTS))
        source = open_store(MaskStore.open(self.masks, key), digests)
        if not isinstance(source, GroundedRegions):
            raise ValueError(
                f"data.masks={self.masks} (key {source.key}) holds proposals, which belong to no phrase; "
                "fill a store with scripts/precompute_masks.py and a detector of phrases"
            )
        out: dict[str, list[dict[str, Any]]] = {}
        for row, prompts in self._asked():
            try:
                found = source.regions(row, prompts)
            except BadImage:
                continue  # its pixels will be asked for, under this run's policy
            rles = ((region, region.mask) for region in found if region.mask is not None)
            out[row["id"]] = [
                {"id": region.id, "phrase": region.label, "rle": rle["counts"]}
                | dict(zip(("height", "width"), rle["size"], strict=True))
                for region, rle in rles
            ]
        return out

    def setup(self, stage: str) -> None:
        """Join the tables for this rank."""
        if getattr(self.trainer, "_accelerator_connector").use_distributed_sampler:  # noqa: B009
            raise ValueError(
                "set trainer.use_distributed_sampler=false: this DataModule shards by itself, exactly"
            )
        encoder = self.trainer.lightning_module.encoder
        assert encoder is not None
        images = {row["id"]: row for row in self.tables.rows("images")}
        if self.bad_images == "skip":
            self._log = BadImageLog(self.trainer.default_root_dir)
        if stage == "fit" and self._train is None:
            pictures = Pictures(self.tables, self.bad_images, self.cache_images, self._log)
            self._train = PairDataset(self._train_rows(images), pictures, self, encoder)
        if stage == "test":
            if not self.test_splits:
                raise ValueError("data.test_splits is empty: name the splits to test on, e.g. '[test-0]'")
            galleries = [(split, self.test_image_split) for split in self.test_splits]
            self._test = [side for pair in galleries for side in self._sides(images, *pair, encoder)]
        elif not self._val:
            self._val = self._sides(images, self.val_split, self.val_image_split, encoder)

    def _sides(
        self, images: dict[str, dict[str, Any]], split: str, image_split: str | None, encoder: Any
    ) -> list[Side]:
        """The two sides of a gallery; a query picture counts once, however many questions are about it."""
        pictures = Pictures(self.tables, self.bad_images, self.cache_images, self._log)
        if image_split is None:  # an image that several splits share has one of them in its row
            rows = corpus(self.tables, self.corpus, splits=[split]).rows
        else:
            rows = [row for row in images.values() if row["split"] == image_split]
        gallery = [(row, row["id"]) for row in rows]
        queries = [q for q in self.tables.queries(split=split) if q.gold_image_ids]
        asked: list[tuple[Any, str]] = [(q.text, q.gold_image_ids[0]) for q in queries]
        if self.partner == "picture":
            shown = dict.fromkeys(
                (q.image_id, q.gold_image_ids[0]) for q in queries if q.image_id is not None
            )
            asked = [(images[image_id], gold) for image_id, gold in shown]
        return [Side(gallery, pictures, encoder), Side(asked, pictures, encoder)]

    def _train_rows(self, images: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        queries: dict[str, list[Query]] = defaultdict(list)
        regions: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for query in self.tables.queries(split=self.train_split):
            for image_id in query.gold_image_ids:
                queries[image_id].append(query)
        if self.max_regions and self.masks is not None:
            regions.update(self._stored_regions())
        elif self.max_regions:
            for row in self.tables.rows("regions"):
                if row["image_id"] in queries and row["rle"] is not None and not row["iscrowd"]:
                    regions[row["image_id"]].append(row)
        rows = []
        absent = queries.keys() - images.keys()
        if absent and self.bad_images == "fail":
            raise ValueError(
                f"{len(absent):,} of {len(queries):,} gold images of {self.train_split} are not in "
                f"{self.tables.root} (missing or unreadable when the tables were made: see bad_images.jsonl "
                "there); data.bad_images=skip trains without them"
            )
        for image_id, asked in queries.items():
            if image_id in absent:
                if self._log is not None and self.trainer.is_global_zero:
                    self._log.add(image_id, "not in the images table")
                continue
            row = {"image": images[image_id], "queries": asked, "regions": regions[image_id], "partners": []}
            if self.partner == "picture":
                row["partners"] = [images[q.image_id] for q in asked if q.image_id is not None]
            rows.append(row)
        lacking = self.max_regions and not any(regions.values())
        if not rows or lacking:
            what = "regions with masks" if lacking else "images with queries"
            raise ValueError(f"{self.tables.root} has no {what} in split {self.train_split!r}")
        return rows

    def teardown(self, stage: str) -> None:
        """Under `skip`: one list of the images that any worker of any rank left out, and how many so far."""
        if self._log is None:
            return
        bad = self._log.merge()  # no barrier: a rank that failed would never reach it
        if self.trainer.is_global_zero:
            print(f"{len(bad):,} bad images were left out: {self._log.directory / BAD_IMAGES}")  # noqa: T201

    def train_dataloader(self) -> DataLoader[PairBatch]:
        """Seeded, sharded, resumable in the middle of an epoch; the incomplete last batch is dropped."""
        assert self._train is not None
        trainer = self.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress

        def seen() -> int:
            # A whole epoch's worth belongs to the last epoch.
            return progress.current.ready % (len(sampler) // self.batch_size) * self.batch_size

        sampler = EpochSampler(
            len(self._train),
            seed=self.seed,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            seen=seen,
        )
        if len(sampler) < self.batch_size:
            raise ValueError(
                f"data.batch_size={self.batch_size} is more than the {len(sampler)} training images of a rank"
            )
        return self._loader(self._train, sampler, drop_last=True)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        """The gallery's images, then its queries, each row on exactly one rank."""
        return self._exact(self._val)

    def test_dataloader(self) -> list[DataLoader[Any]]:
        """The same for each of `test_splits`."""
        return self._exact(self._test)

    def _exact(self, sides: Sequence[Side]) -> list[DataLoader[Any]]:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        return [
            self._loader(side, ShardSampler(len(side), rank=rank, world_size=world_size), drop_last=False)
            for side in sides
        ]

    def _loader(self, dataset: Dataset[Any], sampler: Any, *, drop_last: bool) -> DataLoader[Any]:
        return ResumableLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=_as_is,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
