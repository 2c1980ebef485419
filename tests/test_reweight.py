"""fovea.reweight: eq. 5, 7, 8, 9 on hand-worked numbers, fits against brute force, the table on disk."""

from __future__ import annotations

import json
import math
import time
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from score_tables import large_table, make_table, random_table

from fovea.reweight import (
    Calibration,
    Calibrations,
    eq9_loss,
    fit_eq9,
    fit_ranking,
    fuse,
    local_score,
    ranking_loss,
)
from fovea.score_table import BEYOND, ScoreTable
from fovea.types import FUSIONS


@pytest.mark.parametrize(
    ("weights", "missing", "second", "expected"),
    [
        ("uniform", "zero", 0.3, 0.4),  # (0.5 + 0.3) / 2
        ("eq4", "zero", 0.3, 2 / 3 * 0.5 + 1 / 3 * 0.3),  # 0.2 and 0.1 become 2/3 and 1/3
        ("eq4_raw", "zero", 0.3, 0.2 * 0.5 + 0.1 * 0.3),  # as printed
        ("uniform", "zero", math.nan, 0.25),  # the missing phrase keeps its half
        ("uniform", "ignore", math.nan, 0.5),
        ("eq4", "zero", math.nan, 0.25),
        ("eq4", "ignore", math.nan, 0.5),
        ("eq4_raw", "ignore", math.nan, 0.1),
    ],
)
def test_local_score_by_hand(weights, missing, second, expected):
    """Eq. 5 with two phrases, the second found or not, under every rule: worked by hand."""
    eq4 = np.array([[0.2, 0.0 if math.isnan(second) else 0.1]])
    score, alpha = local_score(
        np.array([[0.5, second]]), eq4, np.array([2]), weights=weights, missing=missing
    )
    assert score[0] == pytest.approx(expected)
    assert np.isfinite(alpha).all()


