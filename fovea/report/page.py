"""results.json + queries.jsonl + the images they name → `report.html`, one file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fovea import figures
from fovea.images import BadImage, ImageReader
from fovea.report import plots, queries
from fovea.report.overlay import Outline, Picture, mark_repeats, outline, picture
from fovea.reweight import Calibration, Calibrations
from fovea.score_table import ScoreTable
from fovea.tables import Tables
from fovea.types import FUSIONS

# Candidates shown in each row of a question; a gold image further down follows them.
SHOWN = 5
# Classes c0 … of page.css.j2; a question with more phrases uses them again.
NUM_COLOURS = 6


@dataclass
class Pictures:
    """The images that the page shows, each embedded once."""

    reader: ImageReader
    rows: dict[str, dict[str, Any]]
    embedded: dict[str, Picture] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)

    def get(self, image_id: str) -> Picture | None:
        """The picture, or None when it is unknown or unreadable (then `bad` says why)."""
        if image_id in self.embedded or image_id in self.bad:
            return self.embedded.get(image_id)
        if image_id not in self.rows:
            self.bad[image_id] = "not in the images table"
            return None
        try:
            pixels = self.reader.read(self.rows[image_id])
        except BadImage as error:
            self.bad[image_id] = error.reason
            return None
        self.embedded[image_id] = picture(f"im{len(self.embedded)}", pixels)
        return self.embedded[image_id]


@dataclass(frozen=True)
class Shown:
    """One candidate as the page draws it.

    `moved` is its rank before reweighting, None when it had none; `similarities` holds the colour, cosine,
    weight and annotated label (empty for a proposal, or where it says what the phrase says) of each region.
    """

    image_id: str
    picture: Picture | None
    rank: int
    moved: int | None
    gold: bool
    scores: dict[str, float]
    outlines: list[Outline]
    similarities: list[tuple[int, float, float | None, str]]
    gap: bool


@dataclass(frozen=True)
class Card:
    """One question as the page draws it."""

    row: dict[str, Any]
    outcome: str
    pieces: list[tuple[str, int | None]]
    phrases: list[tuple[str, int]]
    before: list[Shown]
    after: list[Shown]
    gold_before: int | None
    gold_after: int | None


def build(run_dir: str | Path, *, tables: str | Path | None = None, limit: int = 40, seed: int = 0) -> Path:
    """Write `report.html` into a run's directory.

    Args:
        run_dir: holds `results.json` and `queries.jsonl` as `scripts/evaluate.py retrieval` writes them; the
            CSV logs of training stages below it become curves.
        tables: canonical tables with the images; by default those that results.json names.
        limit: largest number of questions embedded (the page says how they were chosen).
        seed: of that choice.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: results.json, queries.jsonl or the tables are missing.
    """
    run_dir = Path(run_dir)
    missing = [name for name in ("results.json", "queries.jsonl") if not (run_dir / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{run_dir} lacks {' and '.join(missing)}; make them with: "
            f"python scripts/evaluate.py retrieval … --out {run_dir}"
        )
    try:
        results: dict[str, Any] = json.loads((run_dir / "results.json").read_text())
    except ValueError as error:
        raise ValueError(
            f"{run_dir}/results.json is damaged ({error}); run scripts/evaluate.py retrieval again"
        ) from error
    everything = queries.read(run_dir / "queries.jsonl")
    rows = [row for row in everything if row["gold_image_ids"]]
    source = Path(tables or results["settings"]["tables"])
    if not source.is_dir():
        raise FileNotFoundError(
            f"{source}, the tables that {run_dir}/results.json names, is not there; pass tables=DIR"
        )
    chosen = queries.choose(rows, limit, seed)
    pictures = Pictures(ImageReader(source), _image_rows(source, chosen))
    cards = [card(row, pictures) for row in chosen]
    retrieval = ordered(results["retrieval"])
    seconds = results.get("seconds") or {}
    curves = figures.curves_of(results | {"retrieval": retrieval})
    every_k = sorted({k for curve in curves.values() for k in curve.ks})
    path = run_dir / "report.html"
    text = environment().get_template("page.html.j2").render(
        name=run_dir.resolve().name,
        results=results,
        headline=headline(results, rows),
        fusions=fusion_rows(results),
        metrics=[f"recall@{k}" for k in cut_offs(retrieval)],
        calibration=results.get("calibration") or {},
        recall_curve=plots.recall_curve(curves, chance(results, every_k)),
        distributions=plots.score_distributions(rows, *scores(run_dir, results)),
        curves=plots.training_curves(run_dir),
        cards=cards,
        example=next((c for c in cards if c.outcome == "fixed"), cards[0] if cards else None),
        counts=queries.count(rows),
        shown_counts=queries.count(chosen),
        outcomes=queries.OUTCOMES,
        num_rows=len(rows),
        num_without_gold=len(everything) - len(rows),
        seed=seed,
        pictures=list(pictures.embedded.values()),
        bad=pictures.bad,
        num_colours=NUM_COLOURS,
        comparisons=results.get("comparisons") or [],
        seconds=seconds,
        total=seconds.get("total", sum(seconds.values())),
        manifest=Tables(source).manifest,
    )  # fmt: skip
    writing = path.with_name(".report.html.writing")
    writing.write_text(text)
    writing.replace(path)
    return path


def ordered(retrieval: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Fusions in the table's usual order, unknown ones last."""
    names = [
        *(name for name in FUSIONS if name in retrieval),
        *(name for name in retrieval if name not in FUSIONS),
    ]
    return {name: retrieval[name] for name in names}


