"""Canonical tables: the one on-disk layout that every reader writes and every DataModule reads.

A directory with `images.parquet`, `queries.parquet`, `regions.parquet`, `passages.parquet` and
`manifest.json`. Pixels stay where they are: an images row names a file, or a byte range of a tar shard or of
a file of base64 rows.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fovea.replace import replace_directory, restore_directory
from fovea.types import Query

VERSION = 2  # 2: images.encoding, queries.keywords
# What tables of before `files` stood in their manifest may consist of.
_OWN_NAMES = re.compile(
    r"(images|queries|regions|passages)\.parquet|manifest\.json|bad_images\.jsonl|.+-\d{4,}\.tar"
)
_IDS = pa.list_(pa.string())
SCHEMAS: dict[str, pa.Schema] = {
    # offset -1: the whole file; otherwise `size` bytes of `path` from `offset`. encoding: "" for the image
    # file itself, "base64" for its base64 text. Width and height are EXIF-upright. An id has one row: an
    # image that several splits' queries name has one of them here; `fovea.retrieve.corpus` gives it to all.
    "images": pa.schema(
        [("id", pa.string()), ("path", pa.string()), ("offset", pa.int64()), ("size", pa.int64())]
        + [("encoding", pa.string())]
        + [("width", pa.int32()), ("height", pa.int32()), ("caption", pa.string()), ("entity", pa.string())]
        + [("source", pa.string()), ("split", pa.string())]
    ),
    "queries": pa.schema(
        [("id", pa.string()), ("text", pa.string()), ("image_id", pa.string()), ("answers", _IDS)]
        + [("gold_image_ids", _IDS), ("gold_passage_ids", _IDS), ("candidate_image_ids", _IDS)]
        + [("keywords", _IDS), ("split", pa.string()), ("kind", pa.string())]
    ),
    # box: xyxy pixels of the EXIF-upright original; rle: COCO compressed counts for a mask of height × width.
    "regions": pa.schema(
        [("id", pa.string()), ("image_id", pa.string()), ("label", pa.string()), ("phrase", pa.string())]
        + [
            ("box", pa.list_(pa.float32())),
            ("height", pa.int32()),
            ("width", pa.int32()),
            ("rle", pa.binary()),
        ]
        + [("iscrowd", pa.bool_()), ("source", pa.string())]
    ),
    "passages": pa.schema(
        [("id", pa.string()), ("title", pa.string()), ("text", pa.string()), ("entity", pa.string())]
        + [("image_id", pa.string()), ("source", pa.string())]
    ),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "images": {
        "offset": -1, "size": -1, "encoding": "", "caption": "", "entity": None, "source": "", "split": "",
    },
    "queries": {
        "image_id": None, "answers": (), "gold_image_ids": (), "gold_passage_ids": (), "candidate_image_ids":
        (), "keywords": (), "split": "", "kind": "question",
    },
    "regions": {"label": "", "phrase": "", "rle": None, "iscrowd": False, "source": ""},
    "passages": {"title": "", "entity": None, "image_id": None, "source": ""},
}  # fmt: skip


class TableWriter:
    """Streams rows into a hidden sibling of `root` and moves it into place at `finish`: no half-written
    tables.

    Use as a context manager; leaving it without `finish` removes what was written. Files that belong to the
    tables (tar shards) go under `directory` before `finish`, with paths relative to it.
    """

    def __init__(self, root: str | Path, *, overwrite: bool = False, rows_per_group: int = 4096) -> None:
        """Start writing.

        Args:
            root: directory of the tables.
            overwrite: replace tables that are there; nothing else is ever replaced.
            rows_per_group: rows that are held before they are written.

        Raises:
            FileExistsError: there are tables, without `overwrite`; or something that is no tables.
        """
        self.root = Path(root)
        if self.root.is_symlink():
            self.root = self.root.resolve()
        restore_directory(self.root)
        if self.root.exists() and not self.root.is_dir():
            raise FileExistsError(f"--out {self.root} is a file; give a directory")
        if self.root.exists() and any(self.root.iterdir()):
            _check_replaceable(self.root, overwrite)
        self.directory = self.root.with_name(f".{self.root.name}.writing")
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self._rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}
        self._writers = {
            name: pq.ParquetWriter(self.directory / f"{name}.parquet", schema)
            for name, schema in SCHEMAS.items()
        }
        self._rows_per_group = rows_per_group
        self.counts = dict.fromkeys(SCHEMAS, 0)

    def add(self, table: str, **row: Any) -> None:
        """Append one row; optional columns have defaults, an unknown or missing one raises KeyError."""
        full = _DEFAULTS[table] | row
        names = set(SCHEMAS[table].names)
        if set(full) != names:
            raise KeyError(
                f"{table}: unknown {sorted(set(full) - names)}, missing {sorted(names - set(full))}"
            )
        self._rows[table].append(full)
        self.counts[table] += 1
        if len(self._rows[table]) >= self._rows_per_group:
            self._flush(table)

    def _flush(self, table: str) -> None:
        if self._rows[table]:
            self._writers[table].write_table(pa.Table.from_pylist(self._rows[table], schema=SCHEMAS[table]))
            self._rows[table] = []

    def finish(self, manifest: dict[str, Any]) -> Path:
        """Write the manifest and move everything to `root`.

        Args:
            manifest: at least `reader`; readers add `sources` (file → sha256), `split_seed`, `doctor` counts.
        """
        for name, writer in self._writers.items():
            self._flush(name)
            writer.close()
        names = [path.relative_to(self.directory) for path in self.directory.rglob("*") if path.is_file()]
        files = sorted([*(name.as_posix() for name in names), "manifest.json"])
        full = {"version": VERSION, "rows": self.counts, "files": files} | manifest
        (self.directory / "manifest.json").write_text(json.dumps(full, indent=1, sort_keys=True) + "\n")
        replace_directory(self.directory, self.root)
        return self.root

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _check_replaceable(root: Path, overwrite: bool) -> None:
    """Refuse to replace what is not tables, or holds files that are no part of them."""
    try:
        manifest = read_manifest(root)
    except FileNotFoundError:
        manifest = {}
    except ValueError:  # damaged: still ours where all the names are
        manifest = {"reader": None}
    present = {path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}
    own = set(manifest.get("files", [name for name in present if _OWN_NAMES.fullmatch(name)]))
    if "reader" not in manifest or not {f"{name}.parquet" for name in SCHEMAS} & present:
        raise FileExistsError(
            f"{root} is not empty and holds no canonical tables, so it is never replaced; give another --out"
        )
    if foreign := sorted(present - own):
        raise FileExistsError(
            f"{root} holds files that are no part of the tables ({', '.join(foreign[:5])}"
            f"{', …' if len(foreign) > 5 else ''}), so it is never replaced; move them, or give another --out"
        )
    if not overwrite:
        raise FileExistsError(f"{root} is not empty; pass --overwrite to replace the tables in it")


def read_manifest(root: Path) -> dict[str, Any]:
    """The manifest of the tables in `root`, of any version.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged.
    """
    path = root / "manifest.json"
    if not path.is_file():
        old = root.with_name(f".{root.name}.old")
        hint = f" (or bring back {old}, which a killed run had put aside)" if old.is_dir() else ""
        raise FileNotFoundError(
            f"no canonical tables at {root} (manifest.json is missing); make them with: "
            f"python scripts/prepare.py <dataset> --out {root}{hint}"
        )
    try:
        manifest = json.loads(path.read_text())
        if not isinstance(manifest, dict):
            raise ValueError(f"a {type(manifest).__name__}, where an object should be")
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}); make the tables again: python scripts/prepare.py <dataset> "
            f"--out {root} --overwrite"
        ) from error
    return manifest


class Tables:
    """Reads one directory of canonical tables; each table is loaded when first asked for."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        path = self.root / "manifest.json"
        self.manifest = read_manifest(self.root)
        if self.manifest.get("version") != VERSION:
            raise ValueError(
                f"{path}: version {self.manifest.get('version')}, this code reads {VERSION}; run "
                f"scripts/prepare.py again (reader: {self.manifest.get('reader')}) with --out {self.root} "
                "--overwrite"
            )
        self._cache: dict[str, pa.Table] = {}

    def table(self, name: str) -> pa.Table:
        """The whole Arrow table `name`, memory-mapped."""
        if name not in self._cache:
            path = self.root / f"{name}.parquet"
            try:
                table = pq.read_table(path, memory_map=True)
            except (OSError, pa.ArrowException) as error:
                what = (
                    "is missing" if not path.is_file() else f"is damaged ({str(error).partition(chr(10))[0]})"
                )
                raise ValueError(
                    f"{path} {what}; make the tables again: python scripts/prepare.py "
                    f"{self.manifest.get('reader')} --out {self.root} --overwrite"
                ) from error
            if absent := sorted(set(SCHEMAS[name].names) - set(table.column_names)):
                raise ValueError(f"{path} lacks the columns {', '.join(absent)}")
            self._cache[name] = table
        return self._cache[name]

    def check_ids(self, name: str) -> None:
        """Refuse a table in which an id has several rows: one of them would win, without a word."""
        ids = self.table(name).column("id")
        if ids.length() != len(pc.unique(ids)):
            twice = sorted(id_ for id_, count in Counter(ids.to_pylist()).items() if count > 1)
            raise ValueError(
                f"{self.root / name}.parquet: {len(twice):,} ids have more than one row, e.g. "
                f"{', '.join(twice[:5])}; ids must be unique (scripts/prepare.py doctor lists them all)"
            )

    def rows(self, name: str, **equal: str) -> Iterator[dict[str, Any]]:
        """Rows as dicts, those whose columns equal `equal` (e.g. `split="train"`)."""
        table = self.table(name)
        for key, value in equal.items():  # in Arrow: a table of 50,000 rows as dicts takes seconds
            table = table.filter(pc.equal(table[key], value))
        for batch in table.to_batches(max_chunksize=4096):
            yield from batch.to_pylist()

    def queries(self, **equal: str) -> list[Query]:
        """Queries as domain objects."""
        return [
            Query(
                id=row["id"],
                text=row["text"],
                image_id=row["image_id"],
                answers=tuple(row["answers"]),
                gold_image_ids=tuple(row["gold_image_ids"]),
                gold_passage_ids=tuple(row["gold_passage_ids"]),
                candidate_image_ids=tuple(row["candidate_image_ids"]),
                split=row["split"],
                kind=row["kind"],
                keywords=tuple(row["keywords"]),
            )
            for row in self.rows("queries", **equal)
        ]
