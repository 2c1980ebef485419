"""scripts/evaluate.py on two ranks, on the coarse stage alone, and its files: what each says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_evaluate import arguments, evaluate, place, run  # noqa: F401 (fixtures)

ROOT = Path(__file__).resolve().parents[1]


def figures(out):
    """What must not depend on the number of ranks."""
    results = json.loads((out / "results.json").read_text())
    return {
        k: results[k] for k in ("retrieval", "intervals", "galleries", "coverage", "corpus", "comparisons")
    }


def launch(ranks, *command, cwd=ROOT):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # Without `--`, torchrun takes --local for an abbreviation of its own options.
    command = [sys.executable, *torchrun, "--", str(ROOT / "scripts/evaluate.py"), *command]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_two_ranks_equal_one(place, run, tmp_path):  # noqa: F811
    """Images of two splits, regions and queries on two ranks: figures and files are one rank's."""
    out = tmp_path / "two"
    more = ["--local", place / "alpha", "--what", "none"]
    calibration = ["--calibration", str(place / "calibration.json"), "--bootstrap", "100"]
    done = launch(2, "retrieval", *arguments(place, out, *more), *calibration)
    assert done.returncode == 0, done.stderr[-3000:]
    assert figures(out) == figures(run)
    assert done.stdout.count("queries evaluated") == 1, "only the first rank speaks"
    one, two = (pq.read_table(p / "scores.parquet").to_pylist() for p in (run, out))
    for a, b in zip(one, two, strict=True):
        assert (a["query_id"], a["image_id"], a["rank"]) == (b["query_id"], b["image_id"], b["rank"])
        np.testing.assert_allclose([a["global"], a["local"]], [b["global"], b["local"]], atol=1e-6)
    assert len(list((out / "regions").rglob("part-*.arrow"))) == 4, (
        "each rank embedded its part of both splits"
    )

    # A fault on all ranks ends all, with its message; nobody waits.
    gone = launch(2, "retrieval", *arguments(place, tmp_path / "gone", "--masks", place / "nowhere"))
    assert gone.returncode != 0 and "neither `annotated` nor a mask store" in gone.stderr


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
