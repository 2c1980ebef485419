"""Prediction files against gold queries: denominators, faulty files, official figures beside ours."""

import json

import numpy as np
import pytest

from fovea.metrics.answers import (
    RULES,
    SCORERS,
    EntityLinker,
    Tools,
    evaluate,
    read_predictions,
)
from fovea.metrics.retrieval import bootstrap_interval
from fovea.tables import Tables, TableWriter
from fovea.types import Query


def query(name, *answers, keywords=(), kind="question", split="val"):
    return Query(id=name, text=f"what is {name}?", answers=answers, keywords=keywords, kind=kind, split=split)


GOLD = [query("a", "red"), query("b", "white", "blue"), query("c", "3"), query("d", "cat")]


def test_missing_predictions_count_as_zero_and_are_named():
    """Half of four answered, all right: 0.5, coverage 0.5; leaving answers out never raises the score."""
    result = evaluate({"a": "Red", "b": ["blue", "white"], "c": None}, GOLD, scorer="mmqa_list_em_f1")
    assert result.missing == ["c", "d"] and result.coverage == 0.5
    assert result.per_query["list_em"].tolist() == [1, 1, 0, 0] and result.query_ids == list("abcd")
    assert result.honest == {"list_em": 50.0, "list_f1": 50.0} == result.official
    assert result.mean["list_em"] == bootstrap_interval([1.0, 1.0, 0.0, 0.0])
    assert result.by_kind == {"question": {"queries": 4, "list_em": 0.5, "list_f1": 0.5}}
    text = "\n".join(result.lines())
    assert "2 of 4 queries predicted" in text and "2 without a prediction, scored 0: c, d" in text
    assert "list_em: 50 over the gold set; official 50" in text


@pytest.mark.parametrize(
    ("scorer", "official"),
    [
        ("token_f1", 50.0),  # SQuAD counts a missing prediction as 0
        ("relaxed_accuracy", None),  # pix2struct refuses lists of different lengths
        ("vqa_accuracy", None),  # the VQA tools refuse another set of ids
    ],
)
def test_upstream_counts_or_refuses_missing_predictions(scorer, official):
    """Each rule knows what its script does; complete files always have an official figure, equal to ours."""
    gold = [query("a", "red", "red", "red", "red"), query("b", "blue", "blue", "blue", "blue")]
    part = evaluate({"a": "red"}, gold, scorer=scorer)
    (key,) = part.honest
    assert part.honest[key] == pytest.approx(50.0) and part.official[key] == official
    whole = evaluate({"a": "red", "b": "red"}, gold, scorer=scorer)
    assert whole.official == whole.honest and whole.honest[key] == pytest.approx(50.0)


def infoseek_gold():
    return [
        query("a", "China", keywords=("cn", "China"), kind="String", split="val_unseen_question"),
        query("b", "1990", keywords=("1989", "1990"), kind="Time", split="val_unseen_question"),
        query("c", "7", keywords=("6", "8"), kind="Numerical", split="val_unseen_entity"),
        query("d", "x", kind="String", split="val_unseen_entity"),
    ]


def test_infoseek_gives_both_figures():
    """One right answer a split, the others missing: officially 100, over the gold set 50."""
    result = evaluate({"a": "the cn", "c": "6 to 7"}, infoseek_gold(), scorer="infoseek")
    assert result.official["final_score"] == 100.0 and result.honest["final_score"] == 50.0
    assert result.official["unseen_question_score/score_string"] == 100.0
    assert result.honest["unseen_question_score/score_time"] == 0.0
    assert result.honest["unseen_entity_score/score_num"] == 100.0
    assert "  final_score: 50 over the gold set; official 100" in result.lines()
    complete = evaluate({"a": "cn", "b": "1991", "c": "9", "d": "x"}, infoseek_gold(), scorer="infoseek")
    assert complete.honest == complete.official and complete.honest["final_score"] == 50.0
    # A gold set of one split has no harmonic mean with an empty one.
    half = evaluate({"a": "cn"}, infoseek_gold()[:2], scorer="infoseek")
    assert half.honest["final_score"] == 50.0 and "unseen_entity_score/score" not in half.honest


def test_infoseek_duplicates_count_once_here_and_twice_upstream():
    """a right, then a wrong again: upstream 1 of 2; ours by the policy, or a refusal that names it."""
    rows = [("a", "cn"), ("a", "Japan"), ("b", "1990"), ("c", "7"), ("d", "x")]
    with pytest.raises(ValueError, match=r"1 queries are predicted more than once, e.g. \['a'\]"):
        evaluate(rows, infoseek_gold(), scorer="infoseek")
    first = evaluate(rows, infoseek_gold(), scorer="infoseek", duplicates="first")
    last = evaluate(rows, infoseek_gold(), scorer="infoseek", duplicates="last")
    assert first.duplicates == {"a": 2} and first.honest["unseen_question_score/score"] == 100.0
    assert last.honest["unseen_question_score/score"] == 50.0
    for result in (first, last):
        assert result.official["unseen_question_score/score"] == pytest.approx(66.67)


