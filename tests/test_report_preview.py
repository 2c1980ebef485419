"""The preview sheet and Figure 4's heat maps: what is drawn, what is said of nothing, what is escaped."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fovea import heatmap, masks
from fovea.images import ImageReader, ImageTransform
from fovea.models.encoders import ClipEncoder, Encoder, open_clip_from_config, tiny_clip
from fovea.region_bank import View
from fovea.report import preview
from fovea.tables import Tables, TableWriter
from fovea.types import BoolArray, FloatArray, Phrase, Region, UInt8Array

HEIGHT, WIDTH = 40, 60
TINY = {
    "widths": (8, 8, 16, 16),
    "layers": 1,
    "heads": 2,
    "embed_dim": 16,
    "text_width": 16,
    "text_layers": 1,
}
VIT = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def region(
    left: int, top: int, right: int, bottom: int, *, masked: bool = True, score: float = 0.5
) -> Region:
    """A rectangle of the 60×40 image."""
    box = np.array([left, top, right, bottom], np.float32)
    mask = masks.encode(masks.from_boxes(box[None], HEIGHT, WIDTH)[0]) if masked else None
    return Region("r0", box, mask, scores={"detector": score})


def photo(seed: int = 0) -> UInt8Array:
    """Noise of 60×40."""
    return np.random.default_rng(seed).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)


def asked(*texts: str) -> list[Phrase]:
    """Phrases of the question that is the texts joined by blanks."""
    out, at = [], 0
    for number, text in enumerate(texts):
        out.append(Phrase(f"p{number}", text, (at, at + len(text))))
        at += len(text) + 1
    return out


def page(tmp_path: Path, *samples: preview.Sample) -> str:
    """The sheet's text."""
    return preview.build(tmp_path / "a" / "sheet.html", samples, title="t <i>", made_by="key <k>").read_text()


def test_preview_shows_masks_boxes_weights_and_scores(tmp_path: Path) -> None:
    """Two phrases: 20×20 and two of 10×20 and 10×20 pixels, apart: weights 400/800 each, 800/2400 covered."""
    regions = [
        [region(0, 0, 20, 20, score=0.71)],
        [region(30, 0, 40, 20, score=0.42), region(50, 0, 60, 20, masked=False, score=0.33)],
    ]
    made = preview.sample({"id": "im-7"}, photo(), regions, question="pig drum", phrases=asked("pig", "drum"))
    assert made.weights == pytest.approx([0.5, 0.5]) and made.covered == pytest.approx(1 / 3)
    text = page(tmp_path, made)
    assert '<mark class="c0">pig</mark>' in text and '<mark class="c1">drum</mark>' in text
    assert text.count('<path class="halo"') == 2 and "weight 0.50" in text and "1 · 0.50" in text
    assert '<rect class="c0" x="0.0" y="0.0" width="20.0" height="20.0">' in text
    assert '<rect class="c1" x="50.0" y="0.0" width="10.0" height="20.0">' in text
    assert "2 regions · detector 0.42, 0.33" in text and "33 % of the pixels covered" in text
    assert "2 phrases, 0 of them without a region; 3 regions in all." in text


def test_preview_of_overlapping_masks_shares_the_pixels(tmp_path: Path) -> None:
    """20×20 and a 10×20 inside it: 200 + 200/2 pixels against 200/2: 0.75 and 0.25 (eq. 4)."""
    regions = [[region(0, 0, 20, 20)], [region(0, 0, 10, 20)]]
    made = preview.sample({"id": "a"}, photo(), regions, question="a b", phrases=asked("a", "b"))
    assert made.weights == pytest.approx([0.75, 0.25], abs=1e-5)


def test_preview_says_which_phrase_has_no_region(tmp_path: Path) -> None:
    """A phrase without a region, a question without any, an image without proposals: said, never a crash."""
    some = preview.sample(
        {"id": "a"}, photo(), [[region(0, 0, 9, 9)], []], question="pig drum", phrases=asked("pig", "drum")
    )
    nothing = preview.sample({"id": "b"}, photo(), [[]], question="pig", phrases=asked("pig"))
    empty = preview.sample({"id": "c"}, photo(), [[]])
    text = page(tmp_path, some, nothing, empty)
    assert text.count("no region: zero evidence") == 2
    assert "3 phrases, 2 of them without a region; 1 region in all." in text
    assert "Proposals, made without a question" in text and "<div>no region</div>" in text
    assert "nan" not in text.lower().replace("nano", "")


