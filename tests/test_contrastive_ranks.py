"""Contrastive training on two gloo ranks is that of one process, for every option, gradient for gradient."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from two_ranks import CASES, run_all

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two ranks saw; a rank that waits for ever ends the test."""
    out = tmp_path_factory.mktemp("ranks") / "out.json"
    done = subprocess.run(
        [sys.executable, str(HERE / "two_ranks.py"), str(out)], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(out.with_name(f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def test_two_ranks_equal_one_process(ranks: list[dict[str, Any]]) -> None:
    """Uneven shares, an uneven last batch, a rank without regions: each step's loss and every gradient, the
    recall, and the averaged weights are one process's; both ranks hold the same.
    """
    one, (two, other) = run_all(1), ranks
    for case in CASES:
        assert two[case]["figures"] == other[case]["figures"]
        assert one[case]["figures"].keys() == two[case]["figures"].keys() >= {"val/recall@1", "train/loss"}
        for name, value in one[case]["figures"].items():
            assert two[case]["figures"][name] == pytest.approx(value, abs=1e-5), (case, name)
        assert len(one[case]["steps"]) == len(two[case]["steps"]) == 2
        for step, (mine, theirs) in enumerate(zip(one[case]["steps"], two[case]["steps"], strict=True)):
            assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5), (case, step)
            assert mine["gradients"].keys() == theirs["gradients"].keys()
            largest = max(abs(g) for gradient in mine["gradients"].values() for g in gradient)
            for name, gradient in mine["gradients"].items():
                close = pytest.approx(gradient, abs=1e-5 * largest, rel=1e-3)
                assert theirs["gradients"][name] == close, (case, step, name)
    frozen = one["frozen text"]["steps"][0]["gradients"]
    assert "encoder.clip.visual.conv1.alpha.weight" in frozen and len(frozen) < len(
        one["regions"]["steps"][0]["gradients"]
    )
    assert two["average"] == other["average"]
    for name, value in one["average"].items():
        if not name.endswith("in_proj_bias"):  # the keys' has no gradient but rounding, which Adam enlarges
            assert two["average"][name] == pytest.approx(value, abs=1e-4), name


def test_gradcache_is_the_big_batch_on_two_ranks(ranks: list[dict[str, Any]]) -> None:
    """The same figures with and without chunks, where the rest of the case is the same."""
    for plain, chunked in (
        ("frozen text", "gradcache, frozen text"),
        ("pictures as partners", "gradcache, pictures"),
    ):
        for mine, theirs in zip(ranks[0][plain]["steps"], ranks[0][chunked]["steps"], strict=True):
            assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)
            for name, gradient in mine["gradients"].items():
                assert theirs["gradients"][name] == pytest.approx(gradient, abs=1e-5, rel=1e-3), name


def test_a_loss_that_is_nan_on_one_rank_stops_both(ranks: list[dict[str, Any]]) -> None:
    """The sound rank would wait in its backward for ever; both name the faulty rank and its rows."""
    first, second = (rank["error"] for rank in ranks)
    assert first == second
    assert first.startswith("loss is not finite at step 0, logit scale 14.3; rank 1: loss nan (global ")
    assert first.endswith("regional nan), rows with non-finite embeddings: row-3, row-4")
