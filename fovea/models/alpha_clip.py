"""CLIP → Alpha-CLIP: an alpha channel beside the RGB stem, so that a mask says where to look.

Source: HuLiRAG §"Alpha-CLIP" (zero-initialised alpha convolution in the ViT stem); file layout of the public
Alpha-CLIP release (state dict of the visual tower alone, without a `visual.` prefix).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fovea.models.clip_checkpoint import CONFIG, find_file, read_clip, read_state, resize_positions

if TYPE_CHECKING:  # encoders are made of this file
    from fovea.models.encoders import ClipEncoder

# Statistics that the public Alpha-CLIP release normalises alpha in [0, 1] with.
ALPHA_MEAN, ALPHA_STD = 0.5, 0.26


class AlphaConv(nn.Module):
    """A stem convolution with an alpha branch beside it; at step 0 it equals the RGB convolution exactly."""

    def __init__(self, rgb: nn.Conv2d) -> None:
        super().__init__()
        self.rgb = rgb
        self.alpha = nn.Conv2d(
            1,
            rgb.out_channels,
            rgb.kernel_size,  # type: ignore[arg-type]
            rgb.stride,  # type: ignore[arg-type]
            rgb.padding,  # type: ignore[arg-type]
            bias=False,
        ).to(rgb.weight)
        nn.init.zeros_(self.alpha.weight)

    @property
    def weight(self) -> Tensor:
        """The RGB weight, where upstream code looks for dtype and device."""
        return self.rgb.weight

    def forward(self, x: Tensor) -> Tensor:
        """[B, 4, S, S] (RGB, scaled alpha) → [B, width, S / stride, S / stride]."""
        out: Tensor = self.rgb(x[:, :3]) + self.alpha(x[:, 3:])
        return out


def add_alpha(visual: Any) -> None:
    """Give an image tower (anything with a `conv1`) a zero alpha branch, in place; once."""
    if not isinstance(visual.conv1, AlphaConv):
        visual.conv1 = AlphaConv(visual.conv1)


def with_alpha(pixels: Tensor, alpha: Tensor | None) -> Tensor:
    """RGB [B, 3, S, S], alpha [B, 1, S, S] in [0, 1] (None: all 1) → the tower's input [B, 4, S, S]."""
    if alpha is None:
        alpha = torch.ones_like(pixels[:, :1])
    if alpha.shape != (len(pixels), 1, *pixels.shape[2:]):
        raise ValueError(
            f"alpha of shape {tuple(alpha.shape)} for pixels of {tuple(pixels.shape)}: [B, 1, S, S] needed"
        )
    if not alpha.is_floating_point() and alpha.dtype != torch.bool:
        raise TypeError(
            f"alpha is {alpha.dtype}: bool or float in [0, 1] needed (uint8 0..255 would be scaled twice)"
        )
    return torch.cat([pixels, (alpha.to(pixels.dtype) - ALPHA_MEAN) / ALPHA_STD], 1)


def visual_state(state: Mapping[str, Tensor], source: str | Path = "visual") -> dict[str, Tensor]:
    """The public release's names for an image tower → open_clip's with our `AlphaConv`, in fp32.

    Args:
        state: tensors of the tower alone, each with or without `module.` and `visual.` before its name.
        source: for the message.

    Raises:
        ValueError: the file holds more than an image tower.
    """
    plain = [name.removeprefix("module.") for name in state]
    rest = [name for name in plain if not name.startswith("visual.")]
    if 0 < len(rest) < len(plain):
        raise ValueError(
            f"{source} is no image tower alone; unexpected {', '.join(sorted(rest)[:8])}. "
            "A whole Alpha-CLIP is loaded as base"
        )
    renamed = {}
    for name, value in zip(plain, state.values(), strict=True):
        name = name.removeprefix("visual.")
        name = name.replace(".attn.in_proj.weight", ".attn.in_proj_weight")
        name = name.replace(".attn.in_proj.bias", ".attn.in_proj_bias")
        name = {"conv1.weight": "conv1.rgb.weight", "conv1_alpha.weight": "conv1.alpha.weight"}.get(
            name, name
        )
        renamed[name] = value.float()
    return renamed


def load_strict(
    module: nn.Module, state: dict[str, Tensor], source: str | Path, *, assign: bool = False
) -> None:
    """Load every tensor or say all that does not fit: missing, unexpected, and wrong shapes, by name.

    With `assign` the tensors become the parameters (of a module on the meta device), instead of being copied.
    """
    have = module.state_dict()
    problems = [f"missing {name}" for name in have if name not in state]
    problems += [f"unexpected {name}" for name in state if name not in have]
    problems += [
        f"{name} is {tuple(state[name].shape)}, the model needs {tuple(have[name].shape)}"
        for name in have
        if name in state and state[name].shape != have[name].shape
    ]
    if problems:
        shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise ValueError(f"{source} does not fit this model: {shown}")
    module.load_state_dict(state, assign=assign)


