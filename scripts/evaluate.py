"""Score, evaluate, report: `python scripts/evaluate.py COMMAND --help`.

`scores` writes the table of scores that a calibration is fitted on; `retrieval` yields every fusion from
one such table on test galleries; `report` writes the page of a run, `picture` one question of it.

torchrun --nproc_per_node 8 -- scripts/evaluate.py retrieval … --device cuda    # or under srun: a share each

(Without the `--`, torchrun takes `--local` for an option of its own.) All ranks share one directory --out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from retrieval_results import (
    coverage,
    curves,
    pool,
    runs,
    show,
    spans,
    summarise,
    tie_bounds,
    write_per_query,
    write_queries,
    write_text,
)
from retrieval_run import Run, look_at, provenance
from retrieval_settings import Settings


def scores(settings: Settings) -> None:
    """Write OUT/scores.parquet of all splits, pooled: what a Reweight run is calibrated on."""
    galleries = list(look_at(settings, "add", None, {}))
    if not galleries:  # another rank than the first
        return
    table = pool(galleries)
    table.write(Path(settings.out) / "scores.parquet")
    kept = sum(bool((table.is_gold & (table.rank > 0))[a:b].any()) for a, b in spans(table))
    print(
        f"{len(table.query_ids)} queries, {len(table)} rows → {settings.out}/scores.parquet; {kept} have a "
        f"gold image within the top {settings.top_k}, the others do not count for the ranking objective"
    )


def retrieval(
    settings: Settings,
    *,
    calibration: str | None = None,
    reweight: str = "learned",
    ks: tuple[int, ...] = (1, 2, 5, 10, 20),
    bootstrap: int = 1000,
) -> None:
    """Evaluate every fusion on each gallery.

    OUT gets scores.parquet, queries.jsonl (what was seen of each query), per_query.jsonl (its figures, a line
    a fusion), plots/ and, last, results.json.

    Args:
        settings: what is looked at, and how.
        calibration: calibration.json of a Reweight run; without it only the static fusions are evaluated.
        reweight: the fusion that orders the listed candidates; `add` is the ablation "w/o reweight".
        ks: cut-offs of recall, hit, precision and nDCG.
        bootstrap: resamples of the intervals.
    """
    from fovea import figures
    from fovea.metrics.retrieval import evaluate
    from fovea.reweight import CALIBRATED, Calibrations, fuse
    from fovea.types import FUSIONS

    start = time.perf_counter()
    seconds: dict[str, float] = {}
    if reweight not in FUSIONS or not ks or min(ks) < 1 or bootstrap < 1:
        raise ValueError(
            f"--reweight {reweight}: one of {', '.join(FUSIONS)}; --ks {list(ks)}, --bootstrap {bootstrap}: "
            "at least 1"
        )
    calibrations = None if calibration is None else Calibrations.read(calibration)
    coarse_only = settings.where == "none"
    if coarse_only:
        calibrations, reweight = None, "global"
    elif calibrations is None and reweight in CALIBRATED:
        reweight = "add"
    names = ["global"] if coarse_only else list(FUSIONS)
    names = [name for name in names if calibrations is not None or name not in CALIBRATED]
    galleries = list(look_at(settings, reweight, calibrations, seconds))
    if not galleries:  # another rank than the first
        return
    table = pool(galleries)
    fused = {name: fuse(name, table, calibrations) for name in names}
    gold = {query.id: query.gold_image_ids for g in galleries for query in g.queries if query.gold_image_ids}
    if not gold:
        raise ValueError(f"no query of {settings.splits} has a gold image to evaluate against")
    found = {name: runs(table, fused[name], gold) for name in names}
    results = {name: evaluate(run, gold, ks=ks) for name, run in found.items()}
    results_json = summarise(table, results, [g.split for g in galleries], bootstrap)
    results_json |= {
        "coverage": coverage(galleries, table, gold),
        "corpus": {
            "name": settings.corpus,
            "among": settings.among,
            "images": {g.split: g.num_images for g in galleries},
            "unreadable": {g.split: g.unreadable for g in galleries},
        },
        "curves": curves(table, found, gold, settings.top_k, bootstrap),
        "ties": tie_bounds(found, results, gold),
        "calibration": None if calibrations is None else asdict(calibrations),
        "fusion": reweight,
        "settings": asdict(settings) | {"calibration": calibration, "ks": list(ks), "bootstrap": bootstrap},
        "seeds": [settings.seed],
        "world": provenance(settings),
        "seconds": seconds | {"total": time.perf_counter() - start},
    }
    out = Path(settings.out)
    table.write(out / "scores.parquet")
    write_queries(out / "queries.jsonl", galleries, calibrations)
    write_per_query(out / "per_query.jsonl", table, results)
    if not coarse_only:
        shown = ["global", "local"] + (["learned", "eq9"] if calibrations is not None else [reweight])
        panels = figures.score_panels(table, calibrations, list(dict.fromkeys(shown)))
        figures.write_png(
            figures.score_distributions(panels),
            out / "plots" / "scores.png",
            "Scores of gold and other candidates, densities",
        )
    if settings.top_k > 1:
        figures.write_png(
            figures.recall_curves(figures.curves_of(results_json)),
            out / "plots" / "recall.png",
            f"Recall at k in the corpus `{settings.corpus}`, 95 % intervals over queries",
        )
    write_text(out / "results.json", json.dumps(results_json, indent=1) + "\n")
    show(results_json, out)


def candidates(settings: Settings) -> None:
    """Write OUT/candidates.parquet: the kept candidates of every question, to compute their masks beforehand.

    `precompute_masks.py --prompts OUT/candidates.parquet` asks a detector for each question's phrases there.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = Run(settings, {})
    rows: dict[str, list[Any]] = {"query_id": [], "rank": [], "image_id": [], "global": []}
    prompts: list[list[list[str]] | None] = []
    for found in run.galleries():
        kept = found.retriever.candidates(found.queries, k=settings.top_k, among=settings.among)
        for query, own in zip(found.queries, kept, strict=True):
            for candidate in own:
                values = (query.id, candidate.rank, candidate.image_id, candidate.global_score)
                for column, value in zip(rows.values(), values, strict=True):
                    column.append(value)
                prompts.append([[query.text]] if settings.what == "none" else None)
    if run.ranks.rank > 0:
        return
    path = Path(settings.out) / "candidates.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    asked = pa.array(prompts, pa.list_(pa.list_(pa.string())))
    pq.write_table(pa.table(rows | {"prompts": asked}), path)
    print(f"{len(prompts):,} candidates of {len(set(rows['query_id'])):,} queries → {path}")


