"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
