"""The stage runner: what is run, what is skipped, what is refused, what the table says."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
# Appends an x to the file that its first argument names.
COUNT = (
    "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.parent.mkdir(parents=True, exist_ok=True);"
    " p.open('a').write('x')"
)


@pytest.fixture(scope="module")
def scripts() -> dict[str, ModuleType]:
    """The runner's modules, imported as `python scripts/reproduce.py` finds them."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return {name: importlib.import_module(name) for name in ("reproduce", "stage_graph", "stage_run")}
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A world row whose stages are one-line programs: `count` files tell how often each one ran."""
    stages: list[dict[str, Any]] = [
        {
            "name": "world",
            "title": "make a world",
            "shared": True,
            "commands": [
                ["{python}", "-c", COUNT, str(tmp_path / "count-world")],
                ["{python}", "-c", COUNT, "{dir}/tables/manifest.json"],
            ],
            "outputs": ["tables/manifest.json"],
        },
        {
            "name": "train",
            "title": "train on it",
            "about": 1,
            "command": [
                "{python}",
                "-c",
                COUNT + "; print('step', sys.argv[2])",
                "{dir}/model",
                "{world}",
                "{seed}",
            ],
            "outputs": ["model"],
        },
        {
            "name": "evaluate",
            "title": "score it",
            "needs": ["train"],
            "command": [
                "{python}",
                "-c",
                "import json, sys; score = {'recall@1': .4 + .02 * int(sys.argv[2])};"
                " json.dump({'retrieval': {'global': score}}, open(sys.argv[1], 'w'))",
                "{run}/results.json",
                "{seed}",
            ],
            "outputs": ["{run}/results.json"],
        },
    ]
    metric = {"ours": 0.4, "spread": 0.01, "date": "2026-01-01", "band": 0.05}
    row = {"title": "t", "world": True, "stages": stages, "metrics": {"retrieval.global.recall@1": metric}}
    path = tmp_path / "expected.yaml"
    path.write_text(yaml.safe_dump({"rows": {"row": row}}))
    return path


def edit(path: Path, change: Any) -> None:
    """Apply `change` to the only row of an expected.yaml."""
    content = yaml.safe_load(path.read_text())
    change(content["rows"]["row"])
    path.write_text(yaml.safe_dump(content))


def reproduce(rows: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the row in a process of its own, as a user does."""
    command = [sys.executable, "scripts/reproduce.py", "--row", "row", "--expected", str(rows)]
    command += ["--out", str(rows.parent / "runs" / "row"), *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_runs_once_then_skips_then_follows_a_change(rows: Path) -> None:
    """A finished stage is skipped; a changed command runs its stage and what builds on it, nothing before it.

    Also: progress header and elapsed time, child output in terminal and log, seconds and seeds in results,
    the shared stage linked into the run, the paths at the end.
    """
    run = rows.parent / "runs" / "row"
    first = reproduce(rows)
    assert first.returncode == 0, first.stderr
    assert "[2/3] train — train on it (about 1 s)" in first.stdout
    assert "[2/3] train: done in" in first.stdout
    assert "step " in first.stdout and "step " in (run / "logs" / "train.log").read_text()
    assert str(run / "results.json") in first.stdout and "in band" in first.stdout
    results = json.loads((run / "results.json").read_text())
    assert results["seeds"] == [0] and set(results["seconds"]) == {"world", "train", "evaluate"}
    assert (run / "world").is_symlink() and (run / "world" / "tables" / "manifest.json").is_file()

    second = reproduce(rows)
    assert second.returncode == 0 and second.stdout.count("not run again") == 3
    assert (run / "train" / "model").read_text() == "x"

    edit(rows, lambda row: row["stages"][1]["command"].append("--more"))
    third = reproduce(rows)
    assert third.returncode == 0 and third.stdout.count("not run again") == 1
    assert (run / "train" / "model").read_text() == "x", (
        "the old outputs are cleared before a stage runs again"
    )
    assert (rows.parent / "count-world").read_text() == "x"

    edit(rows, lambda row: row["stages"][1].update(shared=True))
    assert reproduce(rows).returncode == 0
    assert (run / "train").is_symlink(), "a stage that became shared leaves its old place"

    assert reproduce(rows, "--force").returncode == 0
    assert (rows.parent / "count-world").read_text() == "xx"


def test_seeds_share_what_does_not_depend_on_them(rows: Path) -> None:
    """Three seeds of recall .40, .42, .44: mean .42, sample spread .02; the shared world is made once."""
    done = reproduce(rows, "--seeds", "3")
    assert done.returncode == 0, done.stderr
    (line,) = json.loads((rows.parent / "runs" / "row" / "summary.json").read_text())["metrics"]
    assert line["measured"] == pytest.approx(0.42) and line["measured_spread"] == pytest.approx(0.02)
    assert line["difference"] == pytest.approx(0.02) and line["verdict"] == "in band"
    assert (rows.parent / "count-world").read_text() == "x"


@pytest.mark.parametrize(
    ("metric", "path", "verdict", "status"),
    [
        ({"ours": 0.3, "date": "d", "band": 0.05}, "retrieval.global.recall@1", "OUT OF BAND", 1),
        ({"ours": 0.3, "date": "d", "band": 0.05}, "retrieval.global.recall@9", "missing", 1),
        ({"paper": 0.9}, "retrieval.global.recall@1", "paper", 0),
        ({}, "retrieval.global.recall@1", "first measurement", 0),
    ],
)
def test_only_a_band_is_judged(
    rows: Path, metric: dict[str, Any], path: str, verdict: str, status: int
) -> None:
    """The exit status follows our own band; the paper's value is shown, not judged."""
    edit(rows, lambda row: row.update(metrics={path: metric}))
    done = reproduce(rows)
    assert done.returncode == status
    (line,) = json.loads((rows.parent / "runs" / "row" / "summary.json").read_text())["metrics"]
    assert line["verdict"] == verdict
    assert (path in done.stderr) == bool(status)


def test_failure_shows_the_end_of_the_log_and_resumes_there(rows: Path) -> None:
    """A failing stage shows its last lines and its log's path, status 1; the next run starts from it."""
    good = yaml.safe_load(rows.read_text())["rows"]["row"]["stages"][1]["command"]
    crash = ["{python}", "-c", "print('first words'); raise SystemExit('no such weights')"]
    edit(rows, lambda row: row["stages"][1].update(command=crash))
    failed = reproduce(rows)
    assert failed.returncode == 1
    assert "stage train failed (exit status 1)" in failed.stderr and "  | no such weights" in failed.stderr
    assert "logs/train.log" in failed.stderr
    edit(rows, lambda row: row["stages"][1].update(command=good))
    again = reproduce(rows)
    assert again.returncode == 0 and again.stdout.count("not run again") == 1


def test_missing_output_is_an_error(rows: Path) -> None:
    """A stage that ends well without its output is not taken for finished."""
    edit(rows, lambda row: row["stages"][1].update(outputs=["other"]))
    done = reproduce(rows)
    assert done.returncode == 1 and "did not write" in done.stderr and "train/other" in done.stderr


@pytest.mark.parametrize("ending", ["cap", "kill"])
def test_unfinished_stage_starts_again(rows: Path, ending: str) -> None:
    """After the time cap or SIGKILL, the finished stages stand and the unfinished one starts clean."""
    slow = [
        "{python}",
        "-c",
        COUNT + "; import time; print('begun', flush=True); time.sleep(60)",
        "{dir}/half",
    ]
    good = yaml.safe_load(rows.read_text())["rows"]["row"]["stages"][1]["command"]
    edit(rows, lambda row: row["stages"][1].update(command=slow))
    half = rows.parent / "runs" / "row" / "train" / "half"
    if ending == "cap":
        start = time.monotonic()
        done = reproduce(rows, "--time-cap", "1.5")
        assert done.returncode == 1 and "time cap reached in stage train" in done.stderr
        assert time.monotonic() - start < 20
    else:
        command = [sys.executable, "scripts/reproduce.py", "--row", "row", "--expected", str(rows)]
        command += ["--out", str(half.parents[1])]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as runner:
            assert runner.stdout is not None
            while "begun" not in runner.stdout.readline():
                pass
            orphans = [
                int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent(int(pid)) == runner.pid
            ]
            runner.send_signal(signal.SIGKILL)
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
    assert half.exists()
    edit(rows, lambda row: row["stages"][1].update(command=good))
    again = reproduce(rows)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("not run again") == 1 and not half.exists()


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def test_resumable_stage_keeps_its_directory(rows: Path) -> None:
    """`resume: true` hands a killed stage what it had written (a mask store goes on from there)."""
    code = COUNT + "; raise SystemExit(len(p.read_text()) < 2)"
    edit(
        rows,
        lambda row: row["stages"][1].update(command=["{python}", "-c", code, "{dir}/model"], resume=True),
    )
    assert reproduce(rows).returncode == 1
    assert reproduce(rows).returncode == 0
    assert (rows.parent / "runs" / "row" / "train" / "model").read_text() == "xx"


def test_progress_bars_stay_alive_on_a_terminal(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    """With a terminal the child sees one as well; its log holds the text without colours and redraws."""
    code = "import sys; assert sys.stdout.isatty(); print('\\x1b[31mred\\x1b[0m\\n1%\\r\\x1b[2K2%\\nend')"
    program = (
        "import sys, pathlib, stage_run\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r}).open('w')\n"
        f"sys.exit(stage_run.stream([sys.executable, '-c', {code!r}], log, deadline=None, keep_open=2))"
    )
    import pty

    master, slave = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "scripts", stdout=slave, stderr=slave, timeout=30
    )
    os.close(slave)
    shown = os.read(master, 4096).decode()
    os.close(master)
    assert done.returncode == 0 and "\x1b[31mred" in shown and "2%" in shown
    assert (tmp_path / "log").read_text() == "red\nend\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[1].update(comand="x"), "stage train: unknown keys ['comand']"),
        (
            lambda s: s[1]["command"].append("{later}"),
            "stage train: {later} is no variable and no earlier stage",
        ),
        (lambda s: s[1]["command"].append("{evaluate}"), "{evaluate} is no variable and no earlier stage"),
        (lambda s: s[1]["command"].append("scripts/none.py"), "stage train: scripts/none.py does not exist"),
        (lambda s: s[1]["command"].append("--config=configs/none.yaml"), "configs/none.yaml does not exist"),
        (lambda s: s[1].update(outputs=[]), "stage train: no outputs"),
        (lambda s: s[1].update(name="world"), "stage world: the name is taken"),
        (lambda s: s[1].update(name="seed"), "stage seed: the name is taken"),
        (lambda s: s[0]["commands"][0].append("{run}"), "stage world: is shared and may not use {run}"),
        (lambda s: s[2].update(shared=True), "stage evaluate: is shared but builds on train, which is not"),
    ],
)
def test_faulty_graph_is_refused_before_anything_runs(
    scripts: dict[str, ModuleType], rows: Path, change: Any, message: str
) -> None:
    """A fault of a graph is named together with its stage."""
    row = yaml.safe_load(rows.read_text())["rows"]["row"]
    change(row["stages"])
    with pytest.raises(scripts["stage_graph"].Failure, match="expected.yaml:") as error:
        scripts["stage_graph"].read_graph(row)
    assert message in str(error.value)


