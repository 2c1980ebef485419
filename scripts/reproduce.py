"""Row of configs/expected.yaml → its stages run, or found finished → measured beside expected figures.

The only runner of stage graphs: `make quickstart` and `make smoke` are rows as well. `stage_graph.py` says
how a graph is written, `stage_run.py` when a stage is run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from stage_graph import ROOT, Failure, read_graph, read_variables, read_yaml
from stage_run import Run, say, write_json

WORLD_CAP = 3600.0


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of expected.yaml, checked; all problems are reported at once."""
    rows: dict[str, dict[str, Any]] = (read_yaml(path) or {}).get("rows", {})
    problems = []
    for name, row in rows.items():
        where = f"row {name}"
        if unknown := set(row) - {"title", "graph", "stages", "vars", "world", "status", "note", "metrics"}:
            problems.append(f"{where}: unknown keys {sorted(unknown)}")
        if row.get("status", "ready") not in ("ready", "open"):
            problems.append(f"{where}: status {row['status']!r}; use ready or open")
        if row.get("status") != "open" and ("graph" in row) == ("stages" in row):
            problems.append(f"{where}: give either graph: FILE or stages: [...]")
        for metric, entry in row.get("metrics", {}).items():
            if unknown := set(entry) - {"ours", "spread", "date", "band", "paper"}:
                problems.append(f"{where}, {metric}: unknown keys {sorted(unknown)}")
            if "date" in entry:
                entry["date"] = str(
                    entry["date"]
                )  # YAML reads an unquoted one as a date, which JSON cannot hold
            if "ours" in entry and not {"date", "band"} <= set(entry):
                problems.append(f"{where}, {metric}: a measured value needs date and band")
    if problems:
        raise Failure("\n".join([f"{path}:", *(f"  {problem}" for problem in problems)]))
    return rows


def lookup(results: dict[str, Any], metric: str) -> float | None:
    """`retrieval.global.recall@1` → the figure in a results JSON, or None when it is not there."""
    value: Any = results
    for name in metric.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


