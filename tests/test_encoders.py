"""SigLIP, SigLIP 2 and Visualized-BGE against upstream; what every encoder of Table 1 must do."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import tiny_encoders as tiny
import torch
import yaml
from PIL import Image

from datamodules.pairs import PairData
from fovea import bundle
from fovea.images import ImageReader
from fovea.index.dense import DenseIndex
from fovea.models.encoders import Encoder, alpha_clip, siglip, visualized_bge
from fovea.models.encoders.json_tokenizer import JsonTokenizer, unpack
from fovea.retrieve import embed_images, embed_texts
from fovea.tables import TableWriter
from lightning_modules.alpha_clip import AlphaClip

TEXTS = ["A red dog, two cats!", "the sign", "is the blue cone left of a man in green"]
NAMES = ["openai", "open_clip", "siglip", "siglip2", "bge_base", "bge_m3"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every tiny model, in its released layout."""
    root = tmp_path_factory.mktemp("encoders")
    tiny.make_alpha_visual(tiny.make_openai_clip(root / "openai").parent)
    tiny.make_open_clip(root / "open_clip")
    tiny.make_siglip(root / "siglip")
    tiny.make_siglip(root / "siglip2", second=True)
    tiny.make_visualized_bge(root / "bge_base")
    tiny.make_visualized_bge(root / "bge_m3", m3=True)
    return root


def arguments(files: Path, name: str) -> tuple[str, dict[str, Any]]:
    """Class and arguments, as a config names them."""
    at = files / name
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "openai": ("alpha_clip", {"base": at / "ViT-tiny.pt", "visual": at / "clip_tiny_alpha.pth"}),
        "open_clip": ("alpha_clip", {"base": at}),
        "siglip": ("siglip", {"path": at}),
        "siglip2": ("siglip", {"path": at}),
        "bge_base": (
            "visualized_bge",
            {"weights": at / "Visualized_base_en_v1.5.pth", "text_model": at / "bge-base-en-v1.5"},
        ),
        "bge_m3": (
            "visualized_bge",
            {
                "weights": at / "Visualized_m3.pth",
                "text_model": at / "bge-m3",
                "query_instruction": "a sign ",
            },
        ),
    }
    factory, named = calls[name]
    return factory, {key: str(v) if isinstance(v, Path) else v for key, v in named.items()}


def build(files: Path, name: str) -> Encoder:
    factory, named = arguments(files, name)
    made: Encoder = {"alpha_clip": alpha_clip, "siglip": siglip, "visualized_bge": visualized_bge}[factory](
        **named
    )
    return made


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.randn(3, 3, tiny.SIDE, tiny.SIDE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["siglip", "siglip2"])
@torch.no_grad()
def test_siglip_equals_transformers(files: Path, name: str, pixels: torch.Tensor) -> None:
    """Embeddings, scale and bias of `SiglipModel`, and the pixels of its processor, on the same files."""
    from transformers import SiglipModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    theirs, ours = SiglipModel.from_pretrained(files / name, dtype=torch.float32).eval(), build(files, name)
    tokens = ours.tokenize(TEXTS)
    got, want = ours.encode_image(pixels), theirs.get_image_features(pixels).pooler_output
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    got, want = ours.encode_text(tokens), theirs.get_text_features(tokens).pooler_output
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    logits = theirs(input_ids=tokens, pixel_values=pixels).logits_per_text
    unit = [torch.nn.functional.normalize(x) for x in (ours.encode_text(tokens), ours.encode_image(pixels))]
    scaled = unit[0] @ unit[1].T * ours.logit_scale.exp() + ours.get_parameter("siglip.logit_bias")
    torch.testing.assert_close(scaled, logits, atol=1e-4, rtol=0)
    photo = np.random.default_rng(0).integers(0, 255, (57, 91, 3), np.uint8)
    processor = SiglipImageProcessorPil.from_pretrained(files / name)
    wanted = processor(Image.fromarray(photo), return_tensors="pt")["pixel_values"]
    made = ours.transform.normalise(torch.from_numpy(ours.transform(photo)[0][None]))
    torch.testing.assert_close(made, wanted, atol=1e-5, rtol=0)


