"""Every YAML under configs/ is what its reader accepts: a typo in any of them turns this red.

Training configs and overlays are instantiated as `train.py` would (module, data, trainer), with tables,
vocabularies, bundles and score tables replaced by tiny ones. New files are found by themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from score_tables import random_table

from fovea import bundle, masks
from fovea.models.encoders import tiny_clip
from fovea.tables import TableWriter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))


def kind(name: str) -> str:
    """Which reader a file is for."""
    content = yaml.safe_load((ROOT / name).read_text())
    if "rows" in content:
        return "rows"
    if "stages" in content or "extends" in content:
        return "graph"
    if "class_path" in content:
        return "encoder"
    if "model" in content:
        return "training"
    if set(content) == {"trainer"}:
        return "overlay"
    if Path(name).name in ("world.yaml", "entities.yaml"):
        return "world"
    return "evaluate"


KINDS = {name: kind(name) for name in FILES}


def of_kind(*kinds: str) -> list[str]:
    return [name for name in FILES if KINDS[name] in kinds]


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No arguments of pytest's, and no seed left behind."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(ROOT)
    before = {key: os.environ.pop(key, None) for key in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    yield
    for key, value in before.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value


@pytest.fixture(scope="session")
def tiny(tiny_world: Path, tiny_entities: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Something tiny in the place of everything that a config may name, by kind."""
    root = tmp_path_factory.mktemp("tiny")
    photos = root / "photos"
    mask = np.zeros((16, 16), bool)
    mask[4:12, 4:12] = True
    with TableWriter(photos) as writer:
        for split in ("train", "dev", "val", "test"):
            Image.new("RGB", (16, 16), "red").save(writer.directory / f"{split}.png")
            writer.add("images", id=split, path=f"{split}.png", width=16, height=16, split=split)
            writer.add("queries", id=split, text="a red square", gold_image_ids=[split], split=split)
            writer.add(
                "regions", id="0", image_id=split, phrase="a square", box=[4, 4, 12, 12], height=16, width=16,
                rle=masks.encode(mask)["counts"],
            )  # fmt: skip
        writer.finish({"reader": "test"})
    encoder = tiny_clip(["a"], widths=(8, 8), layers=1, heads=2, embed_dim=8, text_width=8, text_layers=1)
    bundle.save_encoder(encoder, root / "bundle")
    random_table(20).write(root / "scores.parquet")
    return {
        "world": str(tiny_world),
        "entities": str(tiny_entities),
        "photos": str(photos),
        "bundle": str(root / "bundle"),
        "scores": str(root / "scores.parquet"),
    }


def replaced(value: Any, tiny: dict[str, str], key: str = "") -> Any:
    """A config with every path that it names replaced by a tiny thing of the same kind."""
    if isinstance(value, dict):
        return {k: replaced(v, tiny, k) for k, v in value.items()}
    if isinstance(value, list):
        return [replaced(item, tiny) for item in value]
    if not isinstance(value, str):
        return value
    if key in ("tables", "vocabulary"):
        name = Path(value).name
        return tiny[next((world for world in ("world", "entities") if world in name), "photos")]
    if key == "path":
        return tiny["bundle"]
    if key in ("scores", "val_scores"):
        return tiny["scores"]
    if key == "model" and not value.endswith(
        ".json"
    ):  # an open_clip name: its real size takes seconds and GBs
        return str(ROOT / "configs/real/coco_regions/tower.json")
    return None if key == "pretrained" else value


def build(content: dict[str, Any], tmp_path: Path, *flags: str) -> Any:
    """Instantiate as `train.py` does, without running; a message of its own is shown when it refuses."""
    from scripts import train

    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    root = f"--trainer.default_root_dir={tmp_path}"
    return train.main(["-c", str(file), *flags, root, "--trainer.accelerator=cpu"], run=False)


