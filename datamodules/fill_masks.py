"""Images × phrases → rows of a mask store: what is missing, and one pass over an image that adds it.

Shared by `scripts/precompute_masks.py` (any number of processes and ranks) and by DataModules, whose
`prepare_data` fills a small remainder.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fovea import masks
from fovea.digests import Digests
from fovea.images import BadImage, ImageReader
from fovea.mask_store import Entry, MaskStore
from fovea.models.detectors import Detector, Proposer
from fovea.models.segmenters import Segmenter
from fovea.region_sources import Prompts, prompt_groups
from fovea.tables import Tables
from fovea.types import Query, Region
from fovea.where import Locator

DIGESTS = "digests.txt"
Phrases = Callable[[Sequence[str]], list[list[str]]]


class Asked(NamedTuple):
    """What shall be known of one image.

    Attributes:
        row: of the images table.
        prompts: its prompt groups; `((),)` for query-free proposals.
    """

    row: dict[str, Any]
    prompts: tuple[Prompts, ...]


@dataclass
class Todo:
    """What is missing in a store.

    Attributes:
        asked: images with at least one missing result.
        num_asked: results asked for, of readable images.
        num_missing: those that the store lacks.
        bad: (image id, reason) of images without bytes.
    """

    asked: list[Asked]
    num_asked: int
    num_missing: int
    bad: list[tuple[str, str]]


class Done(NamedTuple):
    """One pass over an image.

    Attributes:
        image_id: its id.
        num_results: results added (prompt groups).
        num_regions: regions in them.
        num_empty: results without any region.
        reason: why the image is unreadable, or nothing.
    """

    image_id: str
    num_results: int = 0
    num_regions: int = 0
    num_empty: int = 0
    reason: str = ""


def make(detector: Detector | Proposer, segmenter: Segmenter | None = None) -> Locator | Proposer:
    """Whatever fills a store: a proposer as it is, a detector with its segmenter as a Locator.

    Raises:
        ValueError: the object is neither, or a proposer got a segmenter.
    """
    if hasattr(detector, "detect"):
        return Locator(detector, segmenter)
    if not hasattr(detector, "rles"):
        raise ValueError(
            f"{type(detector).__name__} has neither `detect` (boxes of phrases) nor `rles` (proposals); see "
            "fovea.models.detectors"
        )
    if segmenter is not None:
        raise ValueError(f"{type(detector).__name__} proposes masks by itself; leave the segmenter out")
    return detector


def made_by(maker: Locator | Proposer) -> str:
    """The options of scripts/precompute_masks.py that make the same maker, read off its attributes."""
    detector: Any = maker.detector if isinstance(maker, Locator) else maker
    kind = type(detector)
    options = ["--detector", f"{kind.__module__}.{kind.__qualname__}"]
    for name, parameter in inspect.signature(kind).parameters.items():
        value = getattr(detector, name, parameter.default)
        if name != "device" and value != parameter.default:
            shown = str(value) if isinstance(value, str | Path) else json.dumps(value)
            options += ["--set", f"{name}={shown}"]
    segmenter = maker.segmenter if isinstance(maker, Locator) else None
    if segmenter is not None:
        options += ["--segmenter", str(getattr(segmenter, "checkpoint", "CHECKPOINT"))]
    return shlex.join(options)


def ask_nothing(rows: Iterable[dict[str, Any]]) -> list[Asked]:
    """Query-free proposals of every image."""
    return [Asked(row, ((),)) for row in rows]


def ask_phrases(
    rows: Mapping[str, dict[str, Any]],
    queries: Iterable[Query],
    images_of: Callable[[Query], Sequence[str]],
    phrases: Phrases,
    *,
    joint: bool,
) -> list[Asked]:
    """Each question's phrases, of the images that `images_of` gives for it (those in `rows`)."""
    wanted = [(query, ids) for query in queries if (ids := [i for i in images_of(query) if i in rows])]
    groups: dict[str, dict[Prompts, None]] = {}
    for (_, ids), own in zip(wanted, phrases([query.text for query, _ in wanted]), strict=True):
        for image_id in ids:
            groups.setdefault(image_id, {}).update(dict.fromkeys(prompt_groups(own, joint=joint)))
    return [Asked(rows[image_id], tuple(own)) for image_id, own in groups.items()]


def ask_file(
    path: Path, rows: Mapping[str, dict[str, Any]], queries: Iterable[Query], phrases: Phrases, *, joint: bool
) -> list[Asked]:
    """What a JSONL or parquet file asks: rows of image_id and query_id, or of image_id and prompts.

    `prompts` are lists of phrases, one list a prompt: [["red pig"], ["blue drum"]].

    Raises:
        ValueError: a line says nothing that can be asked; file and line are named.
    """
    by_id = {query.id: query for query in queries}
    groups: dict[str, dict[Prompts, None]] = {}
    by_query: dict[str, list[str]] = {}
    for number, line in enumerate(_lines(path), 1):
        where = f"{path}, row {number}"
        if not isinstance(line, dict) or "image_id" not in line:
            raise ValueError(f"{where}: an object with `image_id` is needed: {str(line)[:100]}")
        image_id = line["image_id"]
        if image_id not in rows:
            raise ValueError(f"{where}: image {image_id!r} is not among the images of --splits")
        if line.get("prompts") is not None:
            own = [tuple(map(str, group)) for group in line["prompts"]]
            groups.setdefault(image_id, {}).update(dict.fromkeys(own))
        elif line.get("query_id") in by_id:
            by_query.setdefault(line["query_id"], []).append(image_id)
        else:
            raise ValueError(
                f"{where}: `prompts`, or a `query_id` of the tables, is needed: {str(line)[:99]}"
            )
    asked = ask_phrases(
        rows, (by_id[id_] for id_ in by_query), lambda query: by_query[query.id], phrases, joint=joint
    )
    for row, own in asked:
        groups.setdefault(row["id"], {}).update(dict.fromkeys(own))
    return [Asked(rows[image_id], tuple(own)) for image_id, own in groups.items()]


