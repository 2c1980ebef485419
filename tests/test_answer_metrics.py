"""Each answer rule against the scores of its official code, hand-worked values, and its invariants."""

import json
import math
import random
from pathlib import Path

import pytest

from fovea.metrics.answers import SCORERS, mmqa, vqa, webqa
from fovea.metrics.answers.evqa import evqa_normalise
from fovea.metrics.answers.infoseek import harmonic_mean, parse_number
from fovea.metrics.answers.text import lemmatise, squad_normalise

ORACLES = Path(__file__).parent / "data" / "metric_oracles_answers.json"
CASES = json.loads(ORACLES.read_text(encoding="utf-8"))["cases"]
ANSWER_CASES = [case for case in CASES if not case["metric"].startswith("jensen_shannon")]


def same(ours, theirs):
    """Equal in shape and, for numbers, to 1e-12; "NaN" in the file is a NaN."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if theirs == "NaN":
        return math.isnan(ours)
    return ours == theirs or (isinstance(theirs, float) and ours == pytest.approx(theirs, abs=1e-12))


def score(case):
    return SCORERS[case["metric"]](case["prediction"], case["references"], **case.get("params", {}))


@pytest.mark.parametrize("metric", sorted({case["metric"] for case in ANSWER_CASES}))
def test_agrees_with_the_official_code_on_every_case(metric):
    """Value and shape; where the official code raises, the same exception."""
    cases = [case for case in ANSWER_CASES if case["metric"] == metric]
    for case in cases:
        expected = case["score"]
        if isinstance(expected, dict) and "error" in expected:
            with pytest.raises(Exception) as raised:  # noqa: PT011 (the type is compared)
                score(case)
            assert type(raised.value).__name__ == expected["error"], case["id"]
        else:
            assert same(score(case), expected), (case["id"], score(case), expected)


def test_the_shipped_cases_are_those_of_the_shared_file(shared_data):
    """The copy in tests/data holds every answer and Jensen–Shannon case, unchanged."""
    shared = {case["id"]: case for case in json.loads((shared_data / "metric_oracles.json").read_text())}
    ours = {case["id"]: case for case in CASES}
    left_out = {case["metric"] for name, case in shared.items() if name not in ours}
    assert left_out == {"retrieval", "exact_search"} and len(ours) == 157
    assert all(shared[name] == case for name, case in ours.items())


def test_lemma_sensitive_cases_need_the_lemmas(monkeypatch):
    """With plain tokens for lemmas the cases marked so change, and only those of the WebQA rules do."""
    marked = {case["id"] for case in ANSWER_CASES if case.get("lemma_sensitive")}
    monkeypatch.setattr(webqa, "lemmatise", lambda text, model: text)
    changed = {
        case["id"]
        for case in ANSWER_CASES
        if case["metric"] in ("webqa_keyword", "webqa_normalize_text")
        and not same(score(case), case["score"])
    }
    assert changed == {name for name in marked if not name.startswith("webqa_acc_approx")}


@pytest.mark.parametrize(
    ("span", "normal"),
    [
        ("The Beatles", "beatles"),
        ("twenty-two", "20.0 2.0"),
        ("1,000 $5 5%", "1000.0 5.0 5.0"),
        ("Infinity War", "inf war"),
        ("1_000", "1000.0"),
        ("point", "0.0"),
        ("three\tcats", "3.0"),  # not split at a tab, so word2number reads the whole of it
        ("A - the", ""),
        ("²", "²"),
        ("", ""),
    ],
)
def test_mmqa_normal_form(span, normal):
    """Numbers become floats one token at a time, articles vanish, only space and hyphen split."""
    assert mmqa.normalise(span) == normal


def test_mmqa_f1_by_hand():
    """Gold [x y z, 7 w], predicted [y z, 8 w]: 0.8 for the first pair (P 1, R 2/3), 0 for the second, whose
    numbers differ, though it shares "w"; mean 0.4. A third prediction divides by 3: 0.27."""
    gold = ["x y z", "7 w"]
    assert mmqa.list_f1(["y z", "8 w"], gold) == 0.4
    assert mmqa.list_f1(["8 w", "q", "y z"], gold) == 0.27
    # The greedy pairing (red car with red car, 1.0) loses to the best one only where it must.
    assert mmqa.list_f1(["red car", "red"], ["red", "red car"]) == 1.0
    assert math.isnan(mmqa.list_f1([], [])) and mmqa.list_f1([], ["x"]) == 0.0


def test_mmqa_takes_the_best_reference_and_refuses_none():
    """EM and F1 are each the best over the references, not necessarily the same one."""
    assert SCORERS["mmqa_list_em_f1"]("red", [["blue"], "red"]) == {"list_em": 1.0, "list_f1": 1.0}
    with pytest.raises(ValueError, match="empty"):
        SCORERS["mmqa_list_em_f1"]("red", [])
    with pytest.raises(TypeError):
        SCORERS["mmqa_list_em_f1"](5, [["5"]])


@pytest.mark.parametrize("seed", range(5))
def test_mmqa_ignores_the_order_of_spans(seed):
    """Shuffling either list changes neither value; a list against itself is perfect."""
    rng = random.Random(seed)
    pool = ["red", "The Red Car", "twenty two", "3", "Mil Mi-24", "", "U.S.", "3.0 cats"]
    for _ in range(40):
        ours, gold = rng.choices(pool, k=rng.randint(1, 4)), rng.choices(pool, k=rng.randint(1, 4))
        expected = SCORERS["mmqa_list_em_f1"](ours, [gold])
        shuffled = rng.sample(ours, len(ours)), rng.sample(gold, len(gold))
        assert SCORERS["mmqa_list_em_f1"](shuffled[0], [shuffled[1]]) == expected
        assert SCORERS["mmqa_list_em_f1"](gold, [gold]) == {"list_em": 1.0, "list_f1": 1.0}
        assert expected["list_em"] <= expected["list_f1"]


def test_ragvl_em_is_not_the_official_em():
    """Lemmas make "dogs" and "dog" equal; a second gold answer is not looked at; order matters."""
    ragvl = SCORERS["mmqa_em_ragvl"]
    assert ragvl("two dogs", ["2 dog"]) == {"em": 1.0}
    assert SCORERS["mmqa_list_em_f1"]("two dogs", [["2 dog"]])["list_em"] == 0.0
    assert ragvl("white", ["red", "white"]) == {"em": 0.0}


def test_webqa_domains():
    """36 colours with "yes" and "spot", 69 shapes, numbers that int() reads."""
    assert len(webqa.COLORS) == 36 and {"yes", "spot", "bluere"} <= webqa.COLORS
    assert len(webqa.SHAPES) == 69 and {"h", "xs", "octogon"} <= webqa.SHAPES
    f1 = {  # (prediction, keywords, category) → F1, worked by hand without the 1e-5
        ("Yes, it is blue", "blue", "color"): 2 / 3,  # "yes" is a colour: P 1/2
        ("It is crimson", "crimson", "color"): 0,  # no colour on either side
        ("blue blue", "blue", "color"): 1,
        ("3 three 3.5", "3", "number"): 2 / 3,  # numbers are no set: 3 and 3, 3.5 is none
        ("no no", "no", "YesNo"): 1,
    }
    for (prediction, keywords, category), expected in f1.items():
        found = SCORERS["webqa_keyword"](prediction, [keywords], Qcate=category)
        assert found["acc"] == found["F1_avg"] == pytest.approx(expected, abs=1e-5), prediction


def test_webqa_candidates_are_averaged_and_one_miss_zeroes_all():
    """Candidates with F1 1 and 2/3 average to 5/6; with a third that shares nothing every value is 0."""
    found = SCORERS["webqa_keyword"](["red", "red and blue"], ["red"], Qcate="color")
    assert found["F1_avg"] == pytest.approx(5 / 6, abs=1e-5)
    assert found["F1_max"] == pytest.approx(1, abs=1e-5) and found["EM"] == 1
    assert set(SCORERS["webqa_keyword"](["red", "green"], ["red"], Qcate="color").values()) == {0.0}
    with pytest.raises(KeyError, match="colour"):
        SCORERS["webqa_keyword"]("red", ["red"], Qcate="colour")
    with pytest.raises(ValueError, match="join several"):
        SCORERS["webqa_keyword"]("red", ["red", "blue"], Qcate="color")
    with pytest.raises(ValueError, match="at least one"):
        SCORERS["webqa_keyword"]([], ["red"], Qcate="color")
    with pytest.raises(AttributeError):
        SCORERS["webqa_keyword"](None, ["red"], Qcate="color")


def test_webqa_exact_match_does_not_depend_on_the_hash_seed():
    """Bags filtered by a domain are sets: any order of the same colours is an exact match."""
    colors = sorted(webqa.COLORS)
    shuffled = random.Random(0).sample(colors, len(colors))
    assert SCORERS["webqa_keyword"](" ".join(colors), [" ".join(shuffled)], Qcate="color")["EM"] == 1


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("A", "a"),
        ("the", "the"),
        ("the cat", "cat"),
        ("point", "point"),
        ("İ", "i̇"),
        ("one hundred", "1 100"),
    ],
)
def test_webqa_normal_form(text, normal):
    """One character and one word keep their article; "point" is no number here, unlike in MultimodalQA."""
    assert SCORERS["webqa_normalize_text"](text) == normal


def test_a_missing_pipeline_is_named():
    with pytest.raises(OSError, match="no spaCy pipeline 'en_no_such'.*pip install"):
        lemmatise("cats", "en_no_such")


def test_vqa_leave_one_out():
    """0 to 10 of ten equal answers: 0, .3, .6, .9, then 1; symmetric in the order of the answers."""
    for matches in range(10):
        answers = ["net"] * matches + [f"other {i}" for i in range(10 - matches)]
        random.Random(matches).shuffle(answers)
        expected = min(1.0, 0.3 * matches)
        assert SCORERS["vqa_accuracy"]("net", answers)["accuracy"] == pytest.approx(expected)
    assert SCORERS["vqa_accuracy"]("net", ["net"])["accuracy"] == 0.0  # there is no other answer
    with pytest.raises(ZeroDivisionError):
        SCORERS["vqa_accuracy"]("net", [])


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("a" + "." * 40, "a" + "." * 8),  # re.UNICODE = 32 lands in `count`
        ("red/white", "red white"),
        ("1,000 red/white", "1000 redwhite"),  # a comma between digits makes every mark vanish
        ("red/ white-blue", "red white blue"),
        ("Im couldnt've couldntve", "im couldn't've couldntve"),
        ("yall'd've somebody'd 'ow'sat", "y'all'd've somebodyd 'ow's'at"),
        ("the eleven tens", "eleven tens"),
        ("none of ten: 3.5%.", "0 of ten: 3.5%"),
    ],
)
def test_vqa_normal_form(text, normal):
    """Marks vanish or become spaces by what stands beside them; contractions get their apostrophes back."""
    assert vqa.vqa_normalise(text) == normal


def test_ravqa_loop_ends_at_the_first_number_in_range():
    """right, in range, wrong: upstream says 1 of 1 = 1.0; over all questions it is 2 of 3."""
    references = [
        {"answers": ["Cat"], "numeric_range": None},
        {"answers": ["7"], "numeric_range": [6, 8]},
        {"answers": ["dog"]},
    ]
    found = SCORERS["ravqa_exact_match_numeric"](["the cat", "6.5", "fish"], references)
    assert found == {"accuracy": 1.0, "accuracy_all": pytest.approx(2 / 3)}
    assert math.isnan(SCORERS["ravqa_exact_match_numeric"](["6.5"], references[1:2])["accuracy"])
    with pytest.raises(ValueError, match="longer"):
        SCORERS["ravqa_exact_match_numeric"](["cat"], references)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2,50", [2, 50]), ("1,250,000 m", 1250000), ("3/4", [3, 4]), ("30 to 20", 30), ("", [0, 0]),
        ("three", [0, 0]), (".5", 5), ("-5", -5), ("5 -7", 5), ("5-7", [5, 7]), ("-5-7", [-5, 7]),
        ("5–7", [5, 7]), ("1.2.3", [1.2, 3]), ("1e3", 1000), ("1e-3", 0.001), ("٣", 3), ("7.", 7),
        ("²-3", 3),
    ],
)  # fmt: skip
def test_infoseek_reads_numbers(text, number):
    """Worked by hand from the rule: first two numbers, descending pairs keep the first, ".5" is 5."""
    assert parse_number(text) == number


def test_infoseek_numbers_against_ranges():
    """[0, 0] for no number is right where 0 is; an IoU of one half counts; bounds are two numbers."""
    numerical = SCORERS["infoseek_numerical"]
    assert numerical("unknown", ["-1", "1"])["score"] == 1
    assert numerical("0 to 20", ["0", "10"])["score"] == 1  # 10 / 20
    assert numerical("0 to 20.1", ["0", "10"])["score"] == 0
    with pytest.raises(ValueError, match="could not convert"):
        numerical("-.5.3", ["0", "1"])
    with pytest.raises(ValueError, match="unpack"):
        numerical("5", ["5"])
    with pytest.raises(AttributeError):
        numerical(5, ["4", "6"])
    with pytest.raises(ValueError, match="infoseek_numerical"):
        SCORERS["infoseek_string"]("5", ["4", "6"], question_type="Numerical")
    assert SCORERS["infoseek"]("5", [4, 6], question_type="Numerical") == {"score": 1}
    assert SCORERS["infoseek"]("The 1990", ["1990"], question_type="Time") == {"score": 1}


def infoseek_gold():
    return {
        "a": {"answer_eval": ["China"], "question_type": "String", "data_split": "val_unseen_question"},
        "b": {"answer_eval": ["x"], "question_type": "String", "data_split": "val_unseen_question"},
        "c": {
            "answer_eval": [{"wikidata": 7, "range": [6, 8]}],
            "question_type": "Numerical",
            "data_split": "val_unseen_entity",
        },
    }


def test_infoseek_full_ignores_what_is_missing():
    """One right of two gold questions of a split: 100 officially; a duplicate wrong row makes it 50."""
    rows = [{"data_id": "a", "prediction": "china"}, {"data_id": "c", "prediction": "7"}]
    full = SCORERS["infoseek_full"]
    assert full(rows, infoseek_gold())["final_score"] == 100.0
    twice = [*rows, {"data_id": "a", "prediction": "Japan"}, {"data_id": "unknown", "prediction": "x"}]
    found = full(twice, infoseek_gold())
    assert found["unseen_question_score"]["score"] == 50.0 and found["final_score"] == pytest.approx(66.67)
    assert full([], infoseek_gold())["final_score"] == 0.0


def test_harmonic_mean_of_a_zero_is_nearly_zero():
    """2 / (1/50 + 1/1e-12) = 2e-12, and 2 / (1/50 + 1/100) = 66.67."""
    assert harmonic_mean(50, 0) == pytest.approx(2e-12) and harmonic_mean(50, 100) == pytest.approx(200 / 3)


def test_oven_full_rounds_first_and_needs_both_splits():
    """One of three seen: 33.33 (rounded), unseen 100: 2 / (1/33.33 + 1/100) = 49.996… → 50.0."""
    gold = [{"data_id": f"q{i}", "entity_id": "Q1", "data_split": "val_seen"} for i in range(3)]
    gold.append({"data_id": "u", "entity_id": "Q2", "data_split": "val_unseen"})
    right = [{"data_id": row["data_id"], "pred_entity_id": row["entity_id"]} for row in gold]
    one = [right[0], *({**row, "pred_entity_id": "Q9"} for row in right[1:3]), right[3]]
    references = {"query": gold, "entity": gold}
    found = SCORERS["oven_full"]({"query": one, "entity": right}, references)
    assert found["query_result"] == {"seen": 33.33, "unseen": 100.0} and found["entity_score"] == 100.0
    assert found["query_score"] == round(2 / (1 / 33.33 + 1 / 100), 2) == 50.0
    with pytest.raises(KeyError, match="unseen"):
        SCORERS["oven_full"]({"query": one[:3], "entity": right}, references)
    with pytest.raises(KeyError):
        SCORERS["oven_full"]({"query": [{"data_id": "z", "pred_entity_id": "Q1"}], "entity": []}, references)
    with pytest.raises(ValueError, match="u has no pred_entity_id"):
        SCORERS["oven_full"]({"query": [{"data_id": "u"}], "entity": right}, references)


def test_evqa_normal_form_and_lists():
    """Order of the steps: marks, then articles and prefix, then digits; list items as sets."""
    assert evqa_normalise("<extra_id_0> The answer is: a Red\tfox!") == "red fox"
    assert evqa_normalise("None, TRUE contradiction don't") == "0 yes no don't"
    exact = SCORERS["evqa_exact_match"]
    items = {"question_type": "multi_answer"}
    assert exact("Pears & the apples, apples", ["apples&&pears"], **items) == 1.0
    assert exact("", ["apples&&pears"], **items) == 0.0
    assert exact("apples", ["a&&b&&c", "apples&&the"], **items) == 1.0  # "the" normalises away
    for references, kind, told in (
        ([], "automatic", "at least one"),
        ([""], "automatic", "is empty"),
        (["cat", "the"], "automatic", "after normalisation"),  # though the first one matches
        (["a&&the"], "multi_answer", "after normalisation"),
        (["cat"], "string", "unknown question type"),
    ):
        with pytest.raises(ValueError, match=told):
            exact("cat", references, question_type=kind)


def test_relaxed_accuracy_edges():
    """Infinity is not within 5 % of itself, NaN is nothing, underscores and spaces are Python's floats."""
    relaxed = SCORERS["relaxed_accuracy"]
    assert relaxed("inf", ["inf"]) == 0.0 and relaxed("nan", ["nan"]) == 0.0
    assert relaxed(" 1_000 ", ["1000"]) == 1.0 and relaxed("50%%", ["0.5"]) == 1.0
    assert relaxed("110", ["100"]) == 0.0 and relaxed("110", ["100"], max_relative_change=0.1) == 1.0
    assert relaxed("3", ["four", "3.1"]) == 1.0
    with pytest.raises(AttributeError):
        relaxed(5.0, ["5"])


