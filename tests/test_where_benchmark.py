"""benchmarks/where.py: every part runs in miniature and prints its ratio; the count of unlike boxes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from fovea.models.detectors import Detection

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("benchmark_of_where", ROOT / "benchmarks/where.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_runs_in_miniature(benchmark, capsys):
    """All parts but the processes: a ratio each, and no verdict on tiny models."""
    assert benchmark.main(["--tiny", "--parts", "segmenter,detector,masks,proposals"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ratio") == 4
    for title in ("segmenter: 64 × 48", "8 phrases (", "without a partner", "masks of 64 × 48", "proposals"):
        assert title in printed


def test_unlike_boxes_by_hand(benchmark):
    """Threshold 0.5 by count; one box alike, one moved, one that only single has, one phrase without any."""

    def found(*boxes):
        scores = np.full(len(boxes), 0.5, np.float32)
        return Detection(np.array(boxes, np.float32).reshape(-1, 4), scores)

    single = [found([0, 0, 10, 10], [20, 20, 30, 30]), found([0, 0, 4, 4]), found()]
    joint = [found([0, 0, 10, 9], [28, 28, 38, 38]), found(), found()]
    text = benchmark.disagreement(single, joint)
    assert "3 single, 2 joint" in text and text.endswith("2 and 1")


def test_unknown_part(benchmark, capsys):
    """The error names the part and those that there are."""
    with pytest.raises(SystemExit):
        benchmark.main(["--parts", "masks,mask"])
    assert "--parts mask: choose from segmenter,detector" in capsys.readouterr().err
