"""The report: what it draws, what it chooses, that it is safe to open and needs nothing else."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from score_tables import make_table

from fovea import masks
from fovea.report import build, plots, queries
from fovea.report.overlay import outline, trace
from fovea.tables import TableWriter

HOSTILE = """<script>alert("q")</script> & '"><img src=x onerror=alert(1)> $x_1$"""
FUSION_NAMES = ("global", "local", "learned", "eq9")


class Page(html.parser.HTMLParser):
    """Tags with their attributes, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str, **equal: str) -> list[dict[str, str | None]]:
        """Attributes of the tags with that name whose attributes have these values."""
        return [a for t, a in self.tags if t == tag and all(a.get(k) == v for k, v in equal.items())]


def candidate(image_id: str, score: float, regions: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """One entry of `after`, which serves as one of `before` as well."""
    return {
        "image_id": image_id,
        "global": score / 2,
        "local": score / 4,
        "score": score,
        "regions": regions or [],
    }


def row(query_id: str, before: list[str], after: list[str], gold: str, **extra: Any) -> dict[str, Any]:
    """One line of queries.jsonl."""
    return {
        "query_id": query_id, "split": "test-0", "text": "a red pig ?", "gold_image_ids": [gold],
        "phrases": [{"id": "p0", "text": "red pig", "span": [2, 9]}],
        "before": [candidate(name, 1 - i / 10) for i, name in enumerate(before)],
        "after": [candidate(name, 1 - i / 10) for i, name in enumerate(after)],
    } | extra  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run over five pictures: three of 8 px, a photograph of 600×300, one that cannot be read."""
    photo = np.random.default_rng(0).integers(0, 255, (300, 600, 3), np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.jpg")
    (tmp_path / "broken.png").write_text("no picture")
    with TableWriter(tmp_path / "tables") as writer:
        for i, name in enumerate(["a", "b", HOSTILE]):
            Image.new("RGB", (8, 8), (80 * i, 20, 20)).save(tmp_path / f"{i}.png")
            writer.add("images", id=name, path=str(tmp_path / f"{i}.png"), width=8, height=8)
        writer.add("images", id="photo", path=str(tmp_path / "photo.jpg"), width=600, height=300)
        writer.add("images", id="broken", path=str(tmp_path / "broken.png"), width=8, height=8)
        writer.finish({"reader": "test"})
    directory = tmp_path / "run"
    directory.mkdir()
    mask = np.zeros((8, 8), bool)
    mask[2:4, 1:3] = True
    rle = masks.encode(mask)
    region = {"phrase_id": "p0", "box": [1, 2, 3, 4], "similarity": 0.876, "weight": 1.0}
    region["rle"] = {"size": rle["size"], "counts": rle["counts"].decode()}
    fixed = row("fixed", ["b", "a"], ["a", "b"], "a")
    fixed["after"][0]["regions"] = [region]
    rows = [
        fixed,
        row("broken", ["photo", "b"], ["b", "photo"], "photo"),
        row("failed", ["broken", "b"], ["b", "broken"], "a"),
        row("hostile", [HOSTILE, "b"], [HOSTILE, "b"], HOSTILE, text=HOSTILE,
            phrases=[{"id": "p0", "text": HOSTILE[:9], "span": [0, 9]}]),
    ]  # fmt: skip
    write(directory, rows)
    return directory


def write(directory: Path, rows: list[dict[str, Any]], **extra: Any) -> None:
    """results.json and queries.jsonl as `scripts/evaluate.py retrieval` writes them."""
    recalls = {name: {"recall@1": 0.123 + i / 4, "recall@2": 0.9} for i, name in enumerate(FUSION_NAMES)}
    fit = {"objective": "ranking", "w_global": 1.5, "w_local": 2.5, "bias": 0.0}
    results: dict[str, Any] = {
        "retrieval": recalls,
        "intervals": {"global": {"recall@1": [0.0777, 0.2]}},
        "spread": {"global": {"recall@1": 0.0333}},
        "calibration": {"learned": fit, "eq9": fit | {"objective": "eq9", "w_global": -0.25}},
        "comparisons": [
            {
                "metric": "recall@1",
                "a": "learned",
                "b": "global",
                "difference": 0.5,
                "low": 0.4444,
                "high": 0.6,
            }
        ],
        "fusion": "learned",
        "settings": {"tables": str(directory.parent / "tables")},
        "seeds": [0],
        "seconds": {"world": 61.0, "coarse": 64.0},
    }
    (directory / "results.json").write_text(json.dumps(results | extra))
    (directory / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))


