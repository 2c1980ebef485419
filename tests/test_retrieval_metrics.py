"""Metrics of a ranking against trec_eval's numbers, a brute force, and what random embeddings must score."""

import json

import numpy as np
import pytest

from fovea.metrics.retrieval import (
    bootstrap_interval,
    bootstrap_intervals,
    evaluate,
    paired_bootstrap,
    rank,
    recall_curve,
)


def oracle_cases(shared_data, metric):
    return [c for c in json.loads((shared_data / "metric_oracles.json").read_text()) if c["metric"] == metric]


# pytrec_eval's column → ours. Its `ndcg` has no cut-off: ours at a k beyond the list.
COLUMNS = {"recip_rank": "mrr", "map": "map", "ndcg": "ndcg@1000"}
FAMILIES = {"recall": "recall", "success": "hit", "P": "precision", "ndcg_cut": "ndcg"}


def test_equals_trec_eval_on_every_oracle_case(shared_data):
    """All columns of pytrec_eval that we have, ties and graded gains and lost gold included, to 1e-6."""
    cases = oracle_cases(shared_data, "retrieval")
    assert len(cases) >= 7
    for case in cases:
        result = evaluate({"q": case["prediction"]}, {"q": case["references"]}, ks=(1, 2, 3, 5, 10, 1000))
        for column, expected in case["score"]["pytrec_eval"].items():
            family, _, k = column.rpartition("_")
            name = COLUMNS.get(column) or f"{FAMILIES[family]}@{k}"
            assert result.per_query[name][0] == pytest.approx(expected, abs=1e-6), (case["id"], column)


def brute_force(scores, gold, k):
    order = sorted(scores, key=lambda d: (scores[d], d), reverse=True)
    found = [1.0 if d in gold else 0.0 for d in order]
    dcg = sum(f / np.log2(i + 2) for i, f in enumerate(found[:k]))
    ideal = sum(1 / np.log2(i + 2) for i in range(min(k, len(gold))))
    return (
        sum(found[:k]) / len(gold),
        float(any(found[:k])),
        dcg / ideal,
        max(f / (i + 1) for i, f in enumerate(found)),
    )


@pytest.mark.parametrize("num_levels", [1, 3, 1000], ids=["all tied", "many ties", "few ties"])
def test_equals_five_line_brute_force(num_levels):
    """60 random queries, ties at several densities, gold sets of 1–4 of which some are never retrieved."""
    rng = np.random.default_rng(num_levels)
    run, gold = {}, {}
    for q in range(60):
        docs = [f"d{i}" for i in rng.permutation(30)[: rng.integers(1, 25)]]
        run[f"q{q}"] = {d: float(rng.integers(num_levels)) for d in docs}
        gold[f"q{q}"] = {f"d{i}" for i in rng.permutation(30)[: rng.integers(1, 5)]}
    result = evaluate(run, gold, ks=(1, 5, 10))
    for k in (1, 5, 10):
        expected = np.array([brute_force(run[q], gold[q], k) for q in result.query_ids])
        for column, name in enumerate([f"recall@{k}", f"hit@{k}", f"ndcg@{k}", "mrr"]):
            np.testing.assert_allclose(result.per_query[name], expected[:, column], atol=1e-6, err_msg=name)


def test_recall_and_hit_differ_with_two_gold_images():
    """PITFALLS 9: one of two gold images at rank 1, one at 3: hit@1 = 1, recall@1 = 1/2, recall@5 = 1."""
    mean = evaluate({"q": {"a": 3, "b": 2, "c": 1}}, {"q": ["a", "c"]}, ks=(1, 5)).mean
    assert (mean["hit@1"], mean["recall@1"], mean["hit@5"], mean["recall@5"]) == (1, 0.5, 1, 1)


def test_missing_predictions_count_as_zero_and_are_named():
    """Two of four queries answered, both right: recall@1 = coverage = 0.5; an empty ranking is missing."""
    gold = {q: [q.upper()] for q in "abcd"}
    result = evaluate({"a": {"A": 1.0}, "c": {"C": 1.0}, "d": {}}, gold, ks=(1,))
    assert result.missing == ["b", "d"] and result.coverage == 0.5
    assert {name: result.mean[name] for name in ("recall@1", "hit@1", "mrr")} == {
        "recall@1": 0.5,
        "hit@1": 0.5,
        "mrr": 0.5,
    }
    assert result.per_query["recall@1"].tolist() == [1, 0, 1, 0] and result.query_ids == list("abcd")


def test_tie_rules_bound_each_other():
    """Four tied documents, gold `b`: by id it is third (d, c, b, a); optimistic first, pessimistic last."""
    run, gold = {"q": dict.fromkeys("abcd", 0.5)}, {"q": ["b"]}
    mrr = {
        ties: evaluate(run, gold, ks=(1,), ties=ties).mean["mrr"]
        for ties in ("by_id", "optimistic", "pessimistic")
    }
    assert mrr == pytest.approx({"by_id": 1 / 3, "optimistic": 1, "pessimistic": 1 / 4})


def test_scores_tie_at_float32_as_in_trec_eval():
    """0.5 and 0.5 + 1e-12 are one float32 and therefore tied: the larger id is first."""
    assert rank({"a": 0.5 + 1e-12, "b": 0.5}) == ["b", "a"]
    assert rank({"a": 0.5 + 1e-6, "b": 0.5}) == ["a", "b"]


