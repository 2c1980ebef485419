"""Data loading: ImageReader + ImageTransform on canonical tables against plain Pillow decode + resize.

python benchmarks/loading.py --images DIR

Both run in a torch DataLoader with the same workers, batch and collation, and give the same uint8 batches.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

PHOTOS = Path(__file__).resolve().parents[2] / "shared/data/photos/coco_mini_train2017/train2017"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, default=PHOTOS, help="folder of JPEG photos (%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="side of the model input, pixels (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="DataLoader processes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    options = parser.parse_args()
    files = sorted(options.images.glob("*.jpg"))
    if not files:
        print(f"error: --images {options.images}: no *.jpg in it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        comparison = measure(files, Path(folder) / "tables", options)
    print(comparison.text())
    return 0 if comparison.ok else 1


def measure(files: list[Path], root: Path, options: argparse.Namespace) -> Any:
    """Both loaders over the same photos, turn about."""
    import numpy as np
    import torch
    from harness import compare
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    from fovea.images import ImageReader, ImageTransform
    from fovea.tables import Tables, TableWriter

    with TableWriter(root) as writer:
        for path in files:
            with Image.open(path) as image:
                size = {"width": image.width, "height": image.height}
            writer.add("images", id=path.stem, path=str(path.resolve()), **size)
        writer.finish({"reader": "benchmark"})
    rows = list(Tables(root).rows("images"))

    class Ours(Dataset[torch.Tensor]):
        reader, transform = ImageReader(root), ImageTransform(options.size)

        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> torch.Tensor:
            pixels, _ = self.transform(self.reader.read(rows[index]))
            return torch.from_numpy(pixels)

    class Plain(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> torch.Tensor:
            with Image.open(files[index]) as image:
                resized = image.convert("RGB").resize((options.size, options.size), Image.Resampling.BICUBIC)
            return torch.from_numpy(np.array(resized))

    loaders = [
        DataLoader(
            dataset, options.batch, num_workers=options.workers, persistent_workers=options.workers > 0
        )
        for dataset in (Ours(), Plain())
    ]
    for ours, plain in zip(*loaders, strict=True):
        if not torch.equal(ours, plain):
            raise RuntimeError("the two loaders give different pixels: the comparison would be unfair")
    return compare(
        f"data loading: {len(files)} photos → {options.size} px, {options.workers} workers",
        ("fovea", lambda: sum(len(batch) for batch in loaders[0])),
        ("plain Pillow", lambda: sum(len(batch) for batch in loaders[1])),
        items=len(files),
        unit="images",
        rounds=options.rounds,
        need=0.9,
    )


if __name__ == "__main__":
    sys.exit(main())