def test_preview_of_proposals_draws_all_and_lists_the_first(tmp_path: Path) -> None:
    """Thirty boxes at one place: all drawn and numbered, no number over another where they fit."""
    made = preview.sample({"id": "a", "caption": "a <b>"}, photo(), [[region(0, 0, 9, 9)] * 30])
    assert len(made.weights) == 30
    text = page(tmp_path, made)
    assert text.count('<path class="halo"') == 30 and "and 6 more, which are drawn but not listed" in text
    assert "9 × 9 at 0, 0" in text and "a &lt;b&gt;" in text
    found = preview._card(0, made).found
    high = preview.TAG_HEIGHT * WIDTH / 42
    tops = [line.tag_at[1] for line in found]
    assert tops[:3] == pytest.approx([0, high, 2 * high]) and max(tops) <= HEIGHT - high


def test_preview_escapes_everything(tmp_path: Path) -> None:
    """Ids, questions, phrases, labels, score names and keys come from strangers."""
    bad = "<script>alert(1)</script>\"'&"
    hostile = Region("r", np.array([0, 0, 5, 5], np.float32), None, label=bad, scores={bad: 0.5})
    samples = [
        preview.sample({"id": bad}, photo(), [[hostile]], question=bad, phrases=asked(bad)),
        preview.sample({"id": bad, "caption": bad}, photo(), [[hostile]]),
    ]
    path = preview.build(tmp_path / "x.html", samples, title=bad, made_by=bad)
    assert "<script>alert" not in path.read_text() and path.read_text().count("<script>") == 1


def test_preview_is_one_file_that_needs_no_network(tmp_path: Path) -> None:
    """Pictures are data: URIs of at most 640 pixels a side; nothing is loaded from elsewhere."""
    large = np.random.default_rng(0).integers(0, 255, (900, 1200, 3), np.uint8)
    text = page(tmp_path, preview.sample({"id": "a"}, large, [[]]))
    assert "default-src 'none'; img-src data:" in text and "http" not in text.replace("http-equiv", "")
    assert {link for link in re.findall(r'(?:href|src)="([^",]*)', text)} == {
        "data:image/jpeg;base64",
        "#im0",
    }
    assert 'viewBox="0 0 1200 900"' in text and len(text) < 400_000
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["sheet.html"]


@pytest.mark.parametrize("size", [(1, 1), (2, 3000), (3000, 2)])
def test_preview_of_odd_image_sizes(tmp_path: Path, size: tuple[int, int]) -> None:
    """1×1, 3000×2 and 2×3000 pixels, with a box over all of it and heat maps."""
    pixels = np.full((*size, 3), 99, np.uint8)
    full = Region("r", np.array([0, 0, size[1], size[0]], np.float32), masks.encode(np.ones(size, bool)))
    encoder = tiny_clip(["pig"], image_size=32, **TINY).eval()  # type: ignore[arg-type]
    made = preview.sample(
        {"id": "a"}, pixels, [[full]], question="pig", phrases=asked("pig"), encoder=encoder
    )
    assert "weight 1.00" in page(tmp_path, made)


def test_preview_refuses_lists_that_do_not_fit() -> None:
    """The image, both numbers and the rule."""
    with pytest.raises(ValueError, match="image a: 1 lists of regions for 2 phrases"):
        preview.sample({"id": "a"}, photo(), [[]], question="a b", phrases=asked("a", "b"))
    with pytest.raises(ValueError, match=r"masks of size .* for an upright image of \(20, 60\)"):
        preview.sample({"id": "a"}, photo()[:20], [[region(0, 0, 5, 5)]])


def test_preview_of_stored_regions_leaves_unreadable_images_out(tmp_path: Path) -> None:
    """Three images, one of zero bytes: two samples, the bad one in the reader's list; zero regions kept."""
    with TableWriter(tmp_path / "tables") as writer:
        for name in ("a", "bad", "b"):
            path = tmp_path / f"{name}.png"
            Image.fromarray(photo()).save(path)
            if name == "bad":
                path.write_bytes(b"")
            writer.add("images", id=name, path=str(path), width=WIDTH, height=HEIGHT)
        writer.finish({"reader": "test"})
    reader = ImageReader(tmp_path / "tables", policy="skip")
    stored = {"a": [[region(0, 0, 5, 5)]], "b": [[]]}
    samples = list(
        preview.collect(
            Tables(tmp_path / "tables").rows("images"),
            reader,
            lambda row, texts: stored[row["id"]],
            lambda row: ("pig", asked("pig")) if row["id"] == "a" else None,
        )
    )
    assert [(s.row["id"], s.question, len(s.regions[0])) for s in samples] == [
        ("a", "pig", 1),
        ("b", None, 0),
    ]
    assert [name for name, _ in reader.bad] == ["bad"]
    assert (
        "1 image could not be read and is left out"
        in preview.build(tmp_path / "x.html", samples, left_out=len(reader.bad)).read_text()
    )


# Patch tokens and heat maps.


