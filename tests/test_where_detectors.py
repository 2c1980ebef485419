"""fovea.models.grounding_dino: agreement with transformers, the map from tokens to phrases, odd inputs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fovea.models.grounding_dino import GroundingDino

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import random_models  # noqa: E402

PHRASES = ["a man in blue", "Umbrella", "the red cones", "two men", "a man"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A tiny GroundingDINO with a limit of 24 tokens."""
    return random_models.grounding_dino(tmp_path_factory.mktemp("dino"), tiny=True)


@pytest.fixture(scope="module")
def single(path):
    return GroundingDino(path)


@pytest.fixture(scope="module")
def joint(path):
    return GroundingDino(path, prompt="joint")


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)


def upstream(path, image, text):
    """Model, processor and raw output of transformers for one text."""
    from transformers import AutoProcessor, GroundingDinoForObjectDetection

    processor = AutoProcessor.from_pretrained(path)
    model = GroundingDinoForObjectDetection.from_pretrained(path, disable_custom_kernels=True).eval()
    inputs = processor(images=Image.fromarray(image), text=text, return_tensors="pt")
    with torch.inference_mode():
        return processor, inputs, model(**inputs)


def cut(boxes):
    """Boxes within 80 × 60."""
    return np.clip(np.asarray(boxes), 0, [80, 60, 80, 60])


def same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a.scores, b.scores, atol=1e-5)
        np.testing.assert_allclose(a.boxes, b.boxes, atol=1e-3)


@pytest.mark.parametrize("threshold", [0.3, 0.9])
def test_equals_transformers(path, image, threshold):
    """One phrase a prompt: boxes and scores of upstream's own post-processing, sorted and cut at the edge."""
    for phrase, got in zip(PHRASES, GroundingDino(path, threshold).detect(image, PHRASES), strict=True):
        processor, _, output = upstream(path, image, [[phrase]])
        expected = processor.post_process_grounded_object_detection(
            output, threshold=threshold, target_sizes=[(60, 80)]
        )[0]
        order = np.argsort(-expected["scores"].numpy(), kind="stable")
        np.testing.assert_allclose(got.scores, expected["scores"].numpy()[order], atol=1e-5)
        np.testing.assert_allclose(got.boxes, cut(expected["boxes"])[order], atol=1e-3)
        assert got.boxes.dtype == got.scores.dtype == np.float32 and len(got.boxes)


def test_joint_equals_transformers(path, joint, image):
    """Three phrases, one prompt: upstream's logits over the tokens that its character offsets give."""
    phrases = ["a man", "Umbrella left of the man", "red cones"]
    text = ". ".join(phrases).lower() + "."
    processor, inputs, output = upstream(path, image, text)
    offsets = processor.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    (prompt,) = joint.prompts(phrases)
    assert prompt.ids == inputs["input_ids"][0].tolist()
    probability = output.logits.sigmoid()[0].numpy()
    x, y, w, h = output.pred_boxes[0].numpy().T
    boxes = cut(np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 1) * [80, 60, 80, 60])
    for phrase, got in zip(phrases, joint.detect(image, phrases), strict=True):
        start = text.index(phrase.lower())
        end = start + len(phrase) + 1  # its full stop
        own = [i for i, (a, b) in enumerate(offsets) if start <= a < b <= end]
        scores = probability[:, own].max(1)
        order = [i for i in np.argsort(-scores, kind="stable") if scores[i] > 0.3]
        np.testing.assert_allclose(got.scores, scores[order], atol=1e-5)
        np.testing.assert_allclose(got.boxes, boxes[order], atol=1e-3)


def test_phrases_keep_their_tokens(joint):
    """Sub-words, shared words, nested phrases: decoding a span gives the phrase that it stands for."""
    phrases = ["umbrella", "two cones", "a man", "a man in blue", "blue umbrella"]
    prompts = joint.prompts(phrases)
    seen = {}
    for prompt in prompts:
        for position, (start, end) in zip(prompt.phrases, prompt.spans, strict=True):
            seen[phrases[position]] = joint._tokenizer.decode(prompt.ids[start:end])
    assert seen == {phrase: f"{phrase}." for phrase in phrases}
    assert joint._tokenizer.convert_ids_to_tokens(prompts[0].ids)[:8] == [
        "[CLS]", "um", "##bre", "##lla", ".", "two", "cone", "##s",
    ]  # fmt: skip


