"""Image → its regions, wherever they come from: annotations, a mask store, or the whole image.

Query-free sources give the same regions whatever is asked. A store that a `fovea.where.Locator` filled holds
the regions of single phrases: it gives those of the phrases asked of the image, and a phrase is grounded in
its own region only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from fovea import masks
from fovea.digests import Digests
from fovea.images import BadImage
from fovea.mask_store import Entry, MaskStore
from fovea.tables import Tables
from fovea.types import Region

Prompts = tuple[str, ...]
Row = Mapping[str, Any]


class MissingMasks(KeyError):
    """Regions that nobody has computed yet.

    Attributes:
        pairs: (image id, prompt groups) of all of them.
        store: the mask store that lacks them.
    """

    def __init__(self, store: MaskStore, pairs: Sequence[tuple[str, Sequence[Prompts]]], total: int) -> None:
        self.store, self.pairs, self.total = store, list(pairs), total
        example = ", ".join(image_id for image_id, _ in self.pairs[:5])
        super().__init__(
            f"masks for {len(self.pairs):,} of {total:,} images are missing in {store.path} "
            f"(key {store.key}), e.g. {example}; run: {store.command()}"
        )

    def joined(self, other: MissingMasks) -> MissingMasks:
        """Both as one; an image may stand in it twice, with other prompts."""
        return MissingMasks(self.store, self.pairs + other.pairs, self.total + other.total)


class RegionSource(Protocol):
    """Where the regions of an image come from."""

    @property
    def key(self) -> str:
        """Names everything that the regions depend on; part of the cache's key."""

    def prompts(self, phrases: Sequence[str]) -> list[Prompts]:
        """The prompt groups in which a question's phrases are asked; none for query-free regions."""

    def name(self, phrases: Sequence[str], phrase: str) -> str | None:
        """Id of the region that `phrase`, one of a question's `phrases`, means; None: any of the image's."""

    def regions(self, row: Row, asked: Sequence[Prompts] = ()) -> list[Region]:
        """Regions of one image (a row of the images table); an empty list is a normal result."""

    def require(self, asked: Iterable[tuple[Row, Sequence[Prompts]]]) -> None:
        """Raise MissingMasks, naming all at once, unless `regions` can answer each."""


class _QueryFree:
    """A source whose regions do not depend on what is asked."""

    def prompts(self, phrases: Sequence[str]) -> list[Prompts]:
        """None."""
        return []

    def name(self, phrases: Sequence[str], phrase: str) -> str | None:
        """Any region of the image may be meant."""
        return None

    def require(self, asked: Iterable[tuple[Row, Sequence[Prompts]]]) -> None:
        """Nothing is missing."""


class AnnotatedRegions(_QueryFree):
    """The regions table: a data set's own masks, or the exact ones of the embedded world."""

    key = "annotated"

    def __init__(self, tables: Tables, needed: Iterable[str] | None = None) -> None:
        """Read the table; `needed` keeps the regions of these images only."""
        self._of: dict[str, list[Region]] = {}
        wanted = None if needed is None else set(needed)
        for row in tables.rows("regions"):
            if wanted is not None and row["image_id"] not in wanted:
                continue
            rle = (
                None if row["rle"] is None else {"size": [row["height"], row["width"]], "counts": row["rle"]}
            )
            region = Region(
                row["id"], np.array(row["box"], np.float32), rle, label=row["phrase"] or row["label"]
            )
            self._of.setdefault(row["image_id"], []).append(region)

    def regions(self, row: Row, asked: Sequence[Prompts] = ()) -> list[Region]:
        """All annotated regions of the image."""
        return self._of.get(row["id"], [])


class WholeImage(_QueryFree):
    """One region, the full image: the paper's ablation "w/o where"."""

    key = "full"

    def regions(self, row: Row, asked: Sequence[Prompts] = ()) -> list[Region]:
        """The full-image mask."""
        height, width = row["height"], row["width"]
        full = masks.encode(np.ones((height, width), bool))
        return [Region("full", np.array([0, 0, width, height], np.float32), full)]