def area(path: str) -> float:
    """Signed area that an SVG path of M, h, v and z encloses (shoelace), clockwise on screen positive."""
    total = 0.0
    for loop in re.findall(r"M(\d+) (\d+)([^z]*)z", path):
        x, y = start = int(loop[0]), int(loop[1])
        points = [start]
        for axis, step in re.findall(r"([hv])(-?\d+)", loop[2]):
            x, y = (x + int(step), y) if axis == "h" else (x, y + int(step))
            points.append((x, y))
        closed = [*points[1:], points[0]]
        total += sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in zip(points, closed, strict=True)) / 2
    return total


@pytest.mark.parametrize(
    ("mask", "path"),
    [
        ([[1, 1]], "M0 0h2v1h-2z"),
        ([[0, 0], [0, 1]], "M1 1h1v1h-1z"),
        ([[0, 0]], ""),
        ([[1, 1], [1, 0]], "M0 0h2v1h-1v1h-1z"),
    ],
)
def test_outlines_by_hand(mask: list[list[int]], path: str) -> None:
    """Four masks whose outlines can be drawn on squared paper."""
    assert trace(np.array(mask, bool)) == path


def test_outline_encloses_the_mask_and_not_its_holes() -> None:
    """The enclosed area of 50 random masks (holes, islands, touching corners) equals their pixel count."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        mask = rng.random((9, 7)) < rng.random()
        assert area(trace(mask)) == mask.sum()


def test_large_mask_is_traced_small_and_scaled_back() -> None:
    """A 900×600 mask is traced at 200×133; path × scale covers the same pixels within 2 %."""
    mask = np.zeros((600, 900), bool)
    mask[100:400, 200:800] = True
    rle = masks.encode(mask)
    drawn = outline({"box": [0, 0, 1, 1], "rle": rle}, "x", 0)
    assert area(drawn.path) * drawn.scale[0] * drawn.scale[1] == pytest.approx(mask.sum(), rel=0.02)


def test_region_without_a_mask_is_its_box() -> None:
    """Beyond the first candidates queries.jsonl holds boxes alone."""
    assert outline({"box": [1, 2, 3, 4]}, "x", 0).path == "M1.0 2.0H3.0V4.0H1.0z"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("ba", "ab", "fixed"),
        ("ab", "ba", "broken"),
        ("ba", "ba", "failed"),
        ("ab", "ab", "kept"),
        ("b", "b", "failed"),
    ],
)
def test_outcome(before: str, after: str, expected: str) -> None:
    """Gold image a, first before and after, or not; not retrieved at all counts as failed."""
    assert queries.outcome(row("q", list(before), list(after), "a")) == expected


def test_choice_is_stratified_seeded_and_capped() -> None:
    """3 fixed, 1 broken, 10 failed, 10 kept with 12 places: 3 + 1, and the other 8 shared equally."""
    kinds = [("ba", "ab")] * 3 + [("ab", "ba")] + [("ba", "ba")] * 10 + [("ab", "ab")] * 10
    rows = [row(str(i), list(b), list(a), "a") for i, (b, a) in enumerate(kinds)]
    chosen = queries.choose(rows, 12, seed=0)
    assert queries.count(chosen) == {"fixed": 3, "broken": 1, "failed": 4, "kept": 4}
    assert chosen == queries.choose(rows, 12, seed=0) and chosen != queries.choose(rows, 12, seed=1)
    assert len(queries.choose(rows, 100, seed=0)) == 24 and queries.choose([], 40, seed=0) == []


@pytest.mark.parametrize(
    ("phrases", "expected"),
    [
        ([("red pig", None)], [("the ", None), ("red pig", 0), (" by the Red pig", None)]),
        ([("red pig", None)] * 2, [("the ", None), ("red pig", 0), (" by the ", None), ("Red pig", 1)]),
        ([("red pig", [15, 22])], [("the red pig by the ", None), ("Red pig", 0)]),
        ([("pig red", None)], [("the red pig by the Red pig", None)]),
        (
            [("red pig", None), ("pig", None)],
            [("the ", None), ("red pig", 0), (" by the Red ", None), ("pig", 1)],
        ),
    ],
)
def test_highlight(phrases: list[tuple[str, Any]], expected: list[tuple[str, int | None]]) -> None:
    """Spans where given, else the first free occurrence in any case; what is not there stays unmarked."""
    text = "the red pig by the Red pig"
    given = [
        {"text": text_, "span": [text.rindex("Red"), len(text)] if span else None} for text_, span in phrases
    ]
    assert queries.highlight(text, given) == expected


def test_page_is_complete_and_shows_the_figures(run: Path) -> None:
    """One card a question; figures, intervals, spread, weights; masks; moves; the hint on eq. 9."""
    text = build(run).read_text()
    page = Page(text)
    outcomes = [a["data-outcome"] for a in page.all("article")]
    assert outcomes == ["fixed", "broken", "failed", "kept"]
    for shown in (
        "12.3",
        "62.3",
        "7.8–20.0",
        "± 3.3",
        "1.50 S",
        "+50.0",
        "+44.4",
        "0.88",
        "▲ from 2",
        "▼ from 1",
    ):
        assert shown in text, shown
    assert "2 min 05 s" in text and "has a negative weight" in text
    assert {"M1 2h2v2h-2z"} == {a["d"] for a in page.all("path") if (a.get("d") or "").startswith("M1 2h")}
    assert len(page.all("svg", **{"class": "plot"})) == 2


def test_page_needs_nothing_else(run: Path) -> None:
    """No address but fragments and data; each picture embedded once, small ones with hard pixel edges."""
    text = build(run).read_text()
    page = Page(text)
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/")), (tag, name, value)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text
    images = page.all("image")
    assert len(images) == len({a["href"] for a in images}) == 4
    assert [a.get("class") for a in images].count("crisp") == 3
    assert len([a for a in images if str(a["href"]).startswith("data:image/jpeg")]) == 1


def test_everything_is_escaped(run: Path) -> None:
    """Markup in a question, a phrase, an image id, a run's name and a log's columns stays text."""
    hostile = run.rename(run.with_name("<b onclick=x>"))
    log = hostile / "<i>stage" / "metrics.csv"
    log.parent.mkdir()
    log.write_text('step,"<script>loss</script> $\\frac$"\n0,1.5\n1,0.5\n')
    text = build(hostile).read_text()
    page = Page(text)
    assert "<script>alert" not in text and "<script>loss" not in text and "<i>stage" not in text
    assert not page.all("img") and not [a for _, a in page.tags if "onerror" in a or "onclick" in a]
    assert len(page.all("script")) == 1
    assert "&lt;script&gt;loss&lt;/script&gt; $\\frac$" in text


def test_unreadable_pictures_are_counted_not_fatal(run: Path) -> None:
    """A bad file and an id that the tables lack are named in the footer; their places say so."""
    rows = [json.loads(line) for line in (run / "queries.jsonl").read_text().splitlines()]
    write(run, [*rows, row("lost", ["nowhere"], ["nowhere"], "nowhere")])
    text = build(run).read_text()
    assert "2 images could not be shown" in text and "not in the images table" in text
    assert text.count("cannot be shown") >= 2


def test_gold_far_down_is_shown_with_its_rank(run: Path) -> None:
    """Five candidates, and the gold image at rank 7 behind a gap."""
    names = ["b"] * 6 + ["a"]
    write(run, [row("far", names, names, "a")])
    page = Page(build(run).read_text())
    assert len(page.all("figure", **{"class": "cand gold gap"})) == 2
    assert "<b>7</b>" in (run / "report.html").read_text()


def test_limit_is_stated(run: Path) -> None:
    """41 questions, 40 embedded, the rule and the true mix on the page; those without gold left out."""
    rows = [row(str(i), ["a", "b"], ["a", "b"], "a") for i in range(41)]
    write(run, [*rows, row("none", ["a"], ["a"], "a", gold_image_ids=[])])
    text = build(run).read_text()
    assert len(Page(text).all("article")) == 40
    assert (
        "40 of 41, an equal share of each outcome drawn with seed 0" in text and "41 right both times" in text
    )
    assert "1 more have no gold image" in text


def test_without_calibration(run: Path) -> None:
    """Static fusions only: the rule that ordered the candidates is named, no gain is not called one."""
    rows = [row("one", ["a", "b"], ["a", "b"], "a")]
    recalls = {"recall@1": 0.5, "recall@5": 0.5}
    write(
        run,
        rows,
        calibration=None,
        fusion="add",
        comparisons=[],
        spread=None,
        retrieval={"global": recalls, "add": recalls},
    )
    text = build(run).read_text()
    assert "by the rule add" in text and "no gain over whole images" in text


@pytest.mark.parametrize(
    ("difference", "low", "said"),
    [
        (0.3, 0.1, "The difference comes from"),
        (0.3, -0.1, "no clear gain"),
        (-0.1, -0.2, "no gain over whole images"),
    ],
)
def test_headline_claims_no_more_than_the_interval(
    run: Path, difference: float, low: float, said: str
) -> None:
    """A gain is called one only when its interval lies above zero."""
    recalls = {"recall@1": 0.5, "recall@5": 0.9}
    pair = {
        "metric": "recall@1",
        "a": "learned",
        "b": "global",
        "difference": difference,
        "low": low,
        "high": 0.5,
    }
    both = {"global": recalls, "learned": recalls | {"recall@1": 0.5 + difference}}
    write(run, [row("one", ["a", "b"], ["a", "b"], "a")], comparisons=[pair], retrieval=both)
    assert said in build(run).read_text()


def test_training_curves(run: Path) -> None:
    """Columns of Lightning's CSV log without blanks and non-finite values; no losses, no figure."""
    log = run / "coarse" / "version_0" / "metrics.csv"
    log.parent.mkdir(parents=True)
    log.write_text("epoch,step,train/loss,val/recall@1,lr\n0,0,2.5,,1\n0,9,nan,,1\n0,9,,0.25,\n")
    assert plots.read_log(log) == {
        "train/loss": [(0, 2.5)],
        "val/recall@1": [(9, 0.25)],
        "lr": [(0, 1), (9, 1)],
    }
    ((stage, figure),) = plots.training_curves(run)
    assert stage == "coarse" and "train/loss" in figure and "val/recall@1" in figure and ">lr<" not in figure
    log.write_text("epoch,step,lr\n0,0,1\n")
    assert plots.training_curves(run) == []


