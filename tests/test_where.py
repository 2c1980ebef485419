"""fovea.where: eq. 4 over cells, grounding against a loop, region embeddings and their cache."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from fovea import masks
from fovea.digests import Digests
from fovea.images import ImageReader
from fovea.mask_store import MaskStore
from fovea.models.encoders import tiny_clip
from fovea.region_bank import RegionBank, RegionEmbeddings, View, partition, region_masks
from fovea.region_sources import (
    AnnotatedRegions,
    GroundedRegions,
    MissingMasks,
    StoredRegions,
    WholeImage,
    open_store,
)
from fovea.tables import Tables, TableWriter
from fovea.types import Region
from fovea.where import ground, ground_candidates, shares


def unit(array):
    return (array / np.linalg.norm(array, axis=-1, keepdims=True)).astype(np.float32)


def test_eq4_by_hand():
    """Four pixels; mask 0 = pixels 0, 1; mask 1 = pixels 1, 2: α = (1 + ½)/4 each; the fourth adds none."""
    cells, areas = partition(np.array([[[1, 1, 0, 0]], [[0, 1, 1, 0]]], bool))
    assert areas.sum() == pytest.approx(1)
    got = shares(np.array([[0, 1], [0, -1], [0, 0]]), cells, areas)
    assert got == pytest.approx(np.array([[0.375, 0.375], [0.5, 0.0], [0.25, 0.25]]), abs=1e-5)


@pytest.mark.parametrize("num_regions", [1, 5, 43, 100])
def test_cells_equal_pixels(num_regions):
    """For random overlapping regions, any chosen subset's weights equal `masks.region_weights` as printed."""
    rng = np.random.default_rng(num_regions)
    all_masks = rng.random((num_regions, 13, 17)) < 0.3
    cells, areas = partition(all_masks)
    chosen = rng.integers(0, num_regions, (20, 3))
    got = shares(chosen, cells, areas)
    expected = [masks.region_weights(all_masks[own], normalise=False) for own in chosen]
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_cells_of_no_region_and_empty_masks():
    """Zero regions: one cell, no column. An empty mask has weight 0, not NaN."""
    cells, areas = partition(np.zeros((0, 4, 5), bool))
    assert cells.shape == (1, 0) and areas.tolist() == [1.0]
    cells, areas = partition(np.zeros((2, 4, 5), bool))
    assert shares(np.array([[0, 1]]), cells, areas).tolist() == [[0.0, 0.0]]


def test_ground_by_hand():
    """The nearer of two axes is chosen; equal ones give the first; no region gives −1 and NaN."""
    regions = np.eye(2, dtype=np.float32)
    phrases = unit(np.array([[1.0, 0.1], [0.0, 1.0], [1.0, 1.0]]))
    region, similarity = ground(phrases, regions)
    assert region.tolist() == [0, 1, 0]
    assert similarity == pytest.approx([1 / np.sqrt(1.01), 1.0, np.sqrt(0.5)])
    region, similarity = ground(phrases, regions[:0])
    assert region.tolist() == [-1, -1, -1] and np.isnan(similarity).all()


def random_images(rng, num, width, *, regions=(0, 8)):
    """Images with random masks and embeddings, as `RegionBank` yields them."""
    out = {}
    for i in range(num):
        count = int(rng.integers(*regions))
        all_masks = np.concatenate([rng.random((count, 8, 8)) < 0.4, np.ones((1, 8, 8), bool)])
        own = tuple(Region(f"r{r}", np.zeros(4, np.float32), None) for r in range(count))
        out[f"i{i}"] = RegionEmbeddings(
            own, unit(rng.standard_normal((count + 1, width))), *partition(all_masks)
        )
    return out


