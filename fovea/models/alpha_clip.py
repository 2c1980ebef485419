"""CLIP → Alpha-CLIP: an alpha channel beside the RGB stem, so that a mask says where to look.

Source: HuLiRAG §"Alpha-CLIP" (zero-initialised alpha convolution in the ViT stem); file layout of the public
Alpha-CLIP release (state dict of the visual tower alone, without a `visual.` prefix).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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


def visual_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The public release's names for an image tower → open_clip's with our `AlphaConv`, in fp32."""
    renamed = {}
    for name, value in state.items():
        name = name.removeprefix("visual.").removeprefix("module.")
        name = name.replace(".attn.in_proj.weight", ".attn.in_proj_weight")
        name = name.replace(".attn.in_proj.bias", ".attn.in_proj_bias")
        name = {"conv1.weight": "conv1.rgb.weight", "conv1_alpha.weight": "conv1.alpha.weight"}.get(
            name, name
        )
        renamed[name] = value.float()
    return renamed


def _read_state(path: str | Path) -> dict[str, Tensor]:
    """A state dict from safetensors, a plain `torch.save`, or the TorchScript archive that OpenAI ships."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as not_plain:
        try:
            # An archive is a program, but torch.jit runs it in TorchScript's own sandbox: no Python is
            # unpickled.
            loaded = torch.jit.load(str(path), map_location="cpu").state_dict()  # type: ignore[no-untyped-call]
        except RuntimeError:
            raise ValueError(
                f"{path} is neither a state dict of tensors nor a TorchScript archive "
                f"({type(not_plain).__name__}); it may be cut short, or hold Python objects, which are not "
                "loaded"
            ) from not_plain
    state = loaded.get("state_dict", loaded)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


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


def load(base: str | Path, visual: str | Path | None = None) -> Any:
    """OpenAI-layout CLIP (+ an official Alpha-CLIP visual checkpoint) → an encoder with an alpha branch.

    Sizes are read off the checkpoint. Without `visual` the alpha branch is zero, which equals plain CLIP.

    Args:
        base: CLIP in OpenAI's layout (state dict, TorchScript archive or safetensors), fp16 or fp32.
        visual: state dict of the Alpha-CLIP image tower as released, or None.

    Returns:
        `fovea.models.encoders.ClipEncoder`: `encode_image(pixels [B, 3, S, S], alpha [B, 1, S, S])` with
            alpha in
        [0, 1], scaled inside, and `encode_text(tokens [B, L])`; neither is normalised.
    """
    from fovea.models.encoders import open_clip_from_config

    state = {k: v.float() for k, v in _read_state(base).items()}
    for name in ("input_resolution", "context_length", "vocab_size"):
        state.pop(name, None)
    needed = (
        "visual.conv1.weight",
        "visual.positional_embedding",
        "text_projection",
        "token_embedding.weight",
    )
    lacking = [name for name in needed if name not in state]
    if lacking:
        raise ValueError(f"{base} is not a ViT CLIP in OpenAI's layout: missing {', '.join(lacking)}")
    width, _, patch, _ = state["visual.conv1.weight"].shape
    text_width = state["ln_final.weight"].shape[0]
    grid = round((state["visual.positional_embedding"].shape[0] - 1) ** 0.5)
    layers = len({k.split(".")[3] for k in state if k.startswith("visual.transformer.resblocks.")})
    text_layers = len({k.split(".")[2] for k in state if k.startswith("transformer.resblocks.")})
    encoder = open_clip_from_config(
        {
            "embed_dim": state["text_projection"].shape[1],
            "quick_gelu": True,
            # Heads are width // 64 in every released CLIP ViT.
            "vision_cfg": {
                "image_size": grid * patch,
                "layers": layers,
                "width": width,
                "head_width": 64,
                "patch_size": patch,
            },
            "text_cfg": {
                "context_length": state["positional_embedding"].shape[0],
                "vocab_size": state["token_embedding.weight"].shape[0],
                "width": text_width,
                "heads": max(1, text_width // 64),
                "layers": text_layers,
            },
        }
    )
    load_strict(encoder.clip, state, base)
    encoder.enable_alpha()
    if visual is not None:
        load_strict(encoder.clip.visual, visual_state(_read_state(visual)), visual)
    return encoder.eval()
