"""fovea.models.segmenters: agreement with the official package and with transformers, sizes, odd inputs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fovea.models import sam_checkpoint, segmenters
from fovea.models.segmenters import load

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import random_models  # noqa: E402

MAKERS = {
    "official": lambda folder, seed=0: random_models.official_sam(folder / "sam.pth", tiny=True, seed=seed),
    "sam": lambda folder, seed=0: random_models.transformers_sam(folder / "sam", seed=seed),
    "sam2": lambda folder, seed=0: random_models.transformers_sam2(folder / "sam2", seed=seed),
}
BOXES = np.array([[5, 6, 40, 30], [0, 0, 80, 60], [60, 40, 75, 59.5]], np.float32)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One tiny model of each kind."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: make(folder) for kind, make in MAKERS.items()}


@pytest.fixture(params=MAKERS)
def segmenter(request, paths):
    return load(paths[request.param])


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)


def test_equals_the_official_package(shared_data):
    """Masks and logits of a recorded run of segment-anything 1.0: IoU 1, logits to 1e-4."""
    oracle = np.load(shared_data / "sam_tiny/oracle.npz")
    sam = load(shared_data / "sam_tiny/sam_tiny.pth")
    for boxes, masks in [(oracle["two_boxes"], oracle["two_boxes_masks"]), (oracle["box"][None], None)]:
        expected = oracle["box_masks"] if masks is None else masks[:, 0]
        np.testing.assert_array_equal(sam.segment(oracle["image"], boxes), expected)
    low = torch.from_numpy(oracle["box_low_res_logits"])[None]
    expected = sam.model.postprocess_masks(low, (42, 64), (53, 80))[0].numpy()  # 53 × 80 at 64 px
    np.testing.assert_allclose(sam.logits(oracle["image"], oracle["box"][None]), expected, atol=1e-4)


def test_sizes_equal_the_config_that_made_the_checkpoint(shared_data):
    """Every size that config.json states is read off the tensors alone."""
    stated = json.loads((shared_data / "sam_tiny/config.json").read_text())
    state = torch.load(shared_data / "sam_tiny/sam_tiny.pth", weights_only=True)
    found = sam_checkpoint.sizes(state)
    pairs = {
        "image_size": found.image_size,
        "patch": found.patch_size,
        "encoder_dim": found.width,
        "encoder_depth": found.depth,
        "encoder_heads": found.heads,
        "window_size": found.window_size,
        "global_attn_indexes": list(found.global_blocks),
        "mlp_ratio": found.mlp_ratio,
        "prompt_dim": found.prompt_width,
        "mask_in_chans": found.mask_channels,
        "decoder_depth": found.decoder_depth,
        "decoder_heads": found.decoder_heads,
        "decoder_mlp_dim": found.decoder_mlp,
        "iou_head_depth": found.iou_depth,
        "iou_head_hidden_dim": found.iou_width,
    }
    assert pairs == {name: stated[name] for name in pairs}


@pytest.mark.parametrize(
    ("size", "heads", "global_blocks"),
    [("vit_b", 12, (2, 5, 8, 11)), ("vit_l", 16, (5, 11, 17, 23)), ("vit_h", 16, (7, 15, 23, 31))],
)
def test_sizes_of_the_released_models(size, heads, global_blocks):
    """ViT-B, -L, -H as the package builds them, by shapes alone: what it was told is found again."""
    from segment_anything import sam_model_registry

    with torch.device("meta"):
        official = sam_model_registry[size]()
        found = sam_checkpoint.sizes(official.state_dict())
        again = sam_checkpoint.build(found)
    assert (found.heads, found.global_blocks, found.window_size) == (heads, global_blocks, 14)
    assert (found.image_size, found.decoder_heads, found.decoder_downsample) == (1024, 8, 2)
    assert {n: t.shape for n, t in again.state_dict().items()} == {
        n: t.shape for n, t in official.state_dict().items()
    }
    assert again.image_encoder.blocks[0].attn.num_heads == official.image_encoder.blocks[0].attn.num_heads
    ours, theirs = (m.mask_decoder.transformer.layers[0].self_attn for m in (again, official))
    assert ours.num_heads == theirs.num_heads


def test_another_size_equals_the_predictor(paths, image):
    """Three heads, windows of 5 in a grid of 12, one decoder block: equal to the package's own predictor."""
    from segment_anything import SamPredictor

    sam = load(paths["official"])
    found = sam_checkpoint.sizes(torch.load(paths["official"], weights_only=True))
    assert (found.image_size, found.heads, found.window_size, found.global_blocks) == (48, 3, 5, (1,))
    assert (found.decoder_depth, found.decoder_heads, found.num_masks) == (1, 3, 2)
    model = sam_checkpoint.build(found)
    model.load_state_dict(torch.load(paths["official"], weights_only=True))
    predictor = SamPredictor(model)
    predictor.set_image(image)
    for box, logits, mask in zip(BOXES, sam.logits(image, BOXES), sam.segment(image, BOXES), strict=True):
        expected = predictor.predict(box=box, multimask_output=False, return_logits=True)[0][0]
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_array_equal(mask, expected > 0)