@pytest.mark.parametrize("full", [False, True])
def test_ground_candidates_equals_a_loop(full):
    """All rows at once equal one phrase at a time, with 0–3 phrases a query and images without regions."""
    rng = np.random.default_rng(0)
    images = random_images(rng, 6, 5)
    images["i0"] = RegionEmbeddings(
        (), unit(rng.standard_normal((1, 5))), *partition(np.ones((1, 8, 8), bool))
    )
    phrases = [unit(rng.standard_normal((t, 5))) for t in (2, 0, 3, 1)]
    questions = unit(rng.standard_normal((4, 5)))
    query = np.repeat(np.arange(4), 6)
    ids = [f"i{i}" for _ in range(4) for i in range(6)]
    got = ground_candidates(phrases, questions, query, ids, images, full_mask_if_missing=full)
    assert got.region.shape == (24, 3)
    for row, (q, id_) in enumerate(zip(query, ids, strict=True)):
        image = images[id_]
        chosen = []
        for t in range(3):
            values = [float(phrases[q][t] @ v) for v in image.vectors[:-1]] if t < len(phrases[q]) else []
            if values:
                chosen.append(int(np.argmax(values)))
            elif full and t < len(phrases[q]):
                chosen.append(0)  # no region: position 0 is the whole image
            else:
                chosen.append(-1)
            if chosen[-1] < 0:
                assert np.isnan(got.similarity[row, t]) and np.isnan(got.question_similarity[row, t])
            else:
                vector = image.vectors[chosen[-1]]
                assert got.similarity[row, t] == pytest.approx(float(phrases[q][t] @ vector), abs=1e-6)
                assert got.question_similarity[row, t] == pytest.approx(
                    float(questions[q] @ vector), abs=1e-6
                )
        assert got.region[row].tolist() == chosen
        assert got.eq4[row] == pytest.approx(shares(np.array([chosen]), image.cells, image.areas)[0])


def test_grounding_is_fast():
    """500 queries × 20 candidates × 2 phrases × 43 regions at width 128 in under 2 s."""
    rng = np.random.default_rng(0)
    images = random_images(rng, 200, 128, regions=(43, 44))
    phrases = [unit(rng.standard_normal((2, 128))) for _ in range(500)]
    query = np.repeat(np.arange(500), 20)
    ids = [f"i{i}" for i in rng.integers(0, 200, len(query))]
    start = time.perf_counter()
    ground_candidates(phrases, unit(rng.standard_normal((500, 128))), query, ids, images)
    assert time.perf_counter() - start < 2


@pytest.fixture
def tables(tmp_path):
    """Three pictures: two regions, none, and one known by its box alone."""
    rng = np.random.default_rng(0)
    with TableWriter(tmp_path / "tables") as writer:
        for i, (height, width) in enumerate([(40, 30), (32, 32), (20, 50)]):
            Image.fromarray(rng.integers(0, 255, (height, width, 3), np.uint8)).save(tmp_path / f"{i}.png")
            writer.add("images", id=f"i{i}", path=str(tmp_path / f"{i}.png"), width=width, height=height)
        for r, rows in enumerate([slice(0, 10), slice(5, 30)]):
            mask = np.zeros((40, 30), bool)
            mask[rows, 3:20] = True
            rle = masks.encode(mask)["counts"]
            box = masks.to_box(mask).tolist()
            writer.add(
                "regions",
                id=f"r{r}",
                image_id="i0",
                phrase=f"thing {r}",
                box=box,
                height=40,
                width=30,
                rle=rle,
            )
        writer.add("regions", id="b", image_id="i2", label="box", box=[0, 0, 25, 20], height=20, width=50)
        writer.finish({"reader": "test"})
    return Tables(tmp_path / "tables")


@pytest.fixture
def encoder():
    """A random CLIP of 32 px with an alpha branch that matters."""
    torch.manual_seed(0)
    model = tiny_clip(["thing"], image_size=32, embed_dim=16, widths=(4, 8), layers=1, heads=2, alpha=True)
    torch.nn.init.normal_(model.clip.visual.conv1.alpha.weight)
    return model.eval()


