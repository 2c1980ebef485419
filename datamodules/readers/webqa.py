"""WebQA's public files → canonical tables; the images stay in `imgs.tsv`, each row of them a byte range.

An images row has one split: the first of val, test, train and the rest, one of whose questions names the
image, whatever the question's sort; `fovea.retrieve.corpus` gives an image to every split whose questions
name it. What is held in memory is an image's id, split and caption (about 0.2 GB for all 389,750), never a
file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.doctor import Progress, Report, silent
from datamodules.readers.coco import split_of
from datamodules.readers.lines import binary, sha256
from datamodules.readers.photos import Policy, add_images, note_absent
from datamodules.readers.problems import Problems
from fovea.tables import TableWriter

Questions = Literal["image", "text", "all"]
SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}  # HuLiRAG, 4.1; its division is not published
UNLABELLED = "blind"  # the official test questions, beside a random split that has a `test` of its own
FIRST_IMAGE, ROWS = 30_000_000, 10_000_000  # image ids; an id modulo ROWS is its row in the index
_FACTS = ("img_posFacts", "img_negFacts", "img_Facts")
_TEXTS = ("txt_posFacts", "txt_negFacts", "txt_Facts")


def unquote(text: str) -> str:
    """The text without the one pair of double quotes that WebQA puts around it, and with single spaces."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] == '"':
        text = text[1:-1]
    return " ".join(text.split())


