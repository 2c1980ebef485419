"""WebQA's layout → canonical tables: a real row, photos in a TSV read in place, files that do not fit."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datamodules.doctor import examine
from datamodules.readers import webqa
from fovea.images import BadImage, ImageReader, decode
from fovea.retrieve import corpus
from fovea.tables import Tables

ROOT = Path(__file__).resolve().parents[1]


def _png(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (9, 7), (number, 40 * (number % 6), 7)).save(out, "PNG")
    return out.getvalue()


def pack(folder: Path, files: list[bytes], *, end: bytes = b"\n") -> tuple[Path, Path]:
    """imgs.tsv and imgs.lineidx that hold these files as images 30,000,000, 30,000,001, …"""
    offsets, data = [], b""
    for number, content in enumerate(files):
        offsets.append(len(data))
        data += f"{30_000_000 + number}\t".encode() + base64.b64encode(content) + end
    (folder / "imgs.tsv").write_bytes(data)
    (folder / "imgs.lineidx").write_text("".join(f"{offset}\n" for offset in offsets))
    return folder / "imgs.tsv", folder / "imgs.lineidx"


def _fact(number: int) -> dict[str, Any]:
    image_id = 30_000_000 + number
    return {"image_id": image_id, "title": f"title {number}", "caption": f"caption  {number}", "url": "u"}


def _text(guid: str, number: int) -> dict[str, Any]:
    return {"title": "t", "fact": f"fact {number} of  {guid}", "url": "u", "snippet_id": f"{guid}_{number}"}


def question(guid: str, positive: list[int], negative: list[int], **more: Any) -> dict[str, Any]:
    """A row of WebQA_train_val.json."""
    row = {"Guid": guid, "Q": f'"What is "{guid}" ?"', "A": ['"It is "so"."'], "Keywords_A": '"so"'}
    row |= {"Qcate": "Others", "split": "train", "topic": "x"}
    row |= {"img_posFacts": [_fact(n) for n in positive], "img_negFacts": [_fact(n) for n in negative]}
    return row | {"txt_posFacts": [], "txt_negFacts": [_text(guid, 0), _text(guid, 1)]} | more


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text(json.dumps({row["Guid"]: row for row in rows}))
    return path


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    return pack(tmp_path, [_png(number) for number in range(6)])


@pytest.mark.parametrize(
    ("told", "plain"),
    [
        ('"What colour?"', "What colour?"),
        ('"The "big" one"', 'The "big" one'),
        ('""Foo" and "bar""', '"Foo" and "bar"'),
        ("no quotes", "no quotes"),
        ('"only before', '"only before'),
        ('a 5"', 'a 5"'),
        ('"', '"'),
        ('""', ""),
        ('  " spaces  inside " ', "spaces inside"),
    ],
)
def test_one_enclosing_pair_of_quotes_goes(told: str, plain: str) -> None:
    """Quotes that belong to the text stay."""
    assert webqa.unquote(told) == plain


def test_the_real_row_and_the_packed_photos(shared_data: Path, tmp_path: Path) -> None:
    """A real question beside one about each packed photo: pixels equal the photos', the rest is named."""
    source = shared_data / "webqa"
    ((guid, real),) = json.loads(next(source.glob("webqa_sample_*.json")).read_text()).items()
    ours = [question(f"q{n}", [n], [(n + 1) % 6]) for n in range(6)]
    path = write(tmp_path / "train_val.json", real, *ours)
    packed = source / "packed"
    report = webqa.read(packed / "imgs.tsv", packed / "imgs.lineidx", tmp_path / "t", train_val=path)
    tables = Tables(tmp_path / "t")
    query = next(query for query in tables.queries() if query.id == guid)
    assert query.text == "What color is the belly of a Green Tree Frog?"
    assert query.answers == ("The belly of a Green Tree Frog is white.",) and query.keywords == ("white",)
    assert query.kind == "color" and query.gold_image_ids == ("30240126",)
    facts = [*real["img_posFacts"], *real["img_negFacts"]]
    assert query.candidate_image_ids == tuple(sorted(str(fact["image_id"]) for fact in facts))
    passages = {row["id"]: row for row in tables.rows("passages") if row["id"].startswith(guid)}
    assert {id_: row["text"] for id_, row in passages.items()} == {
        fact["snippet_id"]: " ".join(fact["fact"].split()) for fact in real["txt_negFacts"]
    }
    photos = {str(row["image_id"]): row["coco_file"] for row in json.loads((packed / "map.json").read_text())}
    rows = {row["id"]: row for row in tables.rows("images")}
    assert rows.keys() == photos.keys()
    reader = ImageReader(tables.root)
    for id_, row in rows.items():
        photo = shared_data / "photos" / "coco128_val2017" / "val2017" / photos[id_]
        assert reader.bytes(row) == photo.read_bytes()
        pixels = reader.read(row)
        assert np.array_equal(pixels, decode(photo.read_bytes()))
        assert (row["height"], row["width"]) == pixels.shape[:2] and row["encoding"] == "base64"
        assert row["path"] == str((packed / "imgs.tsv").absolute())
    bad = [json.loads(line) for line in (tmp_path / "t" / "bad_images.jsonl").read_text().splitlines()]
    assert {row["id"] for row in bad} == {str(fact["image_id"]) for fact in facts} and len(bad) == 17
    assert all("imgs.lineidx has only 6 rows" in row["reason"] for row in bad)
    assert sum(by["missing"] for by in report.images.values()) == 17
    assert examine(tmp_path / "t").ok