def test_siglip_texts(files: Path) -> None:
    """64 tokens; SigLIP: no case, no punctuation, </s> pads and stays at a cut; 2: as transformers' class."""
    from transformers import Siglip2Tokenizer

    first, second = build(files, "siglip"), build(files, "siglip2")
    same = first.tokenize(["A red, dog!", "a  RED dog", "a red dog"])
    assert same.shape == (3, 64) and (same == same[0]).all() and same[0, 3:].eq(1).all()
    long = first.tokenize(["dog " * 100])[0]
    assert long[-1] == 1 and long[:-1].eq(long[0]).all()
    theirs = Siglip2Tokenizer.from_pretrained(files / "siglip2", add_bos_token=False, add_eos_token=True)
    texts = [*TEXTS, "DOG " * 100, ""]
    want = theirs(texts, padding="max_length", max_length=64, truncation=True, padding_side="right")
    assert second.tokenize(texts).tolist() == want["input_ids"]


@pytest.mark.parametrize("change", ["naflex", "resample", "size", "no tokenizer.json", "no head", "cut"])
def test_a_wrong_siglip_is_refused(files: Path, tmp_path: Path, change: str) -> None:
    """Other kinds, other pixels, missing files: each named."""
    at = shutil.copytree(files / "siglip", tmp_path / "model")
    config, pixels = (json.loads((at / n).read_text()) for n in ("config.json", "preprocessor_config.json"))
    expected: tuple[type[Exception], str] = (ValueError, "")
    if change == "naflex":
        config["model_type"], expected = "siglip2", (ValueError, "NaFlex .* fixed resolution")
    elif change == "resample":
        pixels["resample"], expected = 0, (ValueError, r"preprocessor_config\.json: resample 0")
    elif change == "size":
        pixels["size"] = {"height": 64, "width": 64}
        expected = (ValueError, "64 pixels in the processor, of 32 in config")
    elif change == "no head":
        config["vision_config"]["vision_use_head"], expected = False, (ValueError, "no pooling head")
    elif change == "cut":
        weights = at / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        expected = (ValueError, r"model\.safetensors .*cut short")
    else:
        (at / "tokenizer.json").unlink()
        expected = (FileNotFoundError, "has no tokenizer.json")
    (at / "config.json").write_text(json.dumps(config))
    (at / "preprocessor_config.json").write_text(json.dumps(pixels))
    with pytest.raises(expected[0], match=expected[1]):
        siglip(str(at))


@torch.no_grad()
def test_eva_tower_equals_timm(files: Path, pixels: torch.Tensor) -> None:
    """The tower of the released layout: timm's EVA-02 with the same weights."""
    from timm.models.eva import Eva

    state = torch.load(files / "bge_base" / "Visualized_base_en_v1.5.pth")
    theirs = Eva(
        img_size=tiny.SIDE, patch_size=tiny.PATCH, embed_dim=tiny.WIDTH, depth=tiny.LAYERS, num_heads=2,
        qkv_fused=False, mlp_ratio=2.6667, swiglu_mlp=True, scale_mlp=True, scale_attn_inner=True,
        use_rot_pos_emb=True, ref_feat_shape=(16, 16), num_classes=0, global_pool="token",
    ).eval()  # fmt: skip
    prefix = "model_visual.visual."
    names = {"attn.inner_attn_ln": "attn.norm", "mlp.ffn_ln": "mlp.norm", "mlp.w1": "mlp.fc1_g"}
    names |= {"mlp.w2": "mlp.fc1_x", "mlp.w3": "mlp.fc2"}
    names |= {"attn.q_bias": "attn.q_proj.bias", "attn.v_bias": "attn.v_proj.bias"}
    mapped = {}
    for name, value in state.items():
        if name.startswith(prefix) and "rope" not in name and "head" not in name:
            for old, new in names.items():
                name = name.replace(old, new)
            mapped[name.removeprefix(prefix)] = value
    assert set(theirs.load_state_dict(mapped, strict=False).missing_keys) == set()
    theirs.norm = torch.nn.Identity()
    ours: Any = build(files, "bge_base")
    torch.testing.assert_close(ours.vision(pixels), theirs.forward_features(pixels), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["bge_base", "bge_m3"])