@pytest.mark.parametrize("alpha", [False, True])
def test_patch_tokens_of_open_clip_equal_a_direct_computation(alpha: bool) -> None:
    """Stem, class token, positions, blocks, ln_post, projection by hand: equal to 1e-6.

    The class token of the same computation is what `encode_image` gives. A trained alpha branch counts.
    """
    torch.manual_seed(0)
    encoder = open_clip_from_config(VIT, alpha=alpha).eval()
    visual = encoder.clip.visual
    pixels, mask = torch.randn(2, 3, 32, 32), torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        if alpha:
            visual.conv1.alpha.weight.normal_(std=0.1)
            shown = visual.conv1.rgb(pixels) + visual.conv1.alpha((mask - 0.5) / 0.26)
        else:
            shown = visual.conv1(pixels)
        x = shown.flatten(2).transpose(1, 2)
        x = torch.cat([visual.class_embedding.expand(2, 1, -1), x], 1) + visual.positional_embedding
        x = visual.ln_pre(x)
        for block in visual.transformer.resblocks:
            x = block(x)
        direct = visual.ln_post(x) @ visual.proj
        tokens = encoder.patch_tokens(pixels, mask)
        assert tokens.shape == (2, 16, 24)
        torch.testing.assert_close(tokens, direct[:, 1:], atol=1e-6, rtol=0)
        torch.testing.assert_close(encoder.encode_image(pixels, mask), direct[:, 0], atol=1e-6, rtol=0)


def test_patch_tokens_of_the_tiny_clip() -> None:
    """Their maximum is the embedding, which is how its tower pools."""
    encoder = tiny_clip(["pig"], image_size=32, alpha=True, **TINY).eval()  # type: ignore[arg-type]
    pixels, mask = torch.randn(3, 3, 32, 32), torch.rand(3, 1, 32, 32)
    with torch.no_grad():
        tokens = encoder.patch_tokens(pixels, mask)
        assert tokens.shape == (3, 4, 16)
        torch.testing.assert_close(tokens.amax(1), encoder.encode_image(pixels, mask))