def test_real_questions_of_the_released_table(shared_data: Path, small: Any, tmp_path: Path) -> None:
    """400 real questions and answers, wrapped in quotes as the JSON holds them, come out as they were."""
    import csv

    rows = []
    for name in ("img", "txt"):
        with open(shared_data / "webqa" / f"webqa_val_{name}_queries_vlp_vinvl.tsv", newline="") as file:
            rows += list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    given = {row["Guid"]: row for row in rows}
    wrapped = [
        question(guid, [1], [2], Q=f'"{row["Q"]}"', Qcate=row["Qcate"], Keywords_A=f'"{row["Keywords_A"]}"')
        for guid, row in given.items()
    ]
    path = write(tmp_path / "q.json", *wrapped)
    webqa.read(*small, tmp_path / "t", train_val=path)
    queries = Tables(tmp_path / "t").queries()
    assert len(queries) == len(given) > 390
    for query in queries:
        assert query.text == " ".join(given[query.id]["Q"].split()) and query.kind == given[query.id]["Qcate"]


def test_random_split_is_8_1_1_seeded_and_saved(small: Any, tmp_path: Path) -> None:
    """Shares near 8:1:1, ids in the manifest, the same for the same seed, another for another; no row moves
    when questions are added.
    """
    rows = [question(f"guid{n:04}", [n % 6], [], txt_negFacts=[]) for n in range(600)]
    path = write(tmp_path / "q.json", *rows)
    webqa.read(*small, tmp_path / "t", train_val=path)
    manifest = Tables(tmp_path / "t").manifest
    ids = {split: set(own) for split, own in manifest["split_ids"].items()}
    assert sum(map(len, ids.values())) == 600 == len(set().union(*ids.values()))
    assert abs(len(ids["train"]) - 480) < 30 and min(len(ids["val"]), len(ids["test"])) > 40
    assert manifest["split_seed"] == 0 and manifest["splits"] == {"train": 0.8, "val": 0.1, "test": 0.1}
    for split, own in ids.items():
        assert {query.id for query in Tables(tmp_path / "t").queries(split=split)} == own
    webqa.read(*small, tmp_path / "half", train_val=write(tmp_path / "h.json", *rows[::2]))
    for split, own in Tables(tmp_path / "half").manifest["split_ids"].items():
        assert set(own) <= ids[split]
    webqa.read(*small, tmp_path / "other", train_val=path, split_seed=1)
    assert set(Tables(tmp_path / "other").manifest["split_ids"]["val"]) != ids["val"]


