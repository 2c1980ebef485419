"""fovea.figures: what is drawn is what was given, and a file is whole or not there."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from score_tables import make_table

from fovea import figures
from fovea.figures import Curve
from fovea.reweight import Calibration, Calibrations
from fovea.score_table import BEYOND

FITS = Calibrations(*(Calibration("eq9", w, 2.0, 0.5) for w in (1.0, 3.0, 4.0)))


@pytest.fixture
def table():
    """Two kept candidates, one of them gold, and a gold image beyond them."""
    return make_table(
        {"q": [("a", 1, False, 0.5, 0.1), ("b", 2, True, 0.4, 0.3), ("c", BEYOND, True, 0.1, 0.9)]}
    )


def test_panels_hold_the_kept_candidates(table):
    """By name: S_global, learned = S_g + 2 S_l + 0.5; and on the calibration split the same three."""
    before, after = figures.score_panels(table, FITS, ["global", "learned"])
    assert (before.gold.tolist(), before.others.tolist()) == ([0.4], [0.5])
    np.testing.assert_allclose([after.gold[0], after.others[0]], [1.5, 1.2])
    panels = figures.calibration_panels(table.grid(), FITS)
    assert [panel.title for panel in panels] == [
        "before: whole image",
        "after: learned (eq9)",
        "eq. 9, closed form",
    ]
    np.testing.assert_allclose([panel.gold[0] for panel in panels], [0.4, 1.5, 3 * 0.4 + 2 * 0.3 + 0.5])


def test_lines_and_bands_are_the_curves():
    """A line in percent for each fusion, a band where the interval is known, one line for chance."""
    curves = {
        "global": Curve([1, 2], [0.25, 0.5], [0.2, 0.4], [0.3, 0.6]),
        "other": Curve([1, 2], [0.1, 0.2]),
    }
    (axes,) = figures.recall_curves(curves, {1: 0.05, 2: None}).axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert [list(lines[name]) for name in ("global", "other", "chance")] == [[25, 50], [10, 20], [5]]
    (band,) = axes.collections
    ends = band.get_paths()[0].vertices
    assert {(1, 20), (1, 30), (2, 40), (2, 60)} <= {tuple(map(round, end)) for end in ends.tolist()}


def test_curves_of_older_results():
    """Without `curves`, the cut-offs are the curve; intervals only where all of them are known."""
    row = {"recall@1": 0.5, "recall@10": 0.75, "mrr": 0.6, "recall@2": 0.6}
    results = {"retrieval": {"global": row, "add": row}, "intervals": {"global": {"recall@1": [0.4, 0.6]}}}
    curves = figures.curves_of(results)
    assert curves["global"] == Curve([1, 2, 10], [0.5, 0.6, 0.75]) == curves["add"]
    results["intervals"]["global"] |= {"recall@2": [0.5, 0.7], "recall@10": [0.7, 0.8]}
    assert figures.curves_of(results)["global"].low == [0.4, 0.5, 0.7]


def test_a_file_is_a_picture_and_the_same_each_time(table, tmp_path):
    """Equal scores, one class only, an empty panel: all can be drawn; bytes do not change from run to run."""
    panels = figures.score_panels(table, FITS, ["global"])
    empty = figures.Panel("nothing", np.zeros(0), np.zeros(0))
    same = figures.Panel("equal", np.full(3, 0.5), np.zeros(0))
    one, two = (
        figures.write_png(
            figures.score_distributions([*panels, empty, same]), tmp_path / "plots" / f"{n}.png", "a $title"
        )
        for n in (1, 2)
    )
    assert one.read_bytes() == two.read_bytes()
    with Image.open(io.BytesIO(one.read_bytes())) as picture:
        assert picture.format == "PNG" and picture.width > picture.height
    assert sorted(path.name for path in one.parent.iterdir()) == ["1.png", "2.png"]
