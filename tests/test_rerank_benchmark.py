"""benchmarks/rerank.py: both parts run in miniature and print a ratio each."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_runs_in_miniature(capsys, monkeypatch):
    """The fused scores of the two parts are compared inside; no verdict on a tiny model."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("benchmark_of_rerank", ROOT / "benchmarks/rerank.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    assert benchmark.main(["--tiny"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ratio") == 2 and "MISSED" not in printed
    for part in ("rerank, fresh: 20 candidates × 5 regions", "rerank, cached:"):
        assert part in printed