@torch.no_grad()
def test_bge_reads_texts_and_images(files: Path, name: str, pixels: torch.Tensor) -> None:
    """Texts: [CLS] of transformers' model, its tokenizer's tokens. Images: patches in the words' place."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    ours: Any = build(files, name)
    _, named = arguments(files, name)
    bert = AutoModel.from_config(AutoConfig.from_pretrained(named["text_model"])).eval()
    state = torch.load(named["weights"])
    own = {k.removeprefix("bge_"): v for k, v in state.items() if k.startswith("bge_")}
    bert.load_state_dict(own, strict=True)
    tokenizer = AutoTokenizer.from_pretrained(named["text_model"])
    prefix = named.get("query_instruction", "")
    texts = tokenizer([prefix + text for text in TEXTS], padding=True, return_tensors="pt")
    tokens = ours.tokenize(TEXTS)
    assert torch.equal(tokens, texts["input_ids"])
    want = bert(**texts).last_hidden_state[:, 0]
    torch.testing.assert_close(ours.encode_text(tokens), want, atol=1e-5, rtol=0)

    # One image at a time, without padding: [CLS], patches, the text's tokens, by transformers' layers alone.
    grid = tiny.GRID**2
    for image, ids, mask, got in zip(
        pixels, tokens, texts["attention_mask"], ours.encode_image_text(pixels, tokens), strict=True
    ):
        patches = ours.visual_proj(ours.vision(image[None])[:, 1:])[0]
        embed, ids = bert.embeddings, ids[mask.bool()]
        word = embed.word_embeddings(ids) + embed.token_type_embeddings.weight[0]
        place = embed.position_embeddings.weight
        rows = [word[0] + place[0], *(patches + place[1 : grid + 1])]
        rows += list(word[1:] + place[grid + 1 : grid + len(ids)])
        states = bert.encoder(embed.LayerNorm(torch.stack(rows))[None]).last_hidden_state
        torch.testing.assert_close(got, states[0, 0], atol=1e-5, rtol=0)
    empty = tokenizer([""], return_tensors="pt")["input_ids"].expand(3, -1)
    assert torch.equal(ours.encode_image(pixels), ours.encode_image_text(pixels, empty))
    if name == "bge_base":
        ours.tokenizer.settings["length"] = 10_000
        with pytest.raises(ValueError, match="more than the text encoder's 128 positions"):
            ours.encode_image_text(pixels[:1], ours.tokenize(["dog " * 200]))


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "rotary", "other", "cut", "text model"])
def test_wrong_bge_files_are_refused(files: Path, tmp_path: Path, change: str) -> None:
    """The file and each tensor that does not fit are named; what upstream does not use may be absent."""
    _, named = arguments(files, "bge_base")
    state = torch.load(named["weights"])
    said = ""
    if change == "missing":
        del state["bge_encoder.layer.1.output.dense.bias"], state["bge_pooler.dense.bias"]
        said = r"bad\.pth does not fit this model: missing bge_encoder\.layer\.1\.output\.dense\.bias$"
    elif change == "unexpected":
        state["model_visual.text.x"], said = torch.ones(1), r"unexpected model_visual\.text\.x"
    elif change == "shape":
        state["visual_proj.bias"], said = (
            torch.ones(3),
            r"visual_proj\.bias is \(3,\), the model needs \(128,\)",
        )
    elif change == "rotary":
        state["model_visual.visual.rope.freqs_cos"] += 1
        said = "rope.freqs_cos is not the rotary table"
    elif change == "other":
        state, said = (
            tiny.clip_state(),
            r"no Visualized-BGE as released: missing .*pos_embed.*unexpected pos",
        )
    elif change == "text model":
        named["text_model"], said = (
            str(files / "siglip"),
            "model_type 'siglip' .* needed: bert or xlm-roberta",
        )
    torch.save(state, tmp_path / "bad.pth")
    if change == "cut":
        data = (tmp_path / "bad.pth").read_bytes()
        (tmp_path / "bad.pth").write_bytes(data[: len(data) // 2])
        said = r"bad\.pth is neither .* cut short"
    with pytest.raises(ValueError, match=said):
        visualized_bge(str(tmp_path / "bad.pth"), named["text_model"])


@pytest.mark.parametrize("name", NAMES)
def test_bundle_stands_alone(files: Path, tmp_path: Path, name: str, pixels: torch.Tensor) -> None:
    """By a YAML, into a bundle, the source gone: the same bits for images and texts, and picklable tokens."""
    source = shutil.copytree(files / name, tmp_path / name)
    factory, named = arguments(tmp_path, name)
    config = {"class_path": f"fovea.models.encoders.{factory}", "init_args": named}
    (tmp_path / "encoder.yaml").write_text(yaml.safe_dump(config))
    encoder = bundle.open_encoder(tmp_path / "encoder.yaml")
    saved = bundle.save_encoder(encoder, tmp_path / "bundle")
    shutil.rmtree(source)
    again = bundle.open_encoder(saved)
    tokens = encoder.tokenize(TEXTS)
    assert torch.equal(again.tokenize(TEXTS), tokens)
    assert torch.equal(pickle.loads(pickle.dumps(encoder.tokenizer))(TEXTS), tokens)
    assert again.transform == encoder.transform and again.embed_dim == encoder.embed_dim
    mask = torch.rand(3, 1, tiny.SIDE, tiny.SIDE)
    with torch.no_grad():
        assert torch.equal(again.encode_image(pixels, mask), encoder.encode_image(pixels, mask))
        assert torch.equal(again.encode_text(tokens), encoder.encode_text(tokens))
        lengths = encoder.encode_image(pixels).norm(dim=-1)
    assert (lengths - 1).abs().max() > 1e-3  # not normalised
    text = {id(p) for p in encoder.text_parameters()}
    depths = {encoder.depth_of(n) for n, p in encoder.named_parameters() if id(p) not in text}
    assert depths - {None} == set(range(tiny.LAYERS + 2))
    assert all(encoder.depth_of(n) is None for n, p in encoder.named_parameters() if id(p) in text)


@pytest.mark.parametrize("name", NAMES)
def test_retrieves(files: Path, tmp_path: Path, name: str) -> None:
    """Tables → embeddings → top k: every image finds itself, no text's row is zero, batches do not matter."""
    encoder = build(files, name)
    rng = np.random.default_rng(0)
    with TableWriter(tmp_path / "tables") as writer:
        for i in range(5):
            Image.fromarray(rng.integers(0, 255, (40, 50, 3), np.uint8)).save(writer.directory / f"{i}.png")
            writer.add("images", id=str(i), path=f"{i}.png", width=50, height=40, split="test")
        writer.finish({"reader": "test"})
    rows = [{"id": str(i), "path": f"{i}.png"} for i in range(5)]
    ids, images = embed_images(encoder, rows, ImageReader(tmp_path / "tables"), batch_size=2)
    index = DenseIndex.build(
        ids, images, manifest={"encoder": name, "fingerprint": bundle.fingerprint(encoder), "corpus": "full"}
    )
    found, scores = index.search(images, 3)
    assert [row[0] for row in found] == ids and np.allclose(scores[:, 0], 1, atol=1e-5)
    texts = embed_texts(encoder, TEXTS)
    np.testing.assert_allclose(texts, embed_texts(encoder, TEXTS, batch_size=1), atol=1e-5)
    found, _ = index.search(texts, 5)
    assert [sorted(row) for row in found] == [ids] * len(TEXTS)


