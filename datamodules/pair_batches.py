"""Rows of canonical tables → batches of (image, text), (region, phrase) and (picture, picture) pairs.

`datamodules.pairs` chooses the rows; here they are read, cut, and stacked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fovea import masks
from fovea.bad_images import BadImageLog
from fovea.batches import PairBatch, RetrievalBatch
from fovea.images import BadImage, ImageReader, ImageTransform
from fovea.tables import Tables
from fovea.types import Query, UInt8Array

if TYPE_CHECKING:
    from datamodules.pairs import PairData


def stable_id(text: str) -> int:
    """A 63-bit hash of a text, the same in every process: equal ids are equal things to the loss."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Pictures:
    """Decoded originals of images rows, kept in memory when asked to."""

    def __init__(
        self, tables: Tables, policy: Literal["fail", "skip"], cache: bool, log: BadImageLog | None = None
    ) -> None:
        self.reader = ImageReader(tables.root, policy=policy, log=log)
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
        self, rows: Sequence[dict[str, Any]], pictures: Pictures, module: PairData, encoder: Any
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


class Side(Dataset[RetrievalBatch]):
    """One side of the validation gallery: images, or queries (texts or pictures)."""

    def __init__(self, items: Sequence[tuple[Any, str]], pictures: Pictures, encoder: Any) -> None:
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
