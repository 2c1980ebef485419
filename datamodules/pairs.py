"""Canonical tables → contrastive batches: (image, text), (region, phrase) and (picture, picture) pairs."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from datamodules.sampling import EpochSampler, ResumableLoader, ShardSampler
from fovea import masks
from fovea.batches import PairBatch, RetrievalBatch
from fovea.images import BadImage, ImageReader, ImageTransform
from fovea.tables import Tables
from fovea.types import Query, UInt8Array

Partner = Literal["text", "picture"]


def stable_id(text: str) -> int:
    """A 63-bit hash of a text, the same in every process: equal ids are equal things to the loss."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class _Pictures:
    """Decoded originals of images rows, kept in memory when asked to."""

    def __init__(self, tables: Tables, policy: Literal["fail", "skip"], cache: bool) -> None:
        self.reader = ImageReader(tables.root, policy=policy)
        self._cache: dict[str, UInt8Array] | None = {} if cache else None

    def read(self, row: dict[str, Any]) -> UInt8Array | None:
        """uint8 [H, W, 3], or None for a bad image under the policy `skip`."""
        if self._cache is not None and row["id"] in self._cache:
            return self._cache[row["id"]]
        try:
            pixels = self.reader.read(row)
        except BadImage:
            if self.reader.policy == "fail":
                raise
            return None
        if self._cache is not None:
            self._cache[row["id"]] = pixels
        return pixels


class PairDataset(Dataset[PairBatch]):
    """Training pairs, fetched a whole batch at a time.

    One sample is one image with one of its texts and up to `max_regions` of its regions. Every random choice
    is a function of (seed, epoch, sample), whatever worker makes it.
    """

    def __init__(
        self, rows: Sequence[dict[str, Any]], pictures: _Pictures, module: PairData, encoder: Any
    ) -> None:
        """Rows are `{"image": row, "queries": [Query], "regions": [row], "partners": [images row]}`."""
        self.rows, self.pictures, self.data = rows, pictures, module
        self.transform: ImageTransform = encoder.transform
        self.tokenizer: Callable[[Sequence[str]], Tensor] = encoder.tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> PairBatch:
        """Indices are `epoch · size + index` (see `EpochSampler`)."""
        whole: list[tuple[Any, ...]] = []
        regional: list[tuple[Any, ...]] = []
        for index in indices:
            epoch, i = divmod(index, len(self.rows))
            row = self.rows[i]
            rng = np.random.default_rng((self.data.seed, epoch, i))
            image = self.pictures.read(row["image"])
            if image is None:
                continue
            query: Query = row["queries"][rng.integers(len(row["queries"]))]
            partner: Any = query.text
            if self.data.partner == "picture":
                partner_row = row["partners"][rng.integers(len(row["partners"]))]
                read = self.pictures.read(partner_row)
                if read is None:
                    continue
                partner = self._augment(read, rng)
            pixels, _ = self.transform(self._augment(image, rng))
            name = row["image"]["id"]
            said = query.text if self.data.partner == "text" else row["image"]["entity"] or name
            whole.append((pixels, None, partner, name, said, name))
            for other in self._other_texts(row["queries"], query, rng):  # its further texts: no pixels again
                whole.append((None, None, other, name, other, name))
            regional += self._regional(row, image, query, rng)
        return self._batch(whole, regional)

    def _other_texts(self, queries: list[Query], query: Query, rng: np.random.Generator) -> list[str]:
        """`texts_per_image` − 1 other texts of the image; one with fewer texts says some again."""
        wanted = self.data.texts_per_image - 1
        if wanted == 0:
            return []
        others = [other.text for other in queries if other is not query] or [query.text]
        order = rng.permutation(len(others))
        return [others[order[i % len(others)]] for i in range(wanted)]

    def _augment(self, image: UInt8Array, rng: np.random.Generator) -> UInt8Array:
        """Random resized crop that keeps at least `min_crop` of each side; off (1.0) by default."""
        if self.data.min_crop >= 1:
            return image
        height, width = image.shape[:2]
        h, w = (max(1, round(side * rng.uniform(self.data.min_crop, 1))) for side in (height, width))
        y, x = rng.integers(height - h + 1), rng.integers(width - w + 1)
        return image[y : y + h, x : x + w]

    def _regional(
        self, row: dict[str, Any], image: UInt8Array, query: Query, rng: np.random.Generator
    ) -> list[tuple[Any, ...]]:
        if self.data.max_regions == 0 or not row["regions"]:
            return []
        out = []
        name = row["image"]["id"]
        count = min(self.data.max_regions, len(row["regions"]))
        for r in rng.choice(len(row["regions"]), count, replace=False):
            region = row["regions"][r]
            text = region["phrase"] if self.data.region_text == "phrase" else query.text
            if rng.random() < self.data.full_image_rate:
                # Hybrid sampling: the whole image with alpha = 1 and the question, to keep the global sense.
                pixels, _ = self.transform(image)
                out.append((pixels, None, query.text, name, query.text, name))
                continue
            mask = masks.decode({"size": [region["height"], region["width"]], "counts": region["rle"]})
            patch, alpha = masks.region_view(
                image,
                mask,
                background=self.data.background,
                crop=self.data.crop,
                margin=self.data.margin,
                fill=self.transform.mean_pixel if self.data.fill == "mean" else (0, 0, 0),
            )
            pixels, alphas = self.transform(patch, alpha[None])
            out.append((pixels, alphas[0], text, f"{name}/{region['id']}", text, name))
        return out

    def _batch(self, whole: list[tuple[Any, ...]], regional: list[tuple[Any, ...]]) -> PairBatch:
        rows = whole + regional
        side = self.transform.size
        shown = [r for r in rows if r[0] is not None]
        pixels = np.stack([r[0] for r in shown]) if rows else np.zeros((0, side, side, 3), np.uint8)
        alpha = None
        if self.data.max_regions:
            ones = np.ones((side, side), np.uint8)
            alpha = torch.from_numpy(np.stack([ones if r[1] is None else r[1] for r in shown]))
        tokens = partners = None
        if self.data.partner == "text":
            tokens = self.tokenizer([r[2] for r in rows])
        else:
            partners = torch.from_numpy(np.stack([self.transform(r[2])[0] for r in rows]))
        ids = [[stable_id(f"left {r[3]}"), stable_id(f"right {r[4]}")] for r in rows]
        return PairBatch(
            pixels=torch.from_numpy(pixels),
            alpha=alpha,
            tokens=tokens,
            partner_pixels=partners,
            ids=torch.tensor(ids, dtype=torch.int64).view(-1, 2),
            image_ids=torch.tensor([stable_id(r[5]) for r in rows], dtype=torch.int64),
            num_global=len(whole),
            names=np.array([r[3] for r in rows], np.str_),
            texts_per_image=self.data.texts_per_image,
        )


