"""Checkpoint → bundle: `python scripts/export.py --ckpt RUN_OR_FILE --out BUNDLE`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def find_checkpoint(path: Path) -> Path:
    """A checkpoint file, or that of a run's directory: the best one where the run monitors, else the newest.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the run was stopped before its end.
    """
    from lightning_modules import checkpoints
    from lightning_modules.checkpoints import RECOVERY

    if path.is_file():
        return path
    if (path / RECOVERY).is_file():
        raise ValueError(
            f"--ckpt: the run in {path} was stopped before its end; go on with it: "
            f"python scripts/train.py fit -c {path / 'config.yaml'} --ckpt_path {path / RECOVERY} "
            "(or name a file: it is exported as it is)"
        )
    found = sorted(path.glob("**/*.ckpt"), key=lambda p: p.stat().st_mtime) if path.is_dir() else []
    if not found:
        raise FileNotFoundError(f"--ckpt: no checkpoint at {path}; train one with scripts/train.py fit")
    newest = found[-1]
    for state in checkpoints.read(newest).get("callbacks", {}).values():
        if isinstance(state, dict) and state.get("monitor") and state.get("best_model_path"):
            best = newest.with_name(Path(state["best_model_path"]).name)  # a run's directory may have moved
            return best if best.is_file() else newest
    return newest


def export(ckpt: Path, out: Path) -> Path:
    """Write the bundle, load it again, and compare every tensor before saying that it is there."""
    from fovea import bundle
    from lightning_modules import checkpoints

    ckpt = find_checkpoint(ckpt)
    checkpoint = checkpoints.read(ckpt)
    about = checkpoint.get("fovea")
    if about is None or about.get("kind") != "encoder":
        raise ValueError(f"{ckpt} is not a checkpoint of an encoder that scripts/train.py wrote")
    prefix = about["prefix"]
    weights = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}
    if bad := checkpoints.non_finite(weights):
        raise ValueError(
            f"{ckpt}: {len(bad)} of {len(weights)} tensors hold NaN or infinite values, e.g. "
            f"{', '.join(bad[:5])}; the training diverged: export an older checkpoint"
        )
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
        "--ckpt",
        type=Path,
        required=True,
        help="a checkpoint, or a run's directory (the best one, or the newest)",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the bundle to write")
    args = parser.parse_args()
    try:
        source = export(args.ckpt, args.out)
    except (OSError, ValueError, TypeError) as error:
        parser.error(str(error))
    print(f"{source} → {args.out}")


if __name__ == "__main__":
    main()
