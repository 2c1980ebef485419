"""The embedded world's entities: two renditions, facts, and what the held-out split promises."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from datamodules import world_art, world_entities, world_facts, world_shards
from datamodules.world_entities import EntityConfig
from fovea.tables import Tables

TINY = EntityConfig(
    seed=1, num_countries=12, held_out_countries=4, num_emoji=12, held_out_emoji=4, views_country=3,
    views_emoji=2, eval_views=2, questions_per_view=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world_entities.build(tmp_path_factory.mktemp("entities") / "tables", config=TINY, workers=1)


@pytest.fixture(scope="module")
def tables(root: Path) -> Tables:
    return Tables(root)


def _png(root: Path, row: dict[str, Any]) -> bytes:
    with open(root / row["path"], "rb") as file:
        file.seek(row["offset"])
        return file.read(row["size"])


def test_same_bytes_whatever_the_number_of_workers(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One process and two write the same files; the chunks are small enough for both to get some."""
    monkeypatch.setattr(world_shards, "CHUNK", 40)
    again = world_entities.build(tmp_path / "two", config=TINY, workers=2)
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        for folder in (root, again)
    ]
    assert digests[0] == digests[1]


def test_counts_follow_from_the_settings(tables: Tables):
    """8 + 8 training entities at 3 and 2 views; 2 views of 8 countries twice; 2 of 4 held-out emoji, 4
    countries."""
    counts = Counter(row["split"] for row in tables.rows("images"))
    assert counts == {
        "kb": 24,
        "train": 40,
        "val-seen": 16,
        "test-seen": 16,
        "val-heldout": 8,
        "test-heldout": 8,
    }
    assert tables.manifest["splits"] == counts
    assert tables.manifest["entities"] == {"country": 12, "emoji": 12}
    assert len(tables.manifest["held_out"]) == 8


def test_gold_ids_exist_and_belong_to_the_pictured_entity(tables: Tables):
    """Query picture, gold KB picture and gold passage are rows of one entity, in different renditions."""
    images = {row["id"]: row for row in tables.rows("images")}
    passages = {row["id"]: row for row in tables.rows("passages")}
    queries = tables.queries()
    assert len(queries) == len({query.id for query in queries}) > 100
    for query in queries:
        assert query.kind == "entity" and query.image_id is not None
        shown, (gold,), (fact,) = images[query.image_id], query.gold_image_ids, query.gold_passage_ids
        assert shown["entity"] == images[gold]["entity"] == passages[fact]["entity"]
        assert (shown["source"], images[gold]["source"]) == ("openmoji", "twemoji")
        assert (shown["split"], images[gold]["split"]) == (query.split, "kb")
        assert passages[fact]["image_id"] == gold
        assert any(answer in passages[fact]["text"] for answer in query.answers)
        assert shown["entity"].lower() not in query.text.lower()


def test_training_shows_nothing_that_is_held_out(tables: Tables):
    """No picture, question or answer of `train` is about an entity of the held-out splits, and each kind has
    its own."""
    by_split: dict[str, set[str]] = {}
    for row in tables.rows("images"):
        by_split.setdefault(row["split"], set()).add(row["entity"])
    held = by_split["val-heldout"] | by_split["test-heldout"]
    assert len(held) == 8 and not held & by_split["train"]
    assert not by_split["val-heldout"] & by_split["test-heldout"]
    assert by_split["val-seen"] == by_split["test-seen"] < by_split["train"]
    assert by_split["kb"] == by_split["train"] | held  # the knowledge base knows all: transfer, not absence
    names = {answer for query in tables.queries(split="train") for answer in query.answers}
    assert not held & names
    assert {f"kb-{key}" for key in tables.manifest["held_out"]}.isdisjoint(
        image for query in tables.queries(split="train") for image in query.gold_image_ids
    )


def test_every_picture_differs_and_has_its_size(tables: Tables, root: Path):
    """112 pictures of 48 px, no two equal: the views of an entity are drawn anew in every split."""
    rows = list(tables.rows("images"))
    pictures = {_png(root, row) for row in rows}
    assert len(pictures) == len(rows) == 112
    for picture in pictures:
        assert Image.open(io.BytesIO(picture)).size == (48, 48)