def scores(run_dir: Path, results: dict[str, Any]) -> tuple[ScoreTable | None, Calibrations | None, str]:
    """The run's scores (None where the file is gone), its calibrations, and the fusion that it ordered by."""
    path = run_dir / "scores.parquet"
    fits = results.get("calibration")
    return (
        ScoreTable.read(path) if path.is_file() else None,
        Calibrations(**{name: Calibration(**fit) for name, fit in fits.items()})
        if fits and path.is_file()
        else None,
        results.get("fusion", "learned"),
    )


def cut_offs(retrieval: dict[str, dict[str, float]]) -> list[int]:
    """Every k of recall@k that some fusion has, ascending."""
    return sorted(
        {int(m.partition("@")[2]) for row in retrieval.values() for m in row if m.startswith("recall@")}
    )


def fusion_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the fusion table: value, spread over galleries and interval of each metric, and the scalars."""
    extra = {name: results.get(name) or {} for name in ("intervals", "spread", "calibration")}
    return [
        {
            "name": name,
            "values": row,
            "intervals": extra["intervals"].get(name, {}),
            "spread": extra["spread"].get(name, {}),
            "scalars": extra["calibration"].get(name),
        }
        for name, row in ordered(results["retrieval"]).items()
    ]


def chance(results: dict[str, Any], ks: list[int]) -> dict[int, float | None]:
    """recall@k of a random order of the corpus: k / N, mean over galleries; None where N is not recorded.

    Beyond the top K nothing counts as retrieved, for a random order as for the cascade.
    """
    sizes = [n for n in ((results.get("corpus") or {}).get("images") or {}).values() if n]
    kept = (results.get("settings") or {}).get("top_k") or max(ks)
    return {k: sum(min(k, kept, n) / n for n in sizes) / len(sizes) if sizes else None for k in ks}


def _by_chance(results: dict[str, Any], metric: str, expected: float | None) -> bool:
    """Whether the interval of the coarse stage's figure holds what a random order would give."""
    interval = (results.get("intervals") or {}).get("global", {}).get(metric)
    return bool(expected is not None and interval and interval[0] <= expected <= interval[1])


