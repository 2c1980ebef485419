"""Stage graph → finished stages: run what is missing, keep what is there.

A finished stage leaves a stamp and is skipped next time, as long as its key is the same and its outputs are
there. The key hashes: the commands, every file of this repository that a command names (the script, the
configs), the `inputs:` (a directory by names and sizes), the sources (all of fovea/, lightning_modules/ and
datamodules/, but for fovea/report/, which a stage adds by `code: [fovea/report]`), and the keys of the stages
it builds on. A `shared: true` stage lives in `shared/NAME-HASH` beside the run, so that rows and seeds with
the same command share it; the run's directory holds a link to it. A killed stage starts again in an empty
directory, unless it says `resume: true`.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from stage_graph import PLACEHOLDER, ROOT, Failure, Graph, Stage

SOURCES = ("fovea", "lightning_modules", "datamodules")
NOT_SOURCES = "fovea/report/"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
REDRAW = re.compile(r"\x1b\[\d*[AJK]")


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def hash_files(paths: list[Path]) -> dict[str, str]:
    """Path (relative to the repository where it lies inside) → SHA-256, for files and whole directories."""
    hashes = {}
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
                hashes[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return hashes


def list_sizes(directory: Path) -> dict[str, int]:
    """Name → bytes of every file below a directory that is too large to hash (a data set's photos)."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def hash_sources() -> str:
    """One hash over the sources that every stage depends on."""
    hashes = hash_files([ROOT / name for name in SOURCES])
    return digest({name: value for name, value in hashes.items() if not name.startswith(NOT_SOURCES)})


@dataclass
class Run:
    """One seed of one row: where its stages live, and what they cost."""

    graph: Graph
    directory: Path
    shared: Path
    seed: int
    force: bool = False
    deadline: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    directories: dict[str, Path] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    _command_hashes: dict[str, str] = field(default_factory=dict)

    def execute(self) -> None:
        """Run every stage that is not already there."""
        self._check_inputs()
        (self.directory / ".stages").mkdir(parents=True, exist_ok=True)
        sources = hash_sources()
        for number, stage in enumerate(self.graph.stages, start=1):
            stamp = self._place(stage, sources)
            with lock(stamp.with_suffix(".lock")) as descriptor:
                self._one(stage, stamp, descriptor, f"[{number}/{len(self.graph.stages)}] {stage.name}")
            self._record_seconds()

    def _check_inputs(self) -> None:
        """Name every input that is not there, and the variables that say where it is."""
        problems = []
        for stage in self.graph.stages:
            for path, variables in stage.inputs:
                if (ROOT / path).exists():
                    continue
                text = f"stage {stage.name}: {path} is not there"
                if variables:
                    name, *rest = variables
                    made_from = f", made from {', '.join(rest)}" if rest else ""
                    text += f" (variable {name}{made_from}; give yours: --set {variables[-1]}=PATH)"
                problems.append(text)
        if problems:
            raise Failure("input files are missing:\n" + "\n".join(f"  {text}" for text in problems))

    def fill(self, text: str, stage: Stage | None = None) -> str:
        """Put paths and the seed into a word."""
        values = {"python": sys.executable, "seed": str(self.seed), "run": str(self.directory)}
        values |= {name: str(path) for name, path in self.directories.items()}
        if stage:
            values["dir"] = str(self.directories[stage.name])
        return PLACEHOLDER.sub(lambda match: values[match[1]], text)

    def _place(self, stage: Stage, sources: str) -> Path:
        """Set the stage's key and directory; returns the path of its stamp."""
        # Paths of this machine stay out of the hashes: only the seed is put in.
        commands = [[word.replace("{seed}", str(self.seed)) for word in words] for words in stage.commands]
        own = digest([commands, [self._command_hashes[name] for name in stage.needs]])
        self._command_hashes[stage.name] = own
        words = [
            part for command in stage.commands for word in command for part in {word, word.rpartition("=")[2]}
        ]
        named = [ROOT / word for word in words if not word.startswith("/") and (ROOT / word).is_file()]
        inputs = [path for path, _ in stage.inputs]
        files = hash_files([*named, *(ROOT / path for path in stage.code)])
        files |= hash_files([ROOT / path for path in inputs if (ROOT / path).is_file()])
        sizes = {path: list_sizes(ROOT / path) for path in inputs if (ROOT / path).is_dir()}
        key = [own, list(stage.outputs), files, sources, {name: self.keys[name] for name in stage.needs}]
        self.keys[stage.name] = digest([*key, sizes] if sizes else key)
        if not stage.shared:
            self.directories[stage.name] = self.directory / stage.name
            return self.directory / ".stages" / f"{stage.name}.json"
        place = self.shared / f"{stage.name}-{own[:10]}"
        self.directories[stage.name] = place
        (self.shared / ".stages").mkdir(parents=True, exist_ok=True)
        link = self.directory / stage.name
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            stamp = self.directory / ".stages" / f"{stage.name}.json"
            if not stamp.exists():
                raise Failure(
                    f"{link} exists and was not made by this runner; move it away or choose another --out"
                )
            shutil.rmtree(link)  # of a graph in which this stage was not shared yet
            stamp.unlink()
        link.symlink_to(os.path.relpath(place, self.directory), target_is_directory=True)
        return self.shared / ".stages" / f"{place.name}.json"

    def _one(self, stage: Stage, stamp: Path, descriptor: int, label: str) -> None:
        outputs = [self._output(stage, text) for text in stage.outputs]
        old = json.loads(stamp.read_text()) if stamp.exists() else {}
        same = old.get("key") == self.keys[stage.name] and not self.force
        if same and "finished" in old and all(path.exists() for path in outputs):
            self.seconds[stage.name] = old["seconds"]
            say(f"{label}: finished on {old['finished']} in {old['seconds']:.0f} s, not run again")
            return
        own = self.directories[stage.name]
        if not (same and stage.resume and "finished" not in old):
            if own.exists() and not old:
                raise Failure(
                    f"{own} exists and was not made by this runner; move it away or choose another --out"
                )
            for path in [own, *outputs]:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        own.parent.mkdir(parents=True, exist_ok=True)
        write_json(stamp, {"key": self.keys[stage.name]})
        about = f" (about {stage.about:g} s)" if stage.about else ""
        say(f"{label} — {stage.title}{about}", bold=True)
        log = self.directory / "logs" / f"{stage.name}.log"
        log.parent.mkdir(exist_ok=True)
        start = time.monotonic()
        with log.open("w") as file:
            for words in stage.commands:
                command = [self.fill(word, stage) for word in words]
                file.write(f"$ {shlex.join(command)}\n")
                status = stream(command, file, deadline=self.deadline, keep_open=descriptor)
                if status is None:
                    raise Failure(
                        f"time cap reached in stage {stage.name}; the same command goes on from there"
                    )
                if status:
                    file.flush()
                    tail = "\n".join(f"  | {line}" for line in log.read_text().splitlines()[-25:])
                    raise Failure(
                        f"stage {stage.name} failed (exit status {status}); the end of {log}:\n{tail}"
                    )
        if missing := [str(path) for path in outputs if not path.exists()]:
            raise Failure(
                f"stage {stage.name} ended well but did not write {', '.join(missing)}; its log: {log}"
            )
        self.seconds[stage.name] = round(time.monotonic() - start, 1)
        today = datetime.datetime.now().isoformat(" ", "seconds")
        write_json(
            stamp, {"key": self.keys[stage.name], "seconds": self.seconds[stage.name], "finished": today}
        )
        say(f"{label}: done in {self.seconds[stage.name]:.0f} s")

    def _output(self, stage: Stage, text: str) -> Path:
        """An output's path; a relative one lies in the stage's directory.

        Outputs are deleted before a run, so nothing outside of the run may be named.
        """
        start = Path() if PLACEHOLDER.match(text) else self.directories[stage.name]
        path = Path(os.path.normpath(start / self.fill(text, stage)))
        homes = [self.directories[stage.name], self.directory]
        if not any(path.is_relative_to(home) and (path != home or home == homes[0]) for home in homes):
            raise Failure(
                f"stage {stage.name}: output {path} lies outside of the run's directory {self.directory}"
            )
        return path

    def _record_seconds(self) -> None:
        path = Path(self.fill(self.graph.results))
        if path.is_file():
            write_json(path, json.loads(path.read_text()) | {"seeds": [self.seed], "seconds": self.seconds})


def write_json(path: Path, value: Any) -> None:
    """Write in one step, so that a kill leaves the old file or the new one."""
    writing = path.with_name(f".{path.name}.writing")
    writing.write_text(json.dumps(value, indent=1) + "\n")
    writing.replace(path)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[int]:
    """Hold a stage; the commands inherit the descriptor, so what outlives a killed runner holds on."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting: another process holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield file.fileno()
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def say(text: str, *, bold: bool = False) -> None:
    """One line of the runner's own, told apart from the commands' output where there is a terminal."""
    print(f"\x1b[1m{text}\x1b[0m" if bold and sys.stdout.isatty() else text, flush=True)


def stream(command: list[str], log: TextIO, *, deadline: float | None, keep_open: int) -> int | None:
    """Run one command, its output going to the terminal as it comes and to `log` without colours and redraws.

    On a terminal the command gets a pseudo-terminal, so that its progress bars stay alive.

    Returns:
        The exit status, or None when the deadline (`time.monotonic`) passed and the command was ended.
    """
    if sys.stdout.isatty():
        import pty
        import termios

        reader, writer = pty.openpty()
        termios.tcsetwinsize(writer, termios.tcgetwinsize(sys.stdout.fileno()))
    else:
        reader, writer = os.pipe()
    # Threads of libgomp spin for milliseconds while they wait, which slows training beside another busy
    # process; a short spin costs a quiet machine next to nothing.
    environment = {"GOMP_SPINCOUNT": "2000"} | os.environ | {"PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer,
        start_new_session=True, pass_fds=(keep_open,),
    )  # fmt: skip
    os.close(writer)
    pending = b""
    try:
        while True:
            if deadline is not None and time.monotonic() > deadline:
                return None
            ready, _, _ = select.select([reader], [], [], 0.2)
            if not ready:
                if child.poll() is not None:
                    break  # a grandchild may keep the descriptor open
                continue
            try:
                data = os.read(reader, 65536)
            except OSError:  # how Linux reports the end of a pseudo-terminal
                break
            if not data:
                break
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            *lines, pending = (pending + data).split(b"\n")
            log.writelines(_log_line(line) for line in lines)
        log.write(_log_line(pending) if pending else "")
        return child.wait()
    finally:
        os.close(reader)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _log_line(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip("\r")
    if REDRAW.search(text):
        return ""
    return ANSI.sub("", text.rpartition("\r")[2]) + "\n"
