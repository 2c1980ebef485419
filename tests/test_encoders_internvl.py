"""InternVL-C and -G on tiny files in the released layout, against numbers of upstream's own code.

The numbers below were computed once by OpenGVLab/InternVL's `clip_benchmark/…/internvl_huggingface` (commit
2410d1d) on what `make_internvl` writes, which its classes load strictly, with two sizes that are constants
there (3200 channels, 96 query tokens) taken from the config; the token ids by sentencepiece 0.2.3.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_internvl import CONFIG, make_internvl, sentencepiece_model
from torch.nn.functional import normalize

from fovea import bundle
from fovea.images import ImageReader
from fovea.models.encoders import InternVLEncoder, internvl
from fovea.models.encoders.internvl import InternVLTokenizer
from fovea.models.sentencepiece_bpe import SentencePieceBpe
from fovea.retrieve import embed_images, embed_texts

TEXTS = ["a red panda", "熊猫的照片", "", "a very long text " * 20]
# The first 4 of 16 channels.
IMAGES = {
    "c": [
        [-4.609446, 3.010605, -0.632748, 0.232289],
        [0.68916, 1.307185, -2.550987, 0.223165],
        [0.619708, 2.493761, -1.619725, -2.318669],
    ],
    "g": [
        [-0.700067, 0.468278, -0.073228, 0.157323],
        [-0.024964, 0.383368, -0.284657, -0.005986],
        [-0.148881, 0.335241, -0.166958, -0.030519],
    ],
}
EMBEDDED_TEXTS = [
    [0.797767, 1.989299, 1.967524, -0.803452],
    [-0.687394, 0.52799, 0.16405, 1.153559],
    [2.446604, 3.067322, 0.444848, -0.644693],
    [-1.177894, 0.091488, -0.061474, 1.047044],
]
TOKENS = [1, 268, 299, 305, 307, 304, 2]  # of TEXTS[1]: "▁summarize", ":", "熊猫", "的照", "片"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model; tests that change a file make their own."""
    return make_internvl(tmp_path_factory.mktemp("internvl") / "model")


def pixels() -> torch.Tensor:
    return torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mode", ["c", "g"])
def test_equals_upstream(files: Path, mode: Any) -> None:
    """Images of both modes, texts and token ids; the modes differ; a shard in .bin gives the same."""
    encoder = internvl(str(files), mode).eval()
    tokens = encoder.tokenize(TEXTS)
    assert tokens.shape == (4, 80) and tokens[1].tolist() == TOKENS + [0] * 73
    assert tokens[3, -1] == 2  # cut, and the end kept
    with torch.no_grad():
        images, texts = encoder.encode_image(pixels()), encoder.encode_text(tokens)
        assert images.shape == (3, encoder.embed_dim) and texts.shape == (4, encoder.embed_dim)
        torch.testing.assert_close(images[:, :4], torch.tensor(IMAGES[mode]), atol=1e-5, rtol=0)
        torch.testing.assert_close(texts[:, :4], torch.tensor(EMBEDDED_TEXTS), atol=1e-5, rtol=0)
    assert encoder.transform.size == 28 and encoder.transform.mean == (0.485, 0.456, 0.406)


def test_bin_shards_types_and_larger_positions(files: Path, tmp_path: Path) -> None:
    """pytorch_model*.bin loads alike; half precision is near; `force_image_size` is followed."""
    whole = internvl(str(files), "g").eval()
    other = internvl(str(make_internvl(tmp_path / "bin", kind="bin")), "g")
    assert bundle.fingerprint(whole) == bundle.fingerprint(other)
    with torch.no_grad():
        want = normalize(whole.encode_image(pixels()))
        for dtype, far in (("float16", 1e-4), ("bfloat16", 5e-3)):
            half = internvl(str(files), "g", dtype).eval()
            assert {p.dtype for p in half.parameters()} == {getattr(torch, dtype)}
            assert (1 - (normalize(half.encode_image(pixels()).float()) * want).sum(-1)).max() < far
            assert torch.isfinite(half.encode_text(half.tokenize(TEXTS))).all()
    large = internvl(str(make_internvl(tmp_path / "large", {**CONFIG, "force_image_size": 42})))
    assert large.transform.size == 42 and large.patch_tokens(torch.zeros(1, 3, 42, 42)).shape == (1, 9, 16)


def test_mode_c_leaves_out_what_it_does_not_use(files: Path) -> None:
    """Cross-attention, query tokens and the second pool are G's; no head of upstream's is kept in either."""
    names = {mode: set(internvl(str(files), mode).state_dict()) for mode in ("c", "g")}
    only = {name.split(".")[0] if "layers" not in name else "cross_attn" for name in names["g"] - names["c"]}
    assert only == {"query_tokens", "clip_projector2", "cross_attn"} and names["c"] < names["g"]
    assert not any("lm_head" in name or "itm_head" in name for name in names["g"])