def oven_gold():
    names = {"qs": "val_seen", "qu": "val_unseen", "es": "val_seen", "eu": "val_unseen"}
    return [
        query(name, "Belgium", keywords=("Q31",), kind="query" if name[0] == "q" else "entity", split=split)
        for name, split in names.items()
    ] + [query("eu2", "Belgium", keywords=("Q31",), kind="entity", split="val_unseen")]


def test_oven_gives_both_figures_and_links_generated_answers():
    """Ids and generated answers score alike; a missing unseen entity halves that split, not officially."""
    ids = {"qs": "Q31", "qu": "Q31", "es": "Q31", "eu": "Q31"}
    result = evaluate(ids, oven_gold(), scorer="oven")
    assert result.official["final_score"] == 100.0
    assert result.honest["entity_result/unseen"] == 50.0
    assert result.honest["entity_score"] == pytest.approx(66.67)
    linker = EntityLinker({"Q31": "Belgium", "Q142": "France", "Q90": "Paris, France"})
    texts = dict.fromkeys(ids, "the flag of BELGIUM")
    assert evaluate(texts, oven_gold(), scorer="oven", tools=Tools(linker=linker)).honest == result.honest
    # Without any unseen prediction the official script stops with a KeyError: no figure, ours is there.
    seen = evaluate({"qs": "Q31", "es": "Q31"}, oven_gold(), scorer="oven")
    assert set(seen.official.values()) == {None} and seen.honest["query_result/seen"] == 100.0


def test_the_linker_prefers_whole_titles_and_says_when_nothing_fits():
    """BM25 over titles: the shorter title wins, accents and case do not matter, ties go to the first."""
    titles = {"Q1": "Paris", "Q2": "Paris Hilton", "Q3": "São Tomé", "Q4": "Sao Tome", "Q5": ""}
    linker = EntityLinker(titles)
    assert linker.link("paris") == "Q1" and linker.link("Hilton in Paris") == "Q2"
    assert linker.link("Sao tomé!") == "Q3" and linker.link("Lyon") is None and linker.link("") is None
    cut = EntityLinker(titles, tokenize=lambda text: [text[:2].lower()])
    assert cut.link("Pandora") == "Q1"
    with pytest.raises(ValueError, match="no title has a token"):
        EntityLinker({"Q1": "", "Q2": " "})


def test_the_linker_orders_as_okapi_bm25():
    """Upstream's formula (k1 1.5, b 0.75, Robertson's idf) over 40 random titles, the same first one."""
    rng = np.random.default_rng(0)
    vocabulary = [f"w{i}" for i in range(60)]
    docs = [list(rng.choice(vocabulary, rng.integers(1, 5))) for _ in range(40)]
    linker = EntityLinker({str(i): " ".join(doc) for i, doc in enumerate(docs)}, method="robertson")
    frequency = {word: sum(word in doc for doc in docs) for word in vocabulary}
    mean = np.mean([len(doc) for doc in docs])

    def okapi(words, doc):
        return sum(
            np.log((len(docs) - frequency[w] + 0.5) / (frequency[w] + 0.5))
            * doc.count(w) * 2.5 / (doc.count(w) + 1.5 * (0.25 + 0.75 * len(doc) / mean))
            for w in words
        )  # fmt: skip

    for _ in range(30):
        words = list(rng.choice(vocabulary, 3, replace=False))
        scores = [okapi(words, doc) for doc in docs]
        linked = linker.link(" ".join(words))
        assert (linked is None) == (max(scores) == 0)
        if linked is not None:
            assert scores[int(linked)] == pytest.approx(max(scores))


def test_webqa_leaves_missing_rows_out_upstream():
    """color 1.0 and Others 1.0 answered, one missing: 2/3 over the gold set, 1 officially; by category."""
    gold = [
        query("a", "It is red.", keywords=("red",), kind="color"),
        query("b", "A fountain stands there.", keywords=("fountain",), kind="Others"),
        query("c", "Two.", keywords=("2",), kind="number"),
    ]
    result = evaluate({"a": "red", "b": "the fountain"}, gold, scorer="webqa_keyword")
    assert result.honest["acc"] == pytest.approx(2 / 3, abs=1e-5)
    assert result.official["acc"] == pytest.approx(1, abs=1e-5)
    assert result.by_kind["number"]["acc"] == 0 and result.by_kind["Others"]["RE_avg"] == 1
    approx = evaluate({"a": "red", "b": "a fountain", "c": "2"}, gold, scorer="webqa_acc_approx")
    assert approx.per_query["ragvl_acc_approx"].tolist() == [1, np.float32(1 / 3), 1]
    with pytest.raises(ValueError, match="1 gold queries have no keywords.*webqa_acc_approx"):
        evaluate({}, [query("a", "red", kind="color")], scorer="webqa_keyword")


