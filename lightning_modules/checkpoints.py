"""Checkpoint file → what it says about itself, or why it cannot be gone on from. Imports no Lightning."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# What a fit keeps at the top of its directory while it runs (lightning_modules/recovery.py).
RECOVERY = "recovery.ckpt"
# Hyperparameters that may change when a fit is resumed: no weight depends on them. All others are part of the
# run; many (lr, weight_decay, betas) come back with the optimizer's state, whatever a flag says.
FREE = ("recall_at", "chunk_size")
_MOST = 5  # names that a message shows


def read(path: str | Path) -> dict[str, Any]:
    """A checkpoint that `scripts/train.py` wrote; its tensors stay on disk until they are used.

    Raises:
        ValueError: the file was cut short, cannot be read safely, or is no such checkpoint.
    """
    path = Path(path)
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} ({path.stat().st_size:,} bytes) is no checkpoint: it was cut short, or something else "
            "wrote it; take an older one of the run's checkpoints"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever unpickling meets; torch's advice to trust the file is not ours
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path} is no checkpoint that can be read safely ({first})") from error
    needed = {"state_dict", "pytorch-lightning_version"}
    if not isinstance(content, dict) or (lacking := needed - content.keys()):
        kind = type(content).__name__
        lacking = lacking if isinstance(content, dict) else needed
        raise ValueError(
            f"{path} is no checkpoint of scripts/train.py (a {kind} without {', '.join(sorted(lacking))}); "
            "weights from elsewhere are given to the encoder: see model.encoder in the config"
        )
    return content


def differences(checkpoint: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Hyperparameter → (asked for, in the checkpoint), where the two differ and the checkpoint has one."""
    stored = checkpoint.get("hyper_parameters", {})
    pairs = {key: (value, stored[key]) for key, value in asked.items() if key in stored}
    return {key: pair for key, pair in pairs.items() if _plain(pair[0]) != _plain(pair[1])}


def check_weights(
    checkpoint: Mapping[str, Any], module: nn.Module, path: str | Path, *, resizable: bool
) -> None:
    """Refuse a checkpoint whose weights are not those of `module`.

    Args:
        checkpoint: as `read` gives it.
        module: the LightningModule that the config builds.
        path: of the checkpoint, for the message.
        resizable: another `image_size` of the encoder is no fault (evaluation).

    Raises:
        ValueError: other tensors, shapes, or an encoder built otherwise.
    """
    stored: dict[str, Any] = checkpoint["state_dict"]
    own = module.state_dict()
    problems = []
    if lacking := [name for name in own if name not in stored]:
        problems.append(f"it lacks {_few(lacking)}")
    if foreign := [name for name in stored if name not in own]:
        problems.append(f"the config's module has no {_few(foreign)}")
    shapes = [
        f"{name} {list(stored[name].shape)} for {list(own[name].shape)}"
        for name in own
        if isinstance(stored.get(name), Tensor) and stored[name].shape != own[name].shape
    ]
    if shapes:
        problems.append(f"other shapes: {_few(shapes)}")
    spec, encoder = checkpoint.get("fovea", {}).get("spec"), getattr(module, "encoder", None)
    if spec is not None and encoder is not None and not problems:
        problems += _spec_differences(spec, encoder.spec(), resizable=resizable)
    if problems:
        raise ValueError(
            f"--ckpt_path {path} does not fit the model of this config: {'; '.join(problems)}. Give the "
            "config that it was trained with (config.yaml in its run's directory)"
        )


def _spec_differences(stored: Mapping[str, Any], own: Mapping[str, Any], *, resizable: bool) -> list[str]:
    if stored["class_path"] != own["class_path"]:
        return [f"its encoder is {stored['class_path']}, not {own['class_path']}"]
    one, other = stored["init_args"], own["init_args"]
    names = [key for key in {**one, **other} if _plain(one.get(key)) != _plain(other.get(key))]
    return [
        f"its encoder has {key}={_short(one.get(key))}, not {_short(other.get(key))}"
        for key in names
        if not (resizable and key == "image_size")
    ]


def non_finite(state: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that hold a NaN or an infinite value."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]


def _plain(value: Any) -> Any:
    """A tuple and a list are the same setting."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _MOST:,} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more