class _Side(Dataset[RetrievalBatch]):
    """One side of the validation gallery: images, or queries (texts or pictures)."""

    def __init__(self, items: Sequence[tuple[Any, str]], pictures: _Pictures, encoder: Any) -> None:
        """`items`: (images row or text, id that a match shares)."""
        self.items, self.pictures = items, pictures
        self.transform: ImageTransform = encoder.transform
        self.tokenizer: Callable[[Sequence[str]], Tensor] = encoder.tokenizer

    def __len__(self) -> int:
        return len(self.items)

    def __getitems__(self, indices: list[int]) -> RetrievalBatch:
        items = [self.items[i] for i in indices]
        if isinstance(items[0][0], str):
            ids = torch.tensor([stable_id(key) for _, key in items])
            return RetrievalBatch(None, self.tokenizer([text for text, _ in items]), ids)
        read = [(self.pictures.read(row), key) for row, key in items]
        good = [(self.transform(pixels)[0], key) for pixels, key in read if pixels is not None]
        side = self.transform.size
        pixels = np.stack([p for p, _ in good]) if good else np.zeros((0, side, side, 3), np.uint8)
        ids = torch.tensor([stable_id(key) for _, key in good], dtype=torch.int64)
        return RetrievalBatch(torch.from_numpy(pixels), None, ids)


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
        batch_size: int = 128,
        seed: int | None = None,
        partner: Partner = "text",
        texts_per_image: int = 1,
        max_regions: int = 0,
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
            batch_size: images a rank and step; 1024 (CLIP) and 512 (Alpha-CLIP) over all ranks in the paper.
            seed: of the order and of every random choice; None takes the run's `seed_everything`.
            partner: `text` pairs an image with its queries' texts, `picture` with the query's own picture.
            texts_per_image: texts of an image in a batch; several share one pass of the image tower and are
                all its positives (pays where the text tower is the cheaper one).
            max_regions: regions of an image in a batch (T of eq. 6 is at most this); 0 trains plain CLIP.
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
        self.save_hyperparameters()
        self.tables = Tables(tables)
        self.train_split, self.val_split = train_split, val_split
        self.val_image_split = val_image_split or val_split
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
        if texts_per_image < 1 or (texts_per_image > 1 and partner == "picture"):
            raise ValueError(
                f"data.texts_per_image={texts_per_image} with data.partner={partner}: at least 1, and 1 for "
                "pictures"
            )
        self._train: PairDataset | None = None
        self._val: list[_Side] = []
        self._test: list[_Side] = []

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

    def setup(self, stage: str) -> None:
        """Join the tables for this rank."""
        if getattr(self.trainer, "_accelerator_connector").use_distributed_sampler:  # noqa: B009
            raise ValueError(
                "set trainer.use_distributed_sampler=false: this DataModule shards by itself, exactly"
            )
        encoder = self.trainer.lightning_module.encoder
        assert encoder is not None
        images = {row["id"]: row for row in self.tables.rows("images")}
        if stage == "fit" and self._train is None:
            pictures = _Pictures(self.tables, self.bad_images, self.cache_images)
            self._train = PairDataset(self._train_rows(images), pictures, self, encoder)
        if stage == "test":
            if not self.test_splits:
                raise ValueError("data.test_splits is empty: name the splits to test on, e.g. '[test-0]'")
            galleries = [(split, self.test_image_split or split) for split in self.test_splits]
            self._test = [side for pair in galleries for side in self._sides(images, *pair, encoder)]
        elif not self._val:
            self._val = self._sides(images, self.val_split, self.val_image_split, encoder)

    def _sides(
        self, images: dict[str, dict[str, Any]], split: str, image_split: str, encoder: Any
    ) -> list[_Side]:
        """The two sides of a gallery; a query picture counts once, however many questions are about it."""
        pictures = _Pictures(self.tables, self.bad_images, self.cache_images)
        gallery = [(row, row["id"]) for row in images.values() if row["split"] == image_split]
        queries = [q for q in self.tables.queries(split=split) if q.gold_image_ids]
        asked: list[tuple[Any, str]] = [(q.text, q.gold_image_ids[0]) for q in queries]
        if self.partner == "picture":
            shown = dict.fromkeys(
                (q.image_id, q.gold_image_ids[0]) for q in queries if q.image_id is not None
            )
            asked = [(images[image_id], gold) for image_id, gold in shown]
        return [_Side(gallery, pictures, encoder), _Side(asked, pictures, encoder)]

    def _train_rows(self, images: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        queries: dict[str, list[Query]] = defaultdict(list)
        regions: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for query in self.tables.queries(split=self.train_split):
            for image_id in query.gold_image_ids:
                queries[image_id].append(query)
        if self.max_regions:
            for row in self.tables.rows("regions"):
                if row["image_id"] in queries and row["rle"] is not None and not row["iscrowd"]:
                    regions[row["image_id"]].append(row)
        rows = []
        for image_id, asked in queries.items():
            row = {"image": images[image_id], "queries": asked, "regions": regions[image_id], "partners": []}
            if self.partner == "picture":
                row["partners"] = [images[q.image_id] for q in asked if q.image_id is not None]
            rows.append(row)
        lacking = self.max_regions and not any(regions.values())
        if not rows or lacking:
            what = "regions with masks" if lacking else "images with queries"
            raise ValueError(f"{self.tables.root} has no {what} in split {self.train_split!r}")
        return rows

    def train_dataloader(self) -> DataLoader[PairBatch]:
        """Seeded, sharded, resumable in the middle of an epoch; the incomplete last batch is dropped."""
        assert self._train is not None
        trainer = self.trainer
        sampler = EpochSampler(
            len(self._train), seed=self.seed, rank=trainer.global_rank, world_size=trainer.world_size
        )
        if len(sampler) < self.batch_size:
            raise ValueError(
                f"data.batch_size={self.batch_size} is more than the {len(sampler)} training images of a rank"
            )
        # Batches a killed run had trained on in this epoch; a whole epoch's worth belongs to the last one.
        done = trainer.fit_loop.epoch_loop.batch_progress.current.processed % (
            len(sampler) // self.batch_size
        )
        if trainer.fit_loop.restarting:
            sampler.skip(trainer.current_epoch, done * self.batch_size)
        return self._loader(self._train, sampler, drop_last=True)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        """The gallery's images, then its queries, each row on exactly one rank."""
        return self._exact(self._val)

    def test_dataloader(self) -> list[DataLoader[Any]]:
        """The same for each of `test_splits`."""
        return self._exact(self._test)

    def _exact(self, sides: Sequence[_Side]) -> list[DataLoader[Any]]:
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