def test_patch_tokens_that_a_tower_does_not_have() -> None:
    """A ResNet and a tower with attentional pooling are refused by name."""
    resnet = VIT | {"vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}}
    pooled = VIT | {"vision_cfg": dict(VIT["vision_cfg"], attentional_pool=True)}  # type: ignore[call-overload]
    for config, name in ((resnet, "ModifiedResNet"), (pooled, "VisionTransformer")):
        encoder: ClipEncoder = open_clip_from_config(config)
        with pytest.raises(TypeError, match=f"a {name} has no projected patch tokens"):
            encoder.patch_tokens(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize(("mode", "cut"), [("squash", 0), ("pad", 0), ("crop", 40)])
def test_an_image_transform_goes_back(mode: str, cut: int) -> None:
    """A ramp from left to right over a 40×120 image, through the transform and back: the ramp again.

    `crop` keeps the 40 columns in the middle: 40 on each side have no value.
    """
    ramp = np.broadcast_to(np.arange(120), (40, 120))
    image = np.repeat(ramp[..., None], 3, axis=2).astype(np.uint8)
    transform = ImageTransform(60, mode=mode)  # type: ignore[arg-type]
    grid = transform(image)[0][..., 0].astype(np.float32)
    back = transform.back(grid, 40, 120)
    assert back.shape == (40, 120) and back.dtype == np.float32
    known = np.isfinite(back)
    assert (known == ((np.arange(120) >= cut) & (np.arange(120) < 120 - cut))[None]).all()
    assert np.abs(back - ramp)[known].max() < 3


class Marked(Encoder):
    """Cosine 1 with every text in the lower right patch of 2×2, 0 elsewhere; an image's first pixel is it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_dim = 2
        self.transform = ImageTransform(8, mean=(0, 0, 0), std=(1, 1, 1))
        self.tokenizer = lambda texts: torch.tensor([[len(text)] for text in texts])
        self.logit_scale = torch.nn.Parameter(torch.zeros(()))

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        """Along the first axis, whatever the text."""
        return torch.tensor([[2.0, 0.0]]).expand(len(tokens), 2)

    def encode_image(self, pixels: torch.Tensor, alpha: torch.Tensor | None = None) -> torch.Tensor:
        """The share of the view that the mask covers, as a cosine with every text."""
        assert alpha is not None
        share = alpha.mean((1, 2, 3))
        return torch.stack([share, (1 - share**2).clamp_min(0).sqrt()], 1)

    def patch_tokens(self, pixels: torch.Tensor, alpha: torch.Tensor | None = None) -> torch.Tensor:
        """Only the last patch points along the first axis."""
        return torch.tensor([[0.0, 1], [0, 1], [0, 1], [3, 0]]).expand(len(pixels), 4, 2)

    def depth_of(self, name: str) -> int | None:
        """Unused."""
        return None

    def text_parameters(self) -> list[torch.nn.Parameter]:
        """Unused."""
        return []

    def spec(self) -> dict[str, object]:
        """Unused."""
        return {}


def test_heat_of_an_image_by_hand() -> None:
    """Activation: 1 in the lower right corner, 0 in the others. Relevance: weight × cosine in each mask.

    Masks: the left half and the lower half of an 8×8 image; 16 pixels are in both, 16 in each alone, so
    the weights are (16 + 8) / 48 = 0.5 each, and the cosines 0.5 (share of the view). In the overlap 0.5.
    """
    image = np.full((8, 8, 3), 100, np.uint8)
    left, lower = np.zeros((2, 8, 8), bool)
    left[:, :4], lower[4:] = True, True
    both: BoolArray = np.stack([left, lower])
    weights = masks.region_weights(both)
    encoder = Marked().eval()
    text = encoder.encode_text(torch.zeros(1, 1))[0]
    field = heatmap.activation(encoder, image, text)
    assert field[7, 7] == pytest.approx(1) and field[0, 0] == field[0, 7] == field[7, 0] == pytest.approx(0)
    cosines = heatmap.region_cosines(encoder, image, text.expand(2, 2), both, View(background="keep"))
    assert cosines == pytest.approx([0.5, 0.5])
    relevant = heatmap.relevance(both, weights, cosines)
    expected: FloatArray = (0.25 * (left.astype(np.float32) + lower)).astype(np.float32)
    np.testing.assert_allclose(relevant, expected, atol=1e-5)

    maps = heatmap.look(
        encoder, image, "q", ["a", "b"], both, weights_T=weights, view=View(background="keep")
    )
    assert (maps.activation.low, maps.activation.high) == pytest.approx((0, 1))
    assert (maps.relevance.low, maps.relevance.high) == pytest.approx((0, 0.5), abs=1e-5)
    shown = maps.relevance.picture.astype(int)
    assert shown.shape == (8, 8, 3)
    # brightest where both masks are; outside them the pale activation, the same in mirrored places
    assert shown[6, 1].sum() > shown[1, 1].sum() and (shown[1, 1] == shown[6, 6]).all()
    yellow = maps.activation.picture[7, 7].astype(int)
    assert yellow[0] > yellow[2] + 40  # the light end of the scale is yellow


def test_heat_without_a_region_of_an_image() -> None:
    """Empty masks and no phrase at all: relevance 0 everywhere, no NaN, the range says so."""
    image, none = photo(), np.zeros((2, HEIGHT, WIDTH), bool)
    for mask in (none, none[:0]):
        maps = heatmap.look(
            Marked().eval(), image, "q", ["a", "b"][: len(mask)], mask,
            weights_T=masks.region_weights(mask), view=View(),
        )  # fmt: skip
        assert (maps.relevance.low, maps.relevance.high) == (0, 0)


def test_heat_refuses_an_encoder_in_training() -> None:
    """Batch norm and dropout would change with the image beside it."""
    with pytest.raises(ValueError, match="training mode"):
        heatmap.look(Marked().train(), photo(), "q", [], np.zeros((0, 1, 1), bool),
                     weights_T=np.zeros(0, np.float32), view=View())  # fmt: skip


def test_tinted_image_of_masks() -> None:
    """The first mask is reddish inside and pure on its edge; the list below adds a line a phrase."""
    image = np.full((HEIGHT, WIDTH, 3), 100, np.uint8)
    mask = masks.from_boxes(np.array([[10, 10, 30, 30]], np.float32), HEIGHT, WIDTH)
    shown = heatmap.tint(image, mask, ["pig"]).astype(int)
    assert shown.shape[0] > HEIGHT and shown.shape[1] == WIDTH
    assert tuple(shown[10, 20]) == (0xE4, 0x50, 0x2A) and (shown[5, 5] == 100).all()
    assert shown[20, 20, 0] > 130 > shown[20, 20, 2]
    assert heatmap.tint(image, mask[:0], []).shape == image.shape


def test_preview_with_heat_maps_of_the_image(tmp_path: Path) -> None:
    """Both pictures stand in the sheet with their ranges; without a region there is nothing to paint."""
    encoder = tiny_clip(["pig", "drum"], image_size=32, **TINY).eval()  # type: ignore[arg-type]
    found = preview.sample(
        {"id": "a"}, photo(), [[region(0, 0, 20, 20)]], question="pig", phrases=asked("pig"), encoder=encoder
    )
    nothing = preview.sample(
        {"id": "b"}, photo(), [[]], question="pig", phrases=asked("pig"), encoder=encoder
    )
    text = page(tmp_path, found, nothing)
    assert text.count('<symbol id="activation') == text.count('<symbol id="relevance') == 2
    assert text.count('class="scale relevance"') == 1 and "no region to paint" in text