def test_one_phrase_is_the_same_either_way(single, joint, image):
    """A joint prompt that holds one phrase is a single prompt; one that holds several is not."""
    for phrase in PHRASES:
        same(joint.detect(image, [phrase]), single.detect(image, [phrase]))
    together, alone = joint.detect(image, PHRASES), single.detect(image, PHRASES)
    assert not all(np.array_equal(a.scores, b.scores) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_batches_change_nothing(path, single, joint, image, batch_size):
    """Prompts of unequal length in one batch equal prompts one by one, in any order."""
    detector = GroundingDino(path, batch_size=batch_size)
    expected = [single.detect(image, [phrase])[0] for phrase in PHRASES]
    same(detector.detect(image, PHRASES), expected)
    same(detector.detect(image, PHRASES[::-1]), expected[::-1])
    many = [*PHRASES, "white dog", "big sign on the door", "a woman left of the door", "the white door"]
    assert len(joint.prompts(many)) == 2
    same(
        GroundingDino(path, prompt="joint", batch_size=batch_size).detect(image, many),
        joint.detect(image, many),
    )


def test_repeated_phrases(single, joint, image):
    """Each mention gets its boxes, and the repetition is not asked twice."""
    for detector in (single, joint):
        got = detector.detect(image, ["a man", "dog", "a man"])
        same(got[:1], got[2:])
        same(got[:2], detector.detect(image, ["a man", "dog"]))


def test_separators_and_case(single, joint, image):
    """A full stop or question mark would end the phrase: left out, and a phrase stays one block."""
    for phrase in ("A Man. In Blue?", "a man ? in . blue", "...a man in blue!"[:-1]):
        assert single.prompts([phrase]) == single.prompts(["a man in blue"])
    (prompt,) = joint.prompts(["a. man?", "dog"])
    assert prompt.ids == joint.prompts(["a man", "dog"])[0].ids
    same(joint.detect(image, ["a. man?", "dog"]), joint.detect(image, ["a man", "dog"]))
    text = "[SEP] man [CLS]"  # written out, they are words, which this vocabulary does not know
    assert single.prompts([text])[0].ids.count(102) == 1


@pytest.mark.parametrize("nothing", ["", "   ", "...", "?", "\u200b"])
def test_phrase_without_a_token(single, joint, image, nothing):
    """PITFALLS 12: it has no box, and its neighbours keep theirs."""
    for detector in (single, joint):
        got = detector.detect(image, [nothing, "a man", nothing])
        assert [len(d.boxes) for d in got][::2] == [0, 0] and got[0].boxes.shape == (0, 4)
        same(got[1:2], detector.detect(image, ["a man"]))
        same(detector.detect(image, [nothing]), got[:1])


def test_no_phrase_and_no_box(path, image):
    """An empty list loads no weights; a threshold that nothing passes gives empty detections."""
    detector = GroundingDino(path, 0.99999)
    assert detector.detect(image, []) == []
    assert "_model" not in vars(detector)
    got = detector.detect(image, ["a man", "dog"])
    assert [d.boxes.shape for d in got] == [(0, 4)] * 2 and [d.scores.shape for d in got] == [(0,)] * 2


def test_long_phrase_keeps_its_id(single, joint, image):
    """PITFALLS 17: longer than the limit of 24 tokens: cut, said, and still the asked phrase's own result."""
    long = "the big white dog left of the red sign on the door in blue a man woman two cones umbrella"
    with pytest.warns(UserWarning, match="phrase of 23 tokens cut to 21.*'the big white dog"):
        got = single.detect(image, ["a man", long, "dog"])
    same([got[0], got[2]], single.detect(image, ["a man", "dog"]))
    words = " ".join(long.split()[:-1])  # "umbrella" is three tokens: one of them fits
    with pytest.warns(UserWarning, match="cut to 21"):
        assert single.prompts([words])[0].ids[:-2] == single.prompts([long])[0].ids[:-3]
    with pytest.warns(UserWarning, match="cut to 21"):
        prompts = joint.prompts(["a man", long, "dog", "red sign"])
    assert [prompt.phrases for prompt in prompts] == [[0], [1], [2, 3]]
    assert max(len(prompt.ids) for prompt in prompts) == 24


def test_joint_prompts_split_at_the_limit(joint):
    """30 phrases: every prompt within 24 tokens, none could take the next phrase, order and ids kept."""
    rng = np.random.default_rng(0)
    words = [word for word in random_models.WORDS if not word.startswith("#")]
    phrases = [" ".join(rng.choice(words, rng.integers(1, 8))) for _ in range(30)]
    prompts = joint.prompts(phrases)
    assert [position for prompt in prompts for position in prompt.phrases] == list(range(30))
    for prompt, following in zip(prompts, prompts[1:], strict=False):
        start, end = following.spans[0]
        assert len(prompt.ids) <= 24 < len(prompt.ids) + end - start
    ids = {p: prompt.ids[s : e - 1] for prompt in prompts for p, (s, e) in zip(prompt.phrases, prompt.spans)}  # noqa: B905
    assert ids == {i: joint._tokenizer(text, add_special_tokens=False)["input_ids"] for i, text in enumerate(phrases)}  # fmt: skip # noqa: E501


def test_backbone_runs_once_an_image(path, image):
    """The text does not reach the backbone: five prompts, one pass; another image, another."""
    detector = GroundingDino(path, batch_size=2)
    passes = []
    detector._model.model.backbone.backbone.register_forward_hook(
        lambda *inputs: passes.append(len(inputs[1][0]))
    )
    first = detector.detect(image, PHRASES)
    assert passes == [1]
    detector.detect(image[::-1].copy(), PHRASES[:1])
    same(detector.detect(image, PHRASES), first)
    assert passes == [1, 1, 1]


@pytest.mark.parametrize("shape", [(1, 1), (3000, 2), (2, 3000), (1, 20000), (3, 3), (4, 3)])
def test_odd_images(single, shape):
    """One pixel, strips, pictures as high as channels are many: boxes inside the image or none."""
    image = np.random.default_rng(0).integers(0, 255, (*shape, 3), np.uint8)
    for boxes, scores in single.detect(image, ["a man", "dog"]):
        assert (boxes >= 0).all() and (boxes <= [shape[1], shape[0]] * 2).all()
        assert (boxes[:, :2] < boxes[:, 2:]).all()
        assert (np.diff(scores) <= 0).all()


def test_wrong_image_is_named(single, image):
    for wrong in (image / 255, image[..., 0], image[:0]):
        with pytest.raises(ValueError, match=r"an image is uint8 \[H, W, 3\]; got"):
            single.detect(wrong, ["a man"])


def test_key_names_all_that_changes_the_output(path, single, joint, tmp_path):
    """Weights, tokenizer, threshold, form of the prompt; not the batch. No weights are loaded for it."""
    detector = GroundingDino(path, batch_size=1)
    assert detector.key == single.key and "_model" not in vars(detector)
    assert single.key.endswith("-t0.3-single") and joint.key.endswith("-t0.3-joint")
    assert (single.joint, joint.joint) == (False, True)
    assert GroundingDino(path, 0.25).key != single.key
    other = GroundingDino(random_models.grounding_dino(tmp_path / "other", tiny=True, seed=1))
    assert other.key != single.key
    again = random_models.grounding_dino(tmp_path / "again", tiny=True)
    assert GroundingDino(again).key == single.key
    with open(again / "tokenizer.json", "a") as file:
        file.write("\n")
    assert GroundingDino(again).key != single.key


def test_errors_say_what_to_pass(path, tmp_path, monkeypatch):
    """No directory, a hub name that cannot be had, another model, missing weights, wrong settings."""
    with pytest.raises(FileNotFoundError, match="is no directory; pass a directory.*grounding-dino"):
        GroundingDino(tmp_path / "absent")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nor in the hub's cache.*hf download nobody/nothing"):
        GroundingDino("nobody/nothing")  # HF_HUB_OFFLINE=1: no network is asked
    with pytest.raises(ValueError, match="model_type 'sam' in config.json; needed: grounding-dino"):
        GroundingDino(random_models.transformers_sam(tmp_path / "sam"))
    with pytest.raises(ValueError, match=r"threshold=1.5 must.*prompt='many' must.*batch_size=0 must"):
        GroundingDino(path, 1.5, "many", batch_size=0)


def test_random_weights_are_refused(tmp_path, image):
    """A weight that is missing from the file would stay random."""
    from safetensors.torch import load_file, save_file

    folder = random_models.grounding_dino(tmp_path, tiny=True)
    state = load_file(folder / "model.safetensors")
    name = "model.text_projection.weight"
    state.pop(name)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"do not fit config.json; 1 missing \['{name}'\]"):
        GroundingDino(folder).detect(image, ["a man"])
    (folder / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="an object is needed"):
        GroundingDino(folder)
