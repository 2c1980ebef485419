"""YAML → stage graph: what runs in which order, checked before anything starts.

A graph (`configs/quickstart/stages.yaml`) lists stages in order. A command is a string or an argv list with
placeholders: `{python}`, `{seed}`, `{run}` (the run's directory), `{dir}` (the stage's own directory) and
`{NAME}`, the directory of stage NAME or an entry of `vars:` (a word that is nothing but `{NAME}` of a list is
replaced by its items). There is no shell. Naming a stage makes it a need; `needs:` adds those that no
command names. A graph may extend another one and override its `vars:`; a row of expected.yaml may override
them again, and `reproduce.py --set NAME=VALUE` has the last word. A variable may name others. `inputs:` are
files and directories from outside, all of which must be there before the first stage starts.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEYS = set("name title command commands needs outputs inputs code about shared resume".split())
RESERVED = {"python", "seed", "run", "dir"}
PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w-]*)\}")


class Failure(Exception):
    """Ends the run with a message and exit status 1."""


@dataclass(frozen=True)
class Stage:
    """One node of a graph.

    `commands` hold placeholders, `about` is the expected wall-clock in seconds, `inputs` are paths (relative
    ones to the repository) with the variables that each is made from.
    """

    name: str
    title: str
    commands: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...]
    outputs: tuple[str, ...]
    inputs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    code: tuple[str, ...] = ()
    about: float | None = None
    shared: bool = False
    resume: bool = False


@dataclass(frozen=True)
class Graph:
    """Stages in an order in which each one finds what it needs, with variables already put in."""

    stages: tuple[Stage, ...]
    results: str
    report: str


def read_yaml(path: Path) -> Any:
    """A YAML file, its path in the error when it is missing or malformed."""
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise Failure(f"{path}: no such file") from error
    except yaml.YAMLError as error:
        raise Failure(f"{path}: not valid YAML: {error}") from error


def read_variables(row: dict[str, Any]) -> dict[str, Any]:
    """The variables of a row's graph with the row's values, as they are written."""
    return _read_spec(row)[2]


def _read_spec(row: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A row's file name, its graph (from the file, or inline), and variables, the row's last."""
    spec: dict[str, Any] = dict(row)
    where = "expected.yaml"
    variables: dict[str, Any] = {}
    if "graph" in row:
        where = row["graph"]
        spec = read_yaml(ROOT / where)
        if "extends" in spec:
            base = read_yaml(ROOT / spec["extends"])
            variables |= base.get("vars", {})
            spec = base | spec
        variables |= spec.get("vars", {})
    return where, spec, variables | row.get("vars", {})


def read_graph(row: dict[str, Any]) -> Graph:
    """The stage graph of a row, checked."""
    where, spec, variables = _read_spec(row)
    origins = _resolve(variables)
    problems: list[str] = []
    stages: list[Stage] = []
    about = spec.get("about", {})  # stage → seconds, for a graph that extends a larger one
    for entry in spec.get("stages", []):
        if entry.get("name") in about:
            entry = entry | {"about": about[entry["name"]]}
        names = {stage.name for stage in stages}
        stages.append(
            _stage(entry, variables, origins, earlier={s.name: s for s in stages}, problems=problems)
        )
        if stages[-1].name in names | RESERVED | set(variables):
            problems.append(
                f"stage {stages[-1].name}: the name is taken (by a stage, a variable or a placeholder)"
            )
    if not stages:
        problems.append("no stages")
    if problems:
        raise Failure("\n".join([f"{where}:", *(f"  {problem}" for problem in problems)]))
    return Graph(
        tuple(stages), spec.get("results", "{run}/results.json"), spec.get("report", "{run}/report.html")
    )


def _resolve(variables: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Put variables into those after them, in place; returns name → itself and what it is made from."""
    origins: dict[str, tuple[str, ...]] = {}
    for name, value in variables.items():
        found = PLACEHOLDER.findall(value) if isinstance(value, str) else []
        made_from = [other for part in found for other in origins.get(part, ())]
        if made_from:
            variables[name] = _expand([value], {part: variables[part] for part in found if part in origins})[
                0
            ]
        origins[name] = tuple(dict.fromkeys([name, *made_from]))
    return origins


def _stage(
    entry: dict[str, Any],
    variables: dict[str, Any],
    origins: dict[str, tuple[str, ...]],
    *,
    earlier: dict[str, Stage],
    problems: list[str],
) -> Stage:
    name = str(entry.get("name", "?"))
    if unknown := set(entry) - KEYS:
        problems.append(f"stage {name}: unknown keys {sorted(unknown)}")
    raw = entry.get("commands") or [entry.get("command") or ""]
    commands = tuple(tuple(_expand(command, variables)) for command in raw)
    outputs = tuple(text for output in entry.get("outputs", ()) for text in _expand([output], variables))
    inputs = tuple(
        (_expand([path], variables)[0], sum((origins.get(v, ()) for v in PLACEHOLDER.findall(path)), ()))
        for path in entry.get("inputs", ())
    )
    found = {
        match for text in [*sum(commands, ()), *outputs] for match in PLACEHOLDER.findall(text)
    } - RESERVED
    needs = tuple(dict.fromkeys([*entry.get("needs", ()), *sorted(found)]))
    shared = bool(entry.get("shared", False))
    for other in needs:
        if other not in earlier:
            problems.append(f"stage {name}: {{{other}}} is no variable and no earlier stage")
        elif shared and not earlier[other].shared:
            problems.append(f"stage {name}: is shared but builds on {other}, which is not")
    if shared and any("{run}" in text for text in [*sum(commands, ()), *outputs]):
        problems.append(f"stage {name}: is shared and may not use {{run}}; write to {{dir}}")
    if not outputs:
        problems.append(f"stage {name}: no outputs; name at least one file that it leaves")
    for words in commands:
        if not words:
            problems.append(f"stage {name}: empty command")
        for word in words:
            for part in {word, word.rpartition("=")[2]}:
                if part.startswith(("scripts/", "configs/")) and not (ROOT / part).exists():
                    problems.append(f"stage {name}: {part} does not exist")
    return Stage(
        name=name,
        title=str(entry.get("title", "")),
        commands=commands,
        needs=needs,
        outputs=outputs,
        inputs=inputs,
        code=tuple(entry.get("code", ())),
        about=entry.get("about"),
        shared=shared,
        resume=bool(entry.get("resume", False)),
    )


def _expand(command: str | list[Any], variables: dict[str, Any]) -> list[str]:
    """Words of a command with the graph's variables put in; a list variable becomes several words."""
    words: list[str] = []
    for word in shlex.split(command) if isinstance(command, str) else map(str, command):
        whole = PLACEHOLDER.fullmatch(word)
        if whole and isinstance(variables.get(whole[1]), list):
            words += map(str, variables[whole[1]])
        else:
            words.append(PLACEHOLDER.sub(lambda m: str(variables[m[1]]) if m[1] in variables else m[0], word))
    return words
