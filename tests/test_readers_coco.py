"""COCO layout → tables without loss: every kind of region, every EXIF turn, every fault named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as pycoco

from datamodules.doctor import examine
from datamodules.readers import coco
from fovea import masks
from fovea.images import ImageReader
from fovea.tables import Tables

# (folder, images, captions, instances, panoptic)
_SETS = {
    "coco_mini_train2017": ("train2017", "captions_train2017", "instances_train2017", None),
    "coco128_val2017": ("val2017", "captions_val2017", None, "panoptic_val2017"),
    "minicoco_train": ("images", None, "train", None),
}


def _arguments(root: Path, name: str) -> dict[str, Any]:
    images, captions, instances, panoptic = _SETS[name]
    folder = root / "photos" / name
    notes = folder / ("labels" if name == "minicoco_train" else "annotations")
    found: dict[str, Any] = {"images": folder / images}
    named = {"captions": captions, "instances": instances, "panoptic": panoptic}
    found |= {key: notes / f"{value}.json" for key, value in named.items() if value}
    if panoptic:
        found["panoptic_images"] = folder / panoptic
    return found


def _mask(row: dict[str, Any]) -> masks.BoolArray:
    return masks.decode({"size": [row["height"], row["width"]], "counts": row["rle"]})


@pytest.mark.parametrize("name", _SETS)
def test_real_data_without_loss(shared_data: Path, tmp_path: Path, name: str) -> None:
    """Every photo, caption and annotation of the three real sets arrives, and each mask is COCO's own.

    Panoptic areas equal the JSON's `area`; polygons and crowds equal what pycocotools draws, byte for byte.
    """
    arguments = _arguments(shared_data, name)
    report = coco.read(out=tmp_path / "t", **arguments)
    assert report.ok and not report.notes
    tables = Tables(tmp_path / "t")
    images = {row["id"]: row for row in tables.rows("images")}
    regions = {row["id"]: row for row in tables.rows("regions")}
    data = {key: json.loads(path.read_text()) for key, path in arguments.items() if path.suffix == ".json"}
    assert set(images) == {str(row["id"]) for file in data.values() for row in file["images"]}
    if "captions" in data:
        queries = {query.id: query for query in tables.queries()}
        assert len(queries) == len(data["captions"]["annotations"])
        for row in data["captions"]["annotations"]:
            query = queries[f"caption-{row['id']}"]
            assert query.text == " ".join(row["caption"].split()) and query.kind == "caption"
            assert query.gold_image_ids == (str(row["image_id"]),)
            assert query.split == images[str(row["image_id"])]["split"]
    expected: dict[str, dict[str, Any]] = {}
    for row in data.get("instances", {"annotations": []})["annotations"]:
        expected[f"instance-{row['id']}"] = row | {"image": row["image_id"]}
    for row in data.get("panoptic", {"annotations": []})["annotations"]:
        for info in row["segments_info"]:
            expected[f"panoptic-{row['image_id']}-{info['id']}"] = info | {"image": row["image_id"]}
    assert set(regions) == set(expected)
    for key, row in regions.items():
        told, image = expected[key], images[row["image_id"]]
        assert (row["height"], row["width"]) == (image["height"], image["width"])
        assert row["image_id"] == str(told["image"]) and row["iscrowd"] == bool(told["iscrowd"])
        mask = _mask(row)
        if row["source"] == "panoptic":
            assert mask.sum() == told["area"]
        else:  # COCO's own drawing, and not its `area`, which for a crowd is not the pixel count
            rle = pycoco.frPyObjects(told["segmentation"], row["height"], row["width"])
            assert row["rle"] == (pycoco.merge(rle) if isinstance(rle, list) else rle)["counts"]
        if mask.any():
            assert row["box"] == masks.to_box(mask).tolist()
    assert sum(sum(kinds.values()) for kinds in report.regions.values()) == len(expected)


def test_manifest(shared_data: Path, tmp_path: Path) -> None:
    """The manifest names reader, split seed and shares, a sha256 for each source file, and the doctor's
    counts.
    """
    arguments = _arguments(shared_data, "minicoco_train")
    coco.read(out=tmp_path / "t", split_seed=7, splits={"a": 0.5, "b": 0.5}, **arguments)
    manifest = Tables(tmp_path / "t").manifest
    assert (
        manifest["reader"] == "coco"
        and manifest["split_seed"] == 7
        and manifest["splits"] == {"a": 0.5, "b": 0.5}
    )
    sums = dict(reversed(line.split()) for line in (shared_data / "SHA256SUMS").read_text().splitlines())
    ours = manifest["sources"][str(arguments["instances"])]
    assert ours == next(
        value for key, value in sums.items() if key.endswith("minicoco_train/labels/train.json")
    )
    images = manifest["doctor"]["images"]
    assert sum(counts["present"] for counts in images.values()) == 30
    kinds = sum((Counter(by) for by in manifest["doctor"]["regions"].values()), Counter())
    assert kinds == {"polygon": 273, "crowd_rle": 3}


def test_splits_do_not_move() -> None:
    """An image's split depends on seed and id alone; shares come out within sampling error; the seed
    matters.
    """
    shares = {"train": 0.6, "val": 0.2, "test": 0.2}
    first = {str(i): coco.split_of(str(i), shares, 0) for i in range(5000)}
    counts = Counter(first.values())
    assert all(abs(counts[name] / 5000 - share) < 0.03 for name, share in shares.items())
    assert sum(first[key] != coco.split_of(key, shares, 1) for key in first) > 1000
    assert {coco.split_of(str(i), {"all": 1.0}, 0) for i in range(50)} == {"all"}


def _exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def _stored(pixels: masks.UInt8Array, orientation: int) -> masks.UInt8Array:
    inverse = {6: 8, 8: 6}.get(orientation, orientation)
    planes = [masks.orient_masks(pixels[..., c], inverse) for c in range(3)]  # type: ignore[arg-type]
    return np.stack(planes, axis=-1)


Build = Callable[..., dict[str, Any]]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Writes a data set of one scene in several EXIF turns, annotated on upright or on stored pixels."""

    def write(
        orientations: list[int], annotated_on: str, *, sizes: bool = True, square: bool = False
    ) -> dict[str, Any]:
        height, width = (60, 60) if square else (40, 60)
        scene = np.full((height, width, 3), 120, np.uint8)
        scene[4:14, 6:26] = (220, 20, 20)
        scene[28:36, 4:10] = (20, 20, 220)
        red, blue = scene[..., 0] == 220, scene[..., 2] == 220
        folder, pngs = tmp_path / "images", tmp_path / "png"
        folder.mkdir(), pngs.mkdir()
        images, instances, panoptic = [], [], []
        for o in orientations:
            stored = _stored(scene, o)
            Image.fromarray(stored).save(folder / f"{o}.png", exif=_exif(o))
            on = {"upright": 1, "stored": {6: 8, 8: 6}.get(o, o)}[annotated_on]
            blob, other = masks.orient_masks(red, on), masks.orient_masks(blue, on)
            size = {"height": blob.shape[0], "width": blob.shape[1]} if sizes else {}
            images.append({"id": o, "file_name": f"{o}.png"} | size)
            x0, y0, x1, y1 = masks.to_box(blob).tolist()
            box = {"bbox": [x0, y0, x1 - x0, y1 - y0], "image_id": o, "category_id": 1}
            runs = np.diff(np.flatnonzero(np.diff(np.r_[-1, blob.T.ravel(), -1].astype(int)))).tolist()
            counts = runs if not blob.T.ravel()[0] else [0, *runs]
            rle = {"size": list(blob.shape), "counts": counts}
            text = masks.encode(blob)["counts"].decode()
            polygon = [[x0, y0, x1, y0, x1, y1, x0, y1]]
            instances += [
                {"id": 10 * o, "segmentation": polygon, "iscrowd": 0} | box,
                {"id": 10 * o + 1, "segmentation": rle, "iscrowd": 1} | box,
                {"id": 10 * o + 2, "segmentation": rle | {"counts": text}, "iscrowd": 0} | box,
                {"id": 10 * o + 3, "iscrowd": 0} | box,
            ]  # fmt: skip
            ids = np.zeros((*blob.shape, 3), np.uint8)
            ids[blob], ids[other] = (1, 2, 3), (7, 0, 0)
            Image.fromarray(ids).save(pngs / f"{o}.png")
            info = [{"id": 1 + 2 * 256 + 3 * 65536, "category_id": 1}, {"id": 7, "category_id": 2}]
            panoptic.append({"image_id": o, "file_name": f"{o}.png", "segments_info": info})
        named = [{"id": 1, "name": "red"}, {"id": 2, "name": "blue"}]
        for name, rows in (("instances", instances), ("panoptic", panoptic)):
            (tmp_path / f"{name}.json").write_text(
                json.dumps({"images": images, "annotations": rows, "categories": named})
            )
        files = {name: tmp_path / f"{name}.json" for name in ("instances", "panoptic")}
        return {"images": folder, "panoptic_images": pngs, "out": tmp_path / "tables"} | files

    return write