def test_evaluation_asks_every_fact_and_training_a_few(tables: Tables):
    """A view of an evaluation split has one question for each fact of its entity; a training view at most
    two."""
    facts = Counter(row["entity"] for row in tables.rows("passages"))
    entity = {row["id"]: row["entity"] for row in tables.rows("images")}
    for split in ("train", "test-seen", "test-heldout", "val-heldout"):
        asked = Counter(query.image_id for query in tables.queries(split=split))
        for image, number in asked.items():
            assert number == (min(2, facts[entity[image]]) if split == "train" else facts[entity[image]])


def test_facts_of_a_known_country():
    """France, read by hand: capital Paris, EUR, French, Western Europe, .fr; both flags were found."""
    (france,) = (country for country in world_facts.countries() if country.key == "fr")
    answers = {fact.relation: fact.answers for fact in france.facts}
    assert answers["capital"] == ("Paris",) and answers["currency"] == ("EUR",)
    assert answers["demonym"] == ("French",) and answers["subregion"] == ("Western Europe",)
    assert answers["domain"] == (".fr",) and answers["population"] == ("66078000", "66,078,000")
    assert {fact.relation: fact.sentence for fact in france.facts}[
        "capital"
    ] == "The capital of France is Paris ."
    assert (france.text, france.code) == ("🇫🇷", "1f1eb-1f1f7")


def test_there_are_enough_entities_and_no_two_clean_pictures_are_equal():
    """At least 240 countries and 700 emoji; of countries that share a flag the largest stays."""
    countries, pairs = world_facts.countries(), world_facts.emoji_pairs()
    assert len(countries) >= 240 and len(pairs) >= 700
    codes = {entity.key for entity in countries}
    assert {"no", "id", "ro", "fr"} <= codes and not {"bv", "sj", "mc", "td", "mf"} & codes
    for entities in (countries, pairs):
        assert len({entity.name for entity in entities}) == len(entities)
    assert len({world_art.twemoji(entity.code).tobytes() for entity in countries}) == len(countries)


@pytest.mark.parametrize("text", ["\U0010fffd", "\U0001f1e6\U0001f1f3"])
def test_a_missing_drawing_is_none(text: str):
    """Neither the box of an unknown character nor two letters in place of a flag (AN, no longer a code) is a
    drawing."""
    assert world_art.openmoji(text) is None


def test_the_rendition_stands_out_from_its_background():
    """Same seed, two entities: the pictures differ where the drawings are, and their corners often do not."""
    france, japan = (next(c for c in world_facts.countries() if c.key == key) for key in ("fr", "jp"))
    config = EntityConfig()
    views = [world_entities.View("v", "train", entity, (5, 6)) for entity in (france, japan)]
    first, second = (world_entities.draw_view(view, config=config) for view in views)
    differs = (first != second).any(-1)
    assert 0.05 < differs.mean() < 0.75
    rows, columns = np.flatnonzero(differs.any(1)), np.flatnonzero(differs.any(0))
    longer = max(np.ptp(rows), np.ptp(columns)) + 1
    assert config.scale[0] * 48 - 2 <= longer <= 48


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_countries": 4}, "num_countries=4 must exceed held_out_countries=4"),
        ({"num_emoji": 2}, "num_emoji=2 must exceed held_out_emoji=4"),
        ({"side": 4}, r"side=4 must lie in \[16, 96\]"),
        ({"scale": (0.9, 0.5)}, r"scale=\(0.9, 0.5\) must be increasing"),
        ({"grey": (0.0, 2.0)}, r"grey=\(0.0, 2.0\)"),
        ({"eval_views": 0, "jitter": 2.0}, "eval_views=0.*jitter=2"),
    ],
)
def test_a_bad_setting_is_named_with_its_rule(change: dict[str, Any], message: str):
    """Each bad field raises with its value; two mistakes make one error."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_more_entities_than_exist_is_an_error():
    """The number asked for and the number there are both named."""
    with pytest.raises(ValueError, match=r"9000 entities of kind emoji .* exist; ask for fewer"):
        world_entities.choose(dataclasses.replace(TINY, num_emoji=9000))


def test_without_raqm_the_build_stops_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A Pillow that cannot shape flags is named before anything is written."""
    monkeypatch.setattr(features, "check", lambda name: name != "raqm")
    with pytest.raises(RuntimeError, match="Raqm.*pip install"):
        world_entities.build(tmp_path / "out", config=TINY)
    assert not (tmp_path / "out").exists()
