"""Where: what SAM, GroundingDINO, the mask store and the proposals cost, each against a named alternative.

python benchmarks/where.py                      # real sizes with random weights: some minutes
python benchmarks/where.py --parts masks,proposals,workers
python benchmarks/where.py --tiny               # seconds: does it run; no demand is made

Parts: `segmenter` (8 phrases against 1), `detector` (one phrase a prompt against joint prompts), `masks`
(8 stored masks against their JPEG), `proposals` (propose and store against the bare segmentation calls),
`workers` (two processes against one). Random weights cost what trained ones cost.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PHOTOS = ROOT.parent / "shared/data/photos"
PARTS = ("segmenter", "detector", "masks", "proposals", "workers")
PHRASES = [
    "a man in blue",
    "the red sign",
    "two dogs",
    "umbrella",
    "a woman left of the door",
    "white cones",
    "the big door",
    "a dog",
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny models and images")
    parser.add_argument("--rounds", type=int, default=7, help="of the quick parts (%(default)s)")
    parser.add_argument("--model-rounds", type=int, default=2, help="of the models (%(default)s)")
    parser.add_argument("--images", type=int, default=200, help="of the workers' part (%(default)s)")
    parser.add_argument("--photos", type=Path, default=PHOTOS, help="folder of JPEG files (%(default)s)")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: choose from {','.join(PARTS)}")
    if options.tiny:
        options.rounds = options.model_rounds = 1
        options.images = 16
    jobs = {
        "segmenter": segmenter,
        "detector": detector,
        "masks": stored_masks,
        "proposals": proposals,
        "workers": workers,
    }
    failed = False
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            comparison = jobs[part](Path(folder), options)
        print(comparison.text(), flush=True)
        failed |= not comparison.ok
    return int(failed)


def segmenter(folder: Path, options: argparse.Namespace) -> Any:
    """SAM ViT-B at 1024 px: an image and the boxes of 8 phrases, against the box of one."""
    import numpy as np
    import random_models
    from harness import compare

    from fovea.models.segmenters import load

    sam = load(random_models.official_sam(folder / "sam.pth", tiny=options.tiny))
    image, _ = picture(options)
    height, width = image.shape[:2]
    corners = np.random.default_rng(0).uniform(0, [[width, height]], (len(PHRASES), 2, 2))
    boxes = np.concatenate([corners.min(1), corners.max(1)], 1).astype(np.float32)
    calls = itertools.count()

    def run(count: int) -> None:
        image[0, 0] = next(calls) % 256  # another image to the segmenter: its embedding is not kept
        sam.segment(image, boxes[:count])

    return compare(
        f"segmenter: {width} × {height}, image embedding and masks",
        ("8 phrases", lambda: run(len(PHRASES))),
        ("1 phrase", lambda: run(1)),
        items=1,
        unit="images",
        rounds=options.model_rounds,
        need=None if options.tiny else 1 / 1.3,
    )


def detector(folder: Path, options: argparse.Namespace) -> Any:
    """GroundingDINO-T: 8 phrases one a prompt, against all in one prompt; and where the boxes differ."""
    import random_models
    from harness import compare

    from fovea.models.grounding_dino import GroundingDino

    path = random_models.grounding_dino(folder / "dino", tiny=options.tiny)
    image, _ = picture(options)
    kinds = {kind: GroundingDino(path, 1e-9, kind, batch_size=2) for kind in ("single", "joint")}
    found: dict[str, list[Any]] = {}

    def run(kind: str) -> None:
        found[kind] = kinds[kind].detect(image, PHRASES)

    comparison = compare(
        f"detector: {image.shape[1]} × {image.shape[0]}, {len(PHRASES)} phrases "
        f"({len(kinds['joint'].prompts(PHRASES))} joint prompts)",
        ("one phrase a prompt", lambda: run("single")),
        ("joint prompts", lambda: run("joint")),
        items=1,
        unit="images",
        rounds=max(1, options.model_rounds // 2),
    )
    print(disagreement(found["single"], found["joint"]))
    return comparison


def disagreement(single: list[Any], joint: list[Any]) -> str:
    """How many boxes of one way have no box of the other, for the same phrase, at IoU ≥ 0.5.

    Random weights know no 0.3: the threshold is set so that 10 boxes a phrase pass on average in `single`.
    """
    import numpy as np

    from fovea import masks

    scores = np.sort(np.concatenate([own.scores for own in single]))
    threshold = scores[-min(len(scores), 10 * len(single))]
    total, alone = [0, 0], [0, 0]
    for pair in zip(single, joint, strict=True):
        boxes = [own.boxes[own.scores >= threshold] for own in pair]
        # COCO's boxes are x, y, width, height.
        left, right = (np.concatenate([b[:, :2], b[:, 2:] - b[:, :2]], 1).astype(np.float64) for b in boxes)
        overlap = np.zeros((len(left), len(right)))
        if overlap.size:
            overlap = masks.coco.iou(left, right, [0] * len(right))
        for side, best in enumerate((overlap.max(1, initial=0), overlap.max(0, initial=0))):
            total[side] += len(best)
            alone[side] += int((best < 0.5).sum())
    return (
        f"  boxes with a score ≥ {threshold:.4f} (10 a phrase in single): "
        f"{total[0]} single, {total[1]} joint; without a partner at IoU ≥ 0.5: {alone[0]} and {alone[1]}"
    )


def stored_masks(folder: Path, options: argparse.Namespace) -> Any:
    """Read and decode the 8 masks of an image from a store, against decoding its JPEG."""
    import numpy as np
    from harness import compare

    from fovea import images, masks
    from fovea.mask_store import MaskStore
    from fovea.models.detectors import Felzenszwalb
    from fovea.types import Region

    image, jpeg = picture(options)
    found = Felzenszwalb(scales=(300.0,)).propose(image)
    largest = found[np.argsort(-found.sum((1, 2)))][: len(PHRASES)]
    store = MaskStore(folder, "benchmark")
    regions = [Region(f"r{i}", masks.to_box(m), masks.encode(m)) for i, m in enumerate(largest)]
    store_regions(store, "image", regions)
    store.close()
    reader = MaskStore(folder, "benchmark")
    return compare(
        f"{len(regions)} masks of {image.shape[1]} × {image.shape[0]} pixels, against the JPEG "
        f"({len(jpeg):,} bytes)",
        ("read and decode masks", lambda: read_masks(reader, "image", image.shape[:2])),
        ("decode the JPEG", lambda: images.decode(jpeg)),
        items=1,
        unit="images",
        rounds=10 * options.rounds,
        need=None if options.tiny else 1.0,
    )


def proposals(folder: Path, options: argparse.Namespace) -> Any:
    """Propose the regions of an image and store them, against the segmentation calls alone."""
    from harness import compare
    from skimage.segmentation import felzenszwalb

    from fovea import masks
    from fovea.mask_store import MaskStore
    from fovea.models.detectors import Felzenszwalb
    from fovea.types import Region

    image, _ = picture(options)
    proposer = Felzenszwalb()
    store = MaskStore(folder, proposer.key)
    names = itertools.count()
    counts = []

    def ours() -> None:
        found = proposer.rles(image)
        counts.append(len(found))
        regions = [Region(f"r{i}", masks.to_box(rle), rle) for i, rle in enumerate(found)]
        store_regions(store, f"i{next(names)}", regions)

    def bare() -> None:
        for scale in proposer.scales:
            felzenszwalb(
                image, scale=scale, sigma=proposer.sigma, min_size=proposer.min_size, channel_axis=-1
            )

    comparison = compare(
        f"proposals: {image.shape[1]} × {image.shape[0]}",
        ("propose and store", ours),
        ("segmentation calls", bare),
        items=1,
        unit="images",
        rounds=options.rounds,
        need=None if options.tiny else 1 / 1.3,
    )
    print(f"  {counts[0]} regions an image")
    return comparison


def workers(folder: Path, options: argparse.Namespace) -> Any:
    """`scripts/precompute_masks.py` on two processes, against one; each run starts from nothing."""
    from harness import compare
    from PIL import Image

    from fovea.tables import TableWriter

    image = picture(options)[0][:120, :160]
    height, width = image.shape[:2]
    with TableWriter(folder / "tables") as writer:
        for i in range(options.images):
            image[0, 0] = i % 256, i // 256, 0  # files of their own
            Image.fromarray(image).save(folder / f"{i}.png")
            path = str(folder / f"{i}.png")
            writer.add("images", id=f"i{i}", path=path, width=width, height=height, split="a")
        writer.finish({"reader": "benchmark"})
    names = itertools.count()

    def run(count: int) -> None:
        command = [sys.executable, str(ROOT / "scripts/precompute_masks.py"), "--workers", str(count)]
        command += ["--tables", str(folder / "tables"), "--out", str(folder / f"store{next(names)}")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")

    return compare(
        f"workers: {options.images} images of {width} × {height}, start and end included",
        ("2 workers", lambda: run(2)),
        ("1 worker", lambda: run(1)),
        items=options.images,
        unit="images",
        rounds=max(1, options.rounds // 2),
        need=None if options.tiny else 1.7,
    )


def read_masks(store: Any, image_id: str, size: tuple[int, int]) -> Any:
    """The masks of an image, bool [R, H, W]."""
    from fovea import masks
    from fovea.mask_store import Entry

    return masks.decode_many([region.mask for region in store.get(Entry(image_id))], size)


def store_regions(store: Any, image_id: str, regions: list[Any]) -> None:
    """Append the regions of an image."""
    store.append(image_id, {(): regions})


def picture(options: argparse.Namespace) -> tuple[Any, bytes]:
    """A photo of 640 × 480 (pixels to write to, and its JPEG file), or blobs of that size without a photo."""
    import numpy as np
    from PIL import Image

    from fovea import images

    size = (64, 48) if options.tiny else (640, 480)
    for path in sorted(options.photos.rglob("*.jpg")) if not options.tiny else []:
        with Image.open(path) as image:
            if image.size == size:
                return images.decode(path.read_bytes()).copy(), path.read_bytes()
    coarse = np.random.default_rng(0).integers(0, 256, (size[1] // 8, size[0] // 8, 3), np.uint8)
    blobs = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    file = io.BytesIO()
    blobs.save(file, "JPEG", quality=90)
    return np.array(blobs), file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