def encoder(
    source: str,
    tables: str,
    num: int = 8,
    device: str = "cpu",
    dtype: str = "float32",
    out: str | None = None,
) -> None:
    """Smoke test of an encoder's files: load it, embed a few images and texts, print what came out as JSON.

    Args:
        source: a bundle, or a YAML file that names a class.
        tables: canonical tables; their first queries and the images that answer them are embedded.
        num: how many pairs.
        device: where it runs.
        dtype: floating type of its weights.
        out: JSON file that gets the same under `encoders`, by the name of `source`, beside what it holds.
    """
    from encoder_smoke import smoke

    found = smoke(source, tables, num, device, dtype)
    print(json.dumps(found, indent=1))
    if out is not None:
        path = Path(out)
        known = json.loads(path.read_text()) if path.is_file() else {"smoke": True, "encoders": {}}
        known["encoders"][Path(source).stem] = found
        write_text(path, json.dumps(known, indent=1) + "\n")


def report(run_dir: str, tables: str | None = None, limit: int = 40, seed: int = 0) -> None:
    """Write RUN_DIR/report.html from its results.json and queries.jsonl.

    Args:
        run_dir: what `retrieval` wrote to; training logs below it become curves.
        tables: canonical tables with the images, those of the run when absent.
        limit: questions shown.
        seed: of their choice.
    """
    from fovea.report import build

    print(build(run_dir, tables=tables, limit=limit, seed=seed))


def picture(run_dir: str, out: str, tables: str | None = None) -> None:
    """Write a PNG of one question of RUN_DIR on its way through the cascade.

    Args:
        run_dir: what `retrieval` wrote to.
        out: the PNG.
        tables: canonical tables with the images, those of the run when absent.
    """
    from fovea.report.cascade import draw

    print(f"{draw(run_dir, out, tables=tables)} → {out}")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments (and `--config` YAML files), run the subcommand."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(description=__doc__)
    commands = parser.add_subcommands(dest="command")
    fields: list[str] = []
    for function in (scores, retrieval, candidates):
        sub = ArgumentParser(description=str(function.__doc__).splitlines()[0])
        sub.add_argument("-c", "--config", action="config", help="YAML file of these options")
        fields = sub.add_class_arguments(Settings)
        sub.add_function_arguments(function, skip={"settings"})
        commands.add_subcommand(function.__name__, sub)
    for function in (report, picture, encoder):
        page = ArgumentParser(description=str(function.__doc__).splitlines()[0])
        page.add_function_arguments(function, as_positional=True)
        commands.add_subcommand(function.__name__, page)

    arguments = parser.parse_args(argv)
    own = arguments[arguments.command].as_dict()
    own.pop("config", None)
    functions = (scores, retrieval, candidates, report, picture, encoder)
    function = {function.__name__: function for function in functions}[arguments.command]
    try:
        if function in (scores, retrieval, candidates):
            function(Settings(**{key: own.pop(key) for key in fields}), **own)
        else:
            function(**own)
    except (ValueError, KeyError, FileNotFoundError) as error:
        parser.error(str(error.args[0] if isinstance(error, KeyError) else error))


if __name__ == "__main__":
    main()
