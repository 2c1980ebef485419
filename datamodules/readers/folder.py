"""Any folder of images, and any file of questions → canonical tables.

Ids of images are their paths inside the folder. Columns of a question file (JSONL keys, or the header of a
CSV or TSV): `question` or `text`; and, where there are any, `id`, `image` (what answers it) and `answers`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image

from datamodules.doctor import Progress, Report, silent
from datamodules.readers.lines import delimited, json_lines, sha256
from datamodules.readers.photos import Policy, add_images, note_absent
from datamodules.readers.problems import Problems
from fovea.images import FORMATS
from fovea.tables import TableWriter

# A file of another name counts as an image when its first bytes say so.
EXTENSIONS = frozenset(
    ".jpg .jpeg .jpe .jfif .png .gif .webp .avif .tif .tiff .bmp .ppm .pgm .pbm .pnm .jp2 .j2k .ico".split()
)


def read(
    images: Path,
    out: Path,
    *,
    questions: Path | None = None,
    captions: Path | None = None,
    split: str = "test",
    policy: Policy = "skip",
    workers: int = 1,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Report:
    """Write the canonical tables of one folder; every image is decoded once on the way.

    Args:
        images: the folder, read with all that is below it but for hidden files, in the order of the names.
        out: directory of the tables.
        questions: `.jsonl`, `.csv` or `.tsv`, plain or gzipped; several images or answers of a question are a
            list in JSONL, and separated by `|` in CSV and TSV.
        captions: a file of the same kinds with the columns `image` and `caption`.
        split: name of the one split.
        policy: `skip` leaves unreadable images out and lists them; `fail` raises.
        workers: processes that decode.
        overwrite: replace tables that are already there.
        progress: wraps the pass over the images.

    Raises:
        ValueError: everything that is wrong with the files, each with its line and key.
    """
    problems, report = Problems(), Report()
    if not images.is_dir():
        problems.add(f"--images {images}: no such folder")
    if not split:
        problems.add("--split '': it needs a name")
    names = sorted(_image_names(images, report, problems))
    if images.is_dir() and not names:
        problems.add(f"--images {images}: there is no image in it")
    known = _Names(names)
    texts = _captions(captions, known, problems) if captions is not None else {}
    golds: dict[str, list[str]] = {}
    with TableWriter(out, overwrite=overwrite) as writer:
        for row in _queries(questions, known, problems, report) if questions is not None else ():
            if row["id"] in golds:
                problems.add(f"{questions}: id must be unique", row["id"])
                continue
            golds[row["id"]] = row["gold_image_ids"]
            writer.add("queries", **row, split=split)
            report.queries.setdefault(split, Counter())["question"] += 1
        if questions is not None and not golds:
            problems.add(f"--questions {questions}: there is no question in it")
        problems.raise_if_any("folder")
        root = images.absolute()
        rows = (
            {"id": name, "path": str(root / name), "caption": texts.get(name, "")}
            | {"split": split, "source": "folder"}
            for name in names
        )
        add_images(
            writer, rows, len(names), report, problems,
            where=f"--images {images}", policy=policy, workers=workers, progress=progress,
        )  # fmt: skip
        problems.raise_if_any("folder")
        note_absent(report, {split: golds})
        files = [path for path in (questions, captions) if path is not None]
        writer.finish(
            {"reader": "folder", "sources": {str(path): sha256(path) for path in files}}
            | {"images": str(root), "splits": [split], "doctor": report.to_json()}
        )
    return report


def _image_names(images: Path, report: Report, problems: Problems) -> Iterator[str]:
    """Paths below the folder, with `/`, of everything that is or should be an image."""
    others, special = 0, []
    for folder, folders, files in os.walk(images):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in files:
            path = Path(folder, file)
            if file.startswith("."):
                continue
            if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
                special.append(path.relative_to(images).as_posix())
                continue
            if path.suffix.lower() not in EXTENSIONS and not _opens(path):
                others += 1
                continue
            name = path.relative_to(images).as_posix()
            try:
                name.encode()
            except UnicodeEncodeError:
                problems.add(f"--images {images}: names must be UTF-8; rename these files", repr(name))
                continue
            yield name
    if others:
        report.notes.append(f"{others:,} files of the folder are no images and were passed over")
    if special:
        named = ", ".join(ascii(name) for name in special[:5]) + (", …" if len(special) > 5 else "")
        report.notes.append(
            f"{len(special):,} pipes, sockets or devices in the folder were passed over: {named}"
        )


def _opens(path: Path) -> bool:
    try:
        with Image.open(path, formats=FORMATS):
            return True
    except Exception:  # whatever Pillow or the disk says: not recognised as an image
        return False


class _Names:
    """Finds the images that a file names: by path, or by file name where one image has it."""

    def __init__(self, names: list[str]) -> None:
        self._all = set(names)
        self._by_file: dict[str, list[str]] = {}
        for name in names:
            self._by_file.setdefault(PurePosixPath(name).name, []).append(name)

    def find(self, name: str) -> str:
        """The image's id.

        Raises:
            ValueError: there is none, or several.
        """
        name = name.strip()
        plain = os.path.normpath(name.replace("\\", "/")).replace(os.sep, "/")
        if plain in self._all:
            return plain
        found = self._by_file.get(name, [])
        if len(found) != 1:
            told = f"is the name of {len(found)} images: {found[:3]}" if found else "is not in the folder"
            raise ValueError(f"{name!r} {told}")
        return found[0]


def _rows(path: Path, flag: str, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    kinds = {suffix.lower() for suffix in path.suffixes[-2:]} - {".gz"}
    if ".jsonl" in kinds:
        return json_lines(path, flag, problems)
    if {".csv", ".tsv"} & kinds:
        return delimited(path, flag, problems)
    problems.add(f"{flag} {path}: must be .jsonl, .csv or .tsv (or one of these with .gz)")
    return iter(())


def _queries(path: Path, known: _Names, problems: Problems, report: Report) -> Iterator[dict[str, Any]]:
    ignored: set[str] = set()
    for number, (line, row) in enumerate(_rows(path, "--questions", problems), 1):
        where = f"{path}, line {line}"
        texts = [key for key in ("question", "text") if row.get(key) not in (None, "")]
        if len(texts) != 1 or not isinstance(row[texts[0]], str) or not row[texts[0]].strip():
            has = sorted(key for key in row if key)
            problems.add(f"{path}: each row needs one text, under 'question' or 'text'", f"{where} has {has}")
            continue
        ignored |= set(row) - {"id", "question", "text", "image", "answers"}
        golds, answers = [], []
        for key, values in (("image", golds), ("answers", answers)):
            try:
                values += _list(row.get(key))
                if key == "image":
                    golds[:] = dict.fromkeys(map(known.find, golds))
            except ValueError as error:
                problems.add(f"{path}: key {key!r} is wrong", f"line {line}: {error}")
        yield {
            "id": str(row["id"]) if row.get("id") not in (None, "") else f"q{number}",
            "text": " ".join(row[texts[0]].split()),
            "gold_image_ids": golds,
            "answers": answers,
        }
    if ignored:
        report.notes.append(f"{path}: columns {sorted(ignored)} mean nothing here and were not read")


def _list(value: Any) -> list[str]:
    """A cell or JSON value as texts."""
    if value is None:
        return []
    values = value if isinstance(value, list) else value.split("|") if isinstance(value, str) else [value]
    if bad := [v for v in values if isinstance(v, bool) or not isinstance(v, str | int | float)]:
        raise ValueError(f"{bad[0]!r} is no text")
    return [text for text in (str(v).strip() for v in values) if text]


def _captions(path: Path, known: _Names, problems: Problems) -> dict[str, str]:
    captions: dict[str, str] = {}
    for line, row in _rows(path, "--captions", problems):
        if not all(isinstance(row.get(key), str) for key in ("image", "caption")):
            rule = f"{path}: each row needs the texts 'image' and 'caption'"
            problems.add(rule, f"line {line} has {sorted(row)}")
            continue
        try:
            captions[known.find(row["image"])] = " ".join(row["caption"].split())
        except ValueError as error:
            problems.add(f"{path}: key 'image' is wrong", f"line {line}: {error}")
    return captions
