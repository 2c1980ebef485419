"""Validation images → pictures of what the encoder looks at, in W&B or as PNGs beside the checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
from lightning.pytorch.loggers import WandbLogger
from PIL import Image

from fovea import heatmap, masks
from fovea.images import BadImage, ImageReader
from fovea.region_bank import View, region_masks
from fovea.region_sources import AnnotatedRegions
from fovea.tables import Tables
from fovea.types import BoolArray, UInt8Array


class Fixed(NamedTuple):
    """One validation image that is drawn again after every validation."""

    id: str
    pixels: UInt8Array  # [H, W, 3]
    question: str
    phrases: list[str]  # labels of its annotated regions
    masks: BoolArray  # [T, H, W], the union of each label's regions


class LogPictures(L.Callback):
    """After each validation: the same images with their regions, CLIP's activation, the regional relevance.

    One picture an image, three parts side by side (HuLiRAG Figure 4). With a `WandbLogger` they go to W&B
    under `pictures`, otherwise to `pictures/step-N/ID.png` in the run's directory. Switch it on with
    `--trainer.callbacks+=lightning_modules.pictures.LogPictures --trainer.callbacks.tables=DIR`.
    """

    def __init__(
        self,
        tables: str,
        split: str = "val",
        num_images: int = 4,
        max_phrases: int = 6,
        view: View | None = None,
    ) -> None:
        """Constructor arguments are the config.

        Args:
            tables: canonical tables; regions come from their regions table.
            split: of the queries; their first images in the table's order, those with regions before others.
            num_images: pictures a validation.
            max_phrases: labels shown of an image, those of the largest masks.
            view: how a region is shown to the encoder; the one that it is trained with.
        """
        super().__init__()
        if num_images < 1 or max_phrases < 1:
            raise ValueError(
                f"callbacks.num_images={num_images}, callbacks.max_phrases={max_phrases}: each 1 or more"
            )
        self.tables = Tables(tables)
        self.split = split
        self.num_images = num_images
        self.max_phrases = max_phrases
        self.view = view or View()
        self._fixed: list[Fixed] | None = None

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw on every rank (sharded weights need all of them), log on the first."""
        if trainer.sanity_checking:
            return
        if self._fixed is None:
            self._fixed = self.choose()
        encoder: Any = pl_module.encoder
        drawn: list[tuple[Fixed, UInt8Array]] = []
        for item in self._fixed:
            weights = masks.region_weights(item.masks)
            maps = heatmap.look(
                encoder,
                item.pixels,
                item.question,
                item.phrases,
                item.masks,
                weights_T=weights,
                view=self.view,
            )
            labels = [f"{text}  {weight:.2f}" for text, weight in zip(item.phrases, weights, strict=True)]
            parts = [heatmap.tint(item.pixels, item.masks, labels), maps.activation.picture]
            parts += [maps.relevance.picture] if item.phrases else []
            drawn.append((item, heatmap.side_by_side(parts)))
        if trainer.is_global_zero:
            write(trainer, drawn)

    def choose(self) -> list[Fixed]:
        """The images that are drawn, read once."""
        asked: dict[str, str] = {}
        for row in self.tables.rows("queries", split=self.split):
            for image_id in row["gold_image_ids"][:1]:
                asked.setdefault(image_id, row["text"])
        if not asked:
            raise ValueError(f"callbacks.split={self.split!r}: {self.tables.root} has no query with an image")
        annotated = AnnotatedRegions(self.tables, asked)
        with_regions = {image_id: bool(annotated.regions({"id": image_id})) for image_id in asked}
        order = sorted(asked, key=lambda image_id: not with_regions[image_id])  # stable: the table's order
        rows = {row["id"]: row for row in self.tables.rows("images") if row["id"] in asked}
        reader = ImageReader(self.tables.root)
        out: list[Fixed] = []
        for image_id in order:
            if len(out) == self.num_images:
                break
            try:
                pixels = reader.read(rows[image_id])
            except (BadImage, KeyError):
                continue
            height, width = pixels.shape[:2]
            regions = [region for region in annotated.regions({"id": image_id}) if region.label]
            each = region_masks(regions, height, width)
            merged: dict[str, BoolArray] = {}
            for region, mask in zip(regions, each, strict=True):
                merged[region.label] = merged.get(region.label, np.zeros_like(mask)) | mask
            largest = sorted(merged, key=lambda label: -int(merged[label].sum()))[: self.max_phrases]
            stacked = np.stack([merged[label] for label in largest]) if largest else each[:0]
            out.append(Fixed(image_id, pixels, asked[image_id], largest, stacked))
        return out


def write(trainer: L.Trainer, drawn: list[tuple[Fixed, UInt8Array]]) -> None:
    """To every W&B logger of the run, or to PNGs in its directory when there is none."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
    for logger in loggers:
        logger.log_image(
            "pictures",
            [picture for _, picture in drawn],
            step=trainer.global_step,
            caption=[f"{item.id}: {item.question}" for item, _ in drawn],
        )
    if not loggers:
        directory = Path(trainer.default_root_dir) / "pictures" / f"step-{trainer.global_step:06d}"
        directory.mkdir(parents=True, exist_ok=True)
        for item, picture in drawn:
            name = "".join(c if c.isalnum() or c in "-_." else "_" for c in item.id)
            Image.fromarray(picture).save(directory / f"{name.lstrip('.') or '_'}.png")
