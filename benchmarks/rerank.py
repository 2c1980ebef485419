"""Rerank: 20 candidates × 5 regions of one question, against the bare encoder forward for those 100 crops.

python benchmarks/rerank.py                 # ViT-B/32 at 224 px with random weights, photos of 640 × 480
python benchmarks/rerank.py --tiny          # seconds: does it run; no demand is made

Parts: `fresh` (read, cut, encode, ground, fuse: nothing is known of the candidates) and `cached` (the region
bank holds their embeddings, as it does from the second question on). Both embed the question and its phrases;
the bare forward gets ready tensors and embeds no text.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

NUM_CANDIDATES, NUM_REGIONS = 20, 5
QUESTION = "which of the two signs is behind the man in blue ?"
PHRASES = ["two signs", "the man in blue"]
NEED = {"fresh": 1 / 1.25, "cached": 1 / 0.05}
TINY = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="ViT-B-32", help="of open_clip (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of the fresh part (%(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="of torch (default: its own choice)")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread, CPU seconds: steadier on a busy machine"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny images")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        comparisons = measure(Path(folder), options)
    for comparison in comparisons:
        print(comparison.text(), flush=True)
    return int(not all(comparison.ok for comparison in comparisons))


def measure(folder: Path, options: argparse.Namespace) -> list[Any]:
    """Both parts on one set of candidates."""
    import numpy as np
    import torch
    from harness import compare

    from fovea.images import ImageReader
    from fovea.models.encoders import open_clip, open_clip_from_config
    from fovea.region_bank import RegionBank, View, region_masks
    from fovea.region_embeddings import _show
    from fovea.region_sources import AnnotatedRegions
    from fovea.retrieve import embed_texts
    from fovea.reweight import local_score
    from fovea.tables import Tables
    from fovea.where import ground_candidates

    if options.threads or options.cpu_time:
        torch.set_num_threads(1 if options.cpu_time else options.threads)
    torch.manual_seed(0)
    encoder: Any = open_clip_from_config(TINY) if options.tiny else open_clip(options.model)
    encoder = encoder.enable_alpha().eval()
    tables = Tables(make_photos(folder, (64, 48) if options.tiny else (640, 480)))
    rows = list(tables.rows("images"))
    ids = [row["id"] for row in rows]
    reader, source, view = ImageReader(tables.root), AnnotatedRegions(tables), View(crop=True)
    query = np.zeros(len(rows), np.int64)
    global_score = np.linspace(0.3, 0.2, len(rows))

    def rerank(bank: RegionBank) -> Any:
        """One question: fused scores of its candidates."""
        vectors = embed_texts(encoder, [QUESTION, *PHRASES])
        images = bank.embed(rows)
        found = ground_candidates([vectors[1:]], vectors[:1], query, ids, images)
        counts = np.full(len(rows), len(PHRASES), np.int64)
        local, _ = local_score(found.similarity, found.eq4, counts)
        return 0.4 * global_score + 4.0 * local

    def bank() -> RegionBank:
        return RegionBank(
            encoder, source, reader, view=view, whole=False, batch_size=NUM_CANDIDATES * NUM_REGIONS
        )

    crops, alphas = [], []
    for row in rows:
        image = reader.read(row)
        for mask in region_masks(source.regions(row), *image.shape[:2]):
            patch, alpha = _show(encoder, image, mask, view)
            crops.append(patch)
            alphas.append(alpha)
    pixels = encoder.transform.normalise(torch.from_numpy(np.stack(crops)))
    alpha = torch.from_numpy(np.stack(alphas)).float()
    assert len(pixels) == NUM_CANDIDATES * NUM_REGIONS

    def bare() -> Any:
        with torch.inference_mode():
            return encoder.encode_image(pixels, alpha)

    full = bank()
    np.testing.assert_allclose(rerank(full), rerank(bank()), atol=1e-5)
    size = "tiny" if options.tiny else f"{options.model}, {encoder.transform.size} px"
    title = f"{NUM_CANDIDATES} candidates × {NUM_REGIONS} regions, {size}, {torch.get_num_threads()} threads"
    jobs = {
        "fresh": (lambda: rerank(bank()), options.rounds),
        "cached": (lambda: rerank(full), options.rounds),
    }
    return [
        compare(
            f"rerank, {part}: {title}",
            (f"question to fused scores, {part}", job),
            ("encode_image of the ready crops", bare),
            items=1,
            unit="questions",
            rounds=1 if options.tiny else rounds,
            need=None if options.tiny else NEED[part],
            clock=time.process_time if options.cpu_time else time.perf_counter,
        )
        for part, (job, rounds) in jobs.items()
    ]


def make_photos(folder: Path, size: tuple[int, int]) -> Path:
    """JPEG files of smooth noise, each with five elliptic regions, as canonical tables."""
    import numpy as np
    from PIL import Image

    from fovea import masks
    from fovea.tables import TableWriter

    rng = np.random.default_rng(0)
    width, height = size
    y, x = np.mgrid[:height, :width]
    with TableWriter(folder / "tables") as writer:
        for i in range(NUM_CANDIDATES):
            coarse = rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
            Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(
                folder / f"{i}.jpg", quality=90
            )
            writer.add(
                "images", id=f"i{i}", path=str(folder / f"{i}.jpg"), width=width, height=height, split="a"
            )
            for r in range(NUM_REGIONS):
                cy, cx = rng.uniform(0.25, 0.75, 2) * (height, width)
                ry, rx = rng.uniform(0.08, 0.25, 2) * (height, width)
                mask = ((y - cy) / ry) ** 2 + ((x - cx) / rx) ** 2 <= 1
                box = [cx - rx, cy - ry, cx + rx, cy + ry]
                region = {"phrase": "thing", "box": box, "rle": masks.encode(mask)["counts"]}
                writer.add("regions", id=str(r), image_id=f"i{i}", height=height, width=width, **region)
        writer.finish({"reader": "benchmark"})
    return folder / "tables"


if __name__ == "__main__":
    sys.exit(main())