@pytest.mark.parametrize("name", ["open_clip", "siglip", "bge_base"])
def test_trains_with_the_text_frozen(files: Path, tiny_world: Path, name: str) -> None:
    """One step: every layer of the image tower moves, no text parameter does, none waits for a gradient."""
    encoder = build(files, name)
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    module = AlphaClip(encoder, lr=1e-2, freeze_text=True)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0,
        limit_val_batches=0, max_steps=1,
    )  # fmt: skip
    trainer.fit(module, PairData(str(tiny_world), batch_size=4, max_regions=1, full_image_rate=0.0))
    text = {id(p) for p in encoder.text_parameters()}
    moved = {n: not torch.equal(before[n], p) for n, p in encoder.named_parameters()}
    frozen = {n for n, p in encoder.named_parameters() if id(p) in text}
    assert frozen and not any(moved[n] for n in frozen)
    waiting = [
        n for n, p in encoder.named_parameters() if p.requires_grad and p.grad is None and not moved[n]
    ]
    assert not waiting, waiting
    layers = {encoder.depth_of(n) for n, m in moved.items() if m}
    assert set(range(tiny.LAYERS + 2)) <= layers


@pytest.mark.parametrize("name", ["siglip", "bge_base"])
def test_has_no_patch_tokens(files: Path, name: str, pixels: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="no projected patch tokens"):
        build(files, name).patch_tokens(pixels)


def test_tokenizer_settings() -> None:
    """Left padding, an empty batch, a damaged file."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    file = Tokenizer(models.WordLevel({"a": 1, "b": 2, "?": 0}, "?"))
    file.pre_tokenizer = pre_tokenizers.Whitespace()
    from fovea.models.encoders.json_tokenizer import pack

    packed = pack(file.to_str())
    left = JsonTokenizer(packed, length=3, pad_id=9, side="left", prefix="b ")
    assert left(["a", "", "a a a"]).tolist() == [[9, 2, 1], [9, 9, 2], [2, 1, 1]]
    assert left([]).shape == (0, 0) and unpack(packed) == file.to_str()
    with pytest.raises(ValueError, match="packed is damaged"):
        JsonTokenizer("bm90aGluZw==", length=3, pad_id=0)(["a"])
