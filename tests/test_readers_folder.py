"""Any folder of images and any file of questions → canonical tables."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datamodules.readers import folder
from fovea.images import ImageReader
from fovea.tables import Tables

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {"a.png": (250, 0, 0), "B.JPG": (0, 250, 0), "sub/a.png": (0, 0, 250), "sub/noext": (250, 250, 0)}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Four pictures in odd places and names, one text file named .jpg, and files that are no images."""
    root = tmp_path / "my photos"
    (root / "sub").mkdir(parents=True)
    for name, colour in COLOURS.items():
        kind = {"a.png": "TIFF", "B.JPG": "JPEG"}.get(name, "PNG")
        Image.new("RGB", (9, 7), colour).save(root / name, kind)
    (root / "b text.jpg").write_text("this is no picture")
    (root / "notes.txt").write_text("hello")
    (root / ".DS_Store").write_bytes(b"\0")
    (root / ".thumbnails").mkdir()
    Image.new("RGB", (2, 2)).save(root / ".thumbnails" / "a.png")
    return root


def test_without_questions(images: Path, tmp_path: Path) -> None:
    """Ids are paths, sorted; each has its own pixels; the bad file is listed, other files are noted."""
    report = folder.read(images, tmp_path / "t")
    tables = Tables(tmp_path / "t")
    rows = list(tables.rows("images"))
    assert [row["id"] for row in rows] == ["B.JPG", "a.png", "sub/a.png", "sub/noext"]
    for row in rows:
        pixel = ImageReader(tables.root).read(row)[3, 4].astype(int)
        assert np.abs(pixel - COLOURS[row["id"]]).max() <= 4
        assert row["split"] == "test"
    bad = [json.loads(line) for line in (tmp_path / "t" / "bad_images.jsonl").read_text().splitlines()]
    assert [(row["id"], row["state"]) for row in bad] == [("b text.jpg", "unreadable")]
    assert "1 files of the folder are no images" in report.text()
    with pytest.raises(ValueError, match=r"--policy skip.*b text\.jpg.*no image in a known format"):
        folder.read(images, tmp_path / "u", policy="fail")


JSONL = """\
{"question": "what is  red ?", "image": "B.JPG", "answers": ["green", 3]}

{"id": 7, "text": "which one?", "image": ["sub/a.png", "noext"], "source": "me"}
{"question": "and now?"}
"""
CSV = """\
id,question,image,answers
q1,"what is
red ?",B.JPG,green|3
7,which one?,sub/a.png|noext,
q3,and now?,,
"""
TSV = "text\tid\timage\tanswers\nwhat is red ?\tq1\tB.JPG\tgreen|3\n"
TSV += "which one?\t7\t./sub/a.png|noext\t\nand now?\tq3\t\t\n"


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz", "q.csv", "q.CSV", "q.tsv", "q.tsv.gz"])
def test_questions_of_every_kind(images: Path, tmp_path: Path, name: str) -> None:
    """The same three questions as JSONL, CSV with a line break in a cell, and TSV, packed or with a mark."""
    text = next(t for kind, t in (("jsonl", JSONL), ("csv", CSV), ("tsv", TSV)) if kind in name.lower())
    data = b"\xef\xbb\xbf" + text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    report = folder.read(images, tmp_path / "t", questions=tmp_path / name, split="mine")
    first, second, third = Tables(tmp_path / "t").queries(split="mine")
    assert (first.id, first.text) == ("q1", "what is red ?") and first.answers == ("green", "3")
    assert first.gold_image_ids == ("B.JPG",)
    assert second.id == "7" and second.gold_image_ids == ("sub/a.png", "sub/noext") and not second.answers
    assert (third.id, third.text, third.gold_image_ids) == ("q3", "and now?", ())
    assert ("columns ['source']" in report.text()) == ("jsonl" in name)


