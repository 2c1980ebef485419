"""MultimodalQA's layout → canonical tables: real questions, small pictures, and faults of files."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datamodules.doctor import examine
from datamodules.readers import mmqa
from fovea.images import ImageReader
from fovea.retrieve import corpus
from fovea.tables import Tables

NOWHERE = "e51e7755477179a20eab8310a1c25559"  # a real supporting image that the real image list lacks
ROOT = Path(__file__).resolve().parents[1]
FORMATS = ["JPEG", "PNG", "GIF", "TIFF", "WEBP"]


def _picture(number: int) -> bytes:
    """A picture whose colour tells its number, in a format that changes with it, whatever its name."""
    out = io.BytesIO()
    Image.new("RGB", (9, 7), (number % 256, number // 256, 99)).save(out, FORMATS[number % len(FORMATS)])
    return out.getvalue()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _named(questions: list[dict[str, Any]]) -> set[str]:
    """Every image that a question names, as a candidate or as support."""
    parts = [part for q in questions for part in q["supporting_context"] if part["doc_part"] == "image"]
    return {id_ for q in questions for id_ in q["metadata"]["image_doc_ids"]} | {p["doc_id"] for p in parts}


@pytest.fixture(scope="module")
def real(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """186 real questions and their image list; pictures of ours, a few of them missing or broken."""
    source = shared_data / "mmqa"
    folder = tmp_path_factory.mktemp("mmqa") / "final_dataset_images"
    folder.mkdir()
    questions = _lines(source / "MMQA_dev_image.jsonl")
    images = _lines(source / "MMQA_images.jsonl")
    gold = [q["supporting_context"][0]["doc_id"] for q in questions if q["metadata"]["type"] == "ImageQ"]
    path_of = {image["id"]: image["path"] for image in images}
    upper = next(name for id_, name in path_of.items() if name.endswith(".JPG") and id_ not in gold)
    for number, image in enumerate(images):
        (folder / image["path"]).write_bytes(_picture(number))
    (folder / path_of[gold[0]]).unlink()
    (folder / path_of[gold[1]]).write_bytes(b"")
    (folder / path_of[gold[2]]).write_text("<html>404</html>")
    (folder / upper).rename(folder / upper.replace(".JPG", ".jpg"))
    return {
        "dev": source / "MMQA_dev_image.jsonl.gz",
        "list": source / "MMQA_images.jsonl.gz",
        "folder": folder,
        "questions": questions,
        "images": images,
        "lost": gold[:3],
        "out": folder.parent / "tables",
    }


@pytest.fixture(scope="module")
def report(real: dict[str, Any]) -> Any:
    return mmqa.read(real["folder"], real["list"], {"dev": real["dev"]}, real["out"])


def test_queries_are_the_image_questions(real: dict[str, Any], report: Any) -> None:
    """All 115 ImageQ, none of the other types: text, answers, every gold image, every candidate, in order."""
    rows = {row["id"]: row for row in Tables(real["out"]).rows("queries")}
    wanted = {q["qid"]: q for q in real["questions"] if q["metadata"]["type"] == "ImageQ"}
    assert rows.keys() == wanted.keys() and len(rows) == 115
    for qid, question in wanted.items():
        row = rows[qid]
        assert row["text"] == " ".join(question["question"].split())
        assert row["answers"] == [answer["answer"] for answer in question["answers"]]
        assert row["candidate_image_ids"] == question["metadata"]["image_doc_ids"]
        assert row["gold_image_ids"] == [part["doc_id"] for part in question["supporting_context"]]
        assert (row["split"], row["kind"]) == ("dev", "ImageQ")
    assert "71 ImageListQ" in report.text()


def test_images_keep_their_pixels_and_titles(real: dict[str, Any], report: Any) -> None:
    """Every row's pixels are those of its own file; missing and unreadable ones are counted and named."""
    tables = Tables(real["out"])
    number_of = {image["id"]: number for number, image in enumerate(real["images"])}
    rows = list(tables.rows("images"))
    assert len(rows) == len({row["id"] for row in rows}) == 1288  # the 1,292 that these questions name
    reader = ImageReader(tables.root)
    for row in rows[::7]:
        number = number_of[row["id"]]
        red, green, blue = reader.read(row)[3, 4].astype(int)
        assert abs(red - number % 256) <= 3 and abs(green - number // 256) <= 3, row["path"]
        assert row["caption"] == row["entity"] == real["images"][number]["title"]
        assert (row["width"], row["height"], row["encoding"]) == (9, 7, "")
    assert report.images == {"dev": Counter(present=1288, missing=2, unreadable=2)}
    listed = _lines(real["out"] / "bad_images.jsonl")
    assert {row["id"]: row["state"] for row in listed} == dict(
        zip([*real["lost"], NOWHERE], ["missing", "unreadable", "unreadable", "missing"], strict=True)
    )
    assert next(row for row in listed if row["id"] == NOWHERE)["reason"].startswith("no line in MMQA_images")
    assert "199 images that no question of these files names" in report.text()
    assert "1 files were found under another case" in report.text()
    assert "dev: 3 of 115 queries lack a gold image" in report.text()


def test_the_three_corpora(real: dict[str, Any], report: Any) -> None:
    """gold: images that answer; candidates: the union of the lists; full: all that any dev question names."""
    tables = Tables(real["out"])
    queries = tables.queries()
    gold = {id_ for query in queries for id_ in query.gold_image_ids}
    lists = {id_ for query in queries for id_ in query.candidate_image_ids}
    expected = {"gold": gold, "candidates": lists, "full": _named(real["questions"])}
    sizes = []
    for name, ids in expected.items():
        found = corpus(tables, name, splits=["dev"])  # type: ignore[arg-type]
        assert {row["id"] for row in found.rows} == ids - {*real["lost"], NOWHERE}
        assert found.absent == sorted(real["lost"])
        sizes.append(len(found.rows))
    assert sizes == [114 - 3, 669 - 3, 1292 - 4]


def test_the_doctor_knows_what_was_left_out(real: dict[str, Any], report: Any) -> None:
    """Gold images that were never downloaded are a note, not a contradiction of the tables."""
    checked = examine(real["out"])
    assert checked.ok and checked.images["dev"]["present"] == 1288
    assert "3 queries name an image that was left out" in checked.text()


def test_multi_hop_types_and_all_gold_images(shared_data: Path, real: dict[str, Any], tmp_path: Path) -> None:
    """`--types all` takes list and multi-hop questions too, each with all its supporting images."""
    multihop = shared_data / "mmqa" / "MMQA_dev_image_multihop.jsonl"
    files = {"dev": real["dev"], "train": multihop}
    report = mmqa.read(real["folder"], real["list"], files, tmp_path / "t", types=["all"])
    tables = Tables(tmp_path / "t")
    questions = {q["qid"]: q for q in [*real["questions"], *_lines(multihop)]}
    rows = list(tables.rows("queries"))
    assert len(rows) == 186 + 40 == len(questions)
    for row in rows:
        parts = [p for p in questions[row["id"]]["supporting_context"] if p["doc_part"] == "image"]
        assert row["gold_image_ids"] == [part["doc_id"] for part in parts]
    assert max(len(row["gold_image_ids"]) for row in rows) == 8
    assert report.queries["train"]["Compose(ImageQ,TableQ)"] == 14
    # An image that both files name has one row, in the first split, and is in the corpora of both.
    owned = {row["id"]: row["split"] for row in tables.rows("images")}
    train = {id_ for query in tables.queries(split="train") for id_ in query.candidate_image_ids}
    shared = {id_ for id_ in train if owned.get(id_) == "dev"}
    there = {row["id"] for row in corpus(tables, "full", splits=["train"]).rows}
    assert shared and shared <= there


def _small(tmp_path: Path, *lines: dict[str, Any] | str, images: list[dict[str, Any]] | None = None) -> Any:
    """Arguments for `mmqa.read` on hand-made files."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number, name in enumerate(("a.png", "b.JPG", "c.gif")):
        (folder / name).write_bytes(_picture(number))
    listed = images or [{"id": n[0], "title": n[0], "path": n} for n in ("a.png", "b.JPG", "c.gif")]
    (tmp_path / "images.jsonl").write_text("".join(json.dumps(line) + "\n" for line in listed))
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (tmp_path / "q.jsonl").write_text("\n".join(text) + "\n\n")
    return folder, tmp_path / "images.jsonl", {"dev": tmp_path / "q.jsonl"}, tmp_path / "out"


def _question(qid: str, gold: str = "a", answer: Any = "x", kind: str = "ImageQ") -> dict[str, Any]:
    return {
        "qid": qid,
        "question": " what ? ",
        "answers": [{"answer": answer, "type": "string"}],
        "metadata": {"type": kind, "image_doc_ids": ["a", "b"]},
        "supporting_context": [{"doc_id": gold, "doc_part": "image"}, {"doc_id": "t", "doc_part": "text"}],
    }


def test_numbers_as_answers_and_unlabelled_lines(tmp_path: Path) -> None:
    """Numeric answers become text; a test line has no answers, no gold, no type, and keeps its candidates."""
    blind = {"qid": "3", "question": "who?", "metadata": {"image_doc_ids": ["c"], "text_doc_ids": []}}
    arguments = _small(tmp_path, _question("1", answer=3.5), _question("2", answer=1990), blind)
    mmqa.read(*arguments)
    rows = {query.id: query for query in Tables(arguments[3]).queries()}
    assert rows["1"].answers == ("3.5",) and rows["2"].answers == ("1990",)
    assert rows["1"].gold_image_ids == ("a",) and rows["1"].text == "what ?"
    assert rows["3"].answers == rows["3"].gold_image_ids == () and rows["3"].candidate_image_ids == ("c",)


def test_only_candidates_leaves_other_questions_images_out(tmp_path: Path) -> None:
    """Images that only a question of another type names are in `full`, unless it was asked without."""
    other = _question("2", gold="c", kind="TextQ")
    arguments = _small(tmp_path, _question("1"), other)
    mmqa.read(*arguments)
    assert [row["id"] for row in Tables(arguments[3]).rows("images")] == ["a", "b", "c"]
    mmqa.read(*arguments, only_candidates=True, overwrite=True)
    assert [row["id"] for row in Tables(arguments[3]).rows("images")] == ["a", "b"]


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    """Broken JSON, a missing key, a repeated id, a path that leaves the folder: one error, line by line."""
    images = [{"id": "a", "path": "../a.png"}, {"id": "b"}, {"id": "c", "path": "c.gif"}]
    lacking = {"qid": "9", "question": "?", "answers": []}
    arguments = _small(tmp_path, "{oops", "[1]", lacking, _question("1"), _question("1"), images=images)
    with pytest.raises(ValueError) as caught:
        mmqa.read(*arguments)
    for part in (
        "line 1:",
        "line 2 is a list",
        "line 3: key 'metadata' is missing",
        "line 5: 1",
        "qid must be",
    ):
        assert part in str(caught.value)
    (tmp_path / "q.jsonl").write_text(json.dumps(_question("1")) + "\n")
    with pytest.raises(ValueError, match=r"(?s)'\.\./a\.png'.*lacks \['path'\]|lacks.*\.\./a"):
        mmqa.read(*arguments)
    assert not arguments[3].exists()


def test_no_image_at_all_and_policy_fail(tmp_path: Path) -> None:
    """A wrong folder is an error that shows where it looked; `fail` names the missing image."""
    folder, *rest = _small(tmp_path, _question("1"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"none of the 2 images can be read, e\.g\. .*empty/a\.png"):
        mmqa.read(tmp_path / "empty", *rest)
    (folder / "b.JPG").unlink()
    with pytest.raises(ValueError, match=r"--policy skip.*b \(.*b\.JPG\): no such file"):
        mmqa.read(folder, *rest, policy="fail")


def test_a_cut_off_gzip_is_named(tmp_path: Path) -> None:
    """A download that stopped half way is an error, not a shorter data set."""
    folder, images, questions, out = _small(tmp_path, *(_question(str(n)) for n in range(50)))
    packed = gzip.compress(questions["dev"].read_bytes())
    (tmp_path / "dev.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match="cannot be read to its end"):
        mmqa.read(folder, images, {"dev": tmp_path / "dev.jsonl.gz"}, out)


def test_command_line(real: dict[str, Any], report: Any, tmp_path: Path) -> None:
    """`prepare.py mmqa` on two processes writes the same tables and prints the report of `read`."""
    command = [sys.executable, str(ROOT / "scripts/prepare.py"), "mmqa", "--images", str(real["folder"])]
    command += ["--image-list", str(real["list"]), "--dev", str(real["dev"])]
    command += ["--out", str(tmp_path / "t"), "--workers", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1:] == report.text().splitlines()
    for name in ("images", "queries"):
        assert Tables(tmp_path / "t").table(name).equals(Tables(real["out"]).table(name))
    manifest = Tables(tmp_path / "t").manifest
    assert manifest["doctor"]["images"] == {"dev": {"present": 1288, "missing": 2, "unreadable": 2}}
    assert len(manifest["sources"]) == 2 and np.all([len(v) == 64 for v in manifest["sources"].values()])