def headline(results: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures at the top: the first cut-off, the ceiling that the candidates set, and what changed.

    `fused` is the figure of the rule that ordered the candidates of queries.jsonl, as a rule `learned`.
    """
    retrieval = results["retrieval"]
    fusion = results.get("fusion", "learned")
    ks = cut_offs(retrieval)
    first, last, hit = f"recall@{ks[0]}", f"recall@{ks[-1]}", f"hit@{ks[0]}"
    comparisons = [
        c
        for c in results.get("comparisons") or []
        if (c["a"], c["b"], c["metric"]) == (fusion, "global", first)
    ]
    difference = retrieval[fusion][first] - retrieval["global"][first]
    verdict = "gain" if difference > 0 else "none"
    if verdict == "gain" and comparisons and comparisons[0]["low"] <= 0:
        verdict = "unclear"
    if fusion == "global":
        verdict = "alone"  # nothing was re-ranked
    return {
        "num_queries": len(rows),
        "galleries": len({row["split"] for row in rows}),
        "metric": first,
        "global": retrieval["global"][first],
        "fused": retrieval[fusion][first],
        # Share of questions: hit@k, which is recall@k when every question has one gold image.
        "hits": [retrieval[name].get(hit, retrieval[name][first]) for name in ("global", fusion)],
        "fusion": fusion,
        "chance": chance(results, ks)[ks[0]],
        # Of the coarse stage, whose figure everything else builds on.
        "by_chance": _by_chance(results, first, chance(results, ks)[ks[0]]),
        "ceiling": retrieval["global"][last],
        "ceiling_metric": last,
        "comparison": comparisons[0] if comparisons else None,
        "verdict": verdict,
    }


def card(row: dict[str, Any], pictures: Pictures) -> Card:
    """One question of queries.jsonl with its candidates before and after, ready to draw."""
    phrases = row.get("phrases", [])
    colours = {phrase["id"]: index % NUM_COLOURS for index, phrase in enumerate(phrases)}
    texts = {phrase["id"]: phrase["text"] for phrase in phrases}
    before_ranks = {found["image_id"]: rank for rank, found in enumerate(row["before"], start=1)}
    gold = set(row["gold_image_ids"])

    def shown(order: str) -> Iterable[Shown]:
        last = 0
        for rank, found in enumerate(row[order], start=1):
            is_gold = found["image_id"] in gold
            if rank > SHOWN and not is_gold:
                continue
            regions = [region for region in found.get("regions", []) if region["phrase_id"] in colours]
            yield Shown(
                image_id=found["image_id"],
                picture=pictures.get(found["image_id"]),
                rank=rank,
                moved=before_ranks.get(found["image_id"]) if order == "after" else rank,
                gold=is_gold,
                scores={
                    name: found[name] for name in ("score", "global", "local") if found.get(name) is not None
                },
                outlines=mark_repeats(
                    [outline(r, title(texts[r["phrase_id"]], r), colours[r["phrase_id"]]) for r in regions]
                ),
                similarities=[
                    (
                        colours[r["phrase_id"]],
                        r["similarity"],
                        r.get("weight"),
                        new_label(texts[r["phrase_id"]], r),
                    )
                    for r in regions
                ],
                gap=rank > last + 1,
            )
            last = rank

    return Card(
        row=row,
        outcome=queries.outcome(row),
        pieces=[
            (text, None if index is None else index % NUM_COLOURS)
            for text, index in queries.highlight(row["text"], phrases)
        ],
        phrases=[(phrase["text"], colours[phrase["id"]]) for phrase in phrases],
        before=list(shown("before")),
        after=list(shown("after")),
        gold_before=queries.gold_rank(row, "before"),
        gold_after=queries.gold_rank(row, "after"),
    )


def new_label(phrase: str, region: dict[str, Any]) -> str:
    """The annotated label of a region, unless the phrase says the same or there is none."""
    label = str(region.get("label") or "")
    return "" if label.lower() == phrase.lower() else label


def title(phrase: str, region: dict[str, Any]) -> str:
    """What an outline means: the phrase, and what it was grounded in where that is known."""
    label = new_label(phrase, region)
    return f"{phrase} → {label}" if label else phrase


def _image_rows(source: Path, chosen: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows of the images table for every image that the chosen questions may show."""
    wanted = {found["image_id"] for row in chosen for found in (*row["before"], *row["after"])}
    return {row["id"]: row for row in Tables(source).rows("images") if row["id"] in wanted}


def environment() -> Any:
    """Jinja2 with every value escaped and every unknown name an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fovea.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["pct"] = lambda value: "–" if value is None else f"{100 * value:.1f}"
    return environment
