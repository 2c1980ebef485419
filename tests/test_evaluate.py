"""scripts/evaluate.py: galleries, figures and files against what a few lines recompute."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from datamodules import fill_masks
from fovea import bundle, masks
from fovea.images import ImageReader
from fovea.mask_store import MaskStore
from fovea.models.detectors import Detection
from fovea.models.encoders import tiny_clip
from fovea.reweight import Calibrations, fit_eq9, fit_ranking
from fovea.score_table import ScoreTable
from fovea.tables import Tables, TableWriter
from fovea.types import Region
from fovea.where import Locator

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


@pytest.fixture(scope="module")
def evaluate():
    """The script as a module."""
    sys.path.insert(0, str(ROOT / "scripts"))  # as `python scripts/evaluate.py` does
    spec = importlib.util.spec_from_file_location("evaluate_script", ROOT / "scripts" / "evaluate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two galleries of 12 pictures of two coloured squares, a mask store of the same, random encoders."""
    root = tmp_path_factory.mktemp("evaluate")
    rng = np.random.default_rng(0)
    store = MaskStore(root / "store", "squares")
    with TableWriter(root / "tables") as writer:
        for split in ("one", "two"):
            for i in range(12):
                image = np.zeros((24, 32, 3), np.uint8)
                regions, names = [], rng.choice(list(COLOURS), 2, replace=False)
                for r, name in enumerate(names):
                    mask = np.zeros((24, 32), bool)
                    mask[4 : 14 + i % 3, 2 + 16 * r : 12 + 16 * r] = True
                    image[mask] = COLOURS[name]
                    rle = masks.encode(mask)
                    box = masks.to_box(rle)
                    regions.append(Region(f"r{r}", box, rle))
                    writer.add(
                        "regions", id=f"r{r}", image_id=f"{split}{i}", phrase=f"{name} thing",
                        box=box.tolist(), height=24, width=32, rle=rle["counts"],
                    )  # fmt: skip
                path = root / f"{split}{i}.png"
                Image.fromarray(image).save(path)
                writer.add("images", id=f"{split}{i}", path=str(path), width=32, height=24, split=split)
                gold = [f"{split}{i}"] + ([f"{split}{(i + 1) % 12}"] if i % 4 == 0 else [])
                writer.add(
                    "queries",
                    id=f"{split}{i}q",
                    text=f"the {names[0]} thing {i}",
                    gold_image_ids=gold,
                    split=split,
                )
                store.append(blake2b(path.read_bytes(), digest_size=16).hexdigest(), {(): regions})
            writer.add("queries", id=f"{split}-none", text="a thing", split=split)
            writer.add("queries", id=f"{split}-absent", text="white", gold_image_ids=["nowhere"], split=split)
        writer.finish({"reader": "test", "seed": 5})
    torch.manual_seed(0)
    vocabulary = ["the", "thing", *COLOURS, *map(str, range(12))]
    encoder = tiny_clip(
        vocabulary, image_size=32, embed_dim=16, widths=(8, 8), layers=1, heads=2, text_width=16
    )
    bundle.save_encoder(encoder, root / "bundle")
    torch.nn.init.normal_(encoder.enable_alpha().clip.visual.conv1.alpha.weight)
    bundle.save_encoder(encoder, root / "alpha")
    return root


def arguments(place, out, *more, splits="one,two"):
    fixed = [
        "--tables",
        place / "tables",
        "--splits",
        splits,
        "--coarse",
        place / "bundle",
        "--out",
        out,
        "--top_k",
        5,
    ]
    return [str(a) for a in (*fixed, *more)]


@pytest.fixture(scope="module")
def run(place, evaluate):
    """scores → calibration → retrieval, once."""
    out = place / "run"
    evaluate.main(["scores", *arguments(place, place / "cal", "--local", place / "alpha", "--what", "none")])
    table = ScoreTable.read(place / "cal" / "scores.parquet")
    ranking = fit_ranking(table.grid())
    Calibrations(ranking, fit_eq9(table.grid()), ranking).write(place / "calibration.json")
    evaluate.main(
        ["retrieval", *arguments(place, out, "--local", place / "alpha", "--what", "none"),
         "--calibration", str(place / "calibration.json"), "--bootstrap", "100"]
    )  # fmt: skip
    return out