def bank(encoder, tables, source, **options):
    return RegionBank(encoder, source, ImageReader(tables.root), view=options.pop("view", View()), **options)


@pytest.mark.parametrize("view", [View(), View("keep", True, 0.2), View("remove", True, 0.0, "black")])
@pytest.mark.parametrize("batch_size", [1, 2, 256])
def test_regions_are_embedded_as_shown(encoder, tables, view, batch_size):
    """Every vector equals encoding that view alone, whatever the batch; the last is the whole image."""
    rows = list(tables.rows("images"))
    got = bank(encoder, tables, AnnotatedRegions(tables), view=view, batch_size=batch_size).embed(rows)
    reader = ImageReader(tables.root)
    assert [len(got[row["id"]].regions) for row in rows] == [2, 0, 1]
    for row in rows:
        image = reader.read(row)
        own = region_masks(got[row["id"]].regions, row["height"], row["width"])
        for r, mask in enumerate([*own, np.ones(image.shape[:2], bool)]):
            crop = view.crop and r < len(own)  # the whole image has no margin
            fill = (128, 128, 128) if view.fill == "mean" else (0, 0, 0)
            patch, alpha = masks.region_view(
                image, mask, background=view.background, crop=crop, margin=view.margin, fill=fill
            )
            pixels, alpha = encoder.transform(patch, alpha[None])
            with torch.inference_mode():
                vector = encoder.encode_image(
                    encoder.transform.normalise(torch.from_numpy(pixels[None])),
                    torch.from_numpy(alpha[None]).float(),
                )[0].numpy()
            np.testing.assert_allclose(got[row["id"]].vectors[r], vector / np.linalg.norm(vector), atol=1e-5)
    box = region_masks(got["i2"].regions, 20, 50)[0]
    assert box[:, :25].all() and not box[:, 25:].any()


def test_the_whole_image_only_where_it_is_asked_for(encoder, tables, tmp_path):
    """Same region vectors, a row of zeros for the whole image, in a cache of its own."""
    rows = list(tables.rows("images"))
    full = bank(encoder, tables, AnnotatedRegions(tables)).embed(rows)
    options = {"whole": False, "fingerprint": "f", "tables_key": "t", "cache": tmp_path}
    for _ in range(2):  # made, then read
        part = bank(encoder, tables, AnnotatedRegions(tables), **options).embed(rows)
        for id_, found in full.items():
            np.testing.assert_allclose(part[id_].vectors[:-1], found.vectors[:-1], atol=1e-6)
            assert not part[id_].vectors[-1].any()
            np.testing.assert_array_equal(part[id_].cells, found.cells)
    other = bank(encoder, tables, AnnotatedRegions(tables), **options | {"whole": True}).embed(rows)
    assert other[rows[0]["id"]].vectors[-1].any()


def test_cache_answers_instead_of_the_encoder(encoder, tables, tmp_path):
    """The same key encodes nothing and yields the same; another view or more images encode again."""
    rows = list(tables.rows("images"))
    options = {"cache": tmp_path / "cache", "fingerprint": "f", "tables_key": "t", "images_per_shard": 2}
    first = bank(encoder, tables, AnnotatedRegions(tables), **options).embed(rows[:2])
    calls = []
    encode, encoder.encode_image = (
        encoder.encode_image,
        lambda *args: calls.append(len(args[0])) or encode(*args),
    )
    again = bank(encoder, tables, AnnotatedRegions(tables), **options)
    second = again.embed(rows[:2])
    assert calls == []
    for id_ in first:
        for name in ("vectors", "cells", "areas"):
            np.testing.assert_array_equal(getattr(second[id_], name), getattr(first[id_], name))
        assert [r.id for r in second[id_].regions] == [r.id for r in first[id_].regions]
    again.embed(rows)
    assert calls == [2]  # the third image: its region and the whole
    bank(encoder, tables, AnnotatedRegions(tables), view=View(crop=True), **options).embed(rows[:1])
    assert calls == [2, 3]
    assert not list((tmp_path / "cache").glob("*/*.writing"))