def _assert_masks_lie_on_their_blobs(root: Path, count: int) -> None:
    tables, reader = Tables(root), ImageReader(root)
    pixels = {row["id"]: reader.read(row) for row in tables.rows("images")}
    rows = list(tables.rows("regions"))
    assert len(rows) == 6 * len(pixels) == 6 * count
    for row in rows:
        image = pixels[row["image_id"]]
        blob = image[..., 0] == 220 if row["label"] == "red" else image[..., 2] == 220
        if row["rle"] is not None:
            assert np.array_equal(_mask(row), blob), (row["image_id"], row["source"])
        assert row["box"] == masks.to_box(blob).tolist()
        assert (row["height"], row["width"]) == image.shape[:2]


@pytest.mark.parametrize("annotated_on", ["upright", "stored"])
def test_exif_turned_photos_keep_their_masks(build: Build, annotated_on: str) -> None:
    """All 8 orientations at once, for each kind of region: every mask equals its blob, every box fits it.

    Orientations 2–4 do not swap the sides, so their size fits both readings; 5–8 settle it for the data set.
    """
    arguments = build(list(range(1, 9)), annotated_on)
    report = coco.read(**arguments)
    assert report.ok and "3 EXIF-turned photos" in report.notes[0] and f"as {annotated_on}" in report.notes[0]
    kinds = sum((Counter(by) for by in report.regions.values()), Counter())
    assert kinds == {"polygon": 8, "crowd_rle": 8, "rle": 8, "box": 8, "panoptic": 16}
    _assert_masks_lie_on_their_blobs(arguments["out"], 8)


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("annotated_on", ["upright", "stored"])
def test_a_square_photo_follows_the_option(build: Build, orientation: int, annotated_on: str) -> None:
    """Nothing settles a square photo: upright is the default, the option overrides it, and the note says
    so.
    """
    arguments = build([1, orientation], annotated_on, square=True)
    report = coco.read(**arguments)
    assert "1 EXIF-turned" in report.notes[0] and "--annotated-on" in report.notes[0]
    if annotated_on == "upright":
        _assert_masks_lie_on_their_blobs(arguments["out"], 2)
    report = coco.read(**arguments, annotated_on=annotated_on, overwrite=True)  # type: ignore[arg-type]
    assert not report.notes
    _assert_masks_lie_on_their_blobs(arguments["out"], 2)


