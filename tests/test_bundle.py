"""fovea.bundle: what is written reads back the same without Lightning; what is damaged is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fovea import bundle
from fovea.models.encoders import ClipEncoder, open_clip_from_config, tiny_clip

OPEN_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


@pytest.mark.parametrize("kind", ["tiny", "tiny-alpha", "open_clip", "open_clip-alpha"])
def test_reads_back_in_a_process_without_lightning(tmp_path: Path, kind: str) -> None:
    """Same embeddings, image and text, in a fresh interpreter that must not have loaded Lightning."""
    torch.manual_seed(0)
    if kind.startswith("tiny"):
        encoder = tiny_clip(["red", "pig"], image_size=32, alpha="alpha" in kind)
    else:
        encoder = open_clip_from_config(OPEN_CLIP, alpha="alpha" in kind)
    assert isinstance(encoder, ClipEncoder)
    if encoder.has_alpha:
        torch.nn.init.normal_(encoder.clip.visual.conv1.alpha.weight)
    encoder.eval()
    pixels, alpha = torch.randn(2, 3, 32, 32), torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        want = (encoder.encode_image(pixels, alpha), encoder.encode_text(encoder.tokenize(["a red pig"])))
    torch.save({"pixels": pixels, "alpha": alpha, "want": want}, tmp_path / "io.pt")
    bundle.save_encoder(encoder, tmp_path / "bundle", provenance={"run": kind})
    code = f"""
import sys, torch
from fovea.bundle import load_encoder
io = torch.load({str(tmp_path / "io.pt")!r}, weights_only=True)
e = load_encoder({str(tmp_path / "bundle")!r})
with torch.no_grad():
    got = (e.encode_image(io["pixels"], io["alpha"]), e.encode_text(e.tokenize(["a red pig"])))
assert all(torch.equal(a, b) for a, b in zip(got, io["want"])), "differs"
assert "lightning" not in sys.modules and "pytorch_lightning" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A small bundle."""
    return bundle.save_encoder(
        tiny_clip(["red"], image_size=32, widths=(8, 8), embed_dim=8, heads=2), tmp_path / "b"
    )


def test_damaged_weights_are_refused(written: Path) -> None:
    """A truncated file, and one flipped byte in a tensor: both refused, the file named."""
    weights = written / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        bundle.load_encoder(written)
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="not the file"):
        bundle.load_encoder(written)


def test_only_this_package_is_called(written: Path) -> None:
    """A config that names another factory is refused before anything is imported."""
    file = written / "config.json"
    config = json.loads(file.read_text())
    config["encoder"] = {"class_path": "os.system", "init_args": {"command": "true"}}
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"os\.system"):
        bundle.load_encoder(written)


def test_other_format_and_no_bundle(written: Path, tmp_path: Path) -> None:
    """A newer format and an empty place: the error says what to do."""
    file = written / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        bundle.load_encoder(written)
    with pytest.raises(FileNotFoundError, match=r"scripts/export\.py"):
        bundle.load_encoder(tmp_path / "nothing")


def test_does_not_replace_what_is_no_bundle(written: Path, tmp_path: Path) -> None:
    """Saving over a bundle replaces it; saving over any other directory is refused and leaves it alone."""
    encoder = bundle.load_encoder(written)
    bundle.save_encoder(encoder, written, provenance={"second": True})
    assert bundle.read_config(written)["provenance"] == {"second": True}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError):
        bundle.save_encoder(encoder, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_alpha_and_image_size_overrides(written: Path) -> None:
    """`alpha` adds the branch without moving an embedding; `image_size` changes the input side."""
    plain, alpha = bundle.load_encoder(written), bundle.load_encoder(written, alpha=True, image_size=64)
    pixels = torch.randn(1, 3, 64, 64)
    assert alpha.transform.size == 64
    with torch.no_grad():
        assert torch.equal(plain.encode_image(pixels), alpha.encode_image(pixels, torch.rand(1, 1, 64, 64)))


def test_fingerprint_sees_every_bit() -> None:
    """Another value, name, or type is another fingerprint; another object with the same weights is not."""
    state = {"a": torch.zeros(3), "b": torch.ones(2)}
    same = bundle.fingerprint({"b": torch.ones(2), "a": torch.zeros(3)})
    assert bundle.fingerprint(state) == same
    for other in ({**state, "a": torch.tensor([0, 0, 1e-30])}, {"c": state["a"], "b": state["b"]}):
        assert bundle.fingerprint(other) != same
    assert bundle.fingerprint({**state, "a": state["a"].double()}) != same


def test_opens_a_bundle_or_a_config(tmp_path: Path) -> None:
    encoder = tiny_clip(["red", "pig"], image_size=16, widths=(8, 8), embed_dim=8, heads=2, text_width=8)
    bundle.save_encoder(encoder, tmp_path / "bundle")
    assert bundle.fingerprint(bundle.open_encoder(tmp_path / "bundle")) == bundle.fingerprint(encoder)
    config = tmp_path / "encoder.yaml"
    config.write_text(
        "class_path: fovea.models.encoders.tiny_clip\ninit_args: {vocabulary: [red, pig], image_size: 32}\n"
    )
    opened = bundle.open_encoder(config)
    assert opened.transform.size == 32 and not opened.training


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "needs the keys class_path"),
        ("class_path: fovea.models.encoders.tiny_clip\nargs: {}", "no other"),
        ("class_path: fovea.models.encoders.nothing", "cannot be imported"),
        ("class_path: tiny_clip", "cannot be imported"),
        ("class_path: fovea.models.encoders.tiny_clip\ninit_args: {vocab: []}", "vocab"),
    ],
)
def test_a_wrong_encoder_config_names_the_fault(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        bundle.open_encoder(tmp_path / "e.yaml")
    with pytest.raises(FileNotFoundError, match="no encoder config"):
        bundle.open_encoder(tmp_path / "absent.yaml")