def test_random_embeddings_score_k_over_n():
    """400 queries against 200 images: recall@k is k/N within four standard errors (PITFALLS 11)."""
    rng = np.random.default_rng(0)
    images, texts = rng.normal(size=(200, 32)), rng.normal(size=(400, 32))
    run = {f"q{i}": {f"i{j}": float(s) for j, s in enumerate(row)} for i, row in enumerate(texts @ images.T)}
    mean = evaluate(run, {f"q{i}": [f"i{i % 200}"] for i in range(400)}, ks=(1, 10, 50)).mean
    for k in (1, 10, 50):
        p = k / 200
        assert abs(mean[f"recall@{k}"] - p) < 4 * np.sqrt(p * (1 - p) / 400)


@pytest.mark.parametrize(
    ("run", "gold", "said"),
    [
        ({"z": {"a": 1.0}}, {"q": ["a"]}, "not in the gold set.*'z'"),
        ({"q": {"a": 1.0}}, {"q": []}, "no gold image.*'q'"),
        ({"q": {"a": 1.0}}, {"q": {"a": 0}}, "no gold image"),
        ({"q": {"a": 1.0}}, {"q": {"a": -1, "b": 1}}, "negative gains"),
        ({"q": {"a": float("nan")}}, {"q": ["a"]}, "finite.*'a': nan"),
        ({"q": {"a": 1e300}}, {"q": ["a"]}, "finite"),
        ({}, {}, "no query"),
    ],
)
def test_refuses_what_cannot_be_scored(run, gold, said):
    """Each fault is an error that names the query or document, not a score."""
    with pytest.raises(ValueError, match=said):
        evaluate(run, gold)


def test_all_faults_are_reported_at_once():
    """An unknown query, an empty gold set and a bad k in one message."""
    with pytest.raises(ValueError, match=r"ks must be.*gold set, e.g. \['z'\].*no gold image"):
        evaluate({"z": {"a": 1.0}}, {"q": []}, ks=(0,))


def test_bootstrap_interval_is_the_normal_one_for_many_values():
    """1,000 flips of mean 0.4: the 95 % interval is mean ± 1.96 √(0.24 / 1000) to 0.004, and repeatable."""
    values = np.array([1.0] * 400 + [0.0] * 600)
    interval = bootstrap_interval(values, n=4000)
    half = 1.96 * np.sqrt(0.24 / 1000)
    assert interval.mean == 0.4
    np.testing.assert_allclose([interval.low, interval.high], [0.4 - half, 0.4 + half], atol=0.004)
    assert interval == bootstrap_interval(values, n=4000) != bootstrap_interval(values, n=4000, seed=1)
    assert bootstrap_interval([0.25] * 7) == (0.25, 0.25, 0.25)


def test_bootstrap_does_not_depend_on_its_chunks(monkeypatch):
    """Resampling in blocks that bound the memory draws the same numbers as in one go."""
    values = np.random.default_rng(0).random(50)
    whole = bootstrap_interval(values, n=200)
    monkeypatch.setattr("fovea.metrics.retrieval._CELLS", 350)
    np.testing.assert_allclose(bootstrap_interval(values, n=200), whole, rtol=1e-12)


def test_many_intervals_are_those_of_single_ones():
    """Two columns at once: the same resamples, the same intervals as one by one and as a plain loop."""
    values = np.random.default_rng(1).random((40, 2))
    both = bootstrap_intervals(values, n=300, seed=3)
    drawn = np.random.default_rng(3).integers(0, 40, (300, 40))
    for column, interval in enumerate(both):
        np.testing.assert_allclose(interval, bootstrap_interval(values[:, column], n=300, seed=3), rtol=1e-12)
        means = [values[rows, column].mean() for rows in drawn]
        np.testing.assert_allclose(interval[1:], np.quantile(means, [0.025, 0.975]), rtol=1e-12)


def test_recall_curve_is_recall_at_every_k():
    """Several gold images, some lost, a query without a prediction, ties: the same figures as `evaluate`."""
    run = {"a": {"x": 1.0, "y": 1.0, "z": 0.5, "w": 0.1}, "b": {"x": 0.3}}
    gold = {"a": {"x": 2, "w": 1, "gone": 1, "z": 0}, "b": ["x"], "c": ["y"]}
    curve = recall_curve(run, gold, 6)
    per_query = evaluate(run, gold, ks=range(1, 7)).per_query
    expected = np.stack([per_query[f"recall@{k}"] for k in range(1, 7)], 1)
    np.testing.assert_allclose(curve, expected, atol=1e-7)


def test_paired_bootstrap_uses_the_pairing():
    """`a` beats `b` by exactly 0.1 on every query: the interval is [0.1, 0.1] although both spread widely."""
    b = np.random.default_rng(0).random(100)
    np.testing.assert_allclose(paired_bootstrap(b + 0.1, b), [0.1] * 3, atol=1e-12)
    with pytest.raises(ValueError, match="same queries"):
        paired_bootstrap([1.0, 0.0], [1.0])
    with pytest.raises(ValueError, match="non-empty list of finite"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="non-empty list of finite"):
        bootstrap_interval([1.0, float("nan")])