def test_padding_and_company_do_not_change_a_text(files: Path) -> None:
    """A text alone without padding, padded to 80, and beside a longer one; an empty text is no NaN."""
    encoder = internvl(str(files)).eval()
    tokens = encoder.tokenize(TEXTS)
    with torch.no_grad():
        together = encoder.encode_text(tokens)
        for row, length in enumerate((tokens != 0).sum(1).tolist()):
            torch.testing.assert_close(encoder.encode_text(tokens[row : row + 1, :length])[0], together[row])
        assert torch.isfinite(encoder.encode_text(torch.zeros_like(tokens))).all()
    assert not torch.allclose(together[0], together[2])


def test_the_instruction_stands_before_a_text_once(files: Path) -> None:
    """The tokenizer adds the instruction every time, without a look at what the text begins with."""
    encoder = internvl(str(files))
    spelled = encoder.tokenizer.encode
    tokens = encoder.tokenize(["red", "summarize:red"])
    assert tokens[0][tokens[0] != 0].tolist() == [1, *spelled("summarize:red"), 2]
    assert tokens[1][tokens[1] != 0].tolist() == [1, *spelled("summarize:summarize:red"), 2]


def test_the_tokenizer_in_a_worker(files: Path) -> None:
    """Pickled and back: the same ids; no larger than the file."""
    tokenizer = internvl(str(files)).tokenizer
    data = pickle.dumps(tokenizer)
    assert torch.equal(pickle.loads(data)(TEXTS), tokenizer(TEXTS))
    assert len(data) < len(sentencepiece_model()) + 500


def test_sentencepiece() -> None:
    """Best score first, leftmost among equals; spaces kept; bytes of what no piece has; damage is named."""
    encode = SentencePieceBpe(sentencepiece_model(), "t.model")
    assert encode("熊猫的照片") == [272, 305, 307, 304]  # not 猫的 or 照片, which score the same
    assert encode("a  a") == [271, 272, 271] and encode("") == []
    assert encode("é") == [272, 3 + 0xC3, 3 + 0xA9] and encode("\ud800") == [272, 3 + ord("?")]
    assert encode("</s>")[-1] != 2  # text is never a command
    for data, said in (
        (sentencepiece_model()[:-4], "damaged"),
        (b"\x0a\x02\x0a\x00" * 3, "model_type"),
        (sentencepiece_model().replace(b"\x20\x00", b"\x20\x01"), "normalizer"),
        (b'{"version": "1.0"}', "damaged"),
    ):
        with pytest.raises(ValueError, match=rf"t\.model.*{said}"):
            SentencePieceBpe(data, "t.model")


def test_patch_tokens_are_what_the_pool_mixes(files: Path) -> None:
    """Where the pool looks everywhere alike, the embedding is the mean over class token and patches."""
    encoder = internvl(str(files)).eval()
    with torch.no_grad():
        inner = encoder.clip_projector.cross_attn
        inner.k.weight.zero_()
        inner.k_bias.zero_()
        patches = encoder.patch_tokens(pixels())
        class_token = encoder.clip_projector.each(encoder.vision_model(pixels())[:, :1])
        assert patches.shape == (3, 4, encoder.embed_dim)
        mixed = torch.cat([class_token, patches], 1).mean(1)
        torch.testing.assert_close(encoder.encode_image(pixels()), mixed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["c", "g"])
