"""fovea.report.cascade: which question it shows, and that the picture is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea import masks
from fovea.report.cascade import draw
from fovea.tables import TableWriter


def _row(query_id: str, before: list[str], after: list[str], gold: str) -> dict[str, Any]:
    mask = np.zeros((8, 8), bool)
    mask[2:5, 2:5] = True
    rle = masks.encode(mask)
    region = {
        "phrase_id": "p1",
        "box": [2, 2, 5, 5],
        "rle": {"size": rle["size"], "counts": rle["counts"].decode()},
    }
    return {
        "query_id": query_id,
        "text": "the red pig and the blue drum",
        "gold_image_ids": [gold],
        "phrases": [{"id": "p0", "text": "red pig"}, {"id": "p1", "text": "blue drum"}],
        "before": [{"image_id": i, "global": 0.5} for i in before],
        "after": [{"image_id": i, "global": 0.5, "local": 0.25, "regions": [region]} for i in after],
    }


def _run(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    with TableWriter(tmp_path / "tables") as writer:
        for name in "abcd":
            Image.new("RGB", (8, 8), "grey").save(tmp_path / f"{name}.png")
            writer.add("images", id=name, path=str(tmp_path / f"{name}.png"), width=8, height=8)
        writer.finish({"reader": "test"})
    (tmp_path / "results.json").write_text(json.dumps({"settings": {"tables": str(tmp_path / "tables")}}))
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_shows_the_largest_step_that_fits(tmp_path: Path) -> None:
    """Of a question that stays, one moved from 3rd and one from 4th to 1st, the last is drawn, as a PNG."""
    rows = [
        _row("stays", ["a", "b", "c", "d"], ["a", "b", "c", "d"], "a"),
        _row("third", ["b", "c", "a", "d"], ["a", "b", "c", "d"], "a"),
        _row("fourth", ["b", "c", "d", "a"], ["a", "b", "c", "d"], "a"),
    ]
    assert draw(_run(tmp_path, rows), tmp_path / "out.png") == "fourth"
    with Image.open(tmp_path / "out.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    # The gold's frame is green, the second phrase's outline blue.
    for colour in ((0x2A, 0x9D, 0x5C), (0x2F, 0x6F, 0xDD)):
        assert (abs(pixels - colour).max(-1) < 12).sum() > 50


def test_says_when_nothing_was_gained(tmp_path: Path) -> None:
    """No question was brought to the first place: an error, not an arbitrary picture."""
    run = _run(tmp_path, [_row("lost", ["a", "b"], ["b", "a"], "a")])
    with pytest.raises(ValueError, match="no question"):
        draw(run, tmp_path / "out.png")