@pytest.mark.parametrize("what", ["pixels", "box", "rle", "fewer", "order"])
def test_what_changed_is_embedded_again(encoder, tables, tmp_path, what):
    """Another picture under the same name, a moved region, a changed mask: never the old vectors.

    The unchanged images still come from the cache, and the change undone finds the first rows again.
    """
    rows, regions = list(tables.rows("images")), AnnotatedRegions(tables)._of["i0"]
    options = {"cache": tmp_path / "cache", "fingerprint": "f", "tables_key": "t"}
    bank(encoder, tables, AnnotatedRegions(tables), **options).embed(rows)
    source = AnnotatedRegions(tables)
    if what == "pixels":
        before = os.stat(rows[0]["path"])
        flipped = Image.open(rows[0]["path"]).transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        flipped.save(rows[0]["path"])
        os.utime(rows[0]["path"], ns=(before.st_atime_ns, before.st_mtime_ns))
    elif what == "box":
        source._of["i0"] = [replace(regions[0], box=regions[0].box + 1), regions[1]]
    elif what == "rle":
        source._of["i0"] = [replace(regions[0], mask=regions[1].mask), regions[1]]
    else:
        source._of["i0"] = regions[:1] if what == "fewer" else regions[::-1]
    calls = []
    encode, encoder.encode_image = (
        encoder.encode_image,
        lambda *args: calls.append(len(args[0])) or encode(*args),
    )
    got = bank(encoder, tables, source, **options).embed(rows)
    assert calls == [len(source._of["i0"]) + 1]
    fresh = bank(encoder, tables, source).embed(rows)
    for id_ in got:
        np.testing.assert_allclose(got[id_].vectors, fresh[id_].vectors, atol=1e-6)
    calls.clear()
    if what != "pixels":
        bank(encoder, tables, AnnotatedRegions(tables), **options).embed(rows)
        assert calls == []


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_shard_is_made_again(encoder, tables, tmp_path, damage):
    """One flipped bit, a cut file, an empty one: a warning names it, and only its images are embedded."""
    rows = list(tables.rows("images"))
    options = {"cache": tmp_path / "cache", "fingerprint": "f", "tables_key": "t", "images_per_shard": 1}
    first = bank(encoder, tables, AnnotatedRegions(tables), **options).embed(rows)
    shard = next(
        path for path in (tmp_path / "cache").glob("*/*.arrow") if rows[0]["id"].encode() in path.read_bytes()
    )
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes({"flip": data, "cut": data[:-100], "empty": b""}[damage])
    calls = []
    encode, encoder.encode_image = (
        encoder.encode_image,
        lambda *args: calls.append(len(args[0])) or encode(*args),
    )
    with pytest.warns(UserWarning, match=rf"{shard.name} is damaged .*embedded again"):
        again = bank(encoder, tables, AnnotatedRegions(tables), **options)
    second = again.embed(rows)
    assert calls == [len(first[rows[0]["id"]].regions) + 1]
    for id_ in first:
        np.testing.assert_allclose(second[id_].vectors, first[id_].vectors, atol=1e-6)


def test_store_names_all_missing_images_at_once(tables, tmp_path):
    """The error for an unfinished mask store counts what is missing and gives the command."""
    rows, digests = list(tables.rows("images")), Digests(ImageReader(tables.root))
    whole = Region("r0", np.array([0, 0, 4, 4], np.float32), masks.encode(np.ones((40, 30), bool)))
    store = MaskStore(tmp_path / "store", "proposals")
    store.append(digests(rows[0]), {(): [whole]})
    source = open_store(store, digests)
    assert isinstance(source, StoredRegions) and [r.id for r in source.regions(rows[0])] == ["r0"]
    with pytest.raises(MissingMasks, match="2 of 3 images are missing.*precompute_masks.py") as error:
        source.require((row, ()) for row in rows)
    assert [image_id for image_id, _ in error.value.pairs] == ["i1", "i2"]