def compare(name: str, row: dict[str, Any], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a metric: measured mean and spread over seeds beside the expected value, and a verdict.

    Verdicts: `in band` and `OUT OF BAND` (against our own earlier value), `paper` (shown beside the paper's
    value, not judged), `first measurement`, `missing` (the results lack it).
    """
    lines = []
    for metric, entry in row.get("metrics", {}).items():
        found = [lookup(result, metric) for result in results]
        values = [value for value in found if value is not None]
        line: dict[str, Any] = {
            "row": name,
            "metric": metric,
            **entry,
            "measured": None,
            "verdict": "missing",
        }
        if len(values) == len(results):
            line["measured"] = statistics.fmean(values)
            line["measured_spread"] = statistics.stdev(values) if len(values) > 1 else None
            expected = entry.get("ours", entry.get("paper"))
            line["difference"] = None if expected is None else line["measured"] - expected
            if "ours" in entry:
                line["verdict"] = "in band" if abs(line["difference"]) <= entry["band"] else "OUT OF BAND"
            else:
                line["verdict"] = "paper" if "paper" in entry else "first measurement"
        lines.append(line)
    return lines


def print_results(results: dict[str, Any]) -> None:
    """Every section of a results JSON that is a table of `recall@k` figures (`retrieval`, …), in percent."""
    from rich.console import Console
    from rich.table import Table

    for section, body in results.items():
        rows = (
            {name: row for name, row in body.items() if isinstance(row, dict)}
            if isinstance(body, dict)
            else {}
        )
        columns = [
            key
            for key in dict.fromkeys(key for row in rows.values() for key in row if key.startswith("recall@"))
            if all(isinstance(row.get(key), int | float) for row in rows.values())
        ]
        if not columns:
            continue
        table = Table(section, *(f"{column} %" for column in columns))
        for name, row in rows.items():
            table.add_row(name, *(f"{100 * row[column]:.1f}" for column in columns))
        Console().print(table)


def print_comparison(lines: list[dict[str, Any]]) -> None:
    """The table of expected and measured figures."""
    from rich.console import Console
    from rich.table import Table

    def number(value: float | None, spread: float | None = None) -> str:
        return "–" if value is None else f"{value:.3f}" + ("" if spread is None else f" ± {spread:.3f}")

    several = len({line["row"] for line in lines}) > 1
    dates = sorted({line["date"] for line in lines if "date" in line})
    columns = (["row"] if several else []) + [
        "metric",
        "expected",
        "band",
        "measured",
        "difference",
        "verdict",
    ]
    caption = f"expected values measured on {', '.join(dates)}" if dates else None
    table = Table(*columns, caption=caption)
    for line in lines:
        expected = number(line.get("ours"), line.get("spread"))
        if "ours" not in line and "paper" in line:
            expected = f"paper: {line['paper']:.3f}"
        band = f"±{line['band']:.2f}" if "band" in line else "–"
        difference = f"{line['difference']:+.3f}" if line.get("difference") is not None else "–"
        measured = number(line["measured"], line.get("measured_spread"))
        name = line["metric"].removeprefix("retrieval.").replace("recall@", "R@")
        row = [name, expected, band, measured, difference, line["verdict"]]
        table.add_row(*([line["row"]] if several else []), *row)
    Console().print(table)


def print_list(rows: dict[str, dict[str, Any]]) -> None:
    """What can be reproduced, and what is still to come."""
    from rich.console import Console
    from rich.table import Table

    table = Table("row", "on", "status", "what")
    for name, row in rows.items():
        place = "world" if row.get("world") else "own data"
        table.add_row(
            name, place, row.get("status", "ready"), f"{row.get('title', '')} {row.get('note', '')}".strip()
        )
    Console().print(table)


def with_settings(name: str, row: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """The row with `--set NAME=VALUE` put into its variables; a name that its graph lacks is refused."""
    if not settings:
        return row
    known = read_variables(row)
    chosen: dict[str, Any] = {}
    for text in settings:
        variable, equals, value = text.partition("=")
        if not equals or variable not in known:
            raise Failure(f"--set {text}: NAME=VALUE; the variables of row {name}: {', '.join(known)}")
        # A list is words, as in the graph: --set alpha_args='--trainer.max_epochs=2 --model.lr=1e-4'.
        chosen[variable] = shlex.split(value) if isinstance(known[variable], list) else value
    return row | {"vars": row.get("vars", {}) | chosen}


def run_row(
    name: str, row: dict[str, Any], out: Path, *, args: argparse.Namespace, deadline: float | None
) -> list[Any]:
    """Run one row for every seed; returns the lines of its comparison and leaves them in `summary.json`."""
    if row.get("status") == "open":
        raise Failure(f"row {name} is open: its code is still to come. {row.get('note', '')}".rstrip())
    graph = read_graph(with_settings(name, row, args.set))
    results, seconds = [], time.monotonic()
    about = sum(stage.about or 0 for stage in graph.stages)
    say(f"{name}: {row.get('title', '')} ({len(graph.stages)} stages; from nothing about {about:.0f} s)")
    for seed in range(args.seeds):
        run = Run(
            graph=graph,
            directory=out if seed == 0 else out / f"seed-{seed}",
            shared=out.parent / "shared",
            seed=seed,
            force=args.force,
            deadline=deadline,
        )
        if args.seeds > 1:
            say(f"seed {seed}:", bold=True)
        run.execute()
        results.append(json.loads(Path(run.fill(graph.results)).read_text()))
    lines = compare(name, row, results)
    write_json(out / "summary.json", {"row": name, "seeds": list(range(args.seeds)), "metrics": lines})
    if args.seeds == 1:
        print_results(results[0])
    if lines:
        print_comparison(lines)
    first = Run(graph=graph, directory=out, shared=out.parent / "shared", seed=0)
    say(f"{name}: {time.monotonic() - seconds:.0f} s")
    for what, path in (("report", first.fill(graph.report)), ("results", first.fill(graph.results))):
        if Path(path).exists():
            say(f"  {what:<8} {path}")
    return lines


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="list the rows")
    what.add_argument("--row", metavar="NAME", help="run one row")
    what.add_argument("--all", action="store_true", help="run every row that is not open; needs --world")
    parser.add_argument("--world", action="store_true", help="with --all: the rows of the embedded world")
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="seeds 0 … N-1 (default: 1; claims need 3)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: runs/ROW (with --all: runs, a folder a row)"
    )
    parser.add_argument(
        "--time-cap", type=float, metavar="SECONDS",
        help=f"end after this long; the same command goes on from there (with --all: {WORLD_CAP:.0f})",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="with --row: a variable of its graph, e.g. the paths of your own data",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="run finished stages again")
    parser.add_argument(
        "--expected", type=Path, default=ROOT / "configs" / "expected.yaml", metavar="FILE",
        help="the rows (default: configs/expected.yaml)",
    )  # fmt: skip
    args = parser.parse_args()
    if args.all and not args.world:
        parser.error("--all needs --world: rows on your own data are run one at a time, with --row")
    if args.set and not args.row:
        parser.error("--set needs --row: variables belong to one graph")
    args.out = args.out and args.out.resolve()
    args.expected = args.expected.resolve()
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: at least 1")
    return args


def main() -> int:
    """Exit status 0; 1 when a stage failed or a world row left its band; 130 when interrupted."""
    args = parse()
    # A terminated runner ends its stage too (see `stage_run.stream`).
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        os.chdir(ROOT)
        rows = read_rows(args.expected)
        if args.list:
            print_list(rows)
            return 0
        if args.row and args.row not in rows:
            raise Failure(f"no row {args.row!r} in {args.expected}; rows: {', '.join(rows)}")
        ready = [name for name, row in rows.items() if row.get("world") and row.get("status") != "open"]
        names = [args.row] if args.row else ready
        cap = args.time_cap if args.time_cap is not None else (WORLD_CAP if args.all else None)
        deadline = None if cap is None else time.monotonic() + cap
        if cap is not None:
            say(f"time cap: {cap:.0f} s for {', '.join(names)}")
        lines: list[dict[str, Any]] = []
        for name in names:
            default = ROOT / "runs" if args.all else ROOT / "runs" / name
            out = (args.out or default) / name if args.all else args.out or default
            # Commands run in the repository's root; inside it, short paths are good to read and move with it.
            out = Path(os.path.relpath(out, ROOT)) if out.is_relative_to(ROOT) else out
            lines += run_row(name, rows[name], out, args=args, deadline=deadline)
        if len(names) > 1:
            print_comparison(lines)
        wrong = [
            line
            for line in lines
            if rows[line["row"]].get("world") and line["verdict"] in ("OUT OF BAND", "missing")
        ]
        if wrong:
            text = "; ".join(f"{line['row']} {line['metric']}: {line['verdict']}" for line in wrong)
            raise Failure(f"the figures are not those of {args.expected.name}: {text}")
    except Failure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the unfinished stage", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