def test_what_the_official_code_cannot_score_counts_as_zero_and_is_named():
    """An Encyclopedic-VQA reference "A" raises upstream: no official figure, and the rest is scored."""
    gold = [query("a", "A", kind="automatic"), query("b", "cat", kind="automatic")]
    result = evaluate({"a": "A", "b": "the cat"}, gold, scorer="evqa_exact_match")
    assert result.honest == {"exact_match": 0.5} and result.official == {"exact_match": None}
    assert list(result.faults) == ["a"] and "after normalisation" in result.faults["a"]
    assert any("a cannot be scored and counts as 0: ValueError" in line for line in result.lines())
    wrong = evaluate({"a": 5, "b": {"x": 1}}, GOLD[:2], scorer="mmqa_list_em_f1")
    assert set(wrong.faults) == {"a", "b"} and wrong.honest == {"list_em": 0.0, "list_f1": 0.0}


def test_every_fault_of_the_input_is_told_at_once():
    with pytest.raises(ValueError) as raised:
        evaluate(
            [("a", "x"), ("a", "y"), ("z", "x")], [query("a", kind="colour"), query("a")], scorer="infoseek"
        )
    for told in (
        "more than once, e.g. ['a']",
        "not in the gold set, e.g. ['z']",
        "no answer",
        "gold ids occur",
        "tells the query kinds",
    ):
        assert told in str(raised.value)
    with pytest.raises(ValueError, match="unknown rule 'bleu'"):
        evaluate({}, GOLD, scorer="bleu")
    with pytest.raises(ValueError, match=r"no two bounds as keywords, e.g. \['a'\]"):
        evaluate({}, [query("a", "7", kind="Numerical")], scorer="infoseek")
    with pytest.raises(ValueError, match="no query"):
        evaluate({}, [], scorer="token_f1")
    with pytest.raises(ValueError, match="needs BEM"):
        evaluate({}, [query("a", "x", kind="automatic")], scorer="evqa")
    subset = evaluate({"a": "red", "z": "x"}, GOLD[:1], scorer="token_f1", ignore_unknown=True)
    assert subset.unknown == ["z"] and subset.honest == {"f1": 100.0}


def test_no_prediction_at_all_is_zero_and_not_a_crash():
    """Every rule, an empty file: honest 0 (or nearly, for harmonic means), coverage 0, nothing raised."""
    for scorer, rule in RULES.items():
        kind = sorted(rule.kinds)[0] if rule.kinds else "question"
        split = "val_unseen" if scorer == "oven" else "val_unseen_question"
        gold = [query("a", "1", keywords=("0", "2"), kind=kind, split=split)]
        result = evaluate(
            {}, gold, scorer=scorer, tools=Tools(bem=lambda question, reference, candidate: 1.0)
        )
        assert result.coverage == 0 and result.missing == ["a"]
        assert all(value == pytest.approx(0) for value in result.honest.values()), scorer
        assert result.lines()


def test_gold_comes_from_canonical_tables(tmp_path):
    """Answers, keywords, kind and split are read back from parquet and scored."""
    with TableWriter(tmp_path / "tables") as writer:
        for name, kind in (("a", "color"), ("b", "YesNo")):
            writer.add(
                "queries", id=name, text="?", answers=["red"], keywords=["red"], kind=kind, split="val"
            )
        writer.finish({"reader": "test"})
    gold = Tables(tmp_path / "tables").queries(split="val")
    result = evaluate({"a": "It is red", "b": "yes"}, gold, scorer="webqa_keyword")
    assert result.per_query["RE_avg"].tolist() == [1, 0]


def test_per_question_values_are_those_of_the_scorers():
    """evaluate adds no rule of its own: its columns are SCORERS, one question at a time."""
    predictions = {"a": "Red!", "b": "blue white", "c": "three", "d": "a dog"}
    for name, key in (("token_f1", "f1"), ("exact_match", "exact_match"), ("relaxed_accuracy", "accuracy")):
        column = evaluate(predictions, GOLD, scorer=name).per_query[key]
        direct = [SCORERS[name](predictions[q.id], list(q.answers)) for q in GOLD]
        np.testing.assert_allclose(column, direct, atol=1e-6)


def test_read_predictions(tmp_path):
    """JSON lines, a JSON object and a JSON list, with an id that occurs twice kept as two rows."""
    lines = tmp_path / "out.jsonl"
    lines.write_text('{"data_id": "a", "prediction": "x\u2028y"}\n\n{"data_id": 7, "prediction": null}\n')
    assert read_predictions(lines, id_key="data_id") == [("a", "x\u2028y"), ("7", None)]
    whole = tmp_path / "out.json"
    whole.write_text('{"a": "x", "b": ["y", "z"], "a": "w"}')
    assert read_predictions(whole) == [("a", "x"), ("b", ["y", "z"]), ("a", "w")]
    whole.write_text(json.dumps([{"id": "a", "answer": "x"}]))
    assert read_predictions(whole, answer_key="answer") == [("a", "x")]
    for text, told in (
        ("[1]", "row 1: 'id' and 'prediction' missing"),
        ("3", "needs an object"),
        ("{", "not JSON"),
    ):
        whole.write_text(text)
        with pytest.raises(ValueError, match=told):
            read_predictions(whole)
    lines.write_text('{"id": "a", "prediction": "x"}\n{"id": "b"}\n')
    with pytest.raises(ValueError, match=r"out.jsonl, line 2: 'prediction' missing \(it has \['id'\]\)"):
        read_predictions(lines)