@pytest.mark.parametrize("weights", ["uniform", "eq4", "eq4_raw"])
@pytest.mark.parametrize("missing", ["zero", "ignore", "full_mask"])
@pytest.mark.parametrize("num_phrases", [0, 2])
def test_nothing_found_is_zero_never_nan(weights, missing, num_phrases):
    """No region for any phrase, or no phrase at all: 0, finite, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score, alpha = local_score(
            np.full((1, num_phrases), np.nan),
            np.zeros((1, num_phrases)),
            np.array([num_phrases]),
            weights=weights,
            missing=missing,
        )
    assert score.tolist() == [0.0] and np.isfinite(alpha).all()


def test_empty_masks_share_equally():
    """Regions found but without a pixel: eq. 4 is 0/0, the phrases share equally."""
    score, alpha = local_score(np.array([[0.4, 0.2]]), np.zeros((1, 2)), np.array([2]), weights="eq4")
    assert score[0] == pytest.approx(0.3) and alpha.tolist() == [[0.5, 0.5]]


def test_fuse_by_hand():
    """Each row of the fusion table for S_g = 0.3, S_l = 0.5 (eq. 5: 0.25), B = 1, W_l = 3, W_g = 2, 4, 6."""
    table = make_table({"q": [("a", 1, True, 0.3, 0.5)]})
    fits = Calibrations(*(Calibration("eq9", w, 3.0, 1.0) for w in (2.0, 4.0, 6.0)))
    got = {name: float(fuse(name, table, fits)[0]) for name in FUSIONS}
    assert got == pytest.approx(
        {
            "global": 0.3,
            "local": 0.5,
            "local_eq5": 0.25,
            "add": 0.8,
            "multiply": 0.15,
            "learned": 3.1,
            "eq9": 3.7,
            "ranking": 4.3,
        }
    )


def test_bias_and_common_scale_move_scores_but_no_ranking():
    """B shifts all candidates of all questions alike, a common factor stretches them: every order stays."""
    table = random_table(50, 8, seed=3)
    base = Calibration("eq9", 0.7, 2.0, 0.0)

    def order(calibration):
        scores = fuse("learned", table, Calibrations(calibration, base, base))
        cuts = table.starts()[1:-1]
        return [np.argsort(-own, kind="stable").tolist() for own in np.split(scores, cuts)], scores

    plain, scores = order(base)
    for w_global, w_local, bias in [(0.7, 2.0, -5.0), (0.7, 2.0, 0.25), (7.0, 20.0, 3.0)]:
        moved, other = order(Calibration("eq9", w_global, w_local, bias))
        assert moved == plain
        assert not np.allclose(other, scores)
    assert order(Calibration("eq9", 2.0, 0.7, 0.0))[0] != plain, "the ratio of the weights is what orders"


def test_fuse_refuses_unknown_and_uncalibrated():
    """A typo or a missing calibration names what there is."""
    table = make_table({"q": [("a", 1, True, 0.3, 0.5)]})
    with pytest.raises(ValueError, match="unknown fusion `plus`; one of global, local"):
        fuse("plus", table)
    with pytest.raises(ValueError, match="`eq9` needs a calibration"):
        fuse("eq9", table)


def test_negative_is_of_the_top_five_non_gold():
    """Gold images are skipped, the pool is five deep, the draw follows the seed, a subset keeps it."""
    rows = [(f"i{r}", r, r in (1, 3), 1 - r / 100, 0.0) for r in range(1, 15)]
    queries = {f"q{n}": rows for n in range(200)}
    table = make_table(queries)
    drawn = table.rank[table.negative]
    assert len(drawn) == 200 and set(drawn) == {2, 4, 5, 6, 7}
    assert np.bincount(drawn).max() < 80  # uniform would be 40 each
    subset = make_table({q: queries[q] for q in list(queries)[50:][::-1]})
    for q, query_id in enumerate(subset.query_ids):
        own = subset.rank[(subset.query == q) & subset.negative]
        assert own == table.rank[(table.query == table.query_ids.index(query_id)) & table.negative]
    assert (make_table(queries, seed=1).negative != table.negative).any()


def test_fit_eq9_by_hand_and_warns():
    """Four points on the plane S = −S_g + 2 S_l + 0.2, targets 1, 0, 1, 0: loss 0, and W_g < 0 is reported.

    (0.4, 0.6) → 1, (0.6, 0.2) → 0, (0.2, 0.5) → 1, (0.4, 0.1) → 0.
    """
    table = make_table(
        {
            "a": [("n", 1, False, 0.6, 0.2), ("g", 2, True, 0.4, 0.6)],
            "b": [
                ("n", 1, False, 0.4, 0.1),
                ("g", BEYOND, True, 0.2, 0.5),
            ],  # beyond the top K, still the positive
        }
    )
    with pytest.warns(UserWarning, match="W_g = -1 is negative"):
        fit = fit_eq9(table.grid())
    assert (fit.w_global, fit.w_local, fit.bias, fit.loss) == pytest.approx((-1, 2, 0.2, 0), abs=1e-9)
    assert (fit.num_queries, fit.num_skipped) == (2, 0)


def test_fit_ranking_by_hand():
    """Gold ahead by 1 in three queries, behind by 1 in one: σ(W_l) = 3/4, W_l = ln 3; S_g is equal: W_g = 0.

    The fifth query's gold image is beyond the top K and does not count.
    """
    ahead = [("g", 1, True, 0.5, 1.0), ("n", 2, False, 0.5, 0.0)]
    behind = [("g", 1, True, 0.5, 0.0), ("n", 2, False, 0.5, 1.0)]
    lost = [("n", 1, False, 0.5, 0.0), ("g", BEYOND, True, 0.5, 9.0)]
    table = make_table({"a": ahead, "b": ahead, "c": ahead, "d": behind, "e": lost})
    fit = fit_ranking(table.grid(), l2=1e-12)
    assert (fit.w_global, fit.w_local) == pytest.approx((0, math.log(3)), abs=1e-6)
    assert fit.loss == pytest.approx(-(3 * math.log(3 / 4) + math.log(1 / 4)) / 4)
    assert (fit.num_queries, fit.num_skipped) == (4, 1)


def tensors(table):
    """Grid → torch."""
    grid = table.grid()
    return [torch.from_numpy(a) for a in (grid.scores, grid.gold, grid.top, grid.negative)]


@pytest.mark.parametrize("separation", [(1.0, 2.0), (-1.0, 2.0), (2.0, -1.0), (-1.0, -1.0)])
def test_fits_minimise_their_losses(separation):
    """No step from a solution lowers the torch loss; where the free optimum is negative, `ranking` has 0."""
    table = random_table(separation=separation)
    scores, gold, top, negative = tensors(table)

    def eq9(w):
        return float(eq9_loss(scores @ torch.tensor(w[:2], dtype=torch.float64) + w[2], gold, negative))

    def ranking(w):
        w = torch.tensor(w, dtype=torch.float64)
        return float(ranking_loss(scores @ w, gold, top) + 0.5e-6 * (w**2).sum())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = fit_eq9(table.grid())
    best = [fit.w_global, fit.w_local, fit.bias]
    assert fit.loss == pytest.approx(eq9(best))
    fit = fit_ranking(table.grid())
    weights = [fit.w_global, fit.w_local]
    assert min(weights) >= 0
    assert [w > 0 for w in weights] == [s > 0 for s in separation]
    assert fit.loss == pytest.approx(
        float(ranking_loss(scores @ torch.tensor(weights, dtype=torch.float64), gold, top))
    )
    for step in (1e-3, -1e-3):
        for axis in range(3):
            moved = [w + step * (i == axis) for i, w in enumerate(best)]
            assert eq9(moved) > eq9(best)
        for axis in range(2):
            moved = [w + step * (i == axis) for i, w in enumerate(weights)]
            if min(moved) >= 0:
                assert ranking(moved) >= ranking(weights) - 1e-12


def test_losses_by_loop():
    """The vectorised losses equal a loop over queries: several golds, golds beyond the top K, none at all."""
    table = make_table(
        {
            "two": [("a", 1, True, 0.5, 0.1), ("b", 2, False, 0.4, 0.3), ("c", 3, True, 0.3, 0.7)],
            "beyond": [("a", 1, False, 0.5, 0.1), ("b", 2, False, 0.4, 0.3), ("c", BEYOND, True, 0.3, 0.7)],
            "none": [("a", 1, False, 0.5, 0.1)],
            "only": [("a", 1, True, 0.5, 0.1)],
        }
    )
    fused = 2 * table.global_ + table.local
    eq9, rank = [], []
    for q in range(4):
        own = np.flatnonzero(table.query == q)
        gold = [i for i in own if table.is_gold[i]]
        if gold and table.negative[own].any():
            hard = next(i for i in own if table.negative[i])
            eq9.append(np.mean([(1 - fused[i]) ** 2 for i in gold]) + fused[hard] ** 2)
        kept = [i for i in own if table.rank[i] > 0]
        if any(i in kept for i in gold):
            z = sum(math.exp(fused[i]) for i in kept)
            rank.append(np.mean([-math.log(math.exp(fused[i]) / z) for i in gold if i in kept]))
    assert (len(eq9), len(rank)) == (2, 2)
    scores, gold, top, negative = tensors(table)
    weights = torch.tensor([2.0, 1.0], dtype=torch.float64)
    assert float(eq9_loss(scores @ weights, gold, negative)) == pytest.approx(np.mean(eq9))
    assert float(ranking_loss(scores @ weights, gold, top)) == pytest.approx(np.mean(rank))


def test_separable_scores_stay_finite():
    """Gold always ahead: the ridge keeps the ranking weights finite."""
    rows = [("g", 1, True, 0.5, 0.5), ("n", 2, False, 0.1, 0.1)]
    fit = fit_ranking(make_table({"a": rows, "b": rows}).grid())
    assert 1 < fit.w_global < 1e4 and fit.loss < 1e-2


@pytest.mark.parametrize("fit", [fit_eq9, fit_ranking])
def test_fit_on_nothing_says_so(fit):
    """No query with a gold image: a named error, not a singular matrix."""
    with pytest.raises(ValueError, match="none of 1 queries"):
        fit(make_table({"q": [("a", 1, False, 0.1, 0.1), ("b", 2, False, 0.1, 0.2)]}).grid())


def test_calibration_of_ten_thousand_queries_takes_seconds():
    """10,000 queries × 20 candidates: both closed forms in under 5 s."""
    grid = large_table(10_000).grid()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_eq9(grid), fit_ranking(grid)
    assert time.perf_counter() - start < 5


def test_the_ridge_is_part_of_what_ranking_minimises():
    """Scores of spread 0.001 that nearly coincide: without the ridge W = (0, 693) would win, with it
    (175, 610) does; neither a step nor the corner is better.
    """
    grid = large_table(std=1e-3, rho=0.9999).grid()
    fit = fit_ranking(grid)
    scores, gold, top = (torch.from_numpy(a) for a in (grid.scores, grid.gold, grid.top))

    def objective(w):
        w = torch.tensor(w, dtype=torch.float64)
        return float(ranking_loss(scores @ w, gold, top) + 0.5e-6 * (w**2).sum())

    w = [fit.w_global, fit.w_local]
    assert w == pytest.approx([174.77, 609.83], abs=0.1)
    others = ([0.0, 693.063], [w[0] + 1, w[1]], [w[0] - 1, w[1]], [w[0], w[1] + 1], [w[0], w[1] - 1])
    assert objective(w) < min(map(objective, others))


@pytest.mark.parametrize("objective", ["eq9", "ranking"])
def test_bias_and_scale_change_no_ranking(objective):
    """B shifts all candidates of a query alike, and only W_g : W_l orders them; values do change."""
    table = random_table()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = fit_eq9(table.grid()) if objective == "eq9" else fit_ranking(table.grid())

    def orders(w_global, w_local, bias):
        fits = Calibrations(*[Calibration(objective, w_global, w_local, bias)] * 3)
        fused = fuse("learned", table, fits)
        starts = table.starts()
        return fused, [np.argsort(-fused[a:b], kind="stable").tolist() for a, b in pairwise(starts)]

    w_global, w_local = fit.w_global, fit.w_local
    value, order = orders(w_global, w_local, fit.bias)
    for changed in (
        (w_global, w_local, 0.0),
        (w_global, w_local, -3.0),
        (7 * w_global, 7 * w_local, fit.bias),
    ):
        other, same = orders(*changed)
        assert same == order
        assert (other != value).all() or changed == (w_global, w_local, fit.bias)
    assert orders(w_global, 2 * w_local, fit.bias)[1] != order


def test_table_on_disk_and_pooling(tmp_path):
    """Writing and reading keep every field, missing phrases included; pooling keeps each gallery's rows."""
    first = make_table(
        {"a": [("x", 1, True, 0.5, 0.25), ("y", 2, False, 0.4, 0.1)], "b": [("x", BEYOND, True, 0.1, 0.2)]}
    )
    object.__setattr__(first, "similarity", np.array([[0.25], [np.nan], [0.2]]))
    object.__setattr__(first, "region_ids", (("r0",), (None,), ("r0",)))
    first.write(tmp_path / "a.parquet")
    again = ScoreTable.read(tmp_path / "a.parquet")
    for name in ScoreTable.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(again, name), getattr(first, name), err_msg=name)
    pooled = ScoreTable.concat([first, make_table({"c": [("z", 1, True, 0.9, 0.9)]}, split="other")])
    assert pooled.query_ids == ("a", "b", "c") and pooled.splits == ("cal", "cal", "other")
    assert pooled.query.tolist() == [0, 0, 1, 2] and pooled.num_gold.tolist() == [1, 1, 1]


