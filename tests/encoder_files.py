"""Tiny random models in the released layouts of Table 1's encoders, and a YAML each that names them.

python tests/encoder_files.py DIR: what the row `encoders-smoke` of configs/expected.yaml loads.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_encoders as tiny  # noqa: E402
from tiny_internvl import make_internvl  # noqa: E402


def main(directory: Path) -> None:
    """Write every model and its config; names are those of configs/hulirag/encoders/."""
    archive = tiny.make_openai_clip(directory / "openai")
    visual = tiny.make_alpha_visual(archive.parent)
    base, base_text = tiny.make_visualized_bge(directory / "bge_base")
    m3, m3_text = tiny.make_visualized_bge(directory / "bge_m3", m3=True)
    intern = make_internvl(directory / "internvl")
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "clip": ("alpha_clip", {"base": archive}),
        "open_clip": ("alpha_clip", {"base": tiny.make_open_clip(directory / "open_clip")}),
        "alpha_clip_full_mask": ("alpha_clip", {"base": archive, "visual": visual}),
        "siglip": ("siglip", {"path": tiny.make_siglip(directory / "siglip")}),
        "siglip2": ("siglip", {"path": tiny.make_siglip(directory / "siglip2", second=True)}),
        "visualized_bge_base": ("visualized_bge", {"weights": base, "text_model": base_text}),
        "visualized_bge_m3": ("visualized_bge", {"weights": m3, "text_model": m3_text}),
        "internvl_c": ("internvl", {"path": intern, "mode": "c"}),
        "internvl_g": ("internvl", {"path": intern, "mode": "g"}),
    }
    for name, (factory, arguments) in calls.items():
        named = {key: str(v) if isinstance(v, Path) else v for key, v in arguments.items()}
        spec = {"class_path": f"fovea.models.encoders.{factory}", "init_args": named}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(spec))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
