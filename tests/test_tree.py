"""The whole repository: README's tree equals the disk, nothing machine-bound is tracked, import walls hold.

README.md has a fenced block under the heading `## Layout`. A line of it: two spaces for each level, one or
more names with a single space between them, then, after at least two spaces, what they are for. Folders end
in `/`.

    fovea/                 the method
      types.py tables.py   domain types, canonical tables
      metrics/             retrieval, answers
    README.md NOTICE       …

Every name exists. Every tracked top-level entry is named, but for those that start with a dot. Every file of
fovea/, lightning_modules/, datamodules/ and scripts/ is named, but for `__init__.py` and `py.typed`; a folder
inside them that is named without children stands for all that it holds.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
LISTED = ("fovea", "lightning_modules", "datamodules", "scripts")
TEXT_FREE = {"__init__.py", "py.typed"}
LIGHT_SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.py") if path.name != "train.py")
STAGES = ("retrieve", "what", "where", "reweight")
# Written in two halves, so that this file does not match itself.
MACHINE_BOUND = {
    "machine path": r"(?<![\w.~-])/(?:"
    + "|".join(["ho" + "me", "ro" + "ot", "wo" + "rk", "Us" + "ers"])
    + r")/\w",
    "registry host": r"(?i)pypi\."
    + "|python"
    + "hosted"
    + "|(?:extra-)?index"
    + "-url|find"
    + "-links|/opt"
    + "/pypi",
}


def tracked() -> list[str]:
    """Files of the repository, those not yet added included, ignored ones not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return sorted(name for name in listing.split("\0") if name and (ROOT / name).exists())


def read_tree(readme: str) -> list[str]:
    """Paths of the block under `## Layout`, folders ending in `/`."""
    block = re.search(r"^## Layout\n.*?^```[^\n]*\n(.*?)^```", readme, flags=re.S | re.M)
    assert block, "README.md has no fenced block under the heading `## Layout`"
    paths: list[str] = []
    parents: list[str] = []
    for line in block[1].splitlines():
        if not line.strip():
            continue
        level, rest = divmod(len(line) - len(line.lstrip()), 2)
        assert not rest and level <= len(parents), f"README's layout: indentation of {line!r}"
        names = re.split(r"\s{2,}", line.strip())[0].split()
        paths += ["".join(parents[:level]) + name for name in names]
        parents = [*parents[:level], names[-1]] if names[-1].endswith("/") else parents[:level]
    return paths


def compare(tree: list[str], files: list[str]) -> list[str]:
    """What is wrong with a tree, given the tracked files."""
    folders = {f"{parent}/" for name in files for parent in PurePosixPath(name).parents if parent.name}
    problems = [
        f"{path} is in README's layout but not on disk" for path in tree if path not in {*files, *folders}
    ]
    problems += [
        f"{path} is twice in README's layout" for path in sorted({p for p in tree if tree.count(p) > 1})
    ]
    stand_for_all = {
        folder
        for folder in tree
        if folder.endswith("/")
        and folder.count("/") > 1
        and not any(p.startswith(folder) and p != folder for p in tree)
    }
    for name in files:
        top = name.split("/")[0]
        entry = f"{top}/" if "/" in name else top
        if not top.startswith(".") and entry not in tree:
            problems.append(f"{entry} is not in README's layout")
        if top not in LISTED or PurePosixPath(name).name in TEXT_FREE or name in tree:
            continue
        if not any(name.startswith(folder) for folder in stand_for_all):
            problems.append(f"{name} is not in README's layout")
    return sorted(set(problems))


def test_readme_tree_equals_the_disk() -> None:
    """No entry of README's layout is missing on disk, and nothing on disk is missing there."""
    assert compare(read_tree((ROOT / "README.md").read_text()), tracked()) == []


GOOD = """## Layout

```
fovea/          the method
  types.py      types
  metrics/      all of them
scripts/
  train.py a.py  two on a line
README.md NOTICE
```
"""
FILES = ["fovea/types.py", "fovea/__init__.py", "fovea/metrics/x.py", "scripts/train.py", "scripts/a.py"]
FILES += ["README.md", "NOTICE", ".gitignore"]