def test_captions(images: Path, tmp_path: Path) -> None:
    """Captions reach their images; others have none."""
    (tmp_path / "c.csv").write_text('image,caption\nB.JPG,a  lawn\nnoext,"a, b"\n')
    folder.read(images, tmp_path / "t", captions=tmp_path / "c.csv")
    said = {row["id"]: row["caption"] for row in Tables(tmp_path / "t").rows("images")}
    assert said == {"B.JPG": "a lawn", "sub/noext": "a, b", "a.png": "", "sub/a.png": ""}


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("q.jsonl", '{"question": "a"}\n{"questoin": "b"}\n', ["line 2 has ['questoin']"]),
        ("q.jsonl", '{"question": "a", "text": "b"}\n', ["one text, under 'question' or 'text'"]),
        ("q.jsonl", '{"question": 3}\n[1]\n{', ["line 1 has", "line 2 is a list", "line 3:"]),
        ("q.jsonl", '{"text": "a", "id": 1}\n{"text": "b", "id": "1"}\n', ["id must be unique [1×, e.g. 1]"]),
        (
            "q.jsonl",
            '{"text": "a", "image": "z.png"}\n',
            ["key 'image'", "line 1: 'z.png' is not in the folder"],
        ),
        ("q.jsonl", '{"text": "a", "answers": {"x": 1}}\n', ["key 'answers'", "line 1: {'x': 1} is no text"]),
        ("q.csv", "question,image\na,deep.png\n", ["'deep.png' is the name of 2 images"]),
        ("q.csv", "question,question\na,b\n", ["each once"]),
        ("q.csv", "question,image\nwhat, then?,B.JPG\n", ["the 2 columns of line 1", "line 2 has 3"]),
        ("q.csv", "", ["must name the columns"]),
        ("q.csv", "question\n", ["there is no question in it"]),
        ("q.txt", "what?", [".jsonl, .csv or .tsv"]),
        ("q.tsv", b"question\n\xff\xfe", ["must be TSV in UTF-8"]),
    ],
)
def test_faults_name_file_line_and_key(
    images: Path, tmp_path: Path, name: str, text: str | bytes, parts: list[str]
) -> None:
    """Each fault of a question file is named with its file, its line and its key; nothing is written."""
    for sub in ("one", "two"):
        (images / sub).mkdir()
        Image.new("RGB", (2, 2)).save(images / sub / "deep.png")
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError) as caught:
        folder.read(images, tmp_path / "t", questions=tmp_path / name)
    for part in (name, *parts):
        assert part in str(caught.value)
    assert not (tmp_path / "t").exists()


def test_a_gold_image_that_is_unreadable_stays_gold(images: Path, tmp_path: Path) -> None:
    """The question keeps its gold image: a missing picture must not raise the recall."""
    (tmp_path / "q.csv").write_text("question,image\nwhat?,b text.jpg\n")
    report = folder.read(images, tmp_path / "t", questions=tmp_path / "q.csv")
    assert [query.gold_image_ids for query in Tables(tmp_path / "t").queries()] == [("b text.jpg",)]
    assert "1 of 1 queries lack a gold image" in report.text()


def _run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/prepare.py"), "folder", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_command_line(images: Path, tmp_path: Path) -> None:
    """The command prints the report; an empty or absent folder is an error of one line."""
    (tmp_path / "q.jsonl").write_text(JSONL)
    made = _run("--images", images, "--questions", tmp_path / "q.jsonl", "--out", tmp_path / "t")
    assert made.returncode == 0, made.stderr
    assert "unreadable: b text.jpg" in made.stdout and "queries: question" in made.stdout
    (tmp_path / "empty").mkdir()
    for wrong, reason in (("empty", "there is no image in it"), ("nowhere", "no such folder")):
        failed = _run("--images", tmp_path / wrong, "--out", tmp_path / "u")
        assert failed.returncode == 2 and reason in failed.stderr and "Traceback" not in failed.stderr