def test_decoder_heads_can_be_told(paths, image):
    """The one size that no tensor tells is an argument; another number is another key."""
    told, guessed = load(paths["official"], decoder_heads=6), load(paths["official"])
    assert told.model.mask_decoder.transformer.layers[0].self_attn.num_heads == 6
    assert told.key != guessed.key
    assert not np.allclose(told.logits(image, BOXES), guessed.logits(image, BOXES))


@pytest.mark.parametrize("kind", ["sam", "sam2"])
def test_equals_transformers(kind, paths, image):
    """The model and processor of transformers, used as its documentation shows, give the same logits."""
    from transformers import Sam2Model, Sam2Processor, SamModel, SamProcessor

    ours = load(paths[kind])
    model = (SamModel if kind == "sam" else Sam2Model).from_pretrained(paths[kind]).eval()
    processor = (SamProcessor if kind == "sam" else Sam2Processor)(ours._processor)
    inputs = processor(images=image, input_boxes=[BOXES.tolist()], return_tensors="pt")
    sizes = [inputs["original_sizes"]] + ([inputs["reshaped_input_sizes"]] if kind == "sam" else [])
    inputs = {name: inputs[name].float() for name in ("pixel_values", "input_boxes")}
    with torch.inference_mode():
        low = model(**inputs, multimask_output=False).pred_masks
    expected = processor.post_process_masks(low, *sizes, binarize=False)[0][:, 0].numpy()
    np.testing.assert_allclose(ours.logits(image, BOXES), expected, atol=1e-4)
    np.testing.assert_array_equal(ours.segment(image, BOXES), expected > 0)


def test_official_weights_in_transformers(shared_data, tmp_path):
    """The official tiny weights renamed to transformers' names: the masks differ by the resize alone."""
    from safetensors.torch import save_file

    random_models.transformers_sam(tmp_path / "sam")  # the same sizes
    names = [
        ("image_encoder.", "vision_encoder."),
        ("patch_embed.proj", "patch_embed.projection"),
        ("blocks.", "layers."),
        (r"encoder\.(layers\.\d+)\.norm", r"encoder.\1.layer_norm"),
        (r"neck\.0", "neck.conv1"),
        (r"neck\.1", "neck.layer_norm1"),
        (r"neck\.2", "neck.conv2"),
        (r"neck\.3", "neck.layer_norm2"),
        (r"mask_downscaling\.0", "mask_embed.conv1"),
        (r"mask_downscaling\.1", "mask_embed.layer_norm1"),
        (r"mask_downscaling\.3", "mask_embed.conv2"),
        (r"mask_downscaling\.4", "mask_embed.layer_norm2"),
        (r"mask_downscaling\.6", "mask_embed.conv3"),
        ("point_embeddings", "point_embed"),
        (r"prompt_encoder\.pe_layer\.\w+", "shared_image_embedding.positional_embedding"),
        (r"output_upscaling\.0", "upscale_conv1"),
        (r"output_upscaling\.1", "upscale_layer_norm"),
        (r"output_upscaling\.3", "upscale_conv2"),
        (r"transformer\.(layers\.\d)\.norm", r"transformer.\1.layer_norm"),
        ("norm_final_attn", "layer_norm_final_attn"),
        (r"(mlps\.\d)\.layers\.0", r"\1.proj_in"),
        (r"(mlps\.\d)\.layers\.1", r"\1.layers.0"),
        (r"(mlps\.\d)\.layers\.2", r"\1.proj_out"),
        (r"iou_prediction_head\.layers\.0", "iou_prediction_head.proj_in"),
        (r"iou_prediction_head\.layers\.1", "iou_prediction_head.proj_out"),
    ]  # fmt: skip
    state = {}
    for name, tensor in torch.load(shared_data / "sam_tiny/sam_tiny.pth", weights_only=True).items():
        for pattern, new in names:
            name = re.sub(pattern, new, name)
        state[name] = tensor
    state["prompt_encoder.shared_embedding.positional_embedding"] = state[
        "shared_image_embedding.positional_embedding"
    ].clone()
    save_file(state, tmp_path / "sam/model.safetensors", metadata={"format": "pt"})
    oracle = np.load(shared_data / "sam_tiny/oracle.npz")
    got = load(tmp_path / "sam").segment(oracle["image"], oracle["two_boxes"])
    assert (got == oracle["two_boxes_masks"][:, 0]).mean() > 0.99