def test_json_without_sizes(build: Build) -> None:
    """`height` and `width` are optional: the photo's own size is taken, upright unless told otherwise."""
    arguments = build([1, 6], "stored", sizes=False)
    coco.read(**arguments, annotated_on="stored")
    _assert_masks_lie_on_their_blobs(arguments["out"], 2)


def test_real_photos_turned(shared_data: Path, tmp_path: Path) -> None:
    """Three real photos stored in all 8 turns give the pixels (to JPEG's loss) and the very masks of the
    originals.
    """
    arguments = _arguments(shared_data, "coco_mini_train2017")
    del arguments["captions"]
    coco.read(out=tmp_path / "plain", **arguments)
    plain = Tables(tmp_path / "plain")
    reader = ImageReader(plain.root)
    chosen = [row for row in plain.rows("images") if row["width"] != row["height"]][:3]
    source = json.loads(arguments["instances"].read_text())
    source["images"] = [row for row in source["images"] if str(row["id"]) in {c["id"] for c in chosen}]
    known = {row["id"] for row in source["images"]}
    source["annotations"] = [row for row in source["annotations"] if row["image_id"] in known]
    (tmp_path / "i.json").write_text(json.dumps(source))
    wanted = {row["id"]: row for row in plain.rows("regions")}
    (tmp_path / "turned").mkdir()
    for orientation in range(1, 9):
        for row in chosen:
            stored = Image.fromarray(_stored(reader.read(row), orientation))
            stored.save(
                tmp_path / "turned" / Path(row["path"]).name, "JPEG", quality=95, exif=_exif(orientation)
            )
        coco.read(tmp_path / "turned", tmp_path / "t", instances=tmp_path / "i.json", overwrite=True)
        tables = Tables(tmp_path / "t")
        rows = list(tables.rows("regions"))
        assert len(rows) == len(source["annotations"]) and all(row == wanted[row["id"]] for row in rows)
        again = {row["id"]: ImageReader(tables.root).read(row) for row in tables.rows("images")}
        for row in chosen:
            assert np.abs(again[row["id"]].astype(int) - reader.read(row)).mean() < 3


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("sky-other-merged", "sky"),
        ("wall-brick", "brick wall"),
        ("floor-other-merged", "floor"),
        ("window-blind", "window blind"),
        ("door-stuff", "door"),
        ("dining table", "dining table"),
        ("other", "other"),
    ],
)
def test_panoptic_classes_become_phrases(label: str, name: str) -> None:
    """What a text encoder should read in the place of a panoptic class; the label stays as it is."""
    assert coco.plain_name(label) == name


