"""Encyclopedic-VQA's full rule with a BEM of random weights, opened from a directory as a real one is."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from fovea.metrics.answers import SCORERS, Tools, evaluate
from fovea.metrics.answers.bem import Bem, open_bem
from fovea.types import Query

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "dog", "##s", "what", "is", "it", "?", ","]


def save(path, *, labels=2, segments=3, positions=24):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(PIECES), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=labels, type_vocab_size=segments, max_position_embeddings=positions,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    # Larger than the usual 0.02, so that a segment or an order that is wrong shows in the probability.
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return model.eval()


@pytest.fixture(scope="module")
def bem_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bem")
    save(path)
    return path


def test_input_order_and_segments(bem_path):
    """[CLS] candidate [SEP] reference [SEP] question [SEP] with segments 0, 1, 2; softmax of class 1."""
    model = BertForSequenceClassification.from_pretrained(bem_path).eval()
    #      CLS cats##s  SEP dog SEP what is it ? SEP
    ids = [2, 5, 7, 3, 6, 3, 8, 9, 10, 11, 3]
    segments = [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([segments])).logits[0]
    judge = Bem(bem_path)
    assert judge("What is it?", "DOG", "Cats") == pytest.approx(float(logits.softmax(0)[1]), abs=1e-6)
    assert judge("What is it?", "Cats", "DOG") != pytest.approx(float(logits.softmax(0)[1]), abs=1e-3)
    with pytest.raises(ValueError, match="reads 24 word pieces, this question and its answers have 34"):
        judge("it " * 28, "dog", "cat")


def test_full_rule_asks_bem_only_where_the_exact_match_fails():
    """Exact: no call. Else the best reference at 0.5, inclusive; list references read with commas."""
    calls = []

    def judge(question, reference, candidate):
        calls.append((question, reference, candidate))
        return {"dog": 0.5, "cow": 0.49, "cat,dog": 0.9}[reference]

    common = {"question": "what is it?", "bem": judge}
    assert (
        SCORERS["evqa"]("the cat", ["dog", "cat"], question_type="automatic", **common) == 1.0 and not calls
    )
    assert SCORERS["evqa"]("hound", ["cow"], question_type="automatic", **common) == 0.0
    assert SCORERS["evqa"]("hound", ["cow", "dog"], question_type="automatic", **common) == 1.0
    assert SCORERS["evqa"]("hound", ["cat&&dog"], question_type="multi_answer", **common) == 1.0
    assert calls[-1] == ("what is it?", "cat,dog", "hound")
    for references in ([], ["dog", "the"]):
        with pytest.raises(ValueError):
            SCORERS["evqa"]("hound", references, question_type="automatic", **common)


def test_a_path_opens_once_and_scores_a_file(bem_path):
    """The scorer and evaluate take the directory; both agree with the judge itself."""
    gold = [Query(id="a", text="what is it?", answers=("dog",), kind="automatic")]
    expected = float(open_bem(str(bem_path))("what is it?", "dog", "cat") >= 0.5)
    assert open_bem(str(bem_path)) is open_bem(str(bem_path))
    direct = SCORERS["evqa"](
        "cat", ["dog"], question_type="automatic", question="what is it?", bem=str(bem_path)
    )
    found = evaluate({"a": "cat"}, gold, scorer="evqa", tools=Tools(bem=bem_path))
    assert direct == expected == found.mean["accuracy"].mean


def test_nothing_stands_in_for_bem(tmp_path):
    """No model, no directory, a wrong model: an error that says what to do, never the exact match alone."""
    with pytest.raises(ValueError, match="needs BEM.*evqa_exact_match"):
        SCORERS["evqa"]("a", ["cat"], question_type="automatic", question="?", bem=None)
    with pytest.raises(FileNotFoundError, match=r"config.json, model.safetensors, vocab.txt missing"):
        SCORERS["evqa"]("a", ["cat"], question_type="automatic", question="?", bem=tmp_path / "none")
    gold = [Query(id="a", text="?", answers=("cat",), kind="automatic")]
    with pytest.raises(FileNotFoundError, match="no BEM at"):
        evaluate({"a": "dog"}, gold, scorer="evqa", tools=Tools(bem=tmp_path / "none"))
    save(tmp_path, segments=2)
    with pytest.raises(ValueError, match="2 labels and 3 segment types, this has 2 and 2"):
        Bem(tmp_path)
