"""benchmarks/index.py runs in miniature, and its data are what it says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("benchmark_of_index", ROOT / "benchmarks/index.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_runs_in_miniature(benchmark, capsys):
    """A ratio for each batch size; recall grows with the cells; the compressed file is the smaller one."""
    assert benchmark.main(["--tiny", "--rounds", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ratio") == 2 and printed.count("opened in") == 4
    recalls = [float(text) for text in re.findall(r"recall@10 ([\d.]+)", printed)]
    assert len(recalls) == 3 and recalls == sorted(recalls) and recalls[-1] > 0.4
    small, flat = (float(text.replace(",", "")) for text in re.findall(r"file ([\d,]+) MiB", printed))
    assert small < flat


def test_data_are_the_same_each_time_and_clustered(benchmark):
    """Two passes give equal chunks; cosines within a cluster near 0.5, with a query's own vector 0.94."""
    data = benchmark.Clustered(30_000, 64, 1)
    first, second = (np.concatenate([vectors for _, vectors in data]) for _ in range(2))
    assert np.array_equal(first, second) and len(first) == 30_000
    assert [ids[0] for ids, _ in data] == ["0", "20000"]
    unit = first / np.linalg.norm(first, axis=1, keepdims=True)
    assert abs((unit[:100] @ unit[-100:].T).mean() - 0.5) < 0.2  # by how long the one centre is
    queries = data.queries(40)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    assert abs((queries @ unit.T).max(1).mean() - 0.94) < 0.03


def test_unknown_part(benchmark, capsys):
    """The error names the part and those that there are."""
    with pytest.raises(SystemExit):
        benchmark.main(["--parts", "flat,ivf"])
    assert "--parts ivf: choose from flat,ivfpq" in capsys.readouterr().err
