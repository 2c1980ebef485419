"""LogPictures: the same validation images after every validation, to W&B or as PNGs of the run."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from PIL import Image

from fovea import masks
from fovea.models.encoders import tiny_clip
from fovea.tables import TableWriter
from lightning_modules.pictures import LogPictures

TINY: dict[str, Any] = {"widths": (8, 8, 16, 16), "layers": 1, "heads": 2, "embed_dim": 16, "text_layers": 1}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Four images of 60×40: without a region, unreadable, two pigs and a drum, a box without a mask."""
    with TableWriter(tmp_path / "tables") as writer:
        for number, name in enumerate(("plain", "broken", "pigs", "../box")):
            path = tmp_path / f"{number}.png"
            Image.fromarray(np.full((40, 60, 3), 60 * number, np.uint8)).save(path)
            if name == "broken":
                path.write_bytes(b"no image")
            writer.add("images", id=name, path=str(path), width=60, height=40)
            writer.add("queries", id=f"q-{name}", text=f"the {name}", gold_image_ids=[name], split="val")
        for number, (x, label) in enumerate(((0, "pig"), (20, "pig"), (50, "drum"))):
            mask = masks.from_boxes(np.array([[x, 0, x + 10, 10]], np.float32), 40, 60)[0]
            common = {"image_id": "pigs", "box": masks.to_box(mask).tolist(), "height": 40, "width": 60}
            writer.add(
                "regions", id=f"r{number}", label=label, rle=masks.encode(mask)["counts"], **common
            )  # fmt: skip
        writer.add(
            "regions", id="r9", image_id="../box", label="box", box=[0, 0, 30, 40], height=40, width=60
        )  # fmt: skip
        writer.finish({"reader": "test"})
    return tmp_path / "tables"


def module() -> Any:
    """What the callback needs of a LightningModule."""
    torch.manual_seed(0)
    return SimpleNamespace(encoder=tiny_clip(["pig", "drum"], image_size=32, **TINY).eval())


def trainer(run: Path, *loggers: Any, **changes: Any) -> Any:
    """What it needs of a Trainer."""
    settings = {"loggers": loggers, "global_step": 7, "is_global_zero": True, "sanity_checking": False}
    return SimpleNamespace(default_root_dir=str(run), **settings | changes)


def test_images_with_regions_come_first(tables: Path) -> None:
    """Masks of one label are merged, a box counts as its mask, an unreadable image is passed over."""
    chosen = LogPictures(str(tables), num_images=4).choose()
    assert [item.id for item in chosen] == ["pigs", "../box", "plain"]
    assert chosen[0].phrases == ["pig", "drum"] and chosen[0].masks.sum((1, 2)).tolist() == [200, 100]
    assert chosen[1].masks.sum() == 30 * 40 and chosen[2].masks.shape == (0, 40, 60)
    assert [item.id for item in LogPictures(str(tables), num_images=1).choose()] == ["pigs"]


def test_without_wandb_pictures_are_image_files(tables: Path, tmp_path: Path) -> None:
    """One PNG an image and validation: masks, activation, relevance side by side; ids stay in the folder."""
    callback = LogPictures(str(tables), num_images=3)
    callback.on_validation_epoch_end(trainer(tmp_path / "run"), module())
    callback.on_validation_epoch_end(trainer(tmp_path / "run", global_step=9), module())
    files = sorted(path.relative_to(tmp_path / "run").as_posix() for path in tmp_path.glob("run/**/*.png"))
    names = ["_box.png", "pigs.png", "plain.png"]
    assert files == [f"pictures/step-{step:06d}/{name}" for step in (7, 9) for name in names]
    with Image.open(tmp_path / "run/pictures/step-000007/pigs.png") as image:
        assert image.width == 3 * 60 + 2 * 8 and image.height > 40
    with Image.open(tmp_path / "run/pictures/step-000007/plain.png") as image:
        assert image.size == (2 * 60 + 8, 40)


@pytest.mark.parametrize("changes", [{"sanity_checking": True}, {"is_global_zero": False}])
def test_nothing_is_written_by_the_sanity_check_or_another_rank(
    tables: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Every rank computes (weights may be sharded), the first one writes."""
    LogPictures(str(tables)).on_validation_epoch_end(trainer(tmp_path / "run", **changes), module())
    assert not (tmp_path / "run").exists()


def test_wandb_gets_the_same_images(tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offline run holds one PNG an image; no picture lies beside the checkpoints."""
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="fovea", offline=True, save_dir=tmp_path)
    LogPictures(str(tables), num_images=2).on_validation_epoch_end(
        trainer(tmp_path / "run", logger), module()
    )
    wandb.finish()
    wandb.teardown()  # waits for W&B's service process
    (media,) = tmp_path.glob("wandb/offline-run-*/files/media/images")
    assert len([name for name in os.listdir(media) if name.startswith("pictures_")]) == 2
    assert not (tmp_path / "run").exists()


def test_wrong_settings_are_named(tables: Path) -> None:
    """A split without queries, no image at all, tables that are not there."""
    with pytest.raises(ValueError, match=r"callbacks.split='tset'"):
        LogPictures(str(tables), split="tset").choose()
    with pytest.raises(ValueError, match="callbacks.num_images=0"):
        LogPictures(str(tables), num_images=0)
    with pytest.raises(FileNotFoundError, match="prepare.py"):
        LogPictures("no/tables")
