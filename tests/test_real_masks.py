"""Every real photo at hand through detector and segmenter, killed twice: the store of a whole run."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fovea.mask_store import MaskStore

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared/data"
PHOTOS = DATA / "photos"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PHOTOS.is_dir(), reason="the real photos are not beside this checkout"),
]


def _captions() -> list[tuple[str, str]]:
    """(photo, caption) of every captioned photo, and one question for each of the others."""
    names: dict[str, str] = {}
    for path in sorted(PHOTOS.rglob("*")):
        if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"):
            names.setdefault(path.name, str(path.relative_to(PHOTOS)))
    rows = []
    for path in sorted(PHOTOS.rglob("*.json")):
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not content.get("annotations") or "images" not in content:
            continue
        file_of = {image["id"]: Path(image["file_name"]).name for image in content["images"]}
        rows += [
            (names[file_of[a["image_id"]]], a["caption"].strip())
            for a in content["annotations"]
            if "caption" in a and file_of[a["image_id"]] in names
        ]
    rows = sorted(set(rows))
    seen = {name for name, _ in rows}
    return rows + [(name, "what is in the picture ?") for name in names.values() if name not in seen]


def _content(store: MaskStore) -> dict[Any, Any]:
    return {
        entry: [(r.id, r.box.tolist(), r.mask, r.label, r.scores) for r in regions]
        for entry, regions in store.items()
    }


def test_every_photo_killed_twice(tmp_path: Path) -> None:
    """GroundingDINO and SAM, tiny and random, in the real file formats; captions are the questions. Killed
    with SIGKILL twice and finished, the store equals an uninterrupted one bit for bit, and `--verify` finds
    no fault.
    """
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import random_models

    asked = _captions()
    with open(tmp_path / "questions.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "question"])
        writer.writerows(asked)
    dino = random_models.grounding_dino(tmp_path / "dino", tiny=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)

    tables = tmp_path / "tables"
    made = run(
        ROOT / "scripts/prepare.py", "folder", "--images", PHOTOS, "--questions", tmp_path / "questions.csv",
        "--out", tables,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr

    def command(out: str) -> list[str]:
        fixed = [
            ROOT / "scripts/precompute_masks.py", "--tables", tables, "--out", tmp_path / out,
            "--detector", "fovea.models.grounding_dino.GroundingDino", "--set", f"path={dino}",
            "--set", "threshold=0.5", "--segmenter", DATA / "sam_tiny/sam_tiny.pth",
        ]  # fmt: skip
        return [str(part) for part in fixed]

    whole = run(*command("whole"))
    assert whole.returncode == 0, whole.stderr
    store = MaskStore.open(tmp_path / "whole")
    images = {store.image_id(entry) for entry in store.entries()}
    assert images == {name for name, _ in asked}

    counts = []
    killed = MaskStore(tmp_path / "killed", store.key)
    for share in (0.25, 0.6):
        process = subprocess.Popen(
            [sys.executable, *command("killed")],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 600
        while len(killed) < share * len(store) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
            killed.refresh()
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed.refresh()
        counts.append(len(killed))
    assert 0 < counts[0] < counts[1] < len(store), counts
    last = run(*command("killed"), "--preview", 12)
    assert last.returncode == 0, last.stderr
    assert _content(MaskStore.open(tmp_path / "killed")) == _content(store)
    verified = run(*command("killed"), "--verify")
    assert verified.returncode == 0 and " 0 faults" in verified.stdout, verified.stdout
    regions = sum(len(found) for found in _content(store).values())
    print(
        f"{len(images)} photos, {len(asked)} questions, {len(store)} results, {regions} regions; killed at "
        f"{counts}; {last.stdout}; preview: {tmp_path / 'killed/preview.html'}"
    )
