"""COCO JSON files → one record a photo, with every fault of the files named at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from datamodules.readers.problems import Problems


@dataclass
class Segment:
    """One annotated region as the JSON gives it.

    Attributes:
        id: unique in the tables.
        kind: `polygon`, `crowd_rle`, `rle` (not a crowd), `box` (no segmentation) or `panoptic`.
        label: category name.
        shape: COCO's `segmentation`; for `panoptic` the segment's id in the PNG; None for `box`.
        bbox: x, y, width, height in pixels, or None.
        iscrowd: COCO's flag.
    """

    id: str
    kind: str
    label: str
    shape: Any
    bbox: Sequence[float] | None
    iscrowd: bool


@dataclass
class Photo:
    """One photo and everything that the JSON files say about it.

    Attributes:
        id: COCO's image id as text.
        file_name: relative to the images folder.
        size: (height, width) that the annotations were made on, or None when the JSON does not say.
        captions: (caption id, text).
        segments: annotated regions.
        panoptic_file: the panoptic PNG's name, or None.
    """

    id: str
    file_name: str
    size: tuple[int, int] | None
    captions: list[tuple[str, str]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    panoptic_file: str | None = None


class CocoJson:
    """The photos of up to three COCO files (captions, instances, panoptic).

    Attributes:
        photos: image id → record, in the order of the files.
        sources: file → sha256.
        problems: what is wrong with them.
    """

    def __init__(self) -> None:
        self.photos: dict[str, Photo] = {}
        self.sources: dict[str, str] = {}
        self.problems = Problems()

    def add_captions(self, path: Path) -> None:
        """Read a captions file."""
        for photo, row in self._annotations(path, ("caption",), "captions"):
            text = row["caption"]
            if not isinstance(text, str) or not text.strip():
                rule = f"{path}: annotations[].caption must be a text; remove empty ones"
                self.problems.add(rule, f"annotation {row['id']}: {text!r}")
            else:
                photo.captions.append((str(row["id"]), " ".join(text.split())))

    def add_instances(self, path: Path) -> None:
        """Read an instances file: polygons, run lengths, or boxes alone."""
        for photo, row in self._annotations(path, ("category_id",), "instances"):
            shape, crowd = row.get("segmentation"), bool(row.get("iscrowd", 0))
            kind = "polygon" if isinstance(shape, list) else "crowd_rle" if crowd else "rle"
            if shape is None or shape == []:
                if "bbox" not in row:
                    rule = f"{path}: an annotation needs 'segmentation' or 'bbox'"
                    self.problems.add(rule, f"annotation {row['id']}")
                    continue
                kind, shape = "box", None
            label, bbox = row["category"], row.get("bbox")
            photo.segments.append(Segment(str(row["id"]), kind, label, shape, bbox, crowd))

    def add_panoptic(self, path: Path) -> None:
        """Read a panoptic file: for each photo a PNG and its segments."""
        needed = ("file_name", "segments_info")
        for photo, row in self._annotations(path, needed, "panoptic", ids=False):
            photo.panoptic_file = row["file_name"]
            for info in row["segments_info"]:
                if missing := {"id", "category_id"} - set(info):
                    rule = f"{path}: annotations[].segments_info[] lacks {sorted(missing)}"
                    self.problems.add(rule, f"image {photo.id}")
                    continue
                label = self._categories.get(info["category_id"])
                if label is None:
                    rule = f"{path}: segments_info[].category_id is not in 'categories'"
                    self.problems.add(rule, info["category_id"])
                    continue
                name, crowd = f"{photo.id}-{info['id']}", bool(info.get("iscrowd", 0))
                photo.segments.append(Segment(name, "panoptic", label, info["id"], info.get("bbox"), crowd))

    def _annotations(
        self, path: Path, keys: tuple[str, ...], flag: str, *, ids: bool = True
    ) -> Iterator[tuple[Photo, dict[str, Any]]]:
        """(photo, annotation) of every sound annotation; `category` holds the category's name."""
        data = self._load(path, flag)
        if data is None:
            return
        known = self._add_photos(path, data["images"])
        listed = {c.get("id"): c.get("name") for c in data.get("categories", []) if isinstance(c, dict)}
        self._categories: dict[Any, str] = {key: name for key, name in listed.items() if name}
        needed = {"image_id", *(["id"] if ids else []), *keys}
        seen: set[Any] = set()
        for row in data["annotations"]:
            if missing := needed - set(row):
                wrong = f"{path}: annotations[] lacks {sorted(missing)}; is this a {flag} file (--{flag})?"
                self.problems.add(wrong, f"annotation {row.get('id', '?')}")
                continue
            if str(row["image_id"]) not in known:
                rule = f"{path}: annotations[].image_id is not in 'images'; add the image or remove it"
                self.problems.add(rule, f"image_id {row['image_id']!r} of annotation {row.get('id', '?')}")
                continue
            if ids and row["id"] in seen:
                self.problems.add(f"{path}: annotations[].id must be unique", row["id"])
                continue
            seen.add(row.get("id"))
            if "category_id" in needed:
                if row["category_id"] not in self._categories:
                    rule = f"{path}: annotations[].category_id is not in 'categories', or has no name"
                    self.problems.add(rule, f"category_id {row['category_id']!r}")
                    continue
                row["category"] = self._categories[row["category_id"]]
            yield self.photos[str(row["image_id"])], row

    def _load(self, path: Path, flag: str) -> dict[str, Any] | None:
        if not path.is_file():
            self.problems.add(f"--{flag} {path}: no such file")
            return None
        content = path.read_bytes()
        self.sources[str(path)] = sha256(content).hexdigest()
        try:
            data = json.loads(content)
        except ValueError as error:  # also a UnicodeDecodeError
            self.problems.add(f"{path}: no JSON ({error})")
            return None
        needed = ["images", "annotations", *([] if flag == "captions" else ["categories"])]
        if not isinstance(data, dict):
            self.problems.add(
                f"{path}: the top level must be an object with {needed}; got {type(data).__name__}"
            )
            return None
        for key in needed:
            if not isinstance(data.get(key), list):
                has = sorted(data)
                self.problems.add(
                    f"{path}: key {key!r} must be a list; the file has {has}; is it a {flag} file?"
                )
        return data if all(isinstance(data.get(key), list) for key in needed) else None

    def _add_photos(self, path: Path, rows: list[dict[str, Any]]) -> set[str]:
        """Take in a file's `images`; returns their ids."""
        known: set[str] = set()
        for row in rows:
            if missing := {"id", "file_name"} - set(row):
                self.problems.add(f"{path}: images[] lacks {sorted(missing)}", row.get("id", "?"))
                continue
            image_id, name = str(row["id"]), str(row["file_name"])
            if image_id in known:
                self.problems.add(f"{path}: images[].id must be unique", image_id)
                continue
            known.add(image_id)
            if Path(name).is_absolute() or ".." in Path(name).parts:
                self.problems.add(f"{path}: images[].file_name must stay inside the images folder", name)
            size = (row["height"], row["width"]) if {"height", "width"} <= set(row) else None
            photo = self.photos.setdefault(image_id, Photo(image_id, name, size))
            photo.size = photo.size or size
            if photo.file_name != name or (size and photo.size != size):
                told = f"image {image_id}: {photo.file_name} {photo.size} and {name} {size}"
                self.problems.add(f"{path}: images[] must agree with the other files on name and size", told)
        return known