def test_scores_of_the_table_are_shown_when_it_is_there(run: Path) -> None:
    """Three panels, eq. 9's beside the run's own, instead of the two that queries.jsonl gives."""
    assert build(run).read_text().count("eq. 9, closed form") == 0
    rows = [("a", 1, False, 0.5, 0.1), ("b", 2, True, 0.4, 0.3)]
    make_table({"fixed": rows, "broken": rows}).write(run / "scores.parquet")
    results = json.loads((run / "results.json").read_text())
    results["calibration"]["ranking"] = results["calibration"]["learned"]
    (run / "results.json").write_text(json.dumps(results))
    text = build(run).read_text()
    figure = text[text.index("Scores of gold and other candidates before") :]
    titles = [
        title for title in ("before: whole image", "after: learned", "eq. 9, closed form") if title in figure
    ]
    assert len(titles) == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda run: (run / "results.json").unlink(),
            "lacks results.json; make them with: python scripts/evaluate.py",
        ),
        (lambda run: (run / "queries.jsonl").write_text('{"a": 1}\n{"b"'), "queries.jsonl, line 2: not JSON"),
        (lambda run: (run.parent / "tables").rename(run.parent / "moved"), "is not there; pass tables=DIR"),
    ],
)
def test_faults_are_named(run: Path, fault: Any, message: str) -> None:
    """What is missing or damaged is named with the way out."""
    fault(run)
    with pytest.raises((FileNotFoundError, ValueError), match=re.escape(message)):
        build(run)