def test_output_outside_of_the_run_is_refused(rows: Path) -> None:
    """Outputs are deleted before a run, so `..` and absolute paths elsewhere must not pass."""
    for output in ("../../../elsewhere", "/etc/hostname", "{run}"):
        edit(rows, lambda row, output=output: row["stages"][1].update(outputs=[output]))
        done = reproduce(rows)
        assert done.returncode == 1 and "outside of the run's directory" in done.stderr


def test_a_directory_of_someone_else_is_not_deleted(rows: Path) -> None:
    """A stage never clears a directory that it did not make."""
    precious = rows.parent / "runs" / "row" / "train" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    done = reproduce(rows)
    assert done.returncode == 1 and "was not made by this runner" in done.stderr
    assert precious.read_text() == "years of work"


def test_missing_inputs_end_the_run_before_its_first_stage(rows: Path, tmp_path: Path) -> None:
    """All are named, with their variable; nothing has run. `--set` mends it; the files are watched."""
    data = tmp_path / "data"

    def change(row: dict[str, Any]) -> None:
        row["vars"] = {"data": "nowhere"}
        row["stages"][1]["inputs"] = ["{data}"]
        row["stages"][2]["inputs"] = ["{data}/list.json", "gone.txt"]

    edit(rows, change)
    done = reproduce(rows)
    assert done.returncode == 1 and not (rows.parent / "count-world").exists()
    assert "stage train: nowhere is not there (variable data; give yours: --set data=PATH)" in done.stderr
    assert "stage evaluate: nowhere/list.json is not there" in done.stderr
    assert "stage evaluate: gone.txt is not there\n" in done.stderr
    edit(rows, lambda row: row["stages"][2]["inputs"].pop())
    data.mkdir()
    (data / "list.json").write_text("1")
    assert reproduce(rows, "--set", f"data={data}").returncode == 0
    assert reproduce(rows, "--set", f"data={data}").stdout.count("not run again") == 3
    (data / "list.json").write_text("2")  # of the same size: train knows the folder by names and sizes
    assert reproduce(rows, "--set", f"data={data}").stdout.count("not run again") == 2
    (data / "photo").write_text("x")
    assert reproduce(rows, "--set", f"data={data}").stdout.count("not run again") == 1