def test_official_split_test_file_and_shared_images(small: Any, tmp_path: Path) -> None:
    """Unlabelled facts are candidates, nothing is gold; an image that two splits name is in both corpora."""
    train = write(
        tmp_path / "train_val.json",
        question("a", [0], [1]),
        question("b", [1], [2, 3], split="val"),
        question("c", [], [4], Qcate="text", txt_posFacts=[_text("c", 9)]),
    )
    blind = question("d", [], [], split="test")
    for key in (
        "A",
        "Keywords_A",
        *(f"{kind}_{sign}Facts" for kind in ("img", "txt") for sign in ("pos", "neg")),
    ):
        del blind[key]
    blind |= {"img_Facts": [_fact(5), _fact(1)], "txt_Facts": [_text("d", 0)]}
    test = write(tmp_path / "test.json", blind)
    report = webqa.read(*small, tmp_path / "t", train_val=train, test=test, official_split=True)
    tables = Tables(tmp_path / "t")
    queries = {query.id: query for query in tables.queries()}
    assert {id_: query.split for id_, query in queries.items()} == {"a": "train", "b": "val", "d": "test"}
    assert queries["d"].candidate_image_ids == ("30000001", "30000005")
    assert queries["d"].gold_image_ids == queries["d"].answers == queries["d"].keywords == ()
    assert queries["a"].text == 'What is "a" ?' and queries["a"].answers == ('It is "so".',)
    assert "1 questions of the other sort" in report.text()
    expected = {"gold": {1}, "candidates": {1, 2, 3}, "full": {1, 2, 3}}
    for name, numbers in expected.items():
        found = corpus(tables, name, splits=["val"])  # type: ignore[arg-type]
        assert {row["id"] for row in found.rows} == {str(30_000_000 + n) for n in numbers}
    there = {split: {row["id"][-1] for row in corpus(tables, "full", splits=[split]).rows}
             for split in ("train", "test")}  # fmt: skip
    assert there == {"train": {"0", "1", "4"}, "test": {"1", "5"}}
    assert len(list(tables.rows("images"))) == 6
    webqa.read(*small, tmp_path / "r", train_val=train, test=test, questions="text", only_candidates=True)
    tables = Tables(tmp_path / "r")
    (text,) = tables.queries()
    assert text.id == "c" and text.gold_passage_ids == ("c_9",) and not text.gold_image_ids
    assert [row["id"] for row in tables.rows("images")] == ["30000004"]
    webqa.read(*small, tmp_path / "all", train_val=train, test=test, questions="all")
    assert {query.split for query in Tables(tmp_path / "all").queries() if query.id == "d"} == {"blind"}


def test_dead_and_broken_images(tmp_path: Path) -> None:
    """Empty row, broken base64, truncated picture, cut-off TSV: each counted and named, no id shifts."""
    files = [_png(number) for number in range(6)]
    tsv, lineidx = pack(tmp_path, [files[0], b"", files[2][:45], files[3], files[4], files[5]], end=b"\r\n")
    data = bytearray(tsv.read_bytes())
    offsets = [int(text) for text in lineidx.read_text().split()]
    data[offsets[3] + 30] = ord("!")
    tsv.write_bytes(data[: offsets[5]])
    path = write(tmp_path / "q.json", question("q", [0, 1], [2, 3, 4, 5, 9], split="val"))
    report = webqa.read(tsv, lineidx, tmp_path / "t", train_val=path, official_split=True)
    tables = Tables(tmp_path / "t")
    rows = list(tables.rows("images"))
    assert [row["id"] for row in rows] == ["30000000", "30000004"]
    for row in rows:
        assert (
            ImageReader(tables.root).read(row)[0, 0].tolist()
            == decode(files[int(row["id"][-1])])[0, 0].tolist()
        )
    assert report.images == {"val": Counter(present=2, missing=3, unreadable=2)}
    reasons = {row["id"][-1]: (row["state"], row["reason"]) for row in report.bad}
    assert reasons["1"] == ("missing", "its row holds no image")
    assert reasons["5"][0] == reasons["9"][0] == "missing"
    assert "imgs.tsv ends at byte" in reasons["5"][1] and "only 6 rows" in reasons["9"][1]
    assert "base64" in reasons["3"][1] and reasons["2"][0] == "unreadable"
    assert next(iter(tables.queries())).gold_image_ids == ("30000000", "30000001")
    with pytest.raises(ValueError, match="--policy skip"):
        webqa.read(tsv, lineidx, tmp_path / "u", train_val=path, policy="fail")
    tsv.write_bytes(bytes(data).replace(b"A", b"?"))  # replaced after the tables were made
    with pytest.raises(BadImage, match="no base64 text"):
        ImageReader(tables.root).read(rows[0])


