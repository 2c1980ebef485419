"""CLIP and Alpha-CLIP on open_clip towers, and the CPU-sized CLIP of the embedded world."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from fovea.images import CLIP_MEAN, CLIP_STD, ImageTransform
from fovea.models.alpha_clip import add_alpha, load, load_resized, with_alpha
from fovea.models.clip_checkpoint import clip_state
from fovea.models.encoders.base import Encoder
from fovea.models.tiny import TinyClip, TinyText, TinyVisual, WordTokenizer

Resize = Literal["squash", "pad", "crop"]


class ClipEncoder(Encoder):
    """CLIP-like towers (open_clip's, or `TinyClip`), with or without an alpha branch."""

    def __init__(
        self,
        clip: Any,
        tokenizer: Callable[[Sequence[str]], Tensor],
        transform: ImageTransform,
        embed_dim: int,
        spec: dict[str, Any],
    ) -> None:
        """Use the factories below; `spec` is the factory call that rebuilds this architecture."""
        super().__init__()
        self.clip = clip
        self.tokenizer = tokenizer
        self.transform = transform
        self.embed_dim = embed_dim
        self._spec = spec

    @property
    def logit_scale(self) -> nn.Parameter:  # type: ignore[override]
        """Natural log of the inverse temperature."""
        scale: nn.Parameter = self.clip.logit_scale
        return scale

    @property
    def has_alpha(self) -> bool:
        """Whether a mask changes the embedding."""
        return bool(self._spec["init_args"].get("alpha"))

    def enable_alpha(self) -> ClipEncoder:
        """Add a zero-initialised alpha branch if there is none; embeddings do not change."""
        add_alpha(self.clip.visual)
        self._spec["init_args"]["alpha"] = True
        return self

    def encode_image(self, pixels: Tensor, alpha: Tensor | None = None) -> Tensor:  # noqa: D102
        embedded: Tensor = self.clip.encode_image(with_alpha(pixels, alpha) if self.has_alpha else pixels)
        return embedded

    def patch_tokens(self, pixels: Tensor, alpha: Tensor | None = None) -> Tensor:  # noqa: D102
        visual = self.clip.visual
        shown = with_alpha(pixels, alpha) if self.has_alpha else pixels
        if isinstance(visual, TinyVisual):
            return visual.tokens(shown)
        plain = getattr(visual, "attn_pool", visual) is None and hasattr(visual, "forward_intermediates")
        if not plain or not isinstance(getattr(visual, "proj", None), nn.Parameter):
            raise TypeError(
                f"encoder.model: a {type(visual).__name__} has no projected patch tokens; name a ViT of "
                "open_clip without attentional pooling"
            )
        # The last block's tokens through `ln_post`, then the projection that the class token goes through.
        last = visual.forward_intermediates(
            shown, indices=1, normalize_intermediates=True, intermediates_only=True, output_fmt="NLC"
        )
        tokens: Tensor = last["image_intermediates"][0] @ visual.proj
        return tokens

    def encode_text(self, tokens: Tensor) -> Tensor:  # noqa: D102
        embedded: Tensor = self.clip.encode_text(tokens)
        return embedded

    def depth_of(self, name: str) -> int | None:  # noqa: D102
        if "visual." not in name:
            return None
        found = re.search(r"(?:resblocks|blocks)\.(\d+)\.", name)
        if found:
            return int(found.group(1)) + 1
        after = re.search(r"visual\.(ln_post|proj|attn_pool)", name)
        return self._num_layers() + 1 if after else 0

    def _num_layers(self) -> int:
        numbers = [
            re.search(r"(?:resblocks|blocks)\.(\d+)\.", n) for n, _ in self.clip.visual.named_parameters()
        ]
        return max((int(m.group(1)) + 1 for m in numbers if m), default=0)

    def text_parameters(self) -> list[nn.Parameter]:  # noqa: D102
        shared = ("visual.", "logit_scale", "logit_bias")
        return [p for name, p in self.clip.named_parameters() if not name.startswith(shared)]

    def spec(self) -> dict[str, Any]:  # noqa: D102
        return self._spec


def _words_of(tables: Path) -> list[str]:
    from fovea.tables import Tables

    table = Tables(tables)
    texts = (
        table.table("queries").column("text").to_pylist()
        + table.table("regions").column("phrase").to_pylist()
    )
    return sorted({word for text in set(texts) for word in WordTokenizer.words(text)})


def tiny_clip(
    vocabulary: list[str] | str,
    image_size: int = 64,
    embed_dim: int = 128,
    widths: tuple[int, ...] = (24, 48, 96, 160),
    layers: int = 2,
    heads: int = 4,
    text_width: int = 128,
    text_layers: int = 2,
    context_length: int = 24,
    alpha: bool = False,
) -> Encoder:
    """The CPU-sized CLIP of the embedded world (random weights).

    Args:
        vocabulary: its words, or a directory of canonical tables: then all words of its queries and phrases.
        image_size: side S in pixels, a multiple of 2^len(widths).
        embed_dim: D.
        widths: channels of the stride-2 convolutions.
        layers: transformer blocks of the image tower.
        heads: attention heads, both towers.
        text_width: width of the text tower.
        text_layers: its blocks.
        context_length: words kept of a text.
        alpha: with a zero-initialised alpha branch.
    """
    if isinstance(vocabulary, str):
        vocabulary = _words_of(Path(vocabulary))
    stride = 2 ** len(widths)
    if image_size % stride:
        raise ValueError(
            f"encoder.image_size {image_size} is not a multiple of the stride {stride} of {widths}"
        )
    tokenizer = WordTokenizer(vocabulary, context_length)
    clip = TinyClip(
        TinyVisual(widths, layers, heads, embed_dim),
        TinyText(len(tokenizer), context_length, text_width, text_layers, heads, embed_dim),
    )
    args = {
        "vocabulary": list(vocabulary),
        "image_size": image_size,
        "embed_dim": embed_dim,
        "widths": list(widths),
        "layers": layers,
        "heads": heads,
        "text_width": text_width,
        "text_layers": text_layers,
        "context_length": context_length,
    }
    spec = {"class_path": "fovea.models.encoders.tiny_clip", "init_args": args}
    transform = ImageTransform(image_size, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    encoder = ClipEncoder(clip, tokenizer, transform, embed_dim, spec)
    return encoder.enable_alpha() if alpha else encoder


class _OpenClipTokenizer:
    """open_clip's bundled byte-pair tokenizer, built when first used (importing open_clip takes seconds)."""

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length
        self._tokenizer: Any = None

    def __call__(self, texts: Sequence[str]) -> Tensor:
        if self._tokenizer is None:
            from open_clip import SimpleTokenizer

            self._tokenizer = SimpleTokenizer(context_length=self.context_length)
        tokens: Tensor = self._tokenizer(list(texts))
        return tokens


def open_clip_from_config(
    model_cfg: dict[str, Any],
    resize: Resize = "squash",
    alpha: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> ClipEncoder:
    """An open_clip architecture from its own JSON config (random weights).

    Args:
        model_cfg: `embed_dim`, `vision_cfg`, `text_cfg` (and `quick_gelu`, `init_logit_bias`) as in
            open_clip's model_configs.
        resize: how images become square (see `ImageTransform`).
        alpha: with a zero-initialised alpha branch.
        mean: per-channel mean of [0, 1] pixels; None: CLIP's.
        std: per-channel standard deviation of [0, 1] pixels; None: CLIP's.

    Raises:
        ValueError: its texts are read by another tokenizer than CLIP's, or the sizes do not fit together.
    """
    import open_clip

    text, vision = model_cfg["text_cfg"], model_cfg["vision_cfg"]
    foreign = [key for key in ("hf_model_name", "hf_tokenizer_name", "tokenizer_kwargs") if key in text]
    if foreign:
        raise ValueError(
            f"encoder: text_cfg has {', '.join(foreign)}: its tokens are not those of CLIP's own tokenizer, "
            "which is used here; take another model of open_clip"
        )
    size = vision.get("image_size", 224)
    patch = vision.get("patch_size", 16) or 1  # a ResNet has none
    if not isinstance(size, int) or size % patch:
        raise ValueError(
            f"encoder.image_size {size} must be one number, a multiple of the patch size {patch}"
        )
    known = ("embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "init_logit_bias")
    clip = open_clip.CLIP(**{key: value for key, value in model_cfg.items() if key in known})
    if clip.logit_bias is not None:
        clip.logit_bias.requires_grad_(False)  # InfoNCE does not feel it: DDP would miss its gradient
    args: dict[str, Any] = {"model_cfg": model_cfg, "resize": resize}
    statistics = {"mean": CLIP_MEAN if mean is None else mean, "std": CLIP_STD if std is None else std}
    if (mean, std) != (None, None):
        args |= {name: list(values) for name, values in statistics.items()}
    encoder = ClipEncoder(
        clip,
        _OpenClipTokenizer(text.get("context_length", 77)),
        ImageTransform(size, resize, _three(statistics["mean"]), _three(statistics["std"])),
        int(model_cfg["embed_dim"]),
        {"class_path": "fovea.models.encoders.open_clip_from_config", "init_args": args},
    )
    return encoder.enable_alpha() if alpha else encoder


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = values
    return float(red), float(green), float(blue)


def open_clip(
    model: str,
    pretrained: str | None = None,
    resize: Resize = "squash",
    alpha: bool = False,
    image_size: int | None = None,
) -> Encoder:
    """An open_clip model by name, or from a JSON config file, with weights from a local file.

    Args:
        model: open_clip model name (`ViT-L-14-336-quickgelu`), or the path of a JSON config in open_clip's
            format.
        pretrained: path of a checkpoint, or one of open_clip's tags for this model; None leaves random
            weights.
        resize: how images become square (see `ImageTransform`).
        alpha: add a zero-initialised alpha branch.
        image_size: another input side in pixels for a checkpoint file, whose position embeddings are
            interpolated; None: the model's, and the file must fit it.
    """
    import json

    import open_clip as oc

    if model.endswith(".json"):
        if not Path(model).is_file():
            raise FileNotFoundError(f"encoder.model: no file {model}")
        config = json.loads(Path(model).read_text())
    else:
        config = oc.get_model_config(model)
        if config is None:
            raise ValueError(
                f"encoder.model: open_clip knows no {model!r}; it knows: {', '.join(oc.list_models())}"
            )
    tags = [] if model.endswith(".json") else oc.list_pretrained_tags_by_model(model)
    if pretrained is not None and pretrained not in tags and not Path(pretrained).is_file():
        raise FileNotFoundError(
            f"encoder.pretrained: {pretrained} is neither a file nor a tag of {model} "
            f"(its tags: {', '.join(tags) or 'none'})"
        )
    about = oc.get_pretrained_cfg(model, pretrained) if pretrained in tags else {}
    if about.get("quick_gelu") and not config.get("quick_gelu"):
        # Exact GELU under weights that were trained with QuickGELU is silently wrong by about 1 %.
        raise ValueError(f"{pretrained} weights need QuickGELU: use encoder.model {model}-quickgelu")
    if image_size is not None:
        config = {**config, "vision_cfg": {**config["vision_cfg"], "image_size": image_size}}
    encoder = open_clip_from_config(config, resize, mean=about.get("mean"), std=about.get("std"))
    if pretrained in tags:
        encoder.clip = oc.create_model(model, pretrained=pretrained, force_image_size=image_size)
    elif pretrained is not None:
        state, openai = clip_state(pretrained)
        if openai and not config.get("quick_gelu"):
            raise ValueError(f"{pretrained} is OpenAI's and needs QuickGELU: use a -quickgelu encoder.model")
        load_resized(encoder.clip, state, pretrained, "visual.positional_embedding", image_size)
    return encoder.enable_alpha() if alpha else encoder


def alpha_clip(
    base: str,
    visual: str | None = None,
    image_size: int | None = None,
    resize: Resize | None = None,
    quick_gelu: bool | None = None,
) -> Encoder:
    """CLIP with an alpha branch, by path; whole images go in under a full mask (alpha = 1 everywhere).

    Args:
        base: a CLIP of OpenAI or open_clip, or one of our bundles (see `fovea.models.alpha_clip.load`).
        visual: Alpha-CLIP image tower as released; None: the alpha weights of `base`, zero if it has none.
        image_size: another input side in pixels, position embeddings interpolated; None: the checkpoint's.
        resize: how images become square (see `ImageTransform`); None: as a bundle says, else `squash`.
        quick_gelu: activation of the MLPs, where the files do not say (see `load`).
    """
    return load(base, visual, image_size=image_size, resize=resize, quick_gelu=quick_gelu)