def count_calls(segmenter, monkeypatch):
    """How many images were encoded so far, and how many boxes each decoder call got."""
    encoded, decoded = [], []
    embed, decode = segmenter._embed, segmenter._decode
    monkeypatch.setattr(segmenter, "_embed", lambda image: encoded.append(image.shape) or embed(image))
    monkeypatch.setattr(segmenter, "_decode", lambda e, boxes: decoded.append(len(boxes)) or decode(e, boxes))
    return encoded, decoded


def test_one_embedding_for_all_boxes(segmenter, image, monkeypatch):
    """Two calls about one image encode it once; pixels changed in place, or another shape, encode again."""
    encoded, decoded = count_calls(segmenter, monkeypatch)
    mine = image.copy()
    first = segmenter.segment(mine, BOXES)
    segmenter.logits(mine, BOXES[:1])
    assert len(encoded) == 1 and decoded == [3, 1]
    mine[:30] = 255
    assert not np.array_equal(segmenter.segment(mine, BOXES), first)
    segmenter.segment(mine.reshape(80, 60, 3), BOXES)
    assert len(encoded) == 3


def test_many_boxes_go_in_batches(segmenter, image, monkeypatch):
    """200 boxes reach the decoder 16 at a time, fewer on a large image, and equal 200 single calls."""
    encoded, decoded = count_calls(segmenter, monkeypatch)
    corners = np.random.default_rng(1).uniform(0, 60, (200, 2, 2)).astype(np.float32)
    boxes = np.concatenate([corners.min(1), corners.max(1) + 1], 1)
    logits = segmenter.logits(image, boxes)
    assert max(decoded) == 16 and sum(decoded) == 200 and len(encoded) == 1
    alone = np.concatenate([segmenter.logits(image, boxes[i : i + 1]) for i in range(0, 200, 9)])
    np.testing.assert_allclose(logits[::9], alone, atol=1e-4)
    monkeypatch.setattr(segmenters, "_MAX_PIXELS", 3 * (60 * 80 + segmenter.image_size**2))
    decoded.clear()
    segmenter.segment(image, boxes[:7])
    assert decoded == [3, 3, 1]


def test_no_box_encodes_nothing(segmenter, image, monkeypatch):
    """PITFALLS 12: zero boxes give [0, H, W], whatever the empty array's shape."""
    encoded, _ = count_calls(segmenter, monkeypatch)
    for none in (np.zeros((0, 4), np.float32), np.zeros(0), []):
        masks = segmenter.segment(image, none)
        assert masks.shape == (0, 60, 80) and masks.dtype == bool
        assert segmenter.logits(image, none).shape == (0, 60, 80)
    assert not encoded


def test_boxes_are_cut_to_the_image(segmenter, image):
    """A box that sticks out equals its part inside; corners may be swapped; a point is no crash."""
    wild = np.array([[-9, -9, 40, 1e9], [40, 60, 0, 0], [7, 7, 7, 7], [-9, -9, -5, -5], [90, 70, np.inf, 80]])
    tame = [[0, 0, 40, 60], [0, 0, 40, 60], [7, 7, 7, 7], [0, 0, 0, 0], [80, 60, 80, 60]]
    np.testing.assert_array_equal(
        segmenter.segment(image, wild), segmenter.segment(image, np.array(tame, np.float32))
    )


@pytest.mark.parametrize("shape", [(1, 1), (3000, 2), (2, 3000), (1, 5000), (3, 3), (4, 3)])
def test_odd_images(segmenter, shape):
    """One pixel, strips that the resize would shrink to nothing, pictures as high as channels are many."""
    image = np.random.default_rng(0).integers(0, 255, (*shape, 3), np.uint8)
    masks = segmenter.segment(image, np.array([[0, 0, shape[1], shape[0]], [0, 0, 1, 1]], np.float32))
    assert masks.shape == (2, *shape)


