"""Checkpoint → bundle: `python scripts/export.py --ckpt RUN_OR_FILE --out BUNDLE`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def find_checkpoint(path: Path) -> Path:
    """A checkpoint file, or the newest one below a run's directory (`last.ckpt` is one among them)."""
    if path.is_file():
        return path
    found = sorted(path.glob("**/*.ckpt"), key=lambda p: p.stat().st_mtime) if path.is_dir() else []
    if not found:
        raise FileNotFoundError(f"--ckpt: no checkpoint at {path}; train one with scripts/train.py fit")
    return found[-1]


def export(ckpt: Path, out: Path) -> Path:
    """Write the bundle, load it again, and compare every tensor before saying that it is there."""
    import torch

    from fovea import bundle

    ckpt = find_checkpoint(ckpt)
    try:
        checkpoint = torch.load(ckpt, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{ckpt} is no checkpoint that can be read safely ({error})") from error
    about = checkpoint.get("fovea")
    if about is None or about.get("kind") != "encoder":
        raise ValueError(f"{ckpt} is not a checkpoint of an encoder that scripts/train.py wrote")
    prefix = about["prefix"]
    weights = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}
    provenance = {
        "checkpoint": ckpt.name,
        "epoch": checkpoint["epoch"],
        "step": checkpoint["global_step"],
        "config": {k: v for k, v in checkpoint.get("hyper_parameters", {}).items() if k != "_instantiator"},
    }
    bundle.save_state(about["spec"], weights, out, provenance=provenance)
    again = bundle.load_encoder(out).state_dict()
    if bundle.fingerprint(again) != bundle.fingerprint(weights):
        raise RuntimeError(f"{out} does not read back as it was written")
    return ckpt


def main() -> None:
    """Parse, export, say what was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ckpt", type=Path, required=True, help="a checkpoint, or a run's directory (newest is taken)"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the bundle to write")
    args = parser.parse_args()
    try:
        source = export(args.ckpt, args.out)
    except (FileNotFoundError, FileExistsError, ValueError, TypeError) as error:
        parser.error(str(error))
    print(f"{source} → {args.out}")


if __name__ == "__main__":
    main()
