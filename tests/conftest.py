"""Fixtures that several test files share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]

# Two test workers on two cores: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real photos, documents and oracles that lie beside the checkout where the project is developed."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"{path} is not here: this test reads real data that the project does not ship")
    return path


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Canonical tables of the embedded world's scenes, in miniature."""
    from datamodules import world

    config = world.WorldConfig.smoke()
    return world.build(tmp_path_factory.mktemp("world") / "tables", config=config, workers=1)


@pytest.fixture(scope="session")
def tiny_entities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Canonical tables of the embedded world's entities, in miniature."""
    from datamodules import world_entities

    config = world_entities.EntityConfig.smoke()
    return world_entities.build(tmp_path_factory.mktemp("entities") / "tables", config=config, workers=1)


TOWER: dict[str, Any] = {
    "widths": [8, 8, 16, 16],
    "layers": 1,
    "heads": 2,
    "embed_dim": 16,
    "text_width": 16,
    "text_layers": 1,
}


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if `train.py` ran alone: no arguments of pytest's, no seed left behind for other tests."""
    import torch

    monkeypatch.setattr(sys, "argv", ["train.py"])
    before = {key: os.environ.get(key) for key in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


@pytest.fixture(scope="session")
def train_config(tiny_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of `train.py`: two steps of a very small CLIP on a very small world."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    tables = str(tiny_world)
    encoder = {
        "class_path": "fovea.models.encoders.tiny_clip",
        "init_args": {"vocabulary": tables, "image_size": 32} | TOWER,
    }
    data = {"tables": tables, "train_split": "singles", "batch_size": 8, "cache_images": True}
    path.write_text(
        yaml.safe_dump(
            {
                "model": {
                    "class_path": "lightning_modules.alpha_clip.AlphaClip",
                    "init_args": {"encoder": encoder, "lr": 1e-3},
                },
                "data": {"class_path": "datamodules.pairs.PairData", "init_args": data},
                "trainer": {
                    "accelerator": "cpu", "devices": 1, "max_steps": 2, "max_epochs": 1,
                    "log_every_n_steps": 1, "num_sanity_val_steps": 0, "limit_val_batches": 0,
                    "enable_progress_bar": False, "enable_model_summary": False,
                },
            }
        )
    )  # fmt: skip
    return path
