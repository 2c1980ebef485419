"""MultimodalQA's public files → canonical tables: image questions with their candidates and gold images.

Which split does an image belong to? Its row has one: the first of the splits, in the order given, one of
whose questions names it, whatever the question's type. Order evaluation splits first (dev, test, train: the
default), so that their galleries are whole; training finds its images through the questions. The corpora of a
split S (`fovea.retrieve.corpus`): `gold`, the images that answer S's questions; `candidates`, the union of
their candidate lists; `full`, all images that any question of S names, also those of types left out here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.doctor import Progress, Report, silent
from datamodules.readers.lines import json_lines, sha256
from datamodules.readers.photos import Folder, Policy, add_images, inside, note_absent
from datamodules.readers.problems import Problems
from fovea.tables import TableWriter


def read(
    images: Path,
    image_list: Path,
    questions: Mapping[str, Path],
    out: Path,
    *,
    types: Sequence[str] = ("ImageQ",),
    only_candidates: bool = False,
    policy: Policy = "skip",
    workers: int = 1,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Report:
    """Write the canonical tables of MultimodalQA; every image is decoded once on the way.

    Args:
        images: folder of the image files (`final_dataset_images`).
        image_list: `MMQA_images.jsonl`, plain or gzipped.
        questions: split → `MMQA_<split>.jsonl`, plain or gzipped; the order decides on shared images.
        out: directory of the tables.
        types: question types to take (`metadata.type`); lines without one, as those of the test file, are
            taken as well. `all` takes every type.
        only_candidates: leave out the images that only questions of other types name; the corpus `full` is
            then no larger than `candidates`.
        policy: `skip` leaves missing and unreadable images out and lists them; `fail` raises.
        workers: processes that decode.
        overwrite: replace tables that are already there.
        progress: wraps the pass over the images.

    Raises:
        ValueError: the files contradict themselves or each other; all problems at once.
    """
    problems, report = Problems(), Report()
    if not images.is_dir():
        problems.add(f"--images {images}: no such folder")
    if not questions:
        problems.add("no question file: pass --dev, --test or --train")
    with TableWriter(out, overwrite=overwrite) as writer:
        owner: dict[str, str] = {}
        golds: dict[str, dict[str, list[str]]] = {}
        for split, path in questions.items():
            golds[split] = {}
            _add_questions(writer, report, problems, path, split, types, only_candidates, owner, golds)
        if questions and not writer.counts["queries"]:
            problems.add(f"--types {','.join(types)}: no question of that type in the files")
        problems.raise_if_any("MultimodalQA")
        folder = Folder(images)
        rows = _image_rows(image_list, folder, owner, problems, report)
        add_images(
            writer, rows, len(owner), report, problems,
            where=f"--images {images}", policy=policy, workers=workers, progress=progress,
        )  # fmt: skip
        problems.raise_if_any("MultimodalQA")
        note_absent(report, golds)
        if folder.other_case:
            report.notes.append(f"{folder.other_case:,} files were found under another case of their name")
        files = [image_list, *questions.values()]
        writer.finish(
            {"reader": "mmqa", "sources": {str(path): sha256(path) for path in files}}
            | {"images": str(images.absolute()), "types": list(types), "splits": list(questions)}
            | {"doctor": report.to_json()}
        )
    return report


def _add_questions(
    writer: TableWriter,
    report: Report,
    problems: Problems,
    path: Path,
    split: str,
    types: Sequence[str],
    only_candidates: bool,
    owner: dict[str, str],
    golds: dict[str, dict[str, list[str]]],
) -> None:
    """Write one file's queries; note which images its questions name, and the gold ones of each query."""
    left_out: Counter[str] = Counter()
    for number, line in json_lines(path, f"--{split}", problems):
        try:
            row = _query(line)
        except (KeyError, TypeError, ValueError) as error:
            told = f"key {error} is missing" if isinstance(error, KeyError) else error
            rule = f"{path}: a line must be a MultimodalQA question (qid, question, metadata.image_doc_ids)"
            problems.add(rule, f"line {number}: {told}")
            continue
        taken = row["kind"] in (*types, "question") or "all" in types
        if taken or not only_candidates:
            for image_id in (*row["candidate_image_ids"], *row["gold_image_ids"]):
                owner.setdefault(image_id, split)
        if not taken:
            left_out[row["kind"]] += 1
            continue
        if any(row["id"] in own for own in golds.values()):
            problems.add(f"{path}: qid must be unique over all files", f"line {number}: {row['id']}")
            continue
        golds[split][row["id"]] = row["gold_image_ids"]
        writer.add("queries", **row, split=split)
        report.queries.setdefault(split, Counter())[row["kind"]] += 1
    if left_out:
        told = ", ".join(f"{count:,} {kind}" for kind, count in left_out.most_common())
        report.notes.append(f"{path}: questions of other types left out (--types): {told}")


def _query(line: Mapping[str, Any]) -> dict[str, Any]:
    """One question line as a row of the queries table, its split apart."""
    about = line["metadata"]
    candidates = [_text(id_, "metadata.image_doc_ids") for id_ in about.get("image_doc_ids") or ()]
    gold = [
        _text(part["doc_id"], "supporting_context.doc_id")
        for part in line.get("supporting_context") or ()
        if part["doc_part"] == "image"
    ]
    question = line["question"]
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"question {question!r} must be a text")
    return {
        "id": _text(line["qid"], "qid"),
        "text": " ".join(question.split()),
        "answers": [_text(item["answer"], "answers.answer") for item in line.get("answers") or ()],
        "gold_image_ids": list(dict.fromkeys(gold)),
        "candidate_image_ids": list(dict.fromkeys(candidates)),
        "kind": about.get("type") or "question",  # the test file has no type
    }


def _text(value: Any, key: str) -> str:
    """Ids and answers as text; the files hold some answers as numbers."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{key} {value!r} must be a text or a number")
    return str(value)


def _image_rows(
    path: Path, folder: Folder, owner: Mapping[str, str], problems: Problems, report: Report
) -> Iterator[dict[str, Any]]:
    """Rows of the named images in the order of the list, then the images that the list lacks."""
    seen: set[str] = set()
    unnamed = 0
    for number, line in json_lines(path, "--image-list", problems):
        if missing := {"id", "path"} - set(line):
            rule = f"{path}: a line must be a MultimodalQA image (id, title, path)"
            problems.add(rule, f"line {number} lacks {sorted(missing)}")
            continue
        image_id, name = str(line["id"]), line["path"]
        if image_id in seen:
            problems.add(f"{path}: id must be unique", f"line {number}: {image_id}")
            continue
        seen.add(image_id)
        if not inside(name):
            problems.add(f"{path}: path must stay inside the images folder", f"line {number}: {name!r}")
            continue
        if image_id not in owner:
            unnamed += 1
            continue
        title = line.get("title") or ""
        yield {"id": image_id, "path": folder.find(name), "split": owner[image_id], "source": "mmqa"} | {
            "caption": title,
            "entity": title or None,
        }
    for image_id in sorted(owner.keys() - seen):
        row = {"id": image_id, "path": "", "split": owner[image_id], "source": "mmqa"}
        yield row | {"state": "missing", "reason": f"no line in {path.name}"}
    if unnamed:
        report.notes.append(f"{path}: {unnamed:,} images that no question of these files names were left out")
