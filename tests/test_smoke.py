"""The quickstart in miniature, every stage from nothing: what `make smoke` runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fovea.types import FUSIONS

ROOT = Path(__file__).resolve().parent.parent


def test_smoke(tmp_path: Path) -> None:
    """Every stage ends well and the results hold what they promise.

    Each fusion has its recalls in [0, 1]; seeds, world and the seconds of each stage are there; the page is
    written; the same command finds everything finished.
    """
    run = tmp_path / "runs" / "smoke"
    command = [sys.executable, "scripts/reproduce.py", "--row", "smoke", "--out", str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((run / "results.json").read_text())
    assert set(results["retrieval"]) == set(FUSIONS)
    for row in results["retrieval"].values():
        assert 0 <= row["recall@1"] <= row["recall@5"] <= row["recall@20"] <= 1
    assert results["seeds"] == [0] and results["world"]["reader"] == "world"
    assert {"world", "coarse", "alpha", "masks", "reweight", "evaluate"} <= set(results["seconds"])
    assert (run / "report.html").stat().st_size > 50_000
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and again.stdout.count("not run again") == len(results["seconds"])