def test_figures_equal_a_brute_force_over_the_table(run):
    """recall@k of every fusion and gallery, recounted from scores.parquet; the headline is their mean."""
    results = json.loads((run / "results.json").read_text())
    rows = pq.read_table(run / "scores.parquet").to_pylist()
    fits = results["calibration"]
    score = {
        "global": lambda r: r["global"],
        "local": lambda r: r["local"],
        "local_eq5": lambda r: r["local_eq5"],
        "add": lambda r: r["global"] + r["local"],
        "multiply": lambda r: r["global"] * r["local"],
    } | {
        n: lambda r, f=fits[n]: f["w_global"] * r["global"] + f["w_local"] * r["local"] + f["bias"]
        for n in fits
    }
    assert set(results["retrieval"]) == set(score)
    for name, of in score.items():
        means = {}
        for split in ("one", "two"):
            for k in (1, 2, 5, 10):
                values = []
                for query in {r["query_id"] for r in rows if r["split"] == split and r["num_gold"]}:
                    own = [r for r in rows if r["query_id"] == query and r["rank"] > 0]
                    own.sort(key=lambda r: (np.float32(of(r)), r["image_id"]), reverse=True)
                    gold = next(r["num_gold"] for r in rows if r["query_id"] == query)
                    values.append(sum(r["is_gold"] for r in own[:k]) / gold)
                assert results["galleries"][split][name][f"recall@{k}"] == pytest.approx(np.mean(values)), (
                    name,
                    split,
                    k,
                )
                means.setdefault(k, []).append(np.mean(values))
        for k, values in means.items():
            assert results["retrieval"][name][f"recall@{k}"] == pytest.approx(np.mean(values))
            assert results["spread"][name][f"recall@{k}"] == pytest.approx(np.std(values, ddof=1))


def test_galleries_are_searched_apart(run):
    """A query of one split finds images of its own split only, five each; golds beyond them have rank −1."""
    table = ScoreTable.read(run / "scores.parquet")
    for q, split in zip(table.query, table.image_ids, strict=True):
        assert table.splits[q] == split[:3]
    kept = [int((table.rank[table.query == q] > 0).sum()) for q in range(len(table.query_ids))]
    assert kept == [5] * 28
    assert (table.is_gold[table.rank < 0]).all() and (table.rank < 0).any()


def test_results_say_what_they_rest_on(run):
    """Counts, corpus, seeds, world, calibration, intervals and comparisons are in results.json."""
    results = json.loads((run / "results.json").read_text())
    counts = results["coverage"]
    assert (counts["queries"], counts["queries_evaluated"], counts["queries_without_gold"]) == (28, 26, 2)
    assert counts["gold_images_absent"] == 2 and counts["phrases"] == 28
    corpus = {"name": "full", "among": "corpus", "images": {"one": 12, "two": 12}}
    assert results["corpus"] == corpus | {"unreadable": {"one": 0, "two": 0}}
    assert results["seeds"] == [0] and results["world"] == {"reader": "test", "seed": 5}
    for name, row in results["intervals"].items():
        for metric, (low, high) in row.items():
            assert (
                low <= results["retrieval"][name][metric] + 1e-9
                and results["retrieval"][name][metric] <= high + 1e-9
            )
    pairs = {(c["a"], c["b"]): c for c in results["comparisons"]}
    local = results["retrieval"]["local"]["recall@1"] - results["retrieval"]["global"]["recall@1"]
    assert pairs["local", "global"]["difference"] == pytest.approx(local)
    if results["best_static"] != "global":
        assert pairs["learned", results["best_static"]]["margin"] == 0.03
    assert set(results["seconds"]) >= {"embed images", "retrieve and rerank", "total"}


def test_query_rows(run):
    """Every query, `before` by global, `after` by the learned score, regions that recompute S_local."""
    rows = [json.loads(line) for line in (run / "queries.jsonl").read_text().splitlines()]
    assert len(rows) == 28
    for row in rows:
        assert [p["text"] for p in row["phrases"]] == [row["text"]]
        assert [c["global"] for c in row["before"]] == sorted(
            (c["global"] for c in row["before"]), reverse=True
        )
        learned = [c["learned"] for c in row["after"]]
        assert learned == sorted(learned, reverse=True) == [c["score"] for c in row["after"]]
        assert {c["image_id"] for c in row["before"]} == {c["image_id"] for c in row["after"]}
        for candidate in row["after"]:
            (region,) = candidate["regions"]
            assert candidate["local"] == pytest.approx(region["similarity"] * region["weight"])
            mask = masks.decode({"size": region["rle"]["size"], "counts": region["rle"]["counts"].encode()})
            assert masks.to_box(mask).tolist() == region["box"]