def test_missing_and_unreadable_photos(build: Build) -> None:
    """`skip` leaves them out with their regions, counts and lists them; `fail` names each of them in one
    error.
    """
    arguments = build([1, 2, 3, 4, 5], "upright")
    folder = arguments["images"]
    (folder / "1.png").unlink()
    (folder / "2.png").write_bytes(b"")
    (folder / "3.png").write_bytes((folder / "3.png").read_bytes()[:100])
    Image.new("RGB", (30, 20)).save(folder / "4.png")
    report = coco.read(**arguments, splits={"all": 1.0})
    assert report.images == {"all": {"present": 1, "missing": 1, "unreadable": 3}}
    tables = Tables(arguments["out"])
    assert [row["id"] for row in tables.rows("images")] == ["5"]
    assert {row["image_id"] for row in tables.rows("regions")} == {"5"}
    listed = [json.loads(line) for line in (tables.root / "bad_images.jsonl").read_text().splitlines()]
    assert [(row["id"], row["state"]) for row in listed] == [
        ("1", "missing"), ("2", "unreadable"), ("3", "unreadable"), ("4", "unreadable"),
    ]  # fmt: skip
    assert "not the annotated photo" in listed[3]["reason"]
    assert "4 images were left out" in examine(tables.root).notes[0]
    with pytest.raises(ValueError, match=r"(?s)must be readable.*4×, e\.g\. .*1\.png: no such file.*empty"):
        coco.read(**arguments, policy="fail", overwrite=True)
    assert Tables(arguments["out"]).manifest["doctor"]["images"]["all"]["present"] == 1  # the old tables stay
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="none of the 5 photos"):
        coco.read(**arguments, overwrite=True)