class StoredRegions(_QueryFree):
    """Proposals from a mask store that `scripts/precompute_masks.py` filled."""

    def __init__(self, store: MaskStore, digests: Digests) -> None:
        """`digests` names the bytes of an images row, for the store knows pictures by them."""
        self.key = store.key
        self.store = store
        self.digests = digests

    def regions(self, row: Row, asked: Sequence[Prompts] = ()) -> list[Region]:
        """The stored proposals; an image without a row raises, naming the command that makes it."""
        return self.store.get(Entry(self.digests(row)))

    def require(self, asked: Iterable[tuple[Row, Sequence[Prompts]]]) -> None:
        """Every image has its proposals."""
        _require(self, ((row, [()]) for row, _ in asked))


class GroundedRegions:
    """Regions of phrases, from a mask store that a `fovea.where.Locator` filled.

    Several boxes of a phrase are one region, their union (METHOD.md 1.3); its id is `name`'s.
    """

    def __init__(self, store: MaskStore, digests: Digests, *, joint: bool) -> None:
        """`joint`: the phrases of a question shared a prompt, and the store's rows are theirs together."""
        self.key = store.key
        self.store = store
        self.digests = digests
        self.joint = joint

    def prompts(self, phrases: Sequence[str]) -> list[Prompts]:
        """One group a phrase, or one for the question."""
        return prompt_groups(phrases, joint=self.joint)

    def name(self, phrases: Sequence[str], phrase: str) -> str | None:
        """The phrase, and where it shared a prompt the others too: they changed what was found."""
        return _name(prompt_groups(phrases, joint=self.joint)[0] if self.joint else (phrase,), phrase)

    def regions(self, row: Row, asked: Sequence[Prompts] = ()) -> list[Region]:
        """The region of each phrase asked for; a phrase that was not found has none."""
        from fovea.where import union

        out: dict[str, Region] = {}
        digest = self.digests(row)
        for prompts in asked:
            found = self.store.get(Entry(digest, prompts))
            for phrase in prompts:
                whole = union([region for region in found if region.label == phrase])
                if whole is not None:
                    name = _name(prompts, phrase)
                    out[name] = replace(whole, id=name)
        return list(out.values())

    def require(self, asked: Iterable[tuple[Row, Sequence[Prompts]]]) -> None:
        """Every prompt group has been asked of its image."""
        _require(self, asked)


def open_store(store: MaskStore, digests: Digests) -> StoredRegions | GroundedRegions:
    """The source that fits what the store holds: proposals, or regions of phrases."""
    store.refresh()
    most = max((len(entry.prompts) for entry in store.entries()), default=0)
    return GroundedRegions(store, digests, joint=most > 1) if most else StoredRegions(store, digests)


def prompt_groups(phrases: Sequence[str], *, joint: bool) -> list[Prompts]:
    """A question's phrases → the groups that are asked together: all, or each by itself; repeats once."""
    distinct = tuple(dict.fromkeys(phrases))
    if not distinct:
        return []
    return [distinct] if joint else [(phrase,) for phrase in distinct]


def _name(prompts: Prompts, phrase: str) -> str:
    return phrase if len(prompts) == 1 else f"{phrase} ({' | '.join(prompts)})"


def _require(source: StoredRegions | GroundedRegions, asked: Iterable[tuple[Row, Sequence[Prompts]]]) -> None:
    pairs, total = [], 0
    source.store.refresh()
    for row, groups in asked:
        total += 1
        if not groups:
            continue
        try:
            digest = source.digests(row)
        except BadImage:
            continue  # reading its pixels says so, under the run's own policy
        if lacking := [prompts for prompts in groups if Entry(digest, prompts) not in source.store]:
            pairs.append((row["id"], lacking))
    if pairs:
        raise MissingMasks(source.store, pairs, total)
