"""The benchmark harness: turn about, ratios of neighbours, a verdict that follows the demand; AlphaClip."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from harness import Comparison, compare  # noqa: E402


def test_ratio_by_hand() -> None:
    """Ours 1, 2, 4 s; the other 2, 2, 2 s: ratios 2, 1, 0.5, median 1; 10 items: median speeds 5 and 5
    items/s.
    """
    made = Comparison("job", ("ours", "other"), ((1.0, 2.0, 4.0), (2.0, 2.0, 2.0)), 10, "items", 1.1)
    assert made.ratios == [2.0, 1.0, 0.5] and made.ratio == 1.0 and not made.ok
    text = made.text()
    assert (
        "5.0 items/s  (2.5 – 10.0)" in text
        and "1.000×  (0.500 – 2.000, 3 rounds)" in text
        and "MISSED" in text
    )
    assert Comparison("job", ("a", "b"), ((1.0,), (1.1,)), 1, "x", 1.1).ok
    assert Comparison("job", ("a", "b"), ((1.0,), (0.1,)), 1, "x", None).ok


def test_another_clock() -> None:
    """A clock that ticks once a call: every job takes one second of it, whatever it does."""
    ticks = iter(range(100))
    made = compare(
        "job",
        ("a", lambda: None),
        ("b", lambda: None),
        items=3,
        unit="x",
        rounds=2,
        clock=lambda: next(ticks),
    )
    assert made.seconds == ((1, 1), (1, 1)) and made.ratio == 1


def test_both_sides_take_turns() -> None:
    """One warm-up each, then A B, B A, A B: no side always runs first."""
    calls: list[str] = []
    made = compare(
        "job", ("a", lambda: calls.append("a")), ("b", lambda: calls.append("b")), items=1, unit="x", rounds=3
    )
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert len(made.seconds[0]) == len(made.seconds[1]) == 3
    assert made.ratio == pytest.approx(sorted(made.ratios)[1])


def test_alpha_clip_runs_in_miniature(capsys: pytest.CaptureFixture[str]) -> None:
    """Both loops agree in loss and both ways in gradient (they check it); chunks hold less than the whole."""
    spec = importlib.util.spec_from_file_location("benchmark_of_alpha_clip", BENCHMARKS / "alpha_clip.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    assert benchmark.main(["--tiny"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ratio") == 2
    for title in ("training step: batch 8", "regions: 2 images × 3 regions", "memory: most bytes"):
        assert title in printed
    largest = {
        line.split()[0]: float(line.split()[-1])
        for line in printed.splitlines()
        if line.startswith(("  all at once", "  chunk_size"))
    }
    assert largest["all"] > 7 and largest["chunk_size=2"] < 2


def test_held_bytes_by_hand() -> None:
    """Two tensors of 1 KiB die before the next: views, writes in place, a weight's shape add nothing."""
    import torch
    from alpha_clip import HeldBytes

    weight = torch.nn.Linear(16, 16, bias=False)
    given = torch.ones(256)
    with HeldBytes(weight) as held:
        one = given + 1
        one.view(16, 16).add_(1)
        two = one * 2
        del one, two
        torch.zeros(16, 16)
        three = given.view(256)
        four = three + 1
    assert held.most == 2 * 1024 and held.now == 1024 and four.sum() == 512