def _write(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_all_problems_at_once(tmp_path: Path) -> None:
    """One error names every faulty file, key and value: nothing has to be found out run by run."""
    image = {"id": 1, "file_name": "1.png", "height": 4, "width": 4}
    images = [image, image, {"id": 2}, {"id": 3, "file_name": "../3.png"}]
    captions = {"images": images, "annotations": [{"id": 1, "image_id": 1, "caption": " "}]}
    instances = {
        "images": [image | {"width": 5}],
        "categories": [{"id": 1, "name": "cat"}],
        "annotations": [
            {"id": 1, "image_id": 99, "category_id": 1, "segmentation": []},
            {"id": 2, "image_id": 1, "category_id": 5, "segmentation": [[0, 0, 3, 0, 3, 3]]},
            {"id": 3, "image_id": 1, "segmentation": [[0, 0, 3, 0, 3, 3]]},
            {"id": 4, "image_id": 1, "category_id": 1},
            {"id": 4, "image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1]},
        ],
    }
    with pytest.raises(ValueError) as caught:
        coco.read(
            tmp_path / "nowhere",
            tmp_path / "out",
            captions=_write(tmp_path / "captions.json", captions),
            instances=_write(tmp_path / "instances.json", instances),
            panoptic=_write(tmp_path / "panoptic.json", "{no json"),
            splits={"train": 0.6, "val": 0.2},
        )
    message = str(caught.value)
    for part in (
        "nowhere: no such folder", "add up to 1", "--panoptic-images", "must be a text",
        "images[].id must be unique", "images[] lacks ['file_name']", "../3.png", "category_id 5",
        "image_id 99 of annotation 1", "lacks ['category_id']", "needs 'segmentation' or 'bbox'",
        "annotations[].id must be unique", "must agree with the other files", "panoptic.json: no JSON",
    ):  # fmt: skip
        assert part in message, part
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "data,reason",
    [
        ([], "top level must be an object"),
        ({"annotations": [], "categories": []}, "key 'images' must be a list"),
        ({"images": {}, "annotations": [], "categories": []}, "key 'images' must be a list"),
        ({"images": [], "annotations": []}, "key 'categories' must be a list"),
        ({"images": [], "categories": []}, "key 'annotations' must be a list"),
    ],
)
def test_wrong_files(tmp_path: Path, data: Any, reason: str) -> None:
    """A file of another layout is refused by its keys, not by a KeyError somewhere."""
    with pytest.raises(ValueError, match=reason):
        coco.read(tmp_path, tmp_path / "out", instances=_write(tmp_path / "i.json", data))


@pytest.mark.parametrize(
    "segmentation", [[[1, 2, 3, 4, 5]], {"size": [9, 9], "counts": [81]}, {"counts": [1]}, "x", 3]
)
def test_unsound_segmentations_are_named(tmp_path: Path, segmentation: Any) -> None:
    """A segmentation that cannot be drawn names its annotation and image; nothing is written."""
    Image.new("RGB", (4, 4)).save(tmp_path / "1.png")
    row = {"id": 5, "image_id": 1, "category_id": 1, "segmentation": segmentation, "bbox": [0, 0, 1, 1]}
    data = {"images": [{"id": 1, "file_name": "1.png", "height": 4, "width": 4}], "annotations": [row]}
    path = _write(tmp_path / "i.json", data | {"categories": [{"id": 1, "name": "cat"}]})
    with pytest.raises(ValueError, match="annotation 5 of image 1"):
        coco.read(tmp_path, tmp_path / "out", instances=path)
    assert not (tmp_path / "out").exists()


def test_panoptic_faults_are_named(build: Build) -> None:
    """A missing PNG, one of another size and one with unlisted segments are all named in one error."""
    arguments = build([1, 2, 3], "upright")
    pngs = arguments["panoptic_images"]
    (pngs / "1.png").unlink()
    Image.new("RGB", (3, 3)).save(pngs / "2.png")
    Image.new("RGB", (60, 40), (9, 9, 9)).save(pngs / "3.png")
    with pytest.raises(ValueError) as caught:
        coco.read(**arguments)
    for part in ("must be readable", "must have its photo's size", "segments_info does not list"):
        assert part in str(caught.value)


def test_two_workers_write_the_same_tables(build: Build, tmp_path: Path) -> None:
    """The tables do not depend on the number of processes, byte for byte."""
    arguments = build(list(range(1, 9)), "stored")
    coco.read(**arguments)
    coco.read(**arguments | {"out": tmp_path / "two"}, workers=2)
    for name in ("images", "queries", "regions"):
        assert Tables(tmp_path / "two").table(name).equals(Tables(arguments["out"]).table(name))
