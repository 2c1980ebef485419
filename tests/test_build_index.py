"""scripts/build_index.py: tables and a bundle in, an index that retrieval accepts out."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

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
    assert said.index("2 images, 0 absent\nindex flat: 0.0") < said.index("2 images, 0 unreadable")
    manifest = index.manifest
    assert (manifest["kind"], manifest["precision"], manifest["transform"]["size"]) == ("flat", "float32", 16)


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


def test_an_index_that_cannot_fit_is_refused_before_the_work(place, capsys, monkeypatch):
    """Without memory or disk the error says how much is needed, and nothing is embedded."""
    from fovea.index import kind

    with monkeypatch.context() as patch:
        patch.setattr(kind, "free_bytes", lambda: 0)
        for some in ((), ("--index", "flat")):
            with pytest.raises(SystemExit):
                run(*arguments(place, "gold", *some))
            assert "GiB are free" in capsys.readouterr().err
    module = script()
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(SystemExit):
        module.main([str(argument) for argument in arguments(place, "gold")])
    assert "of disk are needed" in capsys.readouterr().err
    assert not (place / "index").exists() and not (place / "index.embeddings").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--index", "IVF16,PQ4"], "use 'IVF16,PQ4np'"),
        (["--index", "IVF16,Flat"], "at least 16 vectors and there are 2"),
        (["--index", "nonsense"], "could not parse index string"),
        (["--nprobe", "0"], "from 1"),
        (["--batch-size", "0"], "--batch-size 0: too small"),
        (["--device", "cuda"], "torch sees no GPU"),
        (["--gpu", "--index", "flat"], "this faiss sees no GPU"),
        (["--encoder", "nowhere"], "no bundle at nowhere"),
    ],
)
def test_wrong_arguments_are_named_before_the_work(place, capsys, more, said):
    """One line each, and nothing is embedded."""
    with pytest.raises(SystemExit) as stopped:
        run(*arguments(place, "gold", *more))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error.splitlines()[-1]
    assert not (place / "index").exists() and not (place / "index.embeddings").exists()


def test_what_was_embedded_is_used_again(place, capsys):
    """Another kind of index embeds nothing; a damaged block, and one whose image was replaced, are made
    again, the others are not; other weights or another precision are refused; a repaired image is found.
    """
    blocks = place / "index.embeddings"

    def again(*more, corpus="full"):
        skip = ("--bad-images", "skip", "--block-size", 1, "--overwrite")
        before = {path.name: path.stat().st_mtime_ns for path in blocks.glob("*.npz")}
        run(*arguments(place, corpus, *skip, *more))
        said = capsys.readouterr().out
        after = {path.name: path.stat().st_mtime_ns for path in blocks.glob("*.npz")}
        made = sorted(int(name[:8]) for name, time in after.items() if before.get(name) != time)
        return said, made

    said, made = again()
    assert made == [0, 1, 2, 3] and "0 of 4 blocks" in said
    first = DenseIndex.load(place / "index")
    said, made = again("--index", "SQ8", "--train-size", 3)
    assert (
        made == [] and "4 of 4 blocks" in said and DenseIndex.load(place / "index").manifest["kind"] == "SQ8"
    )

    data = bytearray((blocks / "00000001.npz").read_bytes())
    data[-150] ^= 1
    (blocks / "00000001.npz").write_bytes(data)
    assert again()[1] == [1]
    (blocks / "00000002.npz").write_bytes((blocks / "00000002.npz").read_bytes()[:99])
    Image.new("RGB", (64, 48), "red").save(place / "tables" / "a.png")
    said, made = again()
    assert made == [0, 2] and "2 blocks are damaged or of other images" in said
    last = DenseIndex.load(place / "index")
    assert last.ids == first.ids and len(last) == 3
    assert not np.allclose(last._vectors(np.array([0])), first._vectors(np.array([0])))
    np.testing.assert_array_equal(last._vectors(np.array([1, 2])), first._vectors(np.array([1, 2])))

    Image.new("RGB", (64, 48), "blue").save(place / "tables" / "broken.png")
    assert again()[1] == [3] and DenseIndex.load(place / "index").ids == ["a", "b", "c", "broken"]
    assert (place / "index" / "bad_images.jsonl").read_text() == ""
    encoder = tiny_clip(
        ["a", "pig", "drum"], image_size=16, embed_dim=8, widths=(4, 8), text_width=8, heads=2
    )
    save_encoder(encoder.eval(), place / "other")
    for more, field in (
        (("--encoder", place / "other"), "fingerprint"),
        (("--dtype", "bfloat16"), "precision"),
    ):
        with pytest.raises(SystemExit):
            again(*more)
        assert f"made otherwise: {field}: '" in capsys.readouterr().err
    said, made = again("--dtype", "bfloat16", "--embedding-dtype", "float16", "--embeddings", place / "half")
    half = DenseIndex.load(place / "index")
    assert half.manifest["precision"] == "bfloat16" and half.ids == ["a", "b", "c", "broken"]
    cosine = (half._vectors(np.arange(3)) * last._vectors(np.arange(3))).sum(1)
    assert (cosine > 0.99).all() and len(list((place / "half").glob("*.npz"))) == 4


def test_what_one_run_left_out_another_may_not(place, capsys):
    """Embeddings of a run with `skip` are there; with `fail` the bad image is named all the same."""
    for policy, said in (("skip", "none of the 1 images can be read"), ("fail", "broken-val: no image in a")):
        with pytest.raises(SystemExit):
            run(*arguments(place, "full", "--splits", "val", "--bad-images", policy))
        assert said in capsys.readouterr().err and (place / "index.embeddings" / "00000000.npz").exists()


def test_images_without_a_file_are_named_before_the_work(place, capsys):
    """No encoder is opened for a corpus that cannot be read."""
    (place / "tables" / "b.png").unlink()
    with pytest.raises(SystemExit):
        run(*arguments(place, "gold", "--encoder", "nowhere"))
    assert "1 images have no file, e.g. ['b']" in capsys.readouterr().err


def test_a_compressed_index_serves_retrieval(many, tmp_path, capsys):
    """IVF and PQ over 300 pictures, by a YAML that names the encoder: retrieval, memory-mapped, gives a
    picture's own embedding back first, and candidates for questions.
    """
    (tmp_path / "encoder.yaml").write_text(
        f"class_path: fovea.bundle.load_encoder\ninit_args: {{path: {many / 'bundle'}}}\n"
    )
    run("--tables", many / "tables", "--encoder", tmp_path / "encoder.yaml", "--corpus", "full",
        "--splits", "test", "--out", tmp_path / "index", "--index", "IVF4,PQ8np", "--nprobe", 3,
        "--workers", 2)  # fmt: skip
    assert "index IVF4,PQ8np: 0.0" in capsys.readouterr().out
    encoder = load_encoder(many / "bundle")
    retriever = Retriever.load(encoder, tmp_path / "index", mmap=True)
    rows = list(Tables(many / "tables").rows("images"))[:50]
    ids, vectors = embed_images(encoder, rows, ImageReader(many / "tables"))
    assert (
        np.mean([id_ in row for id_, row in zip(ids, retriever.index.search(vectors, 5)[0], strict=True)])
        > 0.9
    )
    found = retriever.candidates(Tables(many / "tables").queries(), k=7)
    assert [len(row) for row in found] == [7] * 2 and [c.rank for c in found[0]] == [*range(1, 8)]
    assert [c.image_id for c in retriever.candidates(Tables(many / "tables").queries(), among="own")[0]] == [
        "i3"
    ]


SLOW = """
import time
from fovea.bundle import load_encoder
def slow(path):
    encoder = load_encoder(path)
    quick = encoder.encode_image
    def encode_image(pixels, alpha=None):
        time.sleep(0.3)
        return quick(pixels, alpha)
    encoder.encode_image = encode_image
    return encoder
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Tables of 300 pictures, one of them broken, two questions, and a bundle."""
    root = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(1)
    with TableWriter(root / "tables") as writer:
        for number in range(300):
            path = writer.directory / f"{number}.png"
            Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8)).resize((24, 20)).save(path)
            writer.add("images", id=f"i{number}", path=path.name, width=24, height=20, split="test")
        for id_ in ("1", "2"):
            writer.add("queries", id=id_, text="a pig", split="test", candidate_image_ids=["i3"])
        writer.finish({"reader": "test"})
    encoder = tiny_clip(["a", "pig"], image_size=16, embed_dim=16, widths=(8, 16), text_width=8, heads=2)
    save_encoder(encoder.eval(), root / "bundle")
    return root


def test_ranks_killed_and_run_again_equal_one_process(many, tmp_path):
    """Two ranks; one is killed with SIGKILL half-way, and the other gives up waiting and says what to do.
    Three ranks go on (two of them processes): nothing that was there is made again, nothing is lost, and the
    index equals, byte for byte, that of one process. A bad image is listed once, whoever met it.
    """
    broken = many / "tables" / "7.png"
    good, _ = broken.read_bytes(), broken.write_bytes(b"not a picture")
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "slow.yaml").write_text(f"class_path: slow.slow\ninit_args: {{path: {many / 'bundle'}}}\n")
    environment = os.environ | {"PYTHONPATH": f"{SCRIPT.parents[1]}{os.pathsep}{tmp_path}"}

    def command(encoder, out, *more):
        fixed = ["--tables", many / "tables", "--encoder", encoder, "--corpus", "full", "--splits", "test",
                 "--out", tmp_path / out, "--bad-images", "skip", "--block-size", "10", "--batch-size", "5",
                 "--index", "IVF4,SQ8"]  # fmt: skip
        return [str(argument) for argument in (*fixed, *more)]

    def start(rank, size, *arguments):
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *command(*arguments)],
            env=environment | {"RANK": str(rank), "WORLD_SIZE": str(size)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    blocks = tmp_path / "two.embeddings"
    slow = start(1, 2, tmp_path / "slow.yaml", "two")
    first = start(0, 2, many / "bundle", "two", "--patience", "0.1")
    deadline = time.monotonic() + 120
    while not (blocks / "00000005.npz").exists() and slow.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(slow.pid, signal.SIGKILL)
    slow.wait()
    said, error = first.communicate(timeout=120)
    assert first.returncode == 2 and "rank 0 of 2: 0 of 15 blocks" in said and "waiting for" in said
    assert "of 30 are missing; run the same command again" in error
    assert not (tmp_path / "two").exists()
    there = {path.name: path.stat().st_mtime_ns for path in blocks.glob("*.npz")}
    assert 18 <= len(there) < 30, sorted(there)

    second = [start(rank, 3, many / "bundle", "two") for rank in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "2")
        patch.setenv("WORLD_SIZE", "3")
        script().main(command(many / "bundle", "two"))
    for rank in second:
        said, error = rank.communicate(timeout=120)
        assert rank.returncode == 0, error
        assert f"of 3: {sum(int(name[:8]) % 3 == second.index(rank) for name in there)} of 10 blocks" in said
    assert {name: (blocks / name).stat().st_mtime_ns for name in there} == there
    assert sorted(path.name for path in blocks.iterdir()) == [
        *(f"{number:08d}.npz" for number in range(30)), "manifest.json",
    ]  # fmt: skip
    script().main(command(many / "bundle", "one"))
    one, two = DenseIndex.load(tmp_path / "one"), DenseIndex.load(tmp_path / "two")
    assert one.ids == two.ids == [f"i{number}" for number in range(300) if number != 7]
    for name in ("vectors.faiss", "ids.arrow", "manifest.json", "bad_images.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert (tmp_path / "two" / "bad_images.jsonl").read_text().count('{"id": "i7"') == 1
    broken.write_bytes(good)


def test_help_is_quick():
    """`--help` imports no heavy library."""
    code = (
        f"import runpy, sys; sys.argv = ['build_index.py', '--help']\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit: print(sorted({'torch', 'faiss', 'numpy', 'lightning'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "--corpus" in out and out.endswith("[]\n")