@pytest.mark.parametrize("fault", ["shifted", "other order", "no numbers"])
def test_an_index_of_another_tsv_is_refused(tmp_path: Path, small: Any, fault: str) -> None:
    """Pictures of other ids at the offsets would give every question a wrong image: refused by name."""
    tsv, lineidx = small
    offsets = lineidx.read_text().split()
    if fault == "shifted":
        offsets = [*offsets[1:], str(tsv.stat().st_size - 5)]
    elif fault == "other order":
        offsets[1], offsets[2] = offsets[2], offsets[1]
    else:
        offsets[0] = "zero"
    lineidx.write_text("\n".join(offsets) + "\n")
    path = write(tmp_path / "q.json", question("q", [0, 1, 2], [3]))
    with pytest.raises(ValueError) as caught:
        webqa.read(tsv, lineidx, tmp_path / "t", train_val=path)
    if fault == "no numbers":
        assert "each line must be a byte offset" in str(caught.value)
    else:
        for part in (str(tsv), str(lineidx), "is not the index of", "3000000"):
            assert part in str(caught.value)
    assert not (tmp_path / "t").exists()


def test_every_fault_of_the_questions_is_named_at_once(tmp_path: Path, small: Any) -> None:
    """Ids of the feature files, a missing key, a repeated snippet, a Guid twice: one error."""
    rows = [
        question("a", [0], [], img_negFacts=[{"image_id": 40_000_001, "title": "", "caption": ""}]),
        question("b", [0], [], txt_negFacts=[_text("b", 1), _text("b", 1)]),
        question("c", [0], []),
    ]
    del rows[2]["Q"]
    good = json.dumps(question("d", [0], []))
    text = ", ".join(f'"{row["Guid"]}": {json.dumps(row)}' for row in rows)
    (tmp_path / "q.json").write_text(f'{{{text}, "d": {good}, "d": {good}, "e": 3}}')
    with pytest.raises(ValueError) as caught:
        webqa.read(*small, tmp_path / "t", train_val=tmp_path / "q.json")
    for part in (
        "a: image_id 40,000,001",
        "b: snippet_id b_1 occurs twice",
        "c: key 'Q' is missing",
        "e: int",
    ):
        assert part in str(caught.value)
    for broken, reason in (('{"a": {', "no sound JSON after 0"), ("[]", "one object"), ("{}", "one object")):
        (tmp_path / "q.json").write_text(broken)
        with pytest.raises(ValueError, match=reason):
            webqa.read(*small, tmp_path / "t", train_val=tmp_path / "q.json")
    with pytest.raises(ValueError, match=r"(?s)no question file.*--tsv .*no such file"):
        webqa.read(tmp_path / "none.tsv", small[1], tmp_path / "t")


def test_the_json_is_never_whole_in_memory(tmp_path: Path, small: Any) -> None:
    """A 20 MB file is read within 6 MB: the real one has about half a gigabyte."""
    filler = [{"title": "t", "fact": "word " * 2000, "url": "u", "snippet_id": "x"}]
    with open(tmp_path / "big.json", "w") as file:
        for number in range(2000):
            row = question(f"g{number}", [0], [1], txt_negFacts=[], txt_posFacts=[], junk=filler)
            file.write(("{" if number == 0 else ",") + f'"g{number}":' + json.dumps(row))
        file.write("}")
    assert (tmp_path / "big.json").stat().st_size > 20e6
    webqa.read(*small, tmp_path / "warm", train_val=write(tmp_path / "s.json", question("q", [0], [1])))
    tracemalloc.start()
    webqa.read(*small, tmp_path / "t", train_val=tmp_path / "big.json")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6e6, peak
    assert Tables(tmp_path / "t").table("queries").num_rows == 2000


def test_command_line(tmp_path: Path, small: Any) -> None:
    """`prepare.py webqa` prints the report, the doctor agrees; a second run asks for --overwrite."""
    path = write(tmp_path / "q.json", *(question(f"q{n}", [n], [(n + 1) % 6]) for n in range(6)))
    command = [
        sys.executable,
        str(ROOT / "scripts/prepare.py"),
        "webqa",
        "--tsv",
        small[0],
        "--lineidx",
        small[1],
    ]
    command += ["--train-val", path, "--out", tmp_path / "t", "--workers", "1"]
    for code, said in ((0, "queries: Others"), (2, "--overwrite")):
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
        assert result.returncode == code and said in result.stdout + result.stderr, result.stderr
    assert examine(tmp_path / "t").ok
