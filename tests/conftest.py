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
