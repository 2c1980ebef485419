"""Jensen–Shannon divergence against scipy's numbers and hand-worked ones."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon

from fovea.metrics import calibration

ORACLES = Path(__file__).parent / "data" / "metric_oracles_answers.json"


def same(ours, theirs):
    if theirs == "NaN":
        return math.isnan(ours)
    return ours == pytest.approx(theirs, abs=1e-12)


def test_agrees_with_scipy_on_every_case():
    """Distance and divergence in base e and 2, of weights and of samples by way of histograms."""
    scorers = {
        "jensen_shannon": calibration.jensen_shannon,
        "jensen_shannon_histogram": calibration.jensen_shannon_histogram,
    }
    cases = [c for c in json.loads(ORACLES.read_text(encoding="utf-8"))["cases"] if c["metric"] in scorers]
    assert len(cases) == 6
    for case in cases:
        found = scorers[case["metric"]](case["prediction"], case["references"], **case.get("params", {}))
        assert found.keys() == case["score"].keys()
        assert all(same(found[key], case["score"][key]) for key in found), case["id"]


@pytest.mark.parametrize("seed", range(3))
def test_equals_scipy_on_random_histograms(seed):
    """Symmetric, within its bound, 0 for itself at any scale, and scipy's value, empty bins included."""
    rng = np.random.default_rng(seed)
    for _ in range(50):
        p, q = (
            rng.integers(0, 4, 8) + np.eye(8, dtype=int)[0],
            rng.integers(0, 4, 8) + np.eye(8, dtype=int)[1],
        )
        for base in (math.e, 2, 10):
            ours = calibration.jensen_shannon_distance(p, q, base=base)
            assert ours == pytest.approx(jensenshannon(p, q, base=base), abs=1e-9)
            assert ours == calibration.jensen_shannon_distance(q, p, base=base)
            assert 0 <= ours <= math.sqrt(math.log(2, base)) + 1e-12
        assert calibration.jensen_shannon_divergence(p, 3 * p) == pytest.approx(0, abs=1e-15)


def test_by_hand():
    """[1, 0] against [1, 1]: m = [3/4, 1/4]; ½ ln(4/3) + ½ (½ ln(2/3) + ½ ln 2) = 0.2158."""
    expected = 0.5 * math.log(4 / 3) + 0.25 * (math.log(2 / 3) + math.log(2))
    assert calibration.jensen_shannon_divergence([1, 0], [1, 1]) == pytest.approx(expected)
    assert calibration.jensen_shannon_distance([1, 0], [0, 1]) == pytest.approx(math.sqrt(math.log(2)))


def test_histogram_counts_what_lies_outside():
    found = calibration.histogram([-0.1, 0.0, 0.25, 0.5, 1.0, 1.1], bins=4)
    assert found.counts.tolist() == [1, 1, 1, 1] and found.outside == 2
    assert found.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]


def test_refuses_what_is_no_histogram():
    for p, q, told in (
        ([1, 2], [1, 2, 3], "same bins"),
        ([[1]], [[1]], "same bins"),
        ([-1, 2], [1, 1], "not negative"),
        ([math.nan, 1], [1, 1], "finite"),
    ):
        with pytest.raises(ValueError, match=told):
            calibration.jensen_shannon_divergence(p, q)
    with pytest.raises(ValueError, match="1 of 2 scores"):
        calibration.histogram([0.5, math.inf])