def test_mask_store_and_annotations_agree(run, place, evaluate):
    """The same masks from a store give the same scores; a second run reads embeddings from the cache."""
    more = ("--local", place / "alpha", "--what", "none", "--masks", place / "store")
    for _ in range(2):
        evaluate.main(["scores", *arguments(place, place / "stored", *more)])
    stored, annotated = (ScoreTable.read(place / d / "scores.parquet") for d in ("stored", "cal"))
    np.testing.assert_allclose(stored.local, annotated.local, atol=1e-6)
    assert (
        len(list((place / "stored" / "regions").glob("*/part-*.arrow"))) == 2
    )  # one shard a gallery, none more


def test_without_what_and_where_local_is_global(place, evaluate, tmp_path):
    """The whole question in the whole image by the coarse encoder: S_local = S_global."""
    more = ("--what", "none", "--where", "full", "--reweight", "add")
    evaluate.main(["retrieval", *arguments(place, tmp_path, *more, splits="one"), "--bootstrap", "50"])
    table = ScoreTable.read(tmp_path / "scores.parquet")
    np.testing.assert_allclose(table.local, table.global_, atol=1e-5)
    np.testing.assert_allclose(table.local_eq5, table.global_, atol=1e-4)
    results = json.loads((tmp_path / "results.json").read_text())
    assert "learned" not in results["retrieval"] and results["calibration"] is None
    assert results["spread"] is None and results["fusion"] == "add"
    assert results["retrieval"]["global"] == results["retrieval"]["add"]


def test_phrases_of_a_config_file(place, evaluate, tmp_path):
    """Options come from YAML too, later flags win; spaCy's phrases reach the rows."""
    (tmp_path / "c.yaml").write_text(
        f"weights: uniform\nmissing_phrase: ignore\ncoarse: nowhere\nsplits: one\nout: {tmp_path}\n"
    )
    evaluate.main(
        [
            "scores",
            "-c",
            str(tmp_path / "c.yaml"),
            "--coarse",
            str(place / "bundle"),
            "--tables",
            str(place / "tables"),
        ]
    )
    table = ScoreTable.read(tmp_path / "scores.parquet")
    assert table.settings["weights"] == "uniform" and table.settings["missing_phrase"] == "ignore"
    rows = pq.read_table(tmp_path / "scores.parquet").to_pylist()
    assert all(len(r["phrase_ids"]) == len(r["region_ids"]) == len(r["weights"]) >= 1 for r in rows)


def test_everything_wrong_is_named_at_once(place, evaluate, capsys, tmp_path):
    """A missing bundle, an unknown split and a missing store in one message, before anything is loaded."""
    with pytest.raises(SystemExit) as failure:
        evaluate.main(
            ["retrieval", "--tables", str(place / "tables"), "--splits", "one,three",
             "--coarse", "/no/bundle", "--masks", "/no/store", "--out", str(tmp_path), "--batch_size", "0"]
        )  # fmt: skip
    assert failure.value.code == 2
    message = capsys.readouterr().err
    for part in (
        "/no/bundle",
        "--batch_size 0: at least 1",
        "export.py",
        "'three'",
        "there are ['one', 'two']",
        "/no/store",
        "precompute_masks.py",
    ):
        assert part in message


def test_half_filled_store_is_refused(place, evaluate, capsys, tmp_path):
    """Images without a row in the store are counted, with the command that fills it."""
    names = [f"{split}{i}.png" for split in ("one", "two") for i in range(12)]
    contents = [(place / name).read_bytes() for name in names]
    digest = blake2b(contents[0], digest_size=16).hexdigest()
    MaskStore(tmp_path / "store", "k").append(digest, {(): []})
    with pytest.raises(SystemExit):
        evaluate.main(
            ["scores", *arguments(place, tmp_path / "out", "--what", "none", "--masks", tmp_path / "store")]
        )
    left = 24 - contents.count(contents[0])  # equal pictures are one to the store
    assert f"masks for {left} of 24 images are missing" in capsys.readouterr().err


