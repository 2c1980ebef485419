"""CLIP checkpoints of every origin into `alpha_clip`: equal to open_clip's own loading, or refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import (
    OPEN_CLIP,
    SIDE,
    WIDTH,
    clip_state,
    make_alpha_visual,
    make_open_clip,
    make_openai_clip,
    torchscript,
)

from fovea import bundle
from fovea.models import alpha_clip
from fovea.models.clip_checkpoint import read_clip
from fovea.models.encoders import ClipEncoder, Encoder, open_clip_from_config
from fovea.models.encoders import alpha_clip as alpha_clip_by_name
from fovea.models.encoders import open_clip as open_clip_by_name

TEXTS = ["a red dog", "two cats on the left"]


@pytest.fixture(scope="module")
def openai(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_openai_clip(tmp_path_factory.mktemp("openai"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_open_clip(tmp_path_factory.mktemp("hub") / "clip")


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def both(encoder: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Image and text embeddings, of ours or of open_clip's model."""
    tokens = open_clip.SimpleTokenizer()(TEXTS)
    return torch.cat([encoder.encode_image(pixels), encoder.encode_text(tokens)])


def test_openai_archive_equals_open_clip(openai: Path, pixels: torch.Tensor) -> None:
    """A half-precision TorchScript archive: the embeddings of open_clip's own loader, without a warning."""
    theirs = open_clip.load_openai_model(str(openai), precision="fp32", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = alpha_clip.load(openai)
    torch.testing.assert_close(both(ours, pixels), both(theirs, pixels), atol=1e-5, rtol=0)
    assert ours.spec()["init_args"]["model_cfg"]["quick_gelu"] is True


def test_hub_layout_equals_open_clip(hub: Path, pixels: torch.Tensor) -> None:
    """Heads, GELU and pixel statistics of open_clip_config.json hold; the zero branch changes no bit."""
    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{hub}")
    ours = alpha_clip.load(hub)
    torch.testing.assert_close(both(ours, pixels), both(theirs.eval(), pixels), atol=1e-5, rtol=0)
    assert list(ours.transform.mean) == preprocess.transforms[-1].mean
    assert list(ours.transform.std) == preprocess.transforms[-1].std
    plain = open_clip_from_config(OPEN_CLIP["model_cfg"]).eval()
    plain.clip.load_state_dict(load_file(hub / "open_clip_model.safetensors"))
    mask = torch.rand(2, 1, SIDE, SIDE)
    with torch.no_grad():
        assert torch.equal(plain.encode_image(pixels), ours.encode_image(pixels, mask))


@pytest.mark.parametrize("name", ["epoch_3.pt", "open_clip_pytorch_model.bin", "bundle", "separate.pt"])
def test_other_containers_of_the_same_weights(
    hub: Path, tmp_path: Path, pixels: torch.Tensor, name: str
) -> None:
    """A training checkpoint, a .bin, a bundle, a separate text tower: the embeddings of the safetensors."""
    want = both(alpha_clip.load(hub), pixels)
    state = load_file(hub / "open_clip_model.safetensors")
    path = tmp_path / name
    if name == "bundle":
        bundle.save_encoder(alpha_clip.load(hub), path)
    else:
        (tmp_path / "open_clip_config.json").write_text(json.dumps(OPEN_CLIP))
        wrapped = {"epoch": 3, "name": "run", "state_dict": {f"module.{k}": v for k, v in state.items()}}
        text = {k if k.startswith(("visual.", "logit_")) else f"text.{k}": v for k, v in state.items()}
        text["logit_scale"] = state["logit_scale"][None]
        torch.save({"epoch_3.pt": wrapped, "separate.pt": text}.get(name, state), path)
    assert torch.equal(both(alpha_clip.load(path), pixels), want)


def test_activation_is_decided_and_said(tmp_path: Path, pixels: torch.Tensor) -> None:
    """Without a config: a warning and the documented guess; the argument decides; a contradiction fails."""
    plain, named = tmp_path / "clip.pt", tmp_path / "open_clip_pytorch_model.bin"
    for path in (plain, named):
        torch.save(clip_state(), path)
    with pytest.warns(UserWarning, match=r"clip\.pt does not say .* taken: QuickGELU"):
        quick = alpha_clip.load(plain)
    with pytest.warns(UserWarning, match="taken: GELU"):
        exact = alpha_clip.load(named)
    assert (both(quick, pixels) - both(exact, pixels)).abs().max() > 1e-3
    visual = make_alpha_visual(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(both(alpha_clip.load(plain, quick_gelu=False), pixels), both(exact, pixels))
        assert alpha_clip.load(plain, visual).spec()["init_args"]["model_cfg"]["quick_gelu"] is True
    (tmp_path / "open_clip_config.json").write_text(json.dumps(OPEN_CLIP))
    with pytest.raises(ValueError, match="quick_gelu=True, but"):
        alpha_clip.load(plain, quick_gelu=True)
    saved = bundle.save_encoder(exact, tmp_path / "bundle")
    with pytest.raises(ValueError, match="says False"):
        alpha_clip.load(saved, quick_gelu=True)


def test_heads_follow_every_config_of_open_clip(tmp_path: Path) -> None:
    """The rule for files without a config gives the heads and MLPs of each plain ViT that open_clip knows."""
    from fovea.models.clip_checkpoint import _sizes

    seen = 0
    for name in open_clip.list_models():
        config = open_clip.get_model_config(name)
        vision, text = config["vision_cfg"], config["text_cfg"]
        plain = "timm_model_name" not in vision and isinstance(vision["layers"], int)
        if not plain or "hf_model_name" in text or config.get("multimodal_cfg"):
            continue
        width, patch, grid = (
            vision["width"],
            vision["patch_size"],
            vision["image_size"] // vision["patch_size"],
        )
        hidden = int(width * vision.get("mlp_ratio", 4.0)), int(text["width"] * text.get("mlp_ratio", 4.0))
        shapes = {
            "visual.conv1.weight": (width, 3, patch, patch),
            "visual.positional_embedding": (grid * grid + 1, width),
            "visual.transformer.resblocks.0.mlp.c_fc.weight": (hidden[0], width),
            "transformer.resblocks.0.mlp.c_fc.weight": (hidden[1], text["width"]),
            "ln_final.weight": (text["width"],),
            "positional_embedding": (text["context_length"], text["width"]),
            "text_projection": (text["width"], config["embed_dim"]),
            "token_embedding.weight": (text["vocab_size"], text["width"]),
        }
        read = _sizes({k: torch.empty(v, device="meta") for k, v in shapes.items()}, tmp_path)
        heads = width // vision.get("head_width", 64)
        assert width // read["vision_cfg"]["head_width"] == heads, name
        assert read["text_cfg"]["heads"] == text["heads"], name
        assert int(width * read["vision_cfg"]["mlp_ratio"]) == hidden[0], name
        assert int(text["width"] * read["text_cfg"]["mlp_ratio"]) == hidden[1], name
        seen += 1
    assert seen > 40


def test_image_size_interpolates_only_when_asked(openai: Path, tmp_path: Path) -> None:
    """48 px from a 32 px checkpoint as open_clip does it; unasked, a visual file of another size fails."""
    pixels = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    config = {**read_clip(openai)[1], "vision_cfg": {**read_clip(openai)[1]["vision_cfg"], "image_size": 48}}
    theirs = open_clip.CLIP(**config).eval()
    state = {name: value.half().float() for name, value in clip_state().items()}
    open_clip.model.resize_pos_embed(state, theirs)
    theirs.load_state_dict(state)
    resized = alpha_clip_by_name(str(openai), image_size=48)
    assert resized.transform.size == 48
    torch.testing.assert_close(both(resized, pixels), both(theirs, pixels), atol=1e-5, rtol=0)
    saved = bundle.save_encoder(alpha_clip.load(openai), tmp_path / "small")
    again = alpha_clip.load(saved, image_size=48, resize="pad")
    assert torch.equal(both(again, pixels), both(resized, pixels)) and again.transform.mode == "pad"
    big = bundle.save_encoder(resized, tmp_path / "big")
    visual = make_alpha_visual(tmp_path)
    with pytest.raises(ValueError, match=r"alpha\.pth does not fit .*\(17, 128\).*\(37, 128\).*image_size"):
        alpha_clip.load(big, visual)
    assert alpha_clip.load(big, visual, image_size=48).transform.size == 48
    with pytest.raises(ValueError, match="multiple of the patch size 8"):
        alpha_clip.load(openai, image_size=50)


@pytest.mark.parametrize("layout", ["module.", "visual.", "module.visual.", "state_dict", "model"])
def test_layouts_of_visual_checkpoints(
    openai: Path, tmp_path: Path, pixels: torch.Tensor, layout: str
) -> None:
    """Prefixes and wrappings of the released towers, in either precision, give one model."""
    path = make_alpha_visual(tmp_path)
    want = both(alpha_clip.load(openai, path), pixels)
    assert (want - both(alpha_clip.load(openai), pixels)).abs().max() > 1e-2
    state = {name: value.float() for name, value in torch.load(path, weights_only=True).items()}
    if layout.endswith("."):
        torch.save({layout + name: value for name, value in state.items()}, path)
    else:
        torch.save({layout: state, "epoch": 1}, path)
    assert torch.equal(both(alpha_clip.load(openai, path), pixels), want)


def test_a_whole_alpha_clip_is_a_base(shared_data: Path) -> None:
    """The official full state dict, image tower and alpha weights included, agrees with the oracle."""
    folder = shared_data / "alphaclip"
    oracle = np.load(folder / "oracle.npz")
    model = alpha_clip.load(folder / "alpha_clip_full.safetensors", quick_gelu=True)
    image, mask = (torch.from_numpy(oracle[name]).float() for name in ("image", "mask"))
    with torch.no_grad():
        got = model.encode_image(image, mask)
    np.testing.assert_allclose(got.numpy(), oracle["image_embeds"], atol=1e-5)
    with pytest.raises(ValueError, match="no image tower alone; unexpected"):
        alpha_clip.load(
            folder / "base_clip_openai_layout.pt", folder / "alpha_clip_full.safetensors", quick_gelu=True
        )


def damaged(kind: str, folder: Path) -> Path:
    state = clip_state()
    if kind == "safetensors":
        save_file(state, folder / "cut.safetensors")
        data = (folder / "cut.safetensors").read_bytes()
        (folder / "cut.safetensors").write_bytes(data[: len(data) // 2])
        return folder / "cut.safetensors"
    if kind == "archive":
        torchscript(state, folder / "cut.pt")
        data = (folder / "cut.pt").read_bytes()
        (folder / "cut.pt").write_bytes(data[: len(data) // 2])
        return folder / "cut.pt"
    if kind == "resnet":
        state = {name: v for name, v in state.items() if not name.startswith("visual.transformer.")}
        state["visual.layer1.0.conv1.weight"] = state["visual.attnpool.positional_embedding"] = torch.ones(2)
        del state["visual.positional_embedding"]
    elif kind == "other":
        state = {"vision_model.embeddings.class_embedding": torch.ones(4), "logit_scale": torch.ones(())}
    elif kind == "no tensors":
        torch.save({"epoch": 3}, folder / "x.pt")
        return folder / "x.pt"
    elif kind == "keys":
        del state["visual.ln_pre.bias"]
        state["visual.trunk.x"] = torch.ones(1)
        state["visual.proj"] = state["visual.proj"][:5]
    elif kind == "narrow":
        state = clip_state(vision=96)
    torch.save(state, folder / "clip.pt")
    return folder / "clip.pt"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("safetensors", r"cut\.safetensors is no whole safetensors file"),
        ("archive", r"cut\.pt is neither a state dict .* cut short"),
        ("resnet", r"missing visual\.positional_embedding.*unexpected visual\.layer1.*ResNet has no patches"),
        ("other", r"missing visual\.conv1\.weight.*unexpected vision_model\.embeddings\.class_embedding"),
        ("no tensors", r"x\.pt holds no state dict"),
        (
            "keys",
            r"missing visual\.ln_pre\.bias; unexpected visual\.trunk\.x; visual\.proj is \(5, 32\), .*\(128,",
        ),
        ("narrow", r"96 wide, no multiple of .*open_clip_config\.json"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, kind: str, said: str) -> None:
    """Cut files, ResNets, other models, other widths: an error that names file and tensors."""
    with pytest.raises(ValueError, match=said):
        alpha_clip.load(damaged(kind, tmp_path), quick_gelu=True)


def test_places_without_a_model_and_wrong_bundles(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a bundle .* nor open_clip's hub layout"):
        alpha_clip.load(tmp_path)
    (tmp_path / "open_clip_config.json").write_text('{"model_cfg": {}}')
    torch.save(clip_state(), tmp_path / "clip.pt")
    with pytest.raises(ValueError, match=r"open_clip_config\.json: model_cfg\.vision_cfg\.image_size"):
        alpha_clip.load(tmp_path / "clip.pt")
    foreign = {**OPEN_CLIP["model_cfg"], "text_cfg": {"hf_tokenizer_name": "bert", "width": 64}}
    with pytest.raises(ValueError, match="hf_tokenizer_name"):
        open_clip_from_config(foreign)


def test_open_clip_by_name_is_strict_too(openai: Path, hub: Path, tmp_path: Path) -> None:
    """A local file in a named architecture: OpenAI's needs QuickGELU, another resolution must be asked."""
    config = read_clip(openai)[1]
    for name, change in (
        ("same", {}),
        ("gelu", {"quick_gelu": False}),
        ("large", {"vision_cfg": {**config["vision_cfg"], "image_size": 48}}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({**config, **change}))
    assert isinstance(open_clip_by_name(str(tmp_path / "same.json"), str(openai)), ClipEncoder)
    with pytest.raises(ValueError, match="needs QuickGELU"):
        open_clip_by_name(str(tmp_path / "gelu.json"), str(openai))
    with pytest.raises(ValueError, match="positional_embedding .* pass image_size"):
        open_clip_by_name(str(tmp_path / "large.json"), str(openai))
    large: Encoder = open_clip_by_name(str(tmp_path / "same.json"), str(openai), image_size=48)
    assert large.transform.size == 48
    with pytest.raises(ValueError, match=r"ViT-B-16-quickgelu"):
        open_clip_by_name("ViT-B-16", "dfn2b")
    assert large.depth_of("clip.visual.proj") == 3 and WIDTH == large.clip.visual.conv1.weight.shape[0]
