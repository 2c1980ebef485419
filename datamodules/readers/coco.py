"""COCO layout → canonical tables: captions are queries; polygons, crowds and panoptic PNGs are regions.

Which pixels were annotated? Canonical masks belong to the EXIF-upright image. COCO's JSON gives the width
and height of what the annotator saw: if only the upright size matches, nothing is turned; if only the size
as stored in the file matches, masks are turned with the pixels. Where both match (no swap of sides, or a
square photo), the photo follows those of its data set that are certain, and is taken as upright when there
is none: annotators' tools show photos upright.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.doctor import Progress, Report, silent, write_bad
from datamodules.readers.coco_json import CocoJson, Photo, Segment
from datamodules.workers import ordered_map
from fovea import masks
from fovea.bad_images import BAD_IMAGES
from fovea.images import BadImage, Decoded, decode, decode_with_orientation
from fovea.tables import TableWriter

AnnotatedOn = Literal["auto", "upright", "stored"]


def split_of(image_id: str, splits: Mapping[str, float], seed: int) -> str:
    """The split of one image: a hash of seed and id, so that it never changes when images are added.

    Args:
        image_id: id of the image.
        splits: name → share; the shares add up to 1.
        seed: another seed gives another division.
    """
    point = int.from_bytes(sha256(f"{seed}:{image_id}".encode()).digest()[:8], "big") / 2**64
    edge = 0.0
    for name, share in splits.items():
        edge += share
        if point < edge:
            return name
    return list(splits)[-1]  # rounding: the shares add up to 1 − 1e-16


def read(
    images: Path,
    out: Path,
    *,
    captions: Path | None = None,
    instances: Path | None = None,
    panoptic: Path | None = None,
    panoptic_images: Path | None = None,
    splits: Mapping[str, float] | None = None,
    split_seed: int = 0,
    annotated_on: AnnotatedOn = "auto",
    policy: Literal["fail", "skip"] = "skip",
    workers: int = 1,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Report:
    """Write the canonical tables of one COCO-layout data set; every photo is decoded once on the way.

    Args:
        images: folder of the photos.
        out: directory of the tables.
        captions: captions JSON.
        instances: instances JSON.
        panoptic: panoptic JSON.
        panoptic_images: folder of the panoptic PNGs.
        splits: name → share of the images (default train .6, val .2, test .2).
        split_seed: seed of the division.
        annotated_on: `upright` or `stored` pixels, or `auto` (see the top of this file).
        policy: `skip` leaves missing and unreadable photos out and lists them in `bad_images.jsonl`; `fail`
            raises.
        workers: processes that decode; the tables do not depend on it.
        overwrite: replace tables that are already there.
        progress: wraps the pass over the photos.

    Raises:
        ValueError: the files contradict themselves or each other; all problems at once.
    """
    splits = splits or {"train": 0.6, "val": 0.2, "test": 0.2}
    source = _load(images, captions, instances, panoptic, panoptic_images, splits)
    source.problems.raise_if_any("COCO input")
    report = Report()
    with TableWriter(out, overwrite=overwrite) as writer:
        jobs = [
            _Job(photo, images.absolute(), panoptic_images, annotated_on) for photo in source.photos.values()
        ]
        results = progress(_examined(jobs, workers, report), len(jobs))
        for result in results:
            split = split_of(result.photo.id, splits, split_seed)
            for rule, example in result.problems:
                source.problems.add(rule, example)
            if result.state == "present":
                _write(writer, report, result, split)
            else:
                path = str(images / result.photo.file_name)
                row = {"id": result.photo.id, "split": split, "path": path}
                report.add_bad(row | {"state": result.state, "reason": result.reason})
        if policy == "fail":
            for row in report.bad:
                rule = f"--images {images}: photos must be readable (--policy skip leaves others out)"
                source.problems.add(rule, f"{row['path']}: {row['reason']}")
        if not writer.counts["images"]:
            source.problems.add(
                f"--images {images}: none of the {len(jobs):,} photos of the JSON is readable"
            )
        source.problems.raise_if_any("COCO input")
        write_bad(writer.directory / BAD_IMAGES, report.bad)
        writer.finish(
            {"reader": "coco", "sources": source.sources, "images": str(images.absolute())}
            | {"split_seed": split_seed, "splits": dict(splits), "annotated_on": annotated_on}
            | {"doctor": report.to_json()}
        )
    return report


def _load(
    images: Path,
    captions: Path | None,
    instances: Path | None,
    panoptic: Path | None,
    panoptic_images: Path | None,
    splits: Mapping[str, float],
) -> CocoJson:
    source = CocoJson()
    if not images.is_dir():
        source.problems.add(f"--images {images}: no such folder")
    if not splits or abs(sum(splits.values()) - 1) > 1e-6 or min(splits.values()) < 0:
        source.problems.add(f"--splits {dict(splits)}: shares must be at least 0 and add up to 1")
    if captions is None and instances is None and panoptic is None:
        source.problems.add("nothing to read: pass --captions, --instances or --panoptic")
    if (panoptic is None) != (panoptic_images is None):
        source.problems.add("--panoptic (JSON) and --panoptic-images (folder of PNGs) go together")
    elif panoptic_images is not None and not panoptic_images.is_dir():
        source.problems.add(f"--panoptic-images {panoptic_images}: no such folder")
    if captions is not None:
        source.add_captions(captions)
    if instances is not None:
        source.add_instances(instances)
    if panoptic is not None:
        source.add_panoptic(panoptic)
    return source


@dataclass
class _Job:
    photo: Photo
    images: Path
    panoptic_images: Path | None
    annotated_on: AnnotatedOn


@dataclass
class _Result:
    """One photo after decoding. `undecided`: both readings of its EXIF orientation fit the annotations."""

    photo: Photo
    path: str = ""
    state: Literal["present", "missing", "unreadable", "undecided"] = "present"
    reason: str = ""
    size: tuple[int, int] = (0, 0)
    turned: AnnotatedOn | None = None
    regions: list[tuple[Segment, list[float], bytes | None]] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)


def _examined(jobs: list[_Job], workers: int, report: Report) -> Iterator[_Result]:
    """Results in the order of the jobs; undecided photos come last, after the certain ones spoke."""
    undecided: list[_Job] = []
    certain: Counter[AnnotatedOn | None] = Counter()
    for job, result in zip(jobs, ordered_map(_examine, jobs, workers=workers), strict=True):
        if result.state == "undecided":
            undecided.append(job)
            continue
        certain[result.turned] += 1
        yield result
    convention: AnnotatedOn = "stored" if certain["stored"] > certain["upright"] else "upright"
    if undecided:
        report.notes.append(
            f"{len(undecided):,} EXIF-turned photos fit their annotations both upright and as stored; taken "
            f"as {convention} (by size: {certain['upright']:,} upright, {certain['stored']:,} stored), "
            "unless --annotated-on says otherwise"
        )
    again = [_Job(job.photo, job.images, job.panoptic_images, convention) for job in undecided]
    yield from ordered_map(_examine, again, workers=workers if len(again) > 100 else 1)


def _examine(job: _Job) -> _Result:
    """Decode one photo and turn its annotations into masks of the upright image."""
    photo = job.photo
    result = _Result(photo, str(job.images / photo.file_name))
    try:
        data = Path(result.path).read_bytes()
    except FileNotFoundError:
        result.state, result.reason = "missing", "no such file"
        return result
    except OSError as error:
        result.state, result.reason = "unreadable", f"cannot be read: {error.strerror or error}"
        return result
    try:
        image = decode_with_orientation(data)
    except BadImage as error:
        result.state, result.reason = "unreadable", error.reason
        return result
    height, width = image.pixels.shape[:2]
    result.size = (height, width)
    readings = _readings(photo, image)
    if not readings:
        told = f"{photo.size[1]}×{photo.size[0]}" if photo.size else "?"
        result.state = "unreadable"
        result.reason = f"the JSON says {told} pixels, the file has {width}×{height}: not the annotated photo"
        return result
    if len(readings) > 1 and job.annotated_on == "auto":
        result.state = "undecided"
        return result
    convention = readings[0] if len(readings) == 1 else job.annotated_on
    if image.orientation != 1 and len(readings) == 1:
        result.turned = convention
    stored = convention == "stored"
    drawn_on = image.stored_size if stored else result.size
    orientation = image.orientation if stored else 1
    _add_regions(job, result, drawn_on, orientation)
    return result


def _readings(photo: Photo, image: Decoded) -> list[AnnotatedOn]:
    """The pixels that may have been annotated, by their size: none, one, or both of `upright`, `stored`."""
    if not photo.segments:
        return ["upright"]
    sizes: dict[AnnotatedOn, tuple[int, int]] = {
        "upright": image.pixels.shape[:2],
        "stored": image.stored_size,
    }
    if image.orientation == 1:
        del sizes["stored"]
    return [name for name, size in sizes.items() if photo.size in (None, size)]


def _add_regions(job: _Job, result: _Result, drawn_on: tuple[int, int], orientation: int) -> None:
    photo, (height, width) = result.photo, drawn_on
    ids = _panoptic_ids(job, result, drawn_on) if photo.panoptic_file else None
    for segment in photo.segments:
        try:
            rle = _rle(segment, ids, height, width)
            box = _box(segment, rle)
        except (ValueError, TypeError) as error:
            rule = "annotations: every segmentation and bbox must be sound and fit its image"
            result.problems.append((rule, f"annotation {segment.id} of image {photo.id}: {error}"))
            continue
        if orientation != 1:
            box = masks.orient_boxes(box[None], orientation, height, width)[0]
            if rle is not None:
                rle = masks.encode(masks.orient_masks(masks.decode(rle), orientation))
        counts = None if rle is None else rle["counts"]
        result.regions.append((segment, box.tolist(), counts))


def _rle(segment: Segment, ids: np.ndarray[Any, Any] | None, height: int, width: int) -> masks.RLE | None:
    if segment.kind == "box":
        return None
    if segment.kind != "panoptic":
        return masks.from_coco(segment.shape, height, width)
    if ids is None:
        raise ValueError("its panoptic PNG is unusable")
    return masks.encode(ids == segment.shape)


def _box(segment: Segment, rle: masks.RLE | None) -> masks.FloatArray:
    """Tight box of the mask; the annotated box where there is no mask, or an empty one."""
    if rle is not None and (masks.area(rle) or segment.bbox is None):
        return masks.to_box(rle)
    values = list(segment.bbox or ())
    if len(values) != 4 or not all(math.isfinite(value) for value in values):
        raise ValueError("bbox must be [x, y, width, height] in pixels")
    x, y, w, h = values
    return np.array([x, y, x + w, y + h], np.float32)


def _panoptic_ids(job: _Job, result: _Result, drawn_on: tuple[int, int]) -> np.ndarray[Any, Any] | None:
    """uint32 [H, W]: segment id R + 256 G + 65536 B of each pixel of the panoptic PNG."""
    assert job.panoptic_images is not None and job.photo.panoptic_file is not None
    path = job.panoptic_images / job.photo.panoptic_file
    try:
        colours = decode(path.read_bytes()).astype(np.uint32)
    except (OSError, BadImage) as error:
        rule = f"--panoptic-images {job.panoptic_images}: every PNG that the JSON names must be readable"
        result.problems.append((rule, f"{job.photo.panoptic_file}: {getattr(error, 'reason', error)}"))
        return None
    if colours.shape[:2] != drawn_on:
        rule = f"--panoptic-images {job.panoptic_images}: a PNG must have its photo's size"
        result.problems.append((rule, f"{path.name}: {colours.shape[:2]} for {drawn_on} (H, W)"))
        return None
    ids: np.ndarray[Any, Any] = colours[..., 0] + 256 * colours[..., 1] + 65536 * colours[..., 2]
    if unlisted := set(np.unique(ids).tolist()) - {0} - {segment.shape for segment in job.photo.segments
                                                       if segment.kind == "panoptic"}:  # fmt: skip
        rule = f"--panoptic-images {job.panoptic_images}: a PNG has segments that segments_info does not list"
        result.problems.append((rule, f"{path.name}: {sorted(unlisted)[:3]}"))
    return ids


def plain_name(label: str) -> str:
    """A panoptic class as one would say it: `sky-other-merged` is sky, `wall-brick` a brick wall."""
    parts = [part for part in label.split("-") if part not in ("merged", "other", "stuff")]
    if parts[:1] in (["wall"], ["floor"], ["ceiling"]):
        parts = [*parts[1:], parts[0]]
    return " ".join(parts) or label


def _write(writer: TableWriter, report: Report, result: _Result, split: str) -> None:
    photo, (height, width) = result.photo, result.size
    caption = photo.captions[0][1] if photo.captions else ""
    pixels = {"path": result.path, "width": width, "height": height}
    writer.add("images", id=photo.id, **pixels, caption=caption, source="coco", split=split)
    report.images.setdefault(split, Counter())["present"] += 1
    for caption_id, text in photo.captions:
        row = {"id": f"caption-{caption_id}", "text": text, "gold_image_ids": [photo.id]}
        writer.add("queries", **row, split=split, kind="caption")
        report.queries.setdefault(split, Counter())["caption"] += 1
    for segment, box, counts in result.regions:
        prefix = "panoptic" if segment.kind == "panoptic" else "instance"
        what = {
            "label": segment.label,
            "phrase": plain_name(segment.label) if segment.kind == "panoptic" else segment.label,
            "iscrowd": segment.iscrowd,
            "source": segment.kind,
        }
        where = {"image_id": photo.id, "box": box, "height": height, "width": width, "rle": counts}
        writer.add("regions", id=f"{prefix}-{segment.id}", **what, **where)
        report.regions.setdefault(split, Counter())[segment.kind] += 1
