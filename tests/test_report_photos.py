"""The report over photographs: chance, annotated labels, outlines that two phrases share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea.report import build
from fovea.report.page import chance
from fovea.tables import TableWriter


def candidate(image_id: str, regions: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """One entry of `after`, which serves as one of `before` as well."""
    return {"image_id": image_id, "global": 0.5, "local": 0.25, "score": 1.0, "regions": regions or []}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory beside the tables of one photograph of 600×300."""
    photo = np.random.default_rng(0).integers(0, 255, (300, 600, 3), np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.jpg")
    with TableWriter(tmp_path / "tables") as writer:
        writer.add("images", id="photo", path=str(tmp_path / "photo.jpg"), width=600, height=300)
        writer.finish({"reader": "coco"})
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def write(run: Path, regions: list[dict[str, Any]], **extra: Any) -> str:
    """One question with two phrases and the photo as its answer; returns the page."""
    recalls = {"recall@1": 0.3, "recall@2": 0.3}
    results = {"retrieval": {"global": recalls, "add": recalls}, "fusion": "add"}
    results |= {"settings": {"tables": str(run.parent / "tables"), "top_k": 1}} | extra
    (run / "results.json").write_text(json.dumps(results))
    phrases = [{"id": f"p{i}", "text": t, "span": None} for i, t in enumerate(["red pig", "blue <b>"])]
    line = {"query_id": "q", "split": "test", "text": "red pig, blue <b>", "gold_image_ids": ["photo"]}
    line |= {"phrases": phrases, "before": [candidate("photo")], "after": [candidate("photo", regions)]}
    (run / "queries.jsonl").write_text(json.dumps(line) + "\n")
    return build(run).read_text()


@pytest.mark.parametrize(("low", "said"), [(0.05, "cannot be told from chance"), (0.2, "did not help")])
def test_chance_is_named(run: Path, low: float, said: str) -> None:
    """Galleries of 5 and 10 images: R@1 by chance (1/5 + 1/10) / 2 = 15 %; within the interval or not.

    R@2 would be 30 %, but the cascade keeps one candidate (top K = 1), so it is 15 % as well.
    """
    intervals = {"global": {"recall@1": [low, 0.4], "recall@2": [low, 0.4]}}
    text = write(run, [], intervals=intervals, corpus={"name": "full", "images": {"x": 5, "y": 10}})
    assert "a random order 15.0&nbsp;%" in text and said in text and ">chance<" in text
    results = json.loads((run / "results.json").read_text())
    assert chance(results, [1, 2]) == {1: pytest.approx(0.15), 2: pytest.approx(0.15)}
    assert chance({}, [1]) == {1: None}


def test_without_the_corpus_nothing_is_said_about_chance(run: Path) -> None:
    """Results of another tool may not say how many images there were."""
    text = write(run, [])
    assert "random order" not in text and ">chance<" not in text


def test_annotated_regions_are_named_and_a_shared_one_shows_both_colours(run: Path) -> None:
    """The label stands beside the cosine unless the phrase says the same; a repeated outline is dashed.

    The photo's own pixels are the coordinates: a viewBox of 600×300, whatever the embedded picture's size.
    """
    region = {"box": [1, 2, 3, 4], "similarity": 0.5}
    text = write(
        run,
        [
            region | {"phrase_id": "p0", "label": "Red pig"},
            region | {"phrase_id": "p1", "label": "toy <b>"},
        ],
    )
    assert "0.50</span>" in text and "0.50 toy &lt;b&gt;</span>" in text
    assert "<title>red pig</title>" in text and "<title>blue &lt;b&gt; → toy &lt;b&gt;</title>" in text
    assert text.count('<g class="c0" ') == text.count('<g class="c1 again" ') > 0
    assert '<g class="c0 again"' not in text
    assert '<symbol id="im0" viewBox="0 0 600 300">' in text