def test_wrong_arguments_are_named(paths, image):
    """The image's type and shape, the boxes' shape, and which box is not a number."""
    sam = load(paths["official"])
    for wrong in (image / 255, image[..., 0], image[:0]):
        with pytest.raises(ValueError, match=r"an image is uint8 \[H, W, 3\]; got"):
            sam.segment(wrong, BOXES)
    with pytest.raises(ValueError, match=r"boxes are \[K, 4\].*got \[3, 2, 2\]"):
        sam.segment(image, BOXES.reshape(3, 2, 2))
    with pytest.raises(ValueError, match="box 1 of 2 holds NaN"):
        sam.segment(image, np.array([[0, 0, 1, 1], [0, np.nan, 1, 1]]))


def test_bad_checkpoints(paths, tmp_path):
    """Cut short, no archive, another layout, a tensor too few, too many, of another shape, no file."""
    whole = paths["official"].read_bytes()
    bad = tmp_path / "bad.pth"
    for content in (whole[:-1000], whole[: len(whole) // 2], b"", b"<html>Not found</html>"):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=r"bad.pth \([\d,]+ bytes\) is no readable checkpoint"):
            load(bad)
    state = torch.load(paths["official"], weights_only=True)
    torch.save({"model": state}, bad)
    with pytest.raises(ValueError, match=r"holds no dict of tensors but \['model'\]"):
        load(bad)
    torch.save({"conv1.weight": torch.zeros(3)}, bad)
    with pytest.raises(ValueError, match=r"10 tensors that tell its size.*unexpected: \['conv1.weight'\]"):
        load(bad)
    less = {name: tensor for name, tensor in state.items() if "neck.3" not in name}
    torch.save(less | {"mask_decoder.hf_token.weight": torch.zeros(1, 96)}, bad)
    with pytest.raises(ValueError) as error:
        load(bad)
    assert "2 tensors are missing ['image_encoder.neck.3.bias', 'image_encoder.neck.3.weight']" in str(
        error.value
    )
    assert "1 are unexpected ['mask_decoder.hf_token.weight']" in str(error.value)
    torch.save(state | {"image_encoder.neck.3.bias": torch.zeros(5)}, bad)
    with pytest.raises(
        ValueError, match=r"1 have another shape \['image_encoder.neck.3.bias \(5,\) for \(96,\)"
    ):
        load(bad)
    with pytest.raises(FileNotFoundError, match="absent.pth does not exist"):
        load(tmp_path / "absent.pth")


def test_old_and_half_precision_files(paths, image, tmp_path):
    """The format from before torch 1.6 loads the same; half-precision weights become float32."""
    state = torch.load(paths["official"], weights_only=True)
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    expected = load(paths["official"]).logits(image, BOXES)
    np.testing.assert_array_equal(load(tmp_path / "old.pth").logits(image, BOXES), expected)
    torch.save({name: tensor.half() for name, tensor in state.items()}, tmp_path / "half.pth")
    np.testing.assert_allclose(load(tmp_path / "half.pth").logits(image, BOXES), expected, atol=0.05)


def test_bad_directories(paths, tmp_path):
    """No weights, another kind of model, weights that do not fit the config: each says what is wrong."""
    from safetensors.torch import load_file, save_file

    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no config.json and no .*safetensors"):
        load(tmp_path / "empty")
    folder = random_models.transformers_sam(tmp_path / "sam")
    weights = folder / "model.safetensors"
    state = load_file(weights)
    state.pop("vision_encoder.neck.conv1.weight")
    save_file(state, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"do not fit config.json; 1 missing \['vision_encoder.neck.conv1"):
        load(folder).segment(np.zeros((4, 4, 3), np.uint8), BOXES)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "clip"}))
    with pytest.raises(ValueError, match="model_type 'clip' in config.json; needed: sam or sam2"):
        load(folder)
    with pytest.raises(FileNotFoundError, match="is no directory; pass a directory"):
        load("no such folder")


@pytest.mark.parametrize("kind", MAKERS)
def test_key_names_the_weights(kind, paths, tmp_path):
    """Other weights, another key; the same files elsewhere, the same key."""
    assert load(MAKERS[kind](tmp_path, seed=1)).key != load(paths[kind]).key
    (tmp_path / "again").mkdir()
    assert load(MAKERS[kind](tmp_path / "again")).key == load(paths[kind]).key
    assert load(paths[kind]).key.endswith("-m0.5")


def test_sam2_video_directories_load(paths, image, tmp_path):
    """The released SAM 2 repositories state the video model's type; their image part is used."""
    folder = random_models.transformers_sam2(tmp_path / "sam2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "sam2_video"}))
    np.testing.assert_array_equal(
        load(folder).segment(image, BOXES), load(paths["sam2"]).segment(image, BOXES)
    )
