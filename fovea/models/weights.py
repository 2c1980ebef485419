"""A directory or a hub name → files of a transformers model on this disk, and a fingerprint of them.

Two models whose files differ in one byte have different fingerprints: caches are keyed by them. Every byte is
read (about a second for 1 GB), because a sample could miss what a fine-tuning changed; nothing is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# What a transformers model reads besides its weights. Everything here may change its output.
_SETTINGS = (
    "config.json",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
)
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # the first kind that is there is what transformers loads
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def fingerprint(files: Iterable[Path]) -> str:
    """BLAKE2b over names and bytes of the files, in order of their names; 16 hexadecimal digits."""
    whole = hashlib.blake2b(digest_size=8)
    for path in sorted(files, key=lambda path: path.name):
        with open(path, "rb") as file:
            whole.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "blake2b").digest())
    return whole.hexdigest()


def model_files(directory: Path) -> list[Path]:
    """The files of a transformers model that decide its output: settings, tokenizer, weights."""
    weights = next((found for kind in _WEIGHTS if (found := sorted(directory.glob(kind)))), [])
    return [directory / name for name in _SETTINGS if (directory / name).is_file()] + weights


def model_directory(
    name: str | Path, model_types: Sequence[str], *, weights: bool = True
) -> tuple[Path, str]:
    """Find a transformers model: a directory, or a hub name that is in the hub's cache or can be fetched.

    A cached copy is used without asking the network.

    Args:
        name: the directory, or `owner/name`.
        model_types: values of `model_type` in its config.json that the caller can use.
        weights: False where config and tokenizer are all that is needed; weights are not fetched then.

    Returns:
        the directory and its model type.

    Raises:
        FileNotFoundError: there is no such directory, or it lacks config.json or the weights.
        ValueError: it is another kind of model.
    """
    directory = Path(name).expanduser()
    if not directory.is_dir():
        if not _HUB_NAME.fullmatch(str(name)) or directory.exists():
            raise FileNotFoundError(
                f"{name} is no directory; pass a directory that save_pretrained wrote (config.json and "
                f"*.safetensors of a model of type {' or '.join(model_types)}), or a hub name owner/name"
            )
        directory = _from_hub(str(name), weights)
    missing = [file for file in ("config.json",) if not (directory / file).is_file()]
    if weights and not any(sorted(directory.glob(kind)) for kind in _WEIGHTS):
        missing.append(" or ".join(_WEIGHTS))
    if missing:
        raise FileNotFoundError(
            f"{directory} has no {' and no '.join(missing)}; pass a directory that save_pretrained wrote"
        )
    model_type = _json(directory / "config.json").get("model_type")
    if model_type not in model_types:
        raise ValueError(
            f"{directory}: model_type {model_type!r} in config.json; needed: {' or '.join(model_types)}"
        )
    return directory, str(model_type)


def _from_hub(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        cached = Path(snapshot_download(name, local_files_only=True))
        if not weights and (cached / "config.json").is_file():
            return cached
        if any(sorted(cached.glob(kind)) for kind in _WEIGHTS):  # else an interrupted download
            return cached
    except OSError:  # not in the cache
        pass
    try:
        if not weights:
            return Path(snapshot_download(name, allow_patterns=list(_SETTINGS)))
        for kind in _WEIGHTS:  # many repositories hold both: the second only where the first is absent
            fetched = Path(snapshot_download(name, allow_patterns=[*_SETTINGS, kind]))
            if sorted(fetched.glob(kind)):
                break
        return fetched
    except (OSError, RuntimeError, ValueError) as error:  # offline, no such name, no permission
        raise FileNotFoundError(
            f"{name} is neither a directory nor in the hub's cache, and could not be fetched "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); fetch it where there is a network with "
            f"`hf download {name}`, or pass the directory of a local copy"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: an object is needed, got {type(content).__name__}")
    return content


def check_loaded(directory: Path, info: Any) -> None:
    """Refuse a model some of whose weights were not in the files: transformers would leave them random.

    Args:
        directory: for the message.
        info: what `from_pretrained(…, output_loading_info=True)` returns beside the model.
    """
    missing = sorted(map(str, info["missing_keys"]))
    mismatched = sorted(str(entry) for entry in info["mismatched_keys"])
    if missing or mismatched:
        raise ValueError(
            f"{directory}: the weights do not fit config.json; "
            f"{len(missing)} missing {missing[:8]}, {len(mismatched)} of another shape {mismatched[:8]}, "
            f"unexpected {sorted(map(str, info['unexpected_keys']))[:8]}"
        )