@pytest.mark.parametrize(
    ("change", "extra", "problem"),
    [
        (("", ""), [], None),
        (("types.py   ", "typos.py   "), [], "fovea/typos.py is in README's layout but not on disk"),
        (("types.py   ", "typos.py   "), [], "fovea/types.py is not in README's layout"),
        ((" NOTICE", ""), [], "NOTICE is not in README's layout"),
        (("", ""), ["docs/new.md"], "docs/ is not in README's layout"),
        (("", ""), ["scripts/new.py"], "scripts/new.py is not in README's layout"),
        (("", ""), ["fovea/metrics/new.py"], None),
        (
            ("all of them\n", "some\n    x.py\n"),
            ["fovea/metrics/new.py"],
            "fovea/metrics/new.py is not in README's layout",
        ),
        (("a.py  two", "train.py  two"), [], "scripts/train.py is twice in README's layout"),
    ],
)
def test_the_comparison_sees_faults(change: tuple[str, str], extra: list[str], problem: str | None) -> None:
    """Seeded faults: a renamed, a forgotten, a new, a doubled entry are each reported; a good tree is not."""
    problems = compare(read_tree(GOOD.replace(*change)), [*FILES, *extra])
    assert problem in problems if problem else problems == []


@pytest.mark.parametrize("kind", MACHINE_BOUND)
def test_nothing_machine_bound_is_tracked(kind: str) -> None:
    """No tracked text file names a path of somebody's machine or the host of a package registry."""
    found = []
    for name in tracked():
        try:
            lines = (ROOT / name).read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{name}:{i}: {line.strip()[:100]}"
            for i, line in enumerate(lines, 1)
            if re.search(MACHINE_BOUND[kind], line)
        ]
    assert found == []


def python(program: str, *args: str) -> list[str]:
    """Words that a program prints in a fresh interpreter that finds this checkout first."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", start + program, *args], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_fovea_runs_without_lightning() -> None:
    """Every module of fovea, in a fresh interpreter, leaves Lightning and the training code unloaded."""
    program = """
import importlib, pkgutil, fovea
walls = {"lightning", "pytorch_lightning", "lightning_modules", "datamodules"}
for module in pkgutil.walk_packages(fovea.__path__, "fovea."):
    importlib.import_module(module.name)
    for name in sorted(walls & set(sys.modules)):
        print(f"{module.name}->{name}")
        walls.discard(name)
"""
    assert python(program) == []


def test_importing_fovea_is_light() -> None:
    """`import fovea` alone loads neither torch nor numpy nor anything of this kind."""
    program = (
        "import fovea; print(*{'torch', 'numpy', 'transformers', 'PIL', 'spacy', 'faiss'} & set(sys.modules))"
    )
    assert python(program) == []


@pytest.mark.parametrize("script", LIGHT_SCRIPTS)
def test_help_is_light(script: str) -> None:
    """`--help` of a script that does not train loads no heavy library."""
    program = """
import contextlib, io, runpy
sys.path.insert(0, "scripts")
script = sys.argv[1]
sys.argv = [script, "--help"]
with contextlib.redirect_stdout(io.StringIO()):
    with contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
print(*{"torch", "lightning", "transformers", "torchvision", "open_clip", "spacy"} & set(sys.modules))
"""
    assert python(program, f"scripts/{script}") == []


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, at its top or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize(
    ("importers", "banned"),
    [
        ("datamodules/**/*.py", ("lightning_modules",)),
        ("lightning_modules/**/*.py", ("datamodules",)),
        *(
            (f"fovea/{stage}.py", tuple(f"fovea.{s}" for s in (*STAGES, "pipeline") if s != stage))
            for stage in STAGES
        ),
        # The stage runner leaves fovea/report out of the sources that make a stage run again.
        *((f"{folder}/**/*.py", ("fovea.report",)) for folder in ("datamodules", "lightning_modules")),
        ("fovea/[!r]*/**/*.py", ("fovea.report",)),
        ("fovea/*.py", ("fovea.report",)),
    ],
)
def test_import_walls(importers: str, banned: tuple[str, ...]) -> None:
    """Lightning folders and stage files do not import each other; nothing but scripts imports the report."""
    broken = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted(ROOT.glob(importers))
        for name in sorted(imports(path))
        if any(name == wall or name.startswith(f"{wall}.") for wall in banned)
    ]
    assert broken == []
