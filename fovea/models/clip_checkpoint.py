"""A file of CLIP weights → its tensors, named as open_clip names them, and the architecture they are of.

OpenAI's archives, state dicts of either package, open_clip's hub files and its training checkpoints hold the
same tensors. What they do not hold (heads, QuickGELU or GELU, pixel statistics) comes from the
`open_clip_config.json` beside the file, or from the rules stated here.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CONFIG = "open_clip_config.json"
# What open_clip's hub repositories call their weights, in the order of its own preference.
_WEIGHTS = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
    "open_clip_pytorch_model.safetensors",
)
_WRAPPERS = ("state_dict", "model", "module")
# Only OpenAI's archives carry their sizes as tensors.
_OPENAI_SIZES = ("input_resolution", "context_length", "vocab_size")
# The tensors that tell the sizes of a ViT CLIP.
_TELLING = (
    "visual.conv1.weight",
    "visual.positional_embedding",
    "visual.transformer.resblocks.0.mlp.c_fc.weight",
    "transformer.resblocks.0.mlp.c_fc.weight",
    "ln_final.weight",
    "positional_embedding",
    "text_projection",
    "token_embedding.weight",
)
_SHOWN = 12  # names in an error


def read_state(path: str | Path) -> dict[str, Tensor]:
    """A state dict from safetensors, `torch.save`, or the TorchScript archive that OpenAI ships.

    A dict inside `state_dict`, `model` or `module` is taken out, `module.` of a parallel run is taken off,
    and half precision becomes float32.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is cut short, or is no set of tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    loaded = _unpacked(path)
    for key in _WRAPPERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{path} holds no state dict (names and tensors), but a {type(loaded).__name__}")
    state = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): value for name, value in state.items()}
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def _unpacked(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(
                f"{path} is no whole safetensors file ({error}); fetch or export it again"
            ) from error
    try:
        if _is_torchscript(path):
            # An archive is a program, but torch.jit runs it in TorchScript's own sandbox: no Python is
            # unpickled. That torch gives TorchScript up is nothing that the owner of the file could change.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                archive = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
            return archive.state_dict()
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} is neither a state dict of tensors nor a TorchScript archive ({type(error).__name__}); "
            "it may be cut short, or hold Python objects, which are not loaded"
        ) from error


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def find_file(base: str | Path) -> Path:
    """The weights that `base` names: the file itself, or those in a directory of open_clip's hub layout."""
    path = Path(base)
    if not path.is_dir():
        return path
    for name in _WEIGHTS:
        if (path / name).is_file():
            return path / name
    raise FileNotFoundError(
        f"{path} is neither a bundle (config.json of scripts/export.py) nor open_clip's hub layout "
        f"({CONFIG} and {' or '.join(_WEIGHTS)})"
    )


def clip_state(path: str | Path) -> tuple[dict[str, Tensor], bool]:
    """`read_state` under the names of open_clip's `CLIP`, and whether it is an archive of OpenAI's."""
    state = read_state(path)
    openai = all(name in state for name in _OPENAI_SIZES)
    for name in _OPENAI_SIZES:
        state.pop(name, None)
    if "text.token_embedding.weight" in state:  # open_clip's models with a separate text tower
        state = {name.removeprefix("text."): value for name, value in state.items()}
    for name in ("logit_scale", "logit_bias"):
        if name in state and state[name].ndim == 1:  # some open_clip runs store [1]
            state[name] = state[name].reshape(())
    return state, openai