def test_rora_and_official_infoseek_differ_on_numbers():
    """104 for 100: within 5 %, so right for RoRA; outside the range [99, 101], so wrong for InfoSeek."""
    rora = SCORERS["rora_infoseek"]
    assert rora("104", ["100"], question_type="Numerical") == 1.0
    assert SCORERS["infoseek_numerical"]("104", ["99", "101"])["score"] == 0
    assert rora("the China.", ["cn", "China"], question_type="String") == 1.0
    assert rora("1991", ["1990"], question_type="Time") == 0.0


def test_token_f1_by_hand():
    """ "a red ball" against "the red kite": one shared token of two and two: F1 1/2, no exact match."""
    assert SCORERS["token_f1"]("a red ball", ["the red kite"]) == pytest.approx(0.5)
    assert SCORERS["token_f1"]("red red ball", ["red kite", "red ball"]) == pytest.approx(0.8)
    assert SCORERS["exact_match"]("The Red-Ball!", ["x", "redball"]) == 1.0
    assert SCORERS["token_f1"]("the", ["a"]) == 1.0 and SCORERS["token_f1"]("", ["cat"]) == 0.0
    assert squad_normalise("The New-York, an  É’") == "newyork é’"
    for prediction, references in (("cat", []), (None, ["cat"]), ("cat", "cat")):
        with pytest.raises(ValueError, match="non-empty list"):
            SCORERS["token_f1"](prediction, references)


def test_aokvqa_is_a_percentage_without_normalisation():
    assert SCORERS["aokvqa_direct_answer"]("dog", ["dog", "dog", "Dog"]) == pytest.approx(200 / 3)
    assert SCORERS["aokvqa_direct_answer"]("dog", []) == 0.0
