"""scripts/evaluate.py on two ranks, on the coarse stage alone, and its files: what each says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_evaluate import arguments, evaluate, place, run  # noqa: F401 (fixtures)

from fovea.report import build
from fovea.score_table import ScoreTable
from fovea.tables import Tables, TableWriter

ROOT = Path(__file__).resolve().parents[1]


def launch(ranks, *command, cwd=ROOT):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # Without `--`, torchrun takes --local for an abbreviation of its own options.
    command = [sys.executable, *torchrun, "--", str(ROOT / "scripts/evaluate.py"), *command]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def uneven(place, tmp_path_factory):  # noqa: F811
    """Splits of 12 and of 7 images, neither a multiple of 2 batches of 5, and one of one image and query."""
    old, root = Tables(place / "tables"), tmp_path_factory.mktemp("uneven") / "tables"
    kept = {f"one{i}": "one" for i in range(12)} | {f"two{i}": "two" for i in range(7)} | {"two9": "few"}
    with TableWriter(root) as writer:
        for row in old.rows("images"):
            if row["id"] in kept:
                writer.add("images", **row | {"split": kept[row["id"]]})
        for row in old.rows("regions"):
            if row["image_id"] in kept:
                writer.add("regions", **row)
        for row in old.rows("queries"):
            if row["id"].removesuffix("q") in kept:
                writer.add("queries", **row | {"split": kept[row["id"].removesuffix("q")]})
        writer.finish({"reader": "test"})
    return root


def test_two_ranks_equal_one(place, run, uneven, evaluate, tmp_path):  # noqa: F811
    """Three uneven splits, one of them smaller than the number of ranks: every file is one rank's, bit for
    bit; the images and the regions were shared.
    """
    more = ["--tables", uneven, "--local", place / "alpha", "--batch_size", "5"]
    calibrated = ["--calibration", str(place / "calibration.json"), "--bootstrap", "100"]
    two, one = tmp_path / "two", tmp_path / "one"
    done = launch(2, "retrieval", *arguments(place, two, *more, splits="one,two,few"), *calibrated)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("queries evaluated") == 1, "only the first rank speaks"
    evaluate.main(["retrieval", *arguments(place, one, *more, splits="one,two,few"), *calibrated])
    assert pq.read_table(one / "scores.parquet").equals(pq.read_table(two / "scores.parquet"))
    for name in ("queries.jsonl", "per_query.jsonl"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    results = [json.loads((out / "results.json").read_text()) for out in (one, two)]
    for own in results:
        del own["seconds"], own["settings"]["out"]
    assert results[0] == results[1]
    assert results[0]["corpus"]["images"] == {"one": 12, "two": 7, "few": 1}
    # `few` has one batch only; of the others, each rank wrote its own.
    assert len(list((two / "regions").rglob("part-*.arrow"))) == 5
    assert len(list((one / "regions").rglob("part-*.arrow"))) == 3


def test_a_rank_that_fails_ends_all(place, uneven, tmp_path):  # noqa: F811
    """Under SLURM's variables. An image that only rank 1 reads is broken: both stop, rank 0 with rank 1's
    message; both can go on; when rank 1 is gone, rank 0 does not wait for it.
    """
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    with TableWriter(tmp_path / "tables") as writer:
        for name in ("images", "queries", "regions"):
            for row in Tables(uneven).rows(name):
                writer.add(name, **row | ({"path": str(broken)} if row["id"] == "one6" else {}))
        writer.finish({"reader": "test"})
    more = ["--tables", tmp_path / "tables", "--what", "none", "--batch_size", "5"]
    command = [sys.executable, str(ROOT / "tests/two_ranks_evaluate.py"), str(tmp_path)]
    command += arguments(place, tmp_path / "out", *more, splits="one")
    with socket.socket() as free:  # the port that the job's number leads to
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    slurm = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "1"}
    slurm |= {"MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(command, env=os.environ | slurm | {"SLURM_PROCID": str(rank)}, cwd=ROOT)
        for rank in (0, 1)
    ]
    first, second = [rank.wait(timeout=240) for rank in ranks]
    # gloo may abort rank 0 while it exits, its peer being gone; by then it has said all that is
    # looked at here.
    assert first in (0, -signal.SIGABRT) and second == 7
    told, own = ((tmp_path / f"bad-image-{rank}.txt").read_text() for rank in (0, 1))
    assert "failed on 1 of 2 ranks; rank 1: BadImage" in told and "one6" in told
    assert "one6" in own and "of 2 ranks" not in own
    table = ScoreTable.read(tmp_path / "out" / "scores.parquet")
    assert "one6" not in table.image_ids and set(table.image_ids) == {f"one{i}" for i in range(12)} - {"one6"}
    assert "one6" in (tmp_path / "out" / "bad_images.jsonl").read_text()
    assert "waiting: another rank has ended" in (tmp_path / "gone.txt").read_text()


def test_the_coarse_stage_alone(place, run, evaluate, tmp_path):  # noqa: F811
    """`--where none` needs no masks and no spaCy model; `global` is that of the whole cascade."""
    more = ["--where", "none", "--masks", tmp_path / "none", "--spacy_model", "absent", "--bootstrap", "100"]
    evaluate.main(["retrieval", *arguments(place, tmp_path / "out", *more), "--ks", "[1,3]"])
    alone = json.loads((tmp_path / "out" / "results.json").read_text())
    whole = json.loads((run / "results.json").read_text())
    assert list(alone["retrieval"]) == ["global"]
    assert alone["retrieval"]["global"]["recall@1"] == whole["retrieval"]["global"]["recall@1"]
    assert {"recall@3", "hit@3", "ndcg@3", "precision@3", "mrr", "map"} <= set(alone["retrieval"]["global"])
    assert "recall@5" not in alone["retrieval"]["global"]
    assert alone["ties"]["rule"] == "by_id"
    assert not (tmp_path / "out" / "regions").exists()
    page = build(tmp_path / "out").read_text()
    assert "Recall at k by fusion" in page and ", by whole images alone" in page
    assert "<h3>Reweight</h3>" not in page and "<h3>Coarse</h3>" in page
    assert set(alone["intervals"]["global"]) == {"recall@1", "recall@3", "hit@1", "hit@3", "mrr", "ndcg@3"}


def test_per_query_rows_and_plots(run):  # noqa: F811
    """A line a query and fusion; their means are the figures; two PNGs."""
    results = json.loads((run / "results.json").read_text())
    rows = [json.loads(line) for line in (run / "per_query.jsonl").read_text().splitlines()]
    assert len(rows) == len(results["retrieval"]) * results["coverage"]["queries_evaluated"]
    for name in results["retrieval"]:
        for split, figures_of in results["galleries"].items():
            own = [r["recall@2"] for r in rows if r["fusion"] == name and r["split"] == split]
            assert np.mean(own) == pytest.approx(figures_of[name]["recall@2"], abs=1e-6)
    # Recall at every k: at the cut-offs it is the table's figure, with the table's interval.
    curves = results["curves"]
    assert curves["k"] == [1, 2, 3, 4, 5]
    for name, curve in curves["recall"].items():
        for k in (1, 2, 5):
            interval = results["intervals"][name][f"recall@{k}"]
            assert curve["mean"][k - 1] == pytest.approx(results["retrieval"][name][f"recall@{k}"])
            np.testing.assert_allclose([curve["low"][k - 1], curve["high"][k - 1]], interval, atol=1e-6)
    for name in ("scores", "recall"):
        assert (run / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_ties_are_bounded(evaluate):  # noqa: F811
    """Two equal scores, the gold one with the smaller id: by_id 0, optimistic 1, pessimistic 0."""
    from retrieval_results import tie_bounds

    from fovea.metrics.retrieval import evaluate as score

    tied = {"q": {"a": 0.5, "b": 0.5}, "r": {"a": 0.5, "b": 0.4}}
    gold = {"q": ["a"], "r": ["a"]}
    results = {"global": score(tied, gold, ks=(1, 2))}
    assert results["global"].mean["recall@1"] == 0.5
    assert tie_bounds({"global": tied}, results, gold)["bounds"] == {"global": {"recall@1": (0.5, 1.0)}}


def test_candidates_for_masks(place, evaluate, tmp_path, capsys):  # noqa: F811
    """Five candidates a query, best first; w/o what the question itself is what a detector is asked."""
    evaluate.main(["candidates", *arguments(place, tmp_path, "--what", "none")])
    rows = pq.read_table(tmp_path / "candidates.parquet").to_pylist()
    assert len(rows) == 2 * 14 * 5 and [r["rank"] for r in rows[:5]] == [1, 2, 3, 4, 5]
    assert rows[0]["global"] >= rows[4]["global"]
    assert rows[0]["prompts"] == [["the green thing 0"]] or rows[0]["prompts"][0][0].startswith("the ")
    evaluate.main(["candidates", *arguments(place, tmp_path / "plain")])
    assert {str(r["prompts"]) for r in pq.read_table(tmp_path / "plain/candidates.parquet").to_pylist()} == {
        "None"
    }


def test_an_encoder_is_tried_out(place, evaluate, tmp_path, capsys):  # noqa: F811
    """A YAML that names a class, in bfloat16; the JSON says that it is a smoke test."""
    config = tmp_path / "encoder.yaml"
    arguments_of = "{vocabulary: [red], image_size: 32, widths: [8, 8], layers: 1, heads: 2, text_width: 16}"
    config.write_text(f"class_path: fovea.models.encoders.tiny_clip\ninit_args: {arguments_of}\n")
    evaluate.main(["encoder", str(config), str(place / "tables"), "--num=3", "--dtype=bfloat16"])
    said = json.loads(capsys.readouterr().out)
    assert said["smoke"] and said["finite"] and (said["images"], said["texts"]) == (3, 3)
    assert said["embed_dim"] == 128 and said["image_size"] == 32
    assert said["about"] == "these figures say that the layout loads, not how well it retrieves"
    assert (said["dtype"], said["pairs"], said["parameters"] > 0) == ("bfloat16", "query", True)
    for low, high in said["norms"].values():
        assert 0 < low <= high < float("inf")
    cosines = said["cosines"]
    assert -1.01 < cosines["min"] <= cosines["mean"] <= cosines["max"] < 1.01
    mean = (3 * cosines["diagonal"] + 6 * cosines["off_diagonal"]) / 9
    assert mean == pytest.approx(cosines["mean"], abs=1e-3)
    evaluate.main(["encoder", str(place / "alpha"), str(place / "tables"), "--num=1"])
    said = json.loads(capsys.readouterr().out)
    assert said["images"] == 1 and said["cosines"]["off_diagonal"] is None
    assert said["cosines"]["diagonal"] == said["cosines"]["mean"]
    with pytest.raises(SystemExit):
        evaluate.main(["encoder", str(config), str(place / "tables"), "--dtype=int8", "--num=0"])
    message = capsys.readouterr().err
    assert "--num 0: at least 1" in message and "--dtype int8" in message


def test_rows_without_questions_pair_with_captions(place, tmp_path):  # noqa: F811
    """No query: an image's caption is its text; no caption either: nothing belongs together."""
    from encoder_smoke import pairs

    from fovea.images import ImageReader

    rows = list(Tables(place / "tables").rows("images"))[:3]
    for caption, kind in (("a square", "caption"), ("", None)):
        root = tmp_path / str(kind)
        with TableWriter(root) as writer:
            for row in rows:
                writer.add("images", **row | {"caption": caption})
            writer.finish({"reader": "test"})
        images, texts, found = pairs(Tables(root), ImageReader(root), 2)
        assert (len(images), found, len(texts)) == (2, kind, 2 if kind else 1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--reweight", "nosuch"], "--reweight nosuch: one of global"),
        (["--bootstrap", "0"], "--bootstrap 0"),
        (["--ks", "[0]"], "--ks [0]"),
        (["--margin", "-3"], "--margin -3.0"),
        (["--coarse", "nowhere.yaml"], "neither a bundle"),
    ],
)
def test_faults_are_named_before_the_work(place, evaluate, tmp_path, more, said, capsys):  # noqa: F811
    """Nothing has been embedded: the output directory is not there."""
    with pytest.raises(SystemExit):
        evaluate.main(["retrieval", *arguments(place, tmp_path / "out", *more)])
    assert said in capsys.readouterr().err.replace("\n", " ").replace("  ", " ")
    assert not (tmp_path / "out").exists()
