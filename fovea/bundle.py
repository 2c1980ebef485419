"""Exported models: safetensors + JSON + version, enough for inference without Lightning.

A bundle is a directory: `config.json` (format version, kind, the factory call that rebuilds the architecture,
fingerprint, provenance) and `model.safetensors`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fovea import __version__
from fovea.models.alpha_clip import load_strict
from fovea.models.encoders import ClipEncoder, Encoder
from fovea.replace import replace_directory, restore_directory

FORMAT = 1


def fingerprint(state: nn.Module | Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) over names, types, shapes and bytes of all weights: what a cache was made with."""
    tensors = state.state_dict() if isinstance(state, nn.Module) else state
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
    return digest.hexdigest()


def build(spec: Mapping[str, Any]) -> Any:
    """Rebuild an architecture from `{"class_path", "init_args"}`; only this package's are called."""
    module, _, name = str(spec["class_path"]).rpartition(".")
    if not module.startswith("fovea."):
        raise ValueError(f"bundle: class_path {spec['class_path']} is not of this package; refused")
    return getattr(importlib.import_module(module), name)(**spec["init_args"])


def open_encoder(source: str | Path) -> Encoder:
    """Any encoder by what a config or a command line names, in evaluation mode.

    Args:
        source: directory of a bundle, or a YAML file `class_path: …, init_args: {…}` as training configs have
            it under `model.encoder` (`configs/hulirag/encoders/` has those of Table 1). A class of another
            package is allowed here: the file is the user's own, unlike a bundle, which may be downloaded.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: the file names no class, one that is not there, or arguments that it does not take.
        TypeError: what it names is no encoder.
    """
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        return load_encoder(path)
    import yaml

    if not path.is_file():
        raise FileNotFoundError(f"no encoder config at {path}")
    spec = yaml.safe_load(path.read_text())
    if not isinstance(spec, dict) or "class_path" not in spec or set(spec) - {"class_path", "init_args"}:
        raise ValueError(f"{path}: needs the keys class_path and init_args, and no other")
    module, _, name = str(spec["class_path"]).rpartition(".")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: class_path {spec['class_path']} cannot be imported ({error})") from error
    arguments = spec.get("init_args") or {}
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{path}: {spec['class_path']}: {error}") from error
    encoder = factory(**arguments)
    if not isinstance(encoder, Encoder):
        raise TypeError(f"{path}: {spec['class_path']} makes a {type(encoder).__name__}, not an Encoder")
    return encoder.eval()


def save_encoder(encoder: Encoder, path: str | Path, *, provenance: dict[str, Any] | None = None) -> Path:
    """Write an encoder bundle; an existing bundle at `path` is replaced in one step.

    Args:
        encoder: the model.
        path: directory to make.
        provenance: what it came from (checkpoint, config, metrics, licence of the base weights).
    """
    spec, state = encoder.spec(), encoder.state_dict()
    return save_state(spec, state, path, provenance=provenance)


def save_state(
    spec: Mapping[str, Any],
    state: Mapping[str, Tensor],
    path: str | Path,
    *,
    provenance: dict[str, Any] | None = None,
) -> Path:
    """`save_encoder` for a state dict that is not in a module (an exporter that has only a checkpoint)."""
    from safetensors.torch import save_file

    path = Path(path)
    restore_directory(path)
    if path.exists() and not _is_bundle(path):
        raise FileExistsError(
            f"{path} exists and is not a bundle, or holds other files as well; choose another --out"
        )
    writing = path.with_name(f".{path.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    save_file(tensors, writing / "model.safetensors")
    config = {
        "format": FORMAT,
        "fovea": __version__,
        "kind": "encoder",
        "encoder": dict(spec),
        "fingerprint": fingerprint(tensors),
        "provenance": provenance or {},
    }
    (writing / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    replace_directory(writing, path)
    return path


def _is_bundle(path: Path) -> bool:
    """Whether nothing but a bundle of ours would be lost with the directory (or an empty one)."""
    if path.is_symlink() or not path.is_dir():
        return False
    names = {item.name for item in path.iterdir()}
    if not names:
        return True
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
    ours = isinstance(config, dict) and "format" in config and config.get("kind") == "encoder"
    return ours and names <= {"config.json", "model.safetensors"}


def read_config(path: str | Path) -> dict[str, Any]:
    """The JSON of a bundle, checked for format and kind."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"no bundle at {path} (config.json is missing); make one with: "
            f"python scripts/export.py --ckpt CHECKPOINT --out {path}"
        )
    again = "export it again: python scripts/export.py --ckpt CHECKPOINT --out ANOTHER"
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); {again}") from error
    if not isinstance(config, dict) or "format" not in config:
        raise ValueError(f"{file} is not of a bundle (it has no `format`); {again}")
    if config["format"] != FORMAT:
        raise ValueError(f"{file}: format {config['format']}, this code reads {FORMAT}; {again}")
    encoder = config.get("encoder")
    lacking = [key for key in ("kind", "encoder", "fingerprint") if key not in config]
    if "encoder" in config:
        there = encoder if isinstance(encoder, dict) else {}
        lacking += [f"encoder.{key}" for key in ("class_path", "init_args") if key not in there]
    if lacking:
        raise ValueError(f"{file} is incomplete: it lacks {', '.join(lacking)}; {again}")
    return config


def load_encoder(path: str | Path, alpha: bool = False, image_size: int | None = None) -> Encoder:
    """Load an encoder bundle, in evaluation mode.

    Args:
        path: the bundle's directory.
        alpha: give it a zero-initialised alpha branch if it has none (the start of Alpha-CLIP training).
        image_size: another input side in pixels, for towers whose weights do not depend on it.

    Raises:
        FileNotFoundError: no bundle there.
        ValueError: wrong format, a tensor missing, unexpected or of another shape, or weights that do not
            hash to the recorded fingerprint.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_config(path)
    if image_size is not None:
        if "image_size" not in config["encoder"]["init_args"]:
            raise ValueError(
                f"image_size={image_size}: the encoder in {path} has position embeddings of a fixed size"
            )
        config["encoder"]["init_args"]["image_size"] = image_size
    encoder: Encoder = build(config["encoder"])
    weights = Path(path) / "model.safetensors"
    try:
        state = load_file(weights)
    except SafetensorError as error:
        raise ValueError(f"{weights} is damaged ({error}); export it again") from error
    load_strict(encoder, state, weights)
    if fingerprint(encoder) != config["fingerprint"]:
        raise ValueError(
            f"{weights} is not the file that {path}/config.json was written for; export it again"
        )
    if alpha:
        if not isinstance(encoder, ClipEncoder):
            raise TypeError(f"{path} holds a {type(encoder).__name__}, which takes no alpha branch")
        encoder.enable_alpha()
    return encoder.eval()