@pytest.mark.parametrize("joint", [False, True])
def test_a_phrase_is_grounded_in_its_own_region(encoder, tables, tmp_path, joint):
    """The union of a phrase's boxes is its region, no other phrase's is taken; a phrase that was not found
    has none, or the whole image under `full_mask`; what was never asked is named.
    """
    row = next(iter(tables.rows("images")))
    digests = Digests(ImageReader(tables.root))
    height, width = row["height"], row["width"]

    def region(name, label, x0, x1):
        mask = np.zeros((height, width), bool)
        mask[:, x0:x1] = True
        return Region(name, masks.to_box(mask), masks.encode(mask), label=label)

    left, right = [region("r0", "pig", 0, 5), region("r1", "pig", 8, 10)], [region("r0", "drum", 20, 30)]
    store = MaskStore(tmp_path / "store", "dino+sam")
    if joint:
        found = {("pig", "drum", "kite"): left + right}
    else:
        found = {("pig",): left, ("drum",): right, ("kite",): []}
    store.append(digests(row), found)
    source = open_store(store, digests)
    assert isinstance(source, GroundedRegions) and source.joint == joint
    said = ["pig", "drum", "kite", "pig"]
    made = bank(encoder, tables, source).embed([row], {row["id"]: source.prompts(said)})
    image = made[row["id"]]
    areas = {r.label: masks.decode(r.mask).sum() / height for r in image.regions}
    assert areas == {"pig": 7, "drum": 10}
    vectors = unit(np.random.default_rng(0).normal(size=(4, image.vectors.shape[1])))
    names = [[source.name(said, text) for text in said]]
    for full in (False, True):
        got = ground_candidates(
            [vectors], vectors[:1], np.array([0]), [row["id"]], made, names=names, full_mask_if_missing=full
        )
        assert got.region.tolist() == [[0, 1, 2 if full else -1, 0]]
        assert np.isnan(got.similarity[0, 2]) != full
        np.testing.assert_allclose(got.similarity[0, 1], vectors[1] @ image.vectors[1], rtol=1e-5)
    with pytest.raises(MissingMasks):
        bank(encoder, tables, source).embed([row], {row["id"]: source.prompts(["goat"])})


def test_whole_image_is_one_region(encoder, tables):
    """ "w/o where": one region equal to the whole image, which every phrase is grounded in."""
    got = bank(encoder, tables, WholeImage()).embed(tables.rows("images"))
    for image in got.values():
        np.testing.assert_allclose(image.vectors[0], image.vectors[1], atol=1e-6)
        assert shares(np.array([[0]]), image.cells, image.areas)[0, 0] == pytest.approx(1, abs=1e-5)


def test_removed_background_is_zero_after_normalisation(encoder):
    """With the mean fill, a masked-out pixel reaches the tower as (nearly) 0, also outside the frame."""
    image = np.full((10, 20, 3), 200, np.uint8)
    mask = np.zeros((10, 20), bool)
    mask[:, 15:] = True
    patch, alpha = masks.region_view(image, mask, crop=True, margin=0.2, fill=encoder.transform.mean_pixel)
    shown = encoder.transform.normalise(torch.from_numpy(patch[None]))[0]
    assert patch.shape == (14, 14, 3) and alpha.sum() == 50
    assert shown[:, ~torch.from_numpy(alpha)].abs().max() < 0.01
    assert shown[:, torch.from_numpy(alpha)].min() > 1


def test_mask_of_another_size_is_refused(tables):
    """A mask that does not fit its image names both sizes."""
    region = Region("r", np.zeros(4, np.float32), masks.encode(np.ones((4, 5), bool)))
    with pytest.raises(
        ValueError, match=r"masks of size \[\(4, 5\)\] \(H, W\) for an upright image of \(5, 4\)"
    ):
        region_masks([region], 5, 4)
