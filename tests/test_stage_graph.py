"""Stage graphs as they are written: variables, and the graphs that the repository ships."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def scripts() -> dict[str, ModuleType]:
    """The runner's modules, imported as `python scripts/reproduce.py` finds them."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return {name: importlib.import_module(name) for name in ("reproduce", "stage_graph")}
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_variables(scripts: dict[str, ModuleType]) -> None:
    """The row's variables win over the graph's; a list becomes words; shell syntax stays text."""
    row = {
        "vars": {"extra": ["-x", "a b"], "size": 7},
        "stages": [
            {
                "name": "one",
                "command": "{python} -c pass {extra} --n={size} '$HOME; ls' {dir}",
                "outputs": ["f{size}"],
            }
        ],
    }
    (stage,) = scripts["stage_graph"].read_graph(row).stages
    assert stage.commands == (("{python}", "-c", "pass", "-x", "a b", "--n=7", "$HOME; ls", "{dir}"),)
    assert stage.outputs == ("f7",)


def test_variables_made_from_variables(scripts: dict[str, ModuleType]) -> None:
    """A variable may name earlier ones; `--set` reaches what is made from it; lists become words."""
    row = {
        "vars": {"data": "d x", "images": "{data}/i", "seeded": "{images}-{seed}", "extra": []},
        "stages": [
            {"name": "one", "command": "{python} {images} {seeded} {extra}", "inputs": ["{images}", "a b"],
             "outputs": ["f"]}
        ],
    }  # fmt: skip
    (stage,) = scripts["stage_graph"].read_graph(row).stages
    assert stage.commands == (("{python}", "d x/i", "d x/i-{seed}"),)
    assert stage.inputs == (("d x/i", ("images", "data")), ("a b", ()))
    changed = scripts["reproduce"].with_settings("row", row, ["data=/my data", "extra=-v 'a b'"])
    (stage,) = scripts["stage_graph"].read_graph(changed).stages
    assert stage.commands == (("{python}", "/my data/i", "/my data/i-{seed}", "-v", "a b"),)
    for wrong in ("dta=x", "data"):
        with pytest.raises(
            scripts["stage_graph"].Failure, match="variables of row row: data, images, seeded"
        ):
            scripts["reproduce"].with_settings("row", row, [wrong])


def test_an_unquoted_date_is_text(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    """YAML makes a date object of 2026-11-30; the comparison goes to JSON, after a long run."""
    text = "rows: {r: {graph: g, metrics: {a.b: {ours: 0.5, date: 2026-11-30, band: 0.1}}}}"
    (tmp_path / "expected.yaml").write_text(text)
    row = scripts["reproduce"].read_rows(tmp_path / "expected.yaml")["r"]
    lines = scripts["reproduce"].compare("r", row, [{"a": {"b": 0.55}}])
    assert json.loads(json.dumps(lines))[0]["date"] == "2026-11-30" and lines[0]["verdict"] == "in band"


def test_every_row_is_well_formed(scripts: dict[str, ModuleType]) -> None:
    """configs/expected.yaml parses, and the graph of every row that is not open passes all checks."""
    rows = scripts["reproduce"].read_rows(ROOT / "configs" / "expected.yaml")
    assert {"quickstart", "smoke"} <= set(rows)
    for row in rows.values():
        if row.get("status") != "open":
            assert scripts["stage_graph"].read_graph(row).stages


def test_smoke_is_the_quickstart_in_miniature(scripts: dict[str, ModuleType]) -> None:
    """Same stages, same programs; only words that variables put in differ."""
    rows = scripts["reproduce"].read_rows(ROOT / "configs" / "expected.yaml")
    big, small = (scripts["stage_graph"].read_graph(rows[name]) for name in ("quickstart", "smoke"))
    assert [stage.name for stage in big.stages] == [stage.name for stage in small.stages]
    for left, right in zip(big.stages, small.stages, strict=True):
        assert [words[:3] for words in left.commands] == [words[:3] for words in right.commands]
