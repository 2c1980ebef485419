"""JSON lines and delimited text, plain or gzipped → rows with their line numbers, one at a time."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from datamodules.readers.problems import Problems


def sha256(path: Path) -> str:
    """Hash of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def binary(path: Path) -> IO[bytes]:
    """Open for reading, unpacked when the content is gzip, whatever the name says."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb") if packed else open(path, "rb"))


def json_lines(path: Path, flag: str, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that holds a JSON object; other lines become problems.

    Args:
        path: JSONL, plain or gzipped; empty lines are passed over.
        flag: the command-line option that named the file.
        problems: where faults are noted.
    """
    if not path.is_file():
        problems.add(f"{flag} {path}: no such file")
        return
    try:
        with binary(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8-sig"))  # Windows editors put a mark at the start
                except ValueError as error:  # also a UnicodeDecodeError
                    problems.add(f"{path}: each line must be JSON in UTF-8", f"line {number}: {error}")
                    continue
                if isinstance(row, dict):
                    yield number, row
                else:
                    kind = type(row).__name__
                    problems.add(f"{path}: each line must be an object", f"line {number} is a {kind}")
    except (OSError, EOFError, zlib.error) as error:  # gzip: cut off or damaged
        problems.add(f"{path}: cannot be read to its end ({error}); fetch the file again")


def delimited(path: Path, flag: str, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, column → text) of every row of a CSV or TSV file whose first line names the columns.

    Args:
        path: `.csv` or `.tsv`, plain or gzipped (`.csv.gz`); quoting as spreadsheets write it.
        flag: the command-line option that named the file.
        problems: where faults are noted.
    """
    if not path.is_file():
        problems.add(f"{flag} {path}: no such file")
        return
    tabs = ".tsv" in path.suffixes
    try:
        with binary(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            reader = csv.reader(text, delimiter="\t" if tabs else ",", strict=True)
            header = [name.strip() for name in next(reader, [])]
            twice = sorted({name for name in header if header.count(name) > 1})
            if not header or twice:
                problems.add(f"{path}: line 1 must name the columns, each once", twice or "the file is empty")
                return
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(header):
                    rule = f"{path}: each row must have the {len(header)} columns of line 1"
                    problems.add(rule, f"line {reader.line_num} has {len(cells)}")
                    continue
                yield reader.line_num, dict(zip(header, cells, strict=True))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        problems.add(f"{path}: must be {'TSV' if tabs else 'CSV'} in UTF-8", error)
