"""scripts/build_index.py: tables and a bundle in, an index that retrieval accepts out."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fovea.bundle import load_encoder, save_encoder
from fovea.images import ImageReader
from fovea.index.dense import DenseIndex
from fovea.models.encoders import tiny_clip
from fovea.retrieve import Retriever, embed_images
from fovea.tables import Tables, TableWriter

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "build_index.py"


def script():
    spec = importlib.util.spec_from_file_location("build_index", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments):
    script().main([str(argument) for argument in arguments])


@pytest.fixture
def place(tmp_path):
    """Tables of five pictures (two are text, one candidate has no row) and a random tiny bundle."""
    rng = np.random.default_rng(0)
    with TableWriter(tmp_path / "tables") as writer:
        for id_ in ("a", "b", "c", "broken", "broken-val"):
            path = writer.directory / f"{id_}.png"
            Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)).save(path)
            if id_.startswith("broken"):
                path.write_text("not a picture")
            writer.add("images", id=id_, path=path.name, width=30, height=20, split=id_[7:] or "test")
        writer.add("queries", id="1", text="a pig", gold_image_ids=["b"], split="test")
        second = {"gold_image_ids": ["c"], "candidate_image_ids": ["b", "gone"]}
        writer.add("queries", id="2", text="a drum", split="test", **second)
        writer.finish({"reader": "test"})
    encoder = tiny_clip(
        ["a", "pig", "drum"], image_size=16, embed_dim=8, widths=(4, 8), text_width=8, heads=2
    )
    save_encoder(encoder.eval(), tmp_path / "bundle", provenance={})
    return tmp_path


def arguments(place, corpus, *more):
    return ["--tables", place / "tables", "--encoder", place / "bundle", "--corpus", corpus,
            "--splits", "test", "--out", place / "index", *more]  # fmt: skip


def test_the_index_holds_the_corpus_and_says_what_made_it(place, capsys):
    """Gold corpus: two images, embedded as by hand; the estimate comes first; retrieval takes the index."""
    run(*arguments(place, "gold"))
    index = DenseIndex.load(
        place / "index", expect={"corpus": "gold", "splits": ["test"], "count": 2, "width": 8}
    )
    assert index.ids == ["b", "c"]
    encoder = load_encoder(place / "bundle")
    tables = Tables(place / "tables")
    rows = [row for row in tables.rows("images") if row["id"] in "bc"]
    _, expected = embed_images(encoder, rows, ImageReader(place / "tables"))
    assert index.search(expected, 1)[0] == [["b"], ["c"]]
    np.testing.assert_allclose(index.search(expected, 1)[1], 1, atol=1e-6)
    found = Retriever.load(encoder, place / "index").candidates(tables.queries(), k=20)
    assert [sorted(candidate.image_id for candidate in row) for row in found] == [["b", "c"]] * 2
    said = capsys.readouterr().out
    assert said.index("2 images, 0 absent; index") < said.index("2 images, 0 unreadable")


def test_bad_and_absent_images_stop_the_build_or_are_listed(place, capsys):
    """By default a bad image stops it and nothing is written; `skip` leaves it out, named, ids unshifted."""
    with pytest.raises(SystemExit):
        run(*arguments(place, "full", "--splits", "val"))
    assert "broken-val" in capsys.readouterr().err and not (place / "index").exists()
    run(*arguments(place, "full", "--bad-images", "skip"))
    assert DenseIndex.load(place / "index").ids == ["a", "b", "c"]
    bad = [json.loads(line) for line in (place / "index" / "bad_images.jsonl").read_text().splitlines()]
    assert [row["id"] for row in bad] == ["broken"] and bad[0]["reason"]

    for name in ("candidates", "full"):
        with pytest.raises(SystemExit):
            run(*arguments(place, name, "--overwrite"))
        assert "'gone'" in capsys.readouterr().err and "a" in DenseIndex.load(place / "index").ids
    run(*arguments(place, "candidates", "--overwrite", "--bad-images", "skip"))
    index = DenseIndex.load(place / "index")
    assert index.ids == ["b", "c"] and (index.manifest["absent"], index.manifest["unreadable"]) == (1, 0)


def test_an_existing_index_is_refused_before_the_work(place, capsys):
    """Embedding may take hours: the full directory is noticed first."""
    run(*arguments(place, "gold"))
    with pytest.raises(SystemExit):
        run(*arguments(place, "gold"))
    assert "--overwrite" in capsys.readouterr().err


def test_an_index_that_cannot_fit_is_refused_before_the_work(place, capsys):
    """With no memory left the error says how much is needed, and nothing is written."""
    module = script()
    module.available_bytes = lambda: 0
    with pytest.raises(SystemExit):
        module.main([str(argument) for argument in arguments(place, "gold")])
    assert "GiB are free" in capsys.readouterr().err and not (place / "index").exists()


def test_help_is_quick():
    """`--help` imports no heavy library."""
    code = (
        f"import runpy, sys; sys.argv = ['build_index.py', '--help']\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit: print(sorted({'torch', 'faiss', 'numpy', 'lightning'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "--corpus" in out and out.endswith("[]\n")