class Stripes:
    """A detector whose boxes depend on the phrase: none for `white`, the left or the right half else."""

    key, joint = "stripes", False

    def detect(self, image, phrases):
        height, width = image.shape[:2]
        found = []
        for phrase in phrases:
            left = 0 if "red" in phrase or "green" in phrase else width // 2
            box = np.array([[left, 0, left + width // 2, height]], np.float32)[: "white" not in phrase]
            found.append(Detection(box, np.full(len(box), 0.5, np.float32)))
        return found


def test_regions_of_phrases(place, evaluate, capsys, tmp_path):
    """What the candidates lack in a store of phrases' regions is listed in a file that fills it; then every
    phrase is grounded in its own region, and a phrase that was not found has none.
    """
    tables, maker = Tables(place / "tables"), Locator(Stripes())
    store, reader = MaskStore(tmp_path / "store", "stripes"), ImageReader(place / "tables")
    rows = {row["id"]: row for row in tables.rows("images")}
    filler = fill_masks.Filler(maker, reader, store)
    gold = fill_masks.ask_phrases(
        rows, tables.queries(), lambda q: q.gold_image_ids, fill_masks.phrase_texts(), joint=False
    )
    assert len(gold) == 24
    for item in gold:
        filler(item)
    command = ["scores", *arguments(place, tmp_path / "out", "--masks", tmp_path / "store")]
    with pytest.raises(SystemExit):
        evaluate.main(command)
    listed = tmp_path / "out" / "missing_masks.jsonl"
    assert f"--prompts {listed}" in capsys.readouterr().err
    lacking = {json.loads(line)["image_id"][:3] for line in listed.read_text().splitlines()}
    assert lacking == {"one", "two"}, "one round of filling is enough, however many galleries"
    asked = fill_masks.ask_file(listed, rows, tables.queries(), fill_masks.phrase_texts(), joint=False)
    assert sum(filler(item).num_results for item in asked) > 0
    evaluate.main(command)
    kept = [r for r in pq.read_table(tmp_path / "out/scores.parquet").to_pylist() if r["rank"] > 0]
    queries = {query.id: query.text for query in tables.queries()}
    assert len(kept) > 24
    for row in kept:
        named = [region for region in row["region_ids"] if region]
        assert all(region in queries[row["query_id"]] for region in named)
        assert bool(named) == ("white" not in queries[row["query_id"]])


def test_help_loads_nothing_heavy():
    """--help answers without torch."""
    command = [sys.executable, "-X", "importtime", "scripts/evaluate.py", "retrieval", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "--calibration" in done.stdout and "jsonargparse" in loaded
    assert not loaded & {"torch", "lightning", "transformers", "faiss", "spacy"}


def test_corpora_and_own_candidates(place, evaluate, tmp_path, capsys):
    """`--corpus` changes what is searched and is named; `--among own` ranks each question's own list."""
    from fovea.tables import Tables

    old = Tables(place / "tables")
    with TableWriter(tmp_path / "tables") as writer:
        for row in old.rows("images"):
            writer.add("images", **row)
        for number in range(4):
            lists = [f"one{i}" for i in (number, number + 4, (number + 5) % 12)] + ["never-downloaded"]
            writer.add("queries", id=str(number), text="the red thing", gold_image_ids=[f"one{number}"],
                       candidate_image_ids=lists, split="one")  # fmt: skip
        writer.finish({"reader": "test"})
    base = ["retrieval", "--tables", str(tmp_path / "tables"), "--splits", "one", "--coarse"]
    base += [str(place / "bundle"), "--where", "full", "--what", "none", "--bootstrap", "20"]
    sizes = {"gold": 4, "candidates": 9, "full": 12}
    for name, size in sizes.items():
        evaluate.main([*base, "--out", str(tmp_path / name), "--corpus", name])
        corpus = json.loads((tmp_path / name / "results.json").read_text())["corpus"]
        assert (corpus["name"], corpus["images"]) == (name, {"one": size})
        assert f"corpus `{name}`" in capsys.readouterr().out
    out = tmp_path / "own"
    evaluate.main([*base, "--out", str(out), "--corpus", "candidates", "--among", "own"])
    table = ScoreTable.read(out / "scores.parquet")
    for q in range(4):
        own = {id_ for id_, row in zip(table.image_ids, table.query, strict=True) if row == q}
        assert own == {f"one{i}" for i in (q, q + 4, (q + 5) % 12)}
    assert json.loads((out / "results.json").read_text())["corpus"]["among"] == "own"
    with pytest.raises(SystemExit):
        evaluate.main(["scores", *arguments(place, tmp_path / "no", "--what", "none", "--among", "own")])
    assert "no query of one has a candidate list" in capsys.readouterr().err