def test_every_parameter_has_one_place_and_a_gradient(files: Path, mode: Any) -> None:
    """A depth, the text tower, or the temperature; images and texts reach all but the temperature."""
    encoder = internvl(str(files), mode)
    text = {id(parameter) for parameter in encoder.text_parameters()}
    depths = {name: encoder.depth_of(name) for name, _ in encoder.named_parameters()}
    for name, parameter in encoder.named_parameters():
        assert (depths[name] is None) == (id(parameter) in text or name == "logit_scale"), name
    assert {depth for depth in depths.values() if depth is not None} == {0, 1, 2, 3}
    (encoder.encode_image(pixels()).sum() + encoder.encode_text(encoder.tokenize(TEXTS)).sum()).backward()
    still = {name for name, p in encoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    # Softmax does not see a bias that all keys share.
    assert still - {name for name in still if name.endswith("k_bias")} == {"logit_scale"}


@pytest.mark.parametrize(("mode", "dtype"), [("c", "float16"), ("g", "bfloat16")])
def test_bundle(files: Path, tmp_path: Path, mode: Any, dtype: Any) -> None:
    """Saved and read back without the original files: type, fingerprint, embeddings and token ids."""
    encoder = internvl(str(files), mode, dtype).eval()
    bundle.save_encoder(encoder, tmp_path / "b")
    back = bundle.load_encoder(tmp_path / "b")
    assert isinstance(back, InternVLEncoder) and back.mode == mode
    assert bundle.fingerprint(back) == bundle.fingerprint(encoder)
    assert torch.equal(back.tokenize(TEXTS), encoder.tokenize(TEXTS))
    with torch.no_grad():
        assert torch.equal(back.encode_image(pixels()), encoder.encode_image(pixels()))


@pytest.mark.parametrize("mode", ["c", "g"])
def test_named_in_a_config_it_embeds_images_and_texts(files: Path, tmp_path: Path, mode: str) -> None:
    """The committed YAML with the tiny directory in the model's place, through the retrieval stage."""
    root = Path(__file__).resolve().parents[1]
    spec = yaml.safe_load((root / f"configs/hulirag/encoders/internvl_{mode}.yaml").read_text())
    assert spec["init_args"]["path"] == "OpenGVLab/InternVL-14B-224px" and spec["init_args"]["mode"] == mode
    spec["init_args"] |= {"path": str(files)}
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(spec))
    encoder = bundle.open_encoder(tmp_path / "e.yaml")
    rng = np.random.default_rng(0)
    rows = []
    for name in "ab":
        Image.fromarray(rng.integers(0, 255, (20, 30, 3), np.uint8)).save(tmp_path / f"{name}.png")
        rows.append({"id": name, "path": f"{name}.png"})
    ids, images = embed_images(encoder, rows, ImageReader(tmp_path))
    texts = embed_texts(encoder, TEXTS)
    assert ids == ["a", "b"] and images.shape == (2, 16) and texts.shape == (4, 16)
    for part in (images, texts):
        np.testing.assert_allclose(np.linalg.norm(part, axis=1), 1, atol=1e-5)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    """All at once: a tensor missing, one too many, one of another shape; also in what only mode G reads."""
    files = make_internvl(tmp_path / "m")
    for shard in SHARDS:
        state = load_file(files / shard)
        state.pop("text_projection", None)
        if "query_tokens" in state:
            state["query_tokens"] = torch.zeros(1, 4, 24)
        if "vision_model.encoder.layers.0.ls1" in state:
            state["vision_model.encoder.layers.9.ls1"] = state["vision_model.encoder.layers.0.ls1"].clone()
        save_file(state, files / shard)
    with pytest.raises(ValueError, match=r"missing text_projection.*layers\.9\.ls1") as in_c:
        internvl(str(files), "c")
    assert "query_tokens" not in str(in_c.value)
    with pytest.raises(ValueError, match=r"query_tokens is \(1, 4, 24\), the model needs \(1, 5, 24\)"):
        internvl(str(files), "g")


@pytest.mark.parametrize("name", [*SHARDS, "tokenizer.model", "config.json"])
@pytest.mark.parametrize("how", ["absent", "truncated"])
def test_a_damaged_or_missing_file_is_named(tmp_path: Path, name: str, how: str) -> None:
    """Each file of the model, absent and cut off at two thirds."""
    file = make_internvl(tmp_path / "m") / name
    if how == "absent":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    with pytest.raises(FileNotFoundError if how == "absent" else ValueError, match=name):
        internvl(str(file.parent))


def test_damaged_bin_and_index(tmp_path: Path) -> None:
    """The other kind of shard, something unpickled that is no tensor, and an index of another form."""
    files = make_internvl(tmp_path / "m", kind="bin")
    shard = files / "pytorch_model-00001-of-00002.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"00001-of-00002\.bin is damaged"):
        internvl(str(files))
    torch.save({"text_projection": Path("not a tensor")}, shard)
    with pytest.raises(ValueError, match=r"00001-of-00002\.bin is damaged"):
        internvl(str(files))
    (files / "pytorch_model.bin.index.json").write_text(json.dumps({"weights": {}}))
    with pytest.raises(ValueError, match=r"index\.json is no index"):
        internvl(str(files))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"qllama_config": None}, "not InternVL 1.0"),
        ({"use_backbone_lora": 16, "attn_pool_num_heads": 5}, "use_backbone_lora is 16.*attn_pool_num_heads"),
        ({"vision_config": CONFIG["vision_config"] | {"hidden_act": "relu"}}, "vision_config.hidden_act"),
        (
            {"qllama_config": CONFIG["qllama_config"] | {"vocab_size": 99}},
            "more than .* vocab_size 99",
        ),
        ({"model_type": "internvl_chat"}, "model_type 'internvl_chat'"),
    ],
)
def test_another_model_is_refused_by_key(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    files = make_internvl(tmp_path / "m")
    (files / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    with pytest.raises(ValueError, match=said):
        internvl(str(files))


def test_wrong_arguments(files: Path) -> None:
    for arguments in ({"mode": "x"}, {"dtype": "int8"}):
        with pytest.raises(ValueError, match=f"encoder.{next(iter(arguments))}"):
            internvl(str(files), **arguments)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        internvl("nowhere")
    with pytest.raises(ValueError, match="damaged"):
        InternVLTokenizer(b"\xff", "x", 1, 2)