def test_bad_tables_are_refused(tmp_path):
    """Duplicate query ids and non-finite scores are named; a foreign parquet file is refused by name."""
    with pytest.raises(ValueError, match="non-finite `local` scores, first .*'a', 'x'"):
        make_table({"a": [("x", 1, True, 0.5, math.nan)]})
    good = make_table({"a": [("x", 1, True, 0.5, 0.5)]})
    with pytest.raises(ValueError, match=r"query ids occur twice: \['a'\]"):
        ScoreTable.concat([good, good])
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="other.parquet: not a score table"):
        ScoreTable.read(tmp_path / "other.parquet")


def test_calibration_file(tmp_path):
    """A calibration round-trips; another JSON is refused by name."""
    fits = Calibrations(
        *(Calibration("ranking", w, 2.0, 0.0, 0.5, 10, 1, "gradient") for w in (1.0, 2.0, 3.0))
    )
    fits.write(tmp_path / "c.json")
    assert Calibrations.read(tmp_path / "c.json") == fits
    # Trained W_g = 1, exact 3: 2 of 3, relative because the exact one is above 1.
    assert json.loads((tmp_path / "c.json").read_text())["difference"] == pytest.approx(2 / 3)
    for content in ("{}", "[]", "{", '{"learned": {"w": 1}}'):
        (tmp_path / "d.json").write_text(content)
        with pytest.raises(ValueError, match="d.json: not a calibration"):
            Calibrations.read(tmp_path / "d.json")
    with pytest.raises(
        FileNotFoundError, match="no calibration at .*make it with: python scripts/train.py fit"
    ):
        Calibrations.read(tmp_path / "e.json")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "2.0"])
def test_a_calibration_of_no_numbers_is_refused_by_name(tmp_path, wrong):
    """Before anything is computed with it."""
    fit = Calibration("eq9", 1.0, 2.0)
    path = tmp_path / "calibration.json"
    Calibrations(fit, fit, fit).write(path)
    content = json.loads(path.read_text())
    content["learned"]["w_local"] = wrong
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="calibration.json: not a calibration"):
        Calibrations.read(path)


def test_a_negative_number_of_questions_is_refused():
    from fovea.report.queries import choose

    with pytest.raises(ValueError, match="--limit -3"):
        choose([], -3, 0)
