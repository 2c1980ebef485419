"""fovea.models.alpha_clip: agreement with the official model, and the alpha branch's start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fovea.models import alpha_clip
from fovea.models.encoders import ClipEncoder, tiny_clip


@pytest.fixture(scope="module")
def oracle(shared_data: Path) -> dict[str, torch.Tensor]:
    """Inputs and embeddings that the official code computed."""
    arrays = np.load(shared_data / "alphaclip" / "oracle.npz")
    return {name: torch.from_numpy(arrays[name]) for name in arrays}


@pytest.fixture(scope="module")
def official(shared_data: Path) -> ClipEncoder:
    """The official-layout pair, loaded by path."""
    folder = shared_data / "alphaclip"
    model: ClipEncoder = alpha_clip.load(folder / "base_clip_openai_layout.pt", folder / "alpha_visual.pth")
    return model


@torch.no_grad()
def test_agrees_with_the_official_model(official: ClipEncoder, oracle: dict[str, torch.Tensor]) -> None:
    """Image and text embeddings of the official Alpha-CLIP code, to 1e-5; masks come in as [0, 1]."""
    images = official.encode_image(oracle["image"].float(), oracle["mask"].float())
    torch.testing.assert_close(images, oracle["image_embeds"], atol=1e-5, rtol=0)
    texts = official.encode_text(oracle["tokens"].long())
    torch.testing.assert_close(texts, oracle["text_embeds"], atol=1e-5, rtol=0)


@torch.no_grad()
def test_without_visual_it_is_plain_clip(shared_data: Path, oracle: dict[str, torch.Tensor]) -> None:
    """A zero alpha branch: the plain model's embeddings, the same bits under any mask."""
    base = alpha_clip.load(shared_data / "alphaclip" / "base_clip_openai_layout.pt")
    with_mask = base.encode_image(oracle["image"].float(), oracle["mask"].float())
    torch.testing.assert_close(with_mask, oracle["base_image_embeds"], atol=1e-5, rtol=0)
    assert torch.equal(with_mask, base.encode_image(oracle["image"].float()))


@torch.no_grad()
def test_the_mask_matters(official: ClipEncoder, oracle: dict[str, torch.Tensor]) -> None:
    """With the trained branch another mask gives another embedding, by far more than rounding."""
    image = oracle["image"].float()
    differs = official.encode_image(image, oracle["mask"].float()) - official.encode_image(image)
    assert differs.abs().max() > 1e-2


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape"])
def test_a_wrong_visual_file_is_refused_by_name(shared_data: Path, tmp_path: Path, fault: str) -> None:
    """The error names the file and each tensor that does not fit."""
    folder = shared_data / "alphaclip"
    state = torch.load(folder / "alpha_visual.pth", weights_only=True)
    name = "transformer.resblocks.1.mlp.c_fc.weight"
    if fault == "missing":
        del state[name]
    elif fault == "unexpected":
        name = "extra.weight"
        state[name] = torch.zeros(1)
    else:
        state[name] = state[name][:4]
    torch.save(state, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match=rf"bad\.pth.*{name}"):
        alpha_clip.load(folder / "base_clip_openai_layout.pt", tmp_path / "bad.pth")


def test_truncated_and_absent_files(shared_data: Path, tmp_path: Path) -> None:
    """Half a file, and no file: both named."""
    data = (shared_data / "alphaclip" / "base_clip_openai_layout.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"half\.pt"):
        alpha_clip.load(tmp_path / "half.pt")
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        alpha_clip.load(tmp_path / "none.pt")


def test_reads_safetensors(shared_data: Path, tmp_path: Path, oracle: dict[str, torch.Tensor]) -> None:
    """The same weights as safetensors give the same embeddings."""
    state = torch.load(shared_data / "alphaclip" / "base_clip_openai_layout.pt", weights_only=True)
    save_file({k: v.contiguous() for k, v in state.items() if v.ndim}, tmp_path / "clip.safetensors")
    assert "logit_scale" not in load_file(tmp_path / "clip.safetensors")
    with pytest.raises(ValueError, match="missing logit_scale"):
        alpha_clip.load(tmp_path / "clip.safetensors")
    save_file({k: v.contiguous().clone() for k, v in state.items()}, tmp_path / "clip.safetensors")
    model = alpha_clip.load(tmp_path / "clip.safetensors")
    with torch.no_grad():
        texts = model.encode_text(oracle["tokens"].long())
    torch.testing.assert_close(texts, oracle["text_embeds"], atol=1e-5, rtol=0)


def test_zero_branch_is_bit_equal_and_gets_gradient() -> None:
    """Step 0 equals plain CLIP exactly, and the alpha weights receive a gradient at once."""
    torch.manual_seed(0)
    plain = tiny_clip(["red"], image_size=32).eval()
    pixels, mask = torch.randn(3, 3, 32, 32), (torch.rand(3, 1, 32, 32) > 0.5).float()
    before = plain.encode_image(pixels)
    assert isinstance(plain, ClipEncoder)
    with_branch = plain.enable_alpha()
    after = with_branch.encode_image(pixels, mask)
    assert torch.equal(before, after)
    after.square().sum().backward()
    assert with_branch.clip.visual.conv1.alpha.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("alpha", "error"),
    [
        (torch.full((1, 1, 32, 32), 255, dtype=torch.uint8), TypeError),
        (torch.ones(1, 32, 32), ValueError),
        (torch.ones(1, 1, 16, 16), ValueError),
    ],
)
def test_wrong_alpha_is_refused(alpha: torch.Tensor, error: type[Exception]) -> None:
    """0..255, a missing channel dimension, another size: each refused, not scaled twice or broadcast."""
    with pytest.raises(error):
        alpha_clip.with_alpha(torch.zeros(1, 3, 32, 32), alpha)