def read(
    tsv: Path,
    lineidx: Path,
    out: Path,
    *,
    train_val: Path | None = None,
    test: Path | None = None,
    questions: Questions = "image",
    official_split: bool = False,
    split_seed: int = 0,
    only_candidates: bool = False,
    policy: Policy = "skip",
    workers: int = 1,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Report:
    """Write the canonical tables of WebQA; every image is decoded once on the way.

    Args:
        tsv: `imgs.tsv`, rows of image id, tab, base64 of the image file.
        lineidx: `imgs.lineidx`, the byte offset of each row; row `image_id % 10,000,000` is the image's.
        out: directory of the tables.
        train_val: `WebQA_train_val.json`.
        test: `WebQA_test.json`, whose facts are not labelled: they become candidates, nothing is gold.
        questions: `image` takes those that images answer, `text` the others, `all` both.
        official_split: take the files' own `split`; otherwise train_val is divided at random 8:1:1, and the
            official test questions form the split `blind`.
        split_seed: of that division; a question's split depends on seed and Guid alone.
        only_candidates: leave out the images that only questions of the other sort name; the corpus `full` is
            then no larger than `candidates`.
        policy: `skip` leaves missing and unreadable images out and lists them; `fail` raises.
        workers: processes that decode.
        overwrite: replace tables that are already there.
        progress: wraps the pass over the images.

    Raises:
        ValueError: the files contradict themselves or each other (above all an index of another TSV); all
            problems at once.
    """
    problems, report = Problems(), Report()
    files = {"--train-val": train_val, "--test": test}
    if not any(files.values()):
        problems.add("no question file: pass --train-val or --test")
    for flag, path in (("--tsv", tsv), ("--lineidx", lineidx), *files.items()):
        if path is not None and not path.is_file():
            problems.add(f"{flag} {path}: no such file")
    problems.raise_if_any("WebQA")
    with TableWriter(out, overwrite=overwrite) as writer:
        tables = _Questions(writer, report, problems, questions, only_candidates)
        for flag, path in files.items():
            for guid, row in _objects(path, flag, problems) if path is not None else ():
                labelled = flag == "--train-val"
                if official_split:
                    split = row.get("split")
                else:
                    split = split_of(guid, SHARES, split_seed) if labelled else UNLABELLED
                tables.add(path, guid, row, split)
        if not writer.counts["queries"]:
            problems.add(f"--questions {questions}: no such question in the files")
        problems.raise_if_any("WebQA")
        if tables.left_out:
            report.notes.append(f"{tables.left_out:,} questions of the other sort left out (--questions)")
        rows = _image_rows(tsv, lineidx, tables.images)
        add_images(
            writer, rows, len(tables.images), report, problems,
            where=f"--tsv {tsv}", policy=policy, workers=workers, progress=progress,
        )  # fmt: skip
        problems.raise_if_any("WebQA")
        note_absent(report, tables.golds)
        sources = [path for path in (train_val, test, lineidx) if path is not None]
        division: dict[str, Any] = {"official_split": official_split}
        if not official_split:
            division |= {"split_seed": split_seed, "splits": SHARES}
        writer.finish(
            {"reader": "webqa", "sources": {str(path): sha256(path) for path in sources}}
            | {"images": str(tsv.absolute()), "images_bytes": tsv.stat().st_size, "questions": questions}
            | {"split_ids": {split: sorted(own) for split, own in tables.golds.items()}}
            | {"doctor": report.to_json()}
            | division
        )
    return report


def _objects(path: Path, flag: str, problems: Problems) -> Iterator[tuple[str, dict[str, Any]]]:
    """(guid, row) of the one big object that the file is, parsed as it is read."""
    import ijson

    number = 0
    try:
        with binary(path) as file:
            for guid, row in ijson.kvitems(file, "", use_float=True):
                number += 1
                if isinstance(row, dict):
                    yield guid, row
                else:
                    problems.add(f"{path}: every value must be an object", f"{guid}: {type(row).__name__}")
    except (ijson.JSONError, OSError, EOFError) as error:
        problems.add(f"{flag} {path}: no sound JSON after {number:,} questions ({error}); fetch it again")
        return
    if not number:
        problems.add(f"{flag} {path}: must be one object, Guid → question")


class _Questions:
    """Writes queries and passages as they come.

    Attributes:
        golds: split → query id → gold image ids.
        images: image id → (split, caption).
        left_out: how many questions of the other sort there were.
    """

    def __init__(
        self,
        writer: TableWriter,
        report: Report,
        problems: Problems,
        questions: Questions,
        only_candidates: bool,
    ) -> None:
        self.golds: dict[str, dict[str, list[str]]] = {}
        self.images: dict[int, tuple[str, str]] = {}
        self.left_out = 0
        self._writer, self._report, self._problems = writer, report, problems
        self._questions, self._only_candidates = questions, only_candidates
        # Passages whose id does not start with their question's Guid could come again: id → hash of the text.
        self._shared: dict[str, bytes] = {}

    def add(self, path: Path, guid: str, row: dict[str, Any], split: Any) -> None:
        """Write one question; what is wrong with it becomes a problem."""
        try:
            if not isinstance(split, str) or not split:
                raise ValueError(f"split {split!r} must be a text")
            if any(guid in own for own in self.golds.values()):
                raise ValueError("this Guid occurs twice")
            self._add(guid, row, split)
        except (KeyError, TypeError, ValueError) as error:
            told = f"key {error} is missing" if isinstance(error, KeyError) else error
            rule = f"{path}: a value must be a WebQA question (Q, A, Qcate, split, img_posFacts, …)"
            self._problems.add(rule, f"{guid}: {told}")

    def _add(self, guid: str, row: dict[str, Any], split: str) -> None:
        if not any(key in row for key in _FACTS + _TEXTS):
            raise ValueError(f"it has none of {', '.join(_FACTS + _TEXTS)}")
        kind = row.get("Qcate") or "question"
        labelled = "img_posFacts" in row or "txt_posFacts" in row
        by_image = bool(row.get("img_posFacts")) if labelled else kind != "text"
        wanted = self._questions == "all" or by_image == (self._questions == "image")
        named = [(_image_id(fact), fact) for key in _FACTS for fact in row.get(key) or ()]
        if wanted or not self._only_candidates:
            self._name_images(named, split)
        if not wanted:
            self.left_out += 1
            return
        gold = [str(_image_id(fact)) for fact in row.get("img_posFacts") or ()]
        self._add_passages(guid, [fact for key in _TEXTS for fact in row.get(key) or ()])
        self._writer.add(
            "queries",
            id=guid,
            text=unquote(row["Q"]),
            answers=_texts(row.get("A")),
            keywords=_texts(row.get("Keywords_A")),
            gold_image_ids=list(dict.fromkeys(gold)),
            gold_passage_ids=[str(fact["snippet_id"]) for fact in row.get("txt_posFacts") or ()],
            # Sorted: the file's order puts the gold ones first, and a tie would find them.
            candidate_image_ids=[str(image_id) for image_id in sorted({image_id for image_id, _ in named})],
            split=split,
            kind=kind,
        )
        self._report.queries.setdefault(split, Counter())[kind] += 1
        self.golds.setdefault(split, {})[guid] = gold

    def _name_images(self, named: list[tuple[int, dict[str, Any]]], split: str) -> None:
        for image_id, fact in named:
            before = self.images.get(image_id)
            if before is None:
                caption = " ".join(str(fact.get("caption") or fact.get("title") or "").split())
                self.images[image_id] = (split, caption)
            elif _order(split) < _order(before[0]):
                self.images[image_id] = (split, before[1])

    def _add_passages(self, guid: str, facts: list[dict[str, Any]]) -> None:
        own = set()
        for fact in facts:
            name, text = str(fact["snippet_id"]), " ".join(str(fact["fact"]).split())
            if name in own:
                raise ValueError(f"snippet_id {name} occurs twice")
            own.add(name)
            if not name.startswith(guid):
                content = blake2b(text.encode(), digest_size=8).digest()
                if name in self._shared and self._shared[name] != content:
                    raise ValueError(f"snippet_id {name} names two different facts")
                if name in self._shared:
                    continue
                self._shared[name] = content
            title = str(fact.get("title") or "")
            self._writer.add("passages", id=name, title=title, text=text, source="webqa")


def _image_id(fact: Mapping[str, Any]) -> int:
    image_id = int(fact["image_id"])
    if not FIRST_IMAGE <= image_id < FIRST_IMAGE + ROWS:
        raise ValueError(
            f"image_id {image_id:,} must be from {FIRST_IMAGE:,} to {FIRST_IMAGE + ROWS - 1:,} (ids from "
            "40,000,000 belong to the feature files)"
        )
    return image_id


def _texts(value: Any) -> list[str]:
    """A text or a list of texts, absent in test files → texts without their quotes."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [text for text in map(unquote, values) if text]


def _order(split: str) -> int:
    return {"val": 0, "test": 1, "train": 2}.get(split, 3)


def _image_rows(tsv: Path, lineidx: Path, images: Mapping[int, tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Rows of the named images in the order of the TSV; the index must be that of this TSV."""
    try:
        offsets = np.array(lineidx.read_text().split(), np.int64)
    except ValueError as error:
        raise ValueError(f"--lineidx {lineidx}: each line must be a byte offset ({error})") from error
    size = tsv.stat().st_size
    ends = np.append(offsets[1:], size)
    with open(tsv, "rb") as file:
        for image_id in sorted(images):
            split, caption = images[image_id]
            row = {"id": str(image_id), "path": str(tsv.absolute()), "split": split, "source": "webqa"}
            row |= {"caption": caption}
            number = image_id % ROWS
            if number >= len(offsets):
                reason = f"{lineidx.name} has only {len(offsets):,} rows, the image's is {number:,}"
                yield row | {"state": "missing", "reason": reason}
                continue
            start, end = int(offsets[number]), int(min(ends[number], size))
            if start >= size:
                reason = f"{tsv.name} ends at byte {size:,}, the image's row starts at {start:,}"
                yield row | {"state": "missing", "reason": reason}
                continue
            file.seek(start)
            found, tab, _ = file.read(32).partition(b"\t")
            if not tab or found != str(image_id).encode() or end <= start:
                raise ValueError(
                    f"--lineidx {lineidx} is not the index of --tsv {tsv}: row {number:,} should start with "
                    f"{image_id} at byte {start:,} and end at {end:,}, but {found[:24]!r} is there; fetch "
                    "both files again, or give the two that belong together"
                )
            start += len(found) + 1
            file.seek(max(start, end - 2))
            end -= len(re.search(rb"[\r\n]*$", file.read(min(2, end - start)))[0])  # type: ignore[index]
            if end <= start:
                yield row | {"state": "missing", "reason": "its row holds no image"}
                continue
            yield row | {"offset": start, "size": end - start, "encoding": "base64"}