def load(
    base: str | Path,
    visual: str | Path | None = None,
    *,
    image_size: int | None = None,
    resize: Literal["squash", "pad", "crop"] | None = None,
    quick_gelu: bool | None = None,
) -> ClipEncoder:
    """CLIP (+ an official Alpha-CLIP visual checkpoint) → an encoder with an alpha branch.

    Without trained alpha weights the branch is zero, which equals plain CLIP bit for bit.

    Args:
        base: a CLIP of OpenAI or open_clip with a ViT of any size (state dict, TorchScript archive,
            safetensors, training checkpoint; fp16 or fp32); a directory in open_clip's hub layout; or one of
            our bundles. Sizes are read off the tensors, or off the `open_clip_config.json` beside them.
        visual: state dict of the Alpha-CLIP image tower as released, or None.
        image_size: another input side in pixels: position embeddings are interpolated. None keeps the
            checkpoint's, exactly.
        resize: how images become square (see `ImageTransform`); None: as the bundle says, else `squash`.
        quick_gelu: activation of the MLPs, where `base` does not say. None: what the config beside it says;
            else GELU for files under open_clip's names and QuickGELU for all others, with a warning unless
            the archive or `visual` shows that the model is OpenAI's.

    Returns:
        the encoder, in evaluation mode: `encode_image(pixels [B, 3, S, S], alpha [B, 1, S, S])` with alpha in
            [0, 1], scaled inside, and `encode_text(tokens [B, L])`; neither is normalised.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file cut short, of another model or size (missing and unexpected tensors are named).
        TypeError: the bundle is of an encoder without a stem for alpha.
    """
    path = Path(base)
    if path.is_dir() and (path / "config.json").is_file() and not (path / CONFIG).is_file():
        encoder = _from_bundle(path, image_size, resize, quick_gelu)
    else:
        if visual is not None and quick_gelu is None and not _says(path):
            quick_gelu = True  # the release is of OpenAI's models alone
        encoder = _from_checkpoint(find_file(path), image_size, resize or "squash", quick_gelu)
    if visual is not None:
        tower = visual_state(read_state(visual), visual)
        load_resized(encoder.clip.visual, tower, visual, "positional_embedding", image_size)
    return encoder.eval()


def _says(path: Path) -> bool:
    """Whether a config beside the weights tells the activation."""
    return ((path if path.is_dir() else path.parent) / CONFIG).is_file()


def _from_checkpoint(
    path: Path, image_size: int | None, resize: Literal["squash", "pad", "crop"], quick_gelu: bool | None
) -> ClipEncoder:
    from fovea.models.encoders import open_clip_from_config

    state, config = read_clip(path, quick_gelu)
    mean, std = config.pop("mean", None), config.pop("std", None)
    if image_size is not None:
        config["vision_cfg"] = {**config["vision_cfg"], "image_size": image_size}
    encoder = open_clip_from_config(config, resize, mean=mean, std=std)
    if "visual.conv1_alpha.weight" in state:  # a whole Alpha-CLIP, as the release's own code saves it
        encoder.enable_alpha()
        tower = {name: state.pop(name) for name in list(state) if name.startswith("visual.")}
        state |= {f"visual.{name}": value for name, value in visual_state(tower, path).items()}
    load_resized(encoder.clip, state, path, "visual.positional_embedding", image_size)
    return encoder.enable_alpha()


def _from_bundle(
    path: Path,
    image_size: int | None,
    resize: Literal["squash", "pad", "crop"] | None,
    quick_gelu: bool | None,
) -> ClipEncoder:
    from fovea import bundle

    arguments = bundle.read_config(path)["encoder"]["init_args"]
    own_size = image_size if "image_size" in arguments else None  # `TinyClip` has no position embeddings
    encoder: Any = bundle.load_encoder(path, alpha=True, image_size=own_size)
    spec = copy.deepcopy(encoder.spec())
    config = spec["init_args"].get("model_cfg")
    says = bool((config or {}).get("quick_gelu", False))
    if quick_gelu is not None and quick_gelu != says:
        raise ValueError(
            f"quick_gelu={quick_gelu}, but the bundle {path} says {says}; leave the argument out"
        )
    if config is None and resize is not None:
        raise ValueError(f"resize={resize}: the encoder in {path} always squashes; leave the argument out")
    if config is None or (image_size is None and resize is None):
        return encoder  # type: ignore[no-any-return]
    if image_size is not None:
        config["vision_cfg"]["image_size"] = image_size
    if resize is not None:
        spec["init_args"]["resize"] = resize
    other: Any = bundle.build(spec)
    load_resized(other, encoder.state_dict(), path, "clip.visual.positional_embedding", image_size)
    return other  # type: ignore[no-any-return]


def load_resized(
    module: nn.Module, state: dict[str, Tensor], source: str | Path, name: str, image_size: int | None
) -> None:
    """`load_strict`, with position embeddings interpolated if a size was asked for."""
    have, given = module.state_dict().get(name), state.get(name)
    hint = ""
    if have is not None and given is not None and given.ndim == 2 and len(given) != len(have):
        if image_size is not None:
            state = {**state, name: resize_positions(given, round((len(have) - 1) ** 0.5))}
        else:
            hint = f"; to interpolate {name} to another resolution, pass image_size in pixels"
    try:
        load_strict(module, state, source)
    except ValueError as error:
        raise ValueError(f"{error}{hint}") from error