def _lines(path: Path) -> Iterable[Any]:
    """Rows of a parquet or JSONL file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield from pq.read_table(path).to_pylist()
        return
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: no JSON ({error})") from error


def phrase_texts(spacy_model: str | None = None) -> Phrases:
    """Questions → the texts of their phrases (`fovea.what`), loaded when first asked."""

    def texts(questions: Sequence[str]) -> list[list[str]]:
        from fovea.what import DEFAULT_MODEL, Phraser

        if not questions:
            return []
        return [
            [phrase.text for phrase in own] for own in Phraser(spacy_model or DEFAULT_MODEL).batch(questions)
        ]

    return texts


def todo(asked: Iterable[Asked], store: MaskStore, digests: Digests, *, read: bool = True) -> Todo:
    """What of `asked` the store lacks.

    Args:
        asked: what shall be known.
        store: where it is kept.
        digests: names the images' bytes.
        read: read the bytes of images whose digest is not remembered; otherwise they count as missing, and
            whoever looks at them finds out. A large corpus is then read once instead of twice.
    """
    store.refresh()
    out = Todo([], 0, 0, [])
    for item in asked:
        try:
            digest = digests(item.row) if read else digests.known(item.row)
        except BadImage as error:
            out.bad.append((item.row["id"], error.reason))
            continue
        lacking = sum(digest is None or Entry(digest, prompts) not in store for prompts in item.prompts)
        out.num_asked += len(item.prompts)
        out.num_missing += lacking
        if lacking:
            out.asked.append(item)
    return out


class Filler:
    """Looks at images and stores what it finds; each process has one of its own."""

    def __init__(
        self, maker: Locator | Proposer, reader: ImageReader, store: MaskStore, digests: Digests | None = None
    ) -> None:
        """`digests` remembers what is learned of the images' bytes."""
        if store.key != maker.key:
            raise ValueError(f"the store's key is {store.key!r}, the maker's {maker.key!r}")
        self.maker = maker
        self.reader = reader
        self.store = store
        self.digests = digests or Digests(reader)

    def __call__(self, item: Asked) -> Done:
        """Look at one image and store all of its missing results at once.

        The phrases of an image go through the detector together, and are stored together or not at all: a
        batch of another size could differ in the last digit, and a resumed run from an uninterrupted one.

        Raises:
            BadImage: under the policy `fail`.
        """
        try:
            digest = self.digests(item.row)
            lacking = [prompts for prompts in item.prompts if Entry(digest, prompts) not in self.store]
            if not lacking:  # the same bytes under another id, or their digest was forgotten
                return Done(item.row["id"])
            image = self.reader.read(item.row)
        except BadImage as error:
            if self.reader.policy == "fail":
                raise
            return Done(item.row["id"], reason=error.reason)
        found = dict(self._look(image, lacking))
        self.store.append(digest, found, image_id=item.row["id"])
        regions = sum(map(len, found.values()))
        return Done(item.row["id"], len(found), regions, sum(not own for own in found.values()))

    def _look(self, image: Any, groups: Sequence[Prompts]) -> list[tuple[Prompts, list[Region]]]:
        if not isinstance(self.maker, Locator):
            rles = self.maker.rles(image)
            return [((), [Region(f"r{i}", masks.to_box(rle), rle) for i, rle in enumerate(rles)])]
        if self.maker.joint:
            located = [self.maker.locate(image, group) for group in groups]
        else:
            located = [[own] for own in self.maker.locate(image, [group[0] for group in groups])]
        return [
            (group, [region for own in by_phrase for region in own])
            for group, by_phrase in zip(groups, located, strict=True)
        ]


def fill(
    tables: Tables,
    asked: Sequence[Asked],
    path: str | Path,
    maker: Locator | Proposer | None,
    *,
    key: str | None,
    max_build: int,
    splits: str,
) -> None:
    """Fill what is missing when it is little; otherwise say how to.

    Args:
        tables: the images' tables.
        asked: what shall be known.
        path: directory of the store.
        maker: finds regions; None: nothing may be missing.
        key: of the store when there is no maker.
        max_build: most images to look at here, in one process.
        splits: of the questions, for the command that is printed when more are missing.

    Raises:
        ValueError: more than `max_build` images are missing, or there is no maker.
    """
    store = MaskStore.open(path, key) if maker is None else MaskStore(path, maker.key, made_by(maker))
    reader = ImageReader(tables.root, policy="skip")
    digests = Digests(reader, Path(path) / DIGESTS)
    lacking = todo(asked, store, digests)
    if not lacking.asked:
        return
    if maker is None or len(lacking.asked) > max_build:
        example = ", ".join(item.row["id"] for item in lacking.asked[:5])
        limit = "" if maker is None else f", more than data.max_build={max_build}"
        raise ValueError(
            f"masks for {len(lacking.asked):,} of {len(asked):,} images are missing in {path} "
            f"(key {store.key}; e.g. {example}){limit}; run: {store.command(tables.root)} --splits {splits}"
        )
    from tqdm import tqdm

    filler = Filler(maker, reader, store, digests)
    for item in tqdm(lacking.asked, desc="masks", unit=" images"):
        filler(item)
    store.close()