def read_clip(path: Path, quick_gelu: bool | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a ViT CLIP and tell its architecture.

    Args:
        path: the file.
        quick_gelu: activation of its MLPs, for files that do not say. None: see `_activation`.

    Returns:
        the tensors under open_clip's names (those of an Alpha-CLIP tower keep the release's), and a
        `model_cfg` as open_clip writes it, with `mean` and `std` where the file's config has its own.

    Raises:
        ValueError: not a ViT CLIP (the names that are missing and unexpected), or a contradiction.
    """
    state, openai = clip_state(path)
    lacking = [name for name in _TELLING if name not in state]
    if lacking:
        known = (
            "visual.transformer.",
            "visual.ln_",
            "visual.class_",
            "visual.proj",
            "transformer.",
            "ln_final",
        )
        other = [n for n in state if n not in _TELLING and n != "logit_scale" and not n.startswith(known)]
        raise ValueError(
            f"{path} is not a ViT CLIP in OpenAI's or open_clip's layout: missing {_names(lacking)}"
            + (f"; unexpected {_names(other)}" if other else "")
            + ("; a ResNet has no patches to add alpha to" if "visual.layer1.0.conv1.weight" in state else "")
        )
    beside = path.parent / CONFIG
    if beside.is_file() and not openai:
        config = _config_of(beside)
        if quick_gelu is not None and quick_gelu != bool(config.get("quick_gelu", False)):
            raise ValueError(
                f"quick_gelu={quick_gelu}, but {beside} says {bool(config.get('quick_gelu', False))}; "
                "leave the argument out"
            )
    else:
        config = _sizes(state, path)
        config["quick_gelu"] = _activation(path, openai) if quick_gelu is None else quick_gelu
    if "logit_bias" in state:
        config["init_logit_bias"] = float(state["logit_bias"])
    return state, config


def _names(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _config_of(path: Path) -> dict[str, Any]:
    """`model_cfg` of open_clip's config, with its pixel statistics."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        config: dict[str, Any] = dict(content["model_cfg"])
        sides = config["vision_cfg"]["image_size"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: model_cfg.vision_cfg.image_size cannot be read ({error!r})") from error
    if isinstance(sides, list):
        if len(set(sides)) != 1:
            raise ValueError(f"{path}: image_size {sides}; only square images are supported")
        config["vision_cfg"] = {**config["vision_cfg"], "image_size": sides[0]}
    pixels = content.get("preprocess_cfg") or {}
    return config | {name: pixels[name] for name in ("mean", "std") if name in pixels}


def _sizes(state: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """The architecture as far as shapes tell it; heads by the rule of every released CLIP ViT."""
    width, _, patch, _ = state["visual.conv1.weight"].shape
    text_width = len(state["ln_final.weight"])
    for name, value in (("image", width), ("text", text_width)):
        if value % 64:
            raise ValueError(
                f"{path}: the {name} tower is {value} wide, no multiple of a head's 64 in released models; "
                f"say the heads in an {CONFIG} beside the file (model_cfg: embed_dim, vision_cfg, text_cfg)"
            )
    grid = round((len(state["visual.positional_embedding"]) - 1) ** 0.5)
    return {
        "embed_dim": state["text_projection"].shape[1],
        "vision_cfg": {
            "image_size": grid * patch,
            "layers": _depth(state, "visual.transformer."),
            "width": width,
            # Heads are 64 wide up to ViT-L; H, g and bigG have 16, as every ViT among open_clip's configs.
            "head_width": 64 if width <= 1024 else width // 16,
            "patch_size": patch,
            "mlp_ratio": _mlp_ratio(state, "visual.transformer."),
        },
        "text_cfg": {
            "context_length": len(state["positional_embedding"]),
            "vocab_size": len(state["token_embedding.weight"]),
            "width": text_width,
            "heads": text_width // 64,
            "layers": _depth(state, "transformer."),
            "mlp_ratio": _mlp_ratio(state, "transformer."),
        },
    }


def _depth(state: Mapping[str, Tensor], prefix: str) -> int:
    blocks = f"{prefix}resblocks."
    return len({name.removeprefix(blocks).split(".")[0] for name in state if name.startswith(blocks)})


def _mlp_ratio(state: Mapping[str, Tensor], prefix: str) -> float:
    hidden, width = state[f"{prefix}resblocks.0.mlp.c_fc.weight"].shape
    # open_clip truncates width × ratio: half a unit keeps 8192 / 1664 from becoming 8191.
    return hidden // width if hidden % width == 0 else (hidden + 0.5) / width


def _activation(path: Path, openai: bool) -> bool:
    """Whether the MLPs use QuickGELU where no config says it: tensors cannot tell, embeddings differ by 1 %.

    OpenAI's models do. A file under one of open_clip's names does not, as most of its models; every other
    file is taken for OpenAI's. Both guesses are said aloud.
    """
    guess = openai or not path.name.startswith("open_clip_")
    if not openai:
        warnings.warn(
            f"{path} does not say whether its MLPs use QuickGELU; taken: "
            f"{'QuickGELU, as in OpenAI models' if guess else 'GELU, the default of open_clip'}. "
            f"Pass quick_gelu, or put {CONFIG} beside it",
            stacklevel=2,
        )
    return guess


def resize_positions(positions: Tensor, grid: int) -> Tensor:
    """Position embeddings of a square grid for another one, as open_clip does it.

    Args:
        positions: float [1 + G², width], the class token first.
        grid: patches a side, g.

    Returns:
        float [1 + g², width]; the very same where G = g.
    """
    token, patches = positions[:1], positions[1:]
    side = round(len(patches) ** 0.5)
    if side == grid:
        return positions
    square = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    square = functional.interpolate(square, (grid, grid), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([token, square.permute(0, 2, 3, 1).reshape(grid * grid, -1)])