def test_a_changed_source_or_config_changes_the_key(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources, files that the command names (also behind `=`) and inputs are in the key; the rest is not."""
    run_module = scripts["stage_run"]
    monkeypatch.setattr(run_module, "ROOT", tmp_path)
    inside = ("fovea/a.py", "scripts/train.py", "c.yaml", "d.yaml", "in.txt")
    outside = ("fovea/report/page.py", "scripts/evaluate.py")
    for name in inside + outside:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    row = {
        "stages": [
            {
                "name": "one",
                "command": "{python} scripts/train.py -c c.yaml --d=d.yaml",
                "inputs": ["in.txt"],
                "outputs": ["x"],
            }
        ]
    }

    def key() -> str:
        run = run_module.Run(
            scripts["stage_graph"].read_graph(row), tmp_path / "run", tmp_path / "shared", seed=0
        )
        run._place(run.graph.stages[0], run_module.hash_sources())
        return str(run.keys["one"])

    before = key()
    assert key() == before
    for name in inside:
        (tmp_path / name).write_text("2")
        assert key() != before, name
        (tmp_path / name).write_text("1")
    for name in outside:
        (tmp_path / name).write_text("2")
        assert key() == before, name


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--all"], "--all needs --world"),
        (["--row", "nope"], "no row 'nope'"),
        (["--row", "hulirag-table4-webqa"], "is open: its code is still to come"),
        (["--row", "smoke", "--seeds", "0"], "at least 1"),
    ],
)
def test_command_line_mistakes(args: list[str], message: str) -> None:
    """A mistake ends at once, non-zero, with its reason."""
    done = subprocess.run(
        [sys.executable, "scripts/reproduce.py", *args], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0 and message in done.stderr
