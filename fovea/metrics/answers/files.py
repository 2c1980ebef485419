"""Prediction file → pairs (query id, answer), duplicates included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class _Object(list[tuple[str, Any]]):
    """A JSON object as its pairs: a dict would swallow an id that occurs twice."""


def read_predictions(
    path: str | Path, *, id_key: str = "id", answer_key: str = "prediction"
) -> list[tuple[str, Any]]:
    """Pairs (query id, answer) of a prediction file in the file's order.

    Args:
        path: JSON lines of objects; or, if the name ends in `.json`, one object id → answer or one list of
            objects.
        id_key: key of the id in each object, e.g. `data_id` (InfoSeek, OVEN), `question_id` (VQA).
        answer_key: key of the answer, e.g. `pred_entity_id`, `answer`.

    Raises:
        ValueError: the file or a line is not JSON of that form, or lacks a key; it names file and row.
    """
    file = Path(path)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        whole = _parse(text, str(file))
        if isinstance(whole, _Object):
            return list(whole)
        if not isinstance(whole, list):
            raise ValueError(f"{file}: needs an object id → answer or a list of objects, not {whole!r:.60}")
        rows = [(f"{file}, row {number}", row) for number, row in enumerate(whole, 1)]
    else:
        # Not splitlines: that also cuts at U+2028, which JSON allows within a text.
        places = ((f"{file}, line {number}", line) for number, line in enumerate(text.split("\n"), 1))
        rows = [(place, _parse(line, place)) for place, line in places if line.strip()]
    pairs = []
    for place, row in rows:
        fields = dict(row) if isinstance(row, _Object) else {}
        if absent := [key for key in (id_key, answer_key) if key not in fields]:
            raise ValueError(
                f"{place}: {' and '.join(map(repr, absent))} missing (it has {sorted(fields)}); name the "
                "keys with id_key and answer_key"
            )
        pairs.append((str(fields[id_key]), fields[answer_key]))
    return pairs


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_Object)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error})") from error
