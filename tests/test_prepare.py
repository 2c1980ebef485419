"""scripts/prepare.py as a user runs it: light help, reports, exit codes, errors of one line or one list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datamodules.doctor import examine
from fovea.tables import Tables, TableWriter

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/prepare.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)


@pytest.mark.parametrize("script", ["prepare", "precompute_masks"])
def test_help_loads_nothing_heavy(script: str) -> None:
    """`--help` of the data scripts imports neither torch nor numpy nor Arrow."""
    code = (
        f"import runpy, sys; sys.argv = ['{script}', '--help']\n"
        f"try: runpy.run_path('{ROOT}/scripts/{script}.py', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'numpy', 'pyarrow', 'transformers', 'lightning'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout


def test_preparing_needs_no_torch() -> None:
    """Reading COCO, checking tables and storing masks import neither torch nor Lightning: workers start
    fast.
    """
    code = (
        "import sys, datamodules.readers.coco, datamodules.doctor, fovea.mask_store, fovea.models.detectors\n"
        "import datamodules.readers.mmqa, datamodules.readers.webqa, datamodules.readers.folder\n"
        "assert not {'torch', 'lightning', 'transformers'} & set(sys.modules), 'heavy'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def photos(tmp_path: Path) -> dict[str, Any]:
    """Ten small photos, one caption each, in COCO's layout."""
    folder = tmp_path / "photos"
    folder.mkdir()
    images, rows = [], []
    for number in range(10):
        pixels = np.random.default_rng(number).integers(0, 255, (6, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
        images.append({"id": number, "file_name": f"{number}.jpg", "height": 6, "width": 8})
        rows.append({"id": number, "image_id": number, "caption": f"picture {number}\n"})
    path = tmp_path / "captions.json"
    path.write_text(json.dumps({"images": images, "annotations": rows}))
    return {"folder": folder, "captions": path, "out": tmp_path / "tables"}


def test_coco_and_doctor(photos: dict[str, Any]) -> None:
    """`coco` prints the report; `doctor` agrees, and exits with 1 once an image is broken or gone."""
    arguments = [
        "coco",
        "--images",
        photos["folder"],
        "--captions",
        photos["captions"],
        "--out",
        photos["out"],
    ]
    made = _run(*arguments, "--splits", "train=.5,test=.5", "--workers", 1)
    assert made.returncode == 0, made.stderr
    assert "queries: caption" in made.stdout and made.stdout.splitlines()[-1].split() == [
        "total",
        "10",
        "0",
        "0",
        "10",
    ]
    checked = _run("doctor", photos["out"], "--workers", 1)
    assert checked.returncode == 0 and checked.stdout == made.stdout
    again = _run(*arguments)
    assert again.returncode == 2 and "--overwrite" in again.stderr
    (photos["folder"] / "3.jpg").write_text("oops")
    (photos["folder"] / "4.jpg").unlink()
    Image.new("RGB", (99, 99)).save(photos["folder"] / "5.jpg")
    broken = _run("doctor", photos["out"], "--workers", 1)
    assert broken.returncode == 1
    for part in (
        "unreadable: 3",
        "missing: 4",
        "no image in a known format",
        "no such file",
        "it was replaced",
    ):
        assert part in broken.stdout
    remade = _run(*arguments, "--overwrite", "--workers", 1)
    assert remade.returncode == 0 and "missing: 4" in remade.stdout
    assert (
        Tables(photos["out"]).table("images").num_rows == 8
    )  # 5.jpg is good: captions do not depend on its size


@pytest.mark.parametrize(
    "arguments,reason",
    [
        (["coco", "--images", "nowhere", "--out", "{tmp}/t"], "no such folder.*nothing to read"),
        (["coco", "--images", "{tmp}", "--out", "{tmp}/t", "--splits", "train"], "name=share"),
        (["doctor", "{tmp}"], "manifest.json is missing"),
        (
            ["mmqa", "--images", "nowhere", "--image-list", "none.gz", "--out", "{tmp}/t"],
            "nowhere: no such folder.*pass --dev, --test or --train",
        ),
        (
            ["webqa", "--tsv", "none.tsv", "--lineidx", "none", "--train-val", "x.json", "--out", "{tmp}/t"],
            "--tsv none.tsv: no such file.*--lineidx.*--train-val x.json",
        ),
        (["folder", "--images", "nowhere", "--out", "{tmp}/t"], "nowhere: no such folder"),
        (["world", "--out", "{tmp}/t", "--set", "num_nounz=3"], "num_nounz"),
        (["world", "--out", "{tmp}/t", "--set", "num_nouns=many"], "num_nouns"),
        (["world", "--out", "{tmp}/t", "--set", "num_nouns"], "NAME=VALUE"),
        (["world", "--out", "{tmp}/t", "--config", "{tmp}/none.yaml"], "none.yaml"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str], reason: str) -> None:
    """Each mistake ends with exit code 2 and a message that names it, without a traceback."""
    import re

    result = _run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert re.search(reason, result.stderr, re.DOTALL)


def test_world(tmp_path: Path) -> None:
    """Settings come from a YAML file and --set, the latter winning; the report covers every split and
    region.
    """
    sizes = {"num_singles": 6, "num_scenes": 6, "gallery_size": 12, "num_cal": 1, "num_test": 1}
    (tmp_path / "world.yaml").write_text(json.dumps(sizes))
    out = tmp_path / "tables"
    result = _run(
        "world", "--config", tmp_path / "world.yaml", "--set", "num_singles=4", "--out", out, "--workers", 1
    )
    assert result.returncode == 0, result.stderr
    assert Tables(out).manifest["config"]["num_singles"] == 4
    assert "regions: world" in result.stdout and "cal-0" in result.stdout
    # Images: 4 singles, 6 scenes, galleries val, cal-0 and test-0 of 12; a question for each gallery image.
    assert result.stdout.splitlines()[-1].split()[:4] == ["total", "46", "0", "0"]
    assert result.stdout.splitlines()[-1].split()[5] == "36"


def test_doctor_finds_contradictions(tmp_path: Path) -> None:
    """Ids twice, queries and regions of unknown images: named, and the tables are not ok."""
    Image.new("RGB", (4, 4)).save(tmp_path / "1.png")
    with TableWriter(tmp_path / "t") as writer:
        for _ in range(2):
            writer.add("images", id="1", path=str(tmp_path / "1.png"), width=4, height=4)
        for _ in range(2):
            writer.add("queries", id="q", text="?", gold_image_ids=["1", "77"])
        writer.add("regions", id="r", image_id="88", box=[0, 0, 1, 1], height=4, width=4)
        writer.finish({"reader": "test"})
    report = examine(tmp_path / "t")
    assert not report.ok and not report.bad
    text = report.text()
    for part in ("id '1' occurs twice", "1 ids occur twice: ['q']", "2 image ids are unknown", "['88']"):
        assert part in text
