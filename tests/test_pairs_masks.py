"""datamodules.pairs with a mask store: regions of the questions' phrases, filled when little is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from PIL import Image

from datamodules.pairs import PairData
from fovea.mask_store import MaskStore
from fovea.models.detectors import Detection
from fovea.models.encoders import tiny_clip
from fovea.region_sources import MissingMasks
from fovea.tables import TableWriter
from fovea.types import BoolArray, FloatArray, UInt8Array
from fovea.where import Locator
from lightning_modules.alpha_clip import AlphaClip

COLOURS = {"red": (250, 0, 0), "green": (0, 250, 0), "blue": (0, 0, 250)}


class ByColour:
    """Finds the half of the picture that has the phrase's colour; nothing for other phrases."""

    key, joint = "by-colour", False

    def __init__(self) -> None:
        self.num_images = 0

    def detect(self, image: UInt8Array, phrases: Sequence[str]) -> list[Detection]:
        self.num_images += 1
        height, width = image.shape[:2]
        out = []
        for phrase in phrases:
            boxes = [
                [x, 0, x + width // 2, height]
                for x in (0, width // 2)
                if tuple(image[0, x]) == COLOURS.get(phrase.split()[0])
            ]
            boxes_n4 = np.array(boxes, np.float32).reshape(-1, 4)
            out.append(Detection(boxes_n4, np.full(len(boxes), 0.5, np.float32)))
        return out


class Fill:
    """The whole box is the mask."""

    key = "fill"

    def segment(self, image: UInt8Array, boxes_K4: FloatArray) -> BoolArray:
        out = np.zeros((len(boxes_K4), *image.shape[:2]), bool)
        for mask, (x0, y0, x1, y1) in zip(out, boxes_K4.astype(int), strict=True):
            mask[y0:y1, x0:x1] = True
        return out


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Eight pictures of two colours side by side; questions name both, the last a thing that is not there."""
    names = list(COLOURS)
    with TableWriter(tmp_path / "tables") as writer:
        for number in range(8):
            left, right = names[number % 3], names[(number + 1) % 3]
            pixels = np.zeros((16, 32, 3), np.uint8)
            pixels[:, :16], pixels[:, 16:] = COLOURS[left], COLOURS[right]
            pixels[-1, -1] = number  # no two files are the same
            Image.fromarray(pixels).save(writer.directory / f"{number}.png")
            text = f"what is next to the {left} house with the {right} wall ?"
            for split in ("train", "val"):
                writer.add(
                    "queries", id=f"{split}{number}", text=text if number < 7 else "where is the goat ?",
                    gold_image_ids=[f"i{number}"], split=split,
                )  # fmt: skip
            writer.add("images", id=f"i{number}", path=f"{number}.png", width=32, height=16, split="val")
        writer.finish({"reader": "test"})
    return tmp_path / "tables"


def build(tables: Path, **options: Any) -> PairData:
    """The DataModule under test."""
    fixed = {"batch_size": 8, "seed": 0, "max_regions": 2, "full_image_rate": 0.0}
    return PairData(str(tables), **(fixed | options))


def fit(data: PairData) -> Any:
    """One training step; the batch."""
    encoder = tiny_clip(["a"], image_size=32, embed_dim=8, widths=(4, 8), text_width=8, heads=2, alpha=True)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_steps=1,
        enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0,
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(AlphaClip(encoder), data)
    return next(iter(data.train_dataloader()))


def test_phrases_are_paired_with_their_regions(tables: Path, tmp_path: Path) -> None:
    """prepare_data looks at each image once; every regional row shows its phrase's colour under its mask; a
    phrase that was not found pairs with nothing. A second run looks at nothing, and needs no locator.
    """
    store = str(tmp_path / "store")
    detector = ByColour()
    batch = fit(build(tables, masks=store, locator=Locator(detector, Fill())))
    assert detector.num_images == 8 and len(MaskStore.open(store)) == 7 * 2 + 1
    regional = range(batch.num_global, len(batch.pixels))
    assert len(regional) == 14
    for i in regional:
        phrase = str(batch.names[i]).partition("/")[2]
        shown = batch.pixels[i][batch.alpha[i] == 1].float().mean(0)
        assert np.abs(shown.numpy() - COLOURS[phrase.split()[0]]).max() < 5
        assert batch.alpha[i].float().mean() == 0.5

    again = ByColour()
    same = fit(build(tables, masks=store, locator=Locator(again, Fill())))
    without = fit(build(tables, masks=store))
    assert again.num_images == 0
    assert (same.pixels == batch.pixels).all() and (without.pixels == batch.pixels).all()


def test_too_much_missing_names_the_command(tables: Path, tmp_path: Path) -> None:
    """More images than max_build, or no locator: nothing is computed, and the error has the command."""
    store = tmp_path / "store"
    detector = ByColour()
    with pytest.raises(ValueError, match="8 of 8 images are missing.*max_build=7.*precompute_masks.py"):
        fit(build(tables, masks=str(store), locator=Locator(detector, Fill()), max_build=7))
    assert detector.num_images == 0 and not list(store.glob("*/*.rows"))
    fit(build(tables, masks=str(store), locator=Locator(detector, Fill())))
    Image.new("RGB", (32, 16), "red").save(tables / "0.png")  # replaced: other bytes, no regions yet
    with pytest.raises(ValueError, match=r"1 of 8 images are missing in .*e\.g\. i0"):
        fit(build(tables, masks=str(store)))


def test_impossible_stores(tables: Path, tmp_path: Path) -> None:
    """Proposals belong to no phrase; a locator without a store, and a key that is not there, are refused."""
    MaskStore(tmp_path / "proposals", "felzenszwalb").append("digest", {(): []})
    with pytest.raises((ValueError, MissingMasks), match="missing|holds proposals"):
        fit(build(tables, masks=str(tmp_path / "proposals")))
    with pytest.raises(ValueError, match="name it: data.masks=DIR"):
        build(tables, locator=Locator(ByColour()))
    with pytest.raises(ValueError, match="has no key 'sam'; it holds"):
        fit(build(tables, masks=str(tmp_path / "proposals"), masks_key="sam"))