@pytest.mark.parametrize("name", of_kind("training"))
def test_training_config(name: str, tiny: dict[str, str], tmp_path: Path) -> None:
    """Module, data and trainer are built; every key, type and split that the file names exists."""
    content = yaml.safe_load((ROOT / name).read_text())
    cli = build(replaced(content, tiny), tmp_path)
    for part, built in (("model", cli.model), ("data", cli.datamodule)):
        assert content[part]["class_path"].endswith(type(built).__name__)
    # A run without an end of its own trains until someone stops it.
    assert (cli.trainer.max_epochs or -1) > 0 or cli.trainer.max_steps > 0


@pytest.mark.parametrize("overlay", of_kind("overlay"))
def test_overlay(overlay: str, tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On top of a training config, each of its keys is what the trainer was built with."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    base = yaml.safe_load((ROOT / "configs/quickstart/coarse_singles.yaml").read_text())
    cli = build(replaced(base, tiny), tmp_path, "-c", overlay)
    config, trainer = cli.config["trainer"], cli.trainer
    for key, value in yaml.safe_load((ROOT / overlay).read_text())["trainer"].items():
        if key == "logger":
            wanted = [item["class_path"] for item in (value if isinstance(value, list) else [value])]
            assert [f".{type(x).__name__}" for x in trainer.loggers] == [
                "." + w.split(".")[-1] for w in wanted
            ]
        elif key == "callbacks+":  # beside those of the base
            added = [item["class_path"].split(".")[-1] for item in value]
            names = [type(callback).__name__ for callback in trainer.callbacks]
            assert set(added) < set(names) and len(config["callbacks"]) > len(added)
        elif key != "accelerator":
            assert config[key] == value
    if overlay.startswith("configs/trainer/"):
        assert trainer.num_devices == config["devices"]


@pytest.mark.parametrize("name", of_kind("encoder"))
def test_encoder_config(name: str) -> None:
    """Encoders by name: the factory is there and takes these arguments (its own test loads a tiny model)."""
    import importlib
    import inspect

    spec = yaml.safe_load((ROOT / name).read_text())
    module, _, factory = spec["class_path"].rpartition(".")
    inspect.signature(getattr(importlib.import_module(module), factory)).bind(**spec["init_args"])


@pytest.mark.parametrize("name", of_kind("graph", "rows", "world", "evaluate"))
def test_other_config(name: str) -> None:
    """Stage graphs, rows, settings of worlds and of evaluate.py: by the reader of each."""
    import dataclasses

    from datamodules.world import WorldConfig
    from datamodules.world_entities import EntityConfig

    content = yaml.safe_load((ROOT / name).read_text())
    if KINDS[name] == "graph":
        from stage_graph import read_graph

        assert len(read_graph({"graph": name}).stages) > 1
    elif KINDS[name] == "rows":
        from reproduce import read_rows
        from stage_graph import read_graph

        for row in read_rows(ROOT / name).values():
            assert row.get("status") == "open" or read_graph(row).stages
    elif KINDS[name] == "world":
        of = WorldConfig if Path(name).name == "world.yaml" else EntityConfig
        assert set(content) <= {field.name for field in dataclasses.fields(of)}
        of(**content)
    else:
        from evaluate import Settings

        known = {field.name for field in dataclasses.fields(Settings)} | {
            "calibration",
            "reweight",
            "bootstrap",
        }
        assert set(content) <= known, (
            f"{name} is for no reader that this test knows: {sorted(set(content) - known)}"
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": {"init_args": {"lrr": 1}}},
        {"model": {"init_args": {"encoder": {"init_args": {"image_sise": 32}}}}},
        {"data": {"init_args": {"train_split": "trian"}}},
        {"trainer": {"max_epoch": 3}},
        {"trainer": {"callbacks": [{"class_path": "lightning.pytorch.callbacks.EarlyStoping"}]}},
        {"traner": {"max_steps": 1}},
    ],
)
def test_a_typo_is_red(wrong: dict[str, Any], tiny: dict[str, str], tmp_path: Path) -> None:
    """The check above does see a mistyped key, split or class at every depth."""
    base = yaml.safe_load((ROOT / "configs/quickstart/coarse_singles.yaml").read_text())
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(wrong))
    build(replaced(base, tiny), tmp_path)
    with pytest.raises(SystemExit):
        build(replaced(base, tiny), tmp_path, "-c", str(file))
