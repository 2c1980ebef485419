"""Tables × encoder bundle → index of one corpus, for coarse retrieval.

python scripts/build_index.py --tables TABLES --encoder BUNDLE --corpus gold --splits test-0 --out INDEX
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

GIB = 2**30


def available_bytes() -> int | None:
    """Memory that can still be used, page cache included, or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def build(options: argparse.Namespace) -> Path:
    """Choose the corpus, say what it will cost, embed it, write the index and the list of bad images."""
    from fovea import bundle
    from fovea.images import ImageReader
    from fovea.index.dense import DenseIndex
    from fovea.retrieve import corpus, embed_images
    from fovea.tables import Tables

    if options.out.exists() and any(options.out.iterdir()) and not options.overwrite:
        raise FileExistsError(f"{options.out} is not empty; pass --overwrite to replace the index in it")
    tables = Tables(options.tables)
    found = corpus(tables, options.corpus, splits=options.splits)
    if found.absent and options.bad_images == "fail":
        raise ValueError(
            f"{len(found.absent)} images of the corpus are not in {options.tables}, e.g. {found.absent[:5]}; "
            "pass --bad-images skip to leave them out (their queries then count as not retrieved)"
        )
    encoder = bundle.load_encoder(options.encoder).to(options.device)
    size = DenseIndex.estimate_bytes(len(found.rows), encoder.embed_dim)
    free = available_bytes()
    print(
        f"corpus {options.corpus} of {', '.join(options.splits)}: {len(found.rows):,} images, "
        f"{len(found.absent):,} absent; index {size / GIB:.3f} GiB, {2 * size / GIB:.3f} GiB while building"
        + (f", {free / GIB:.1f} GiB free" if free is not None else "")
    )
    if free is not None and 2 * size > free:
        raise MemoryError(
            f"the index needs {2 * size / GIB:.1f} GiB while it is built and {free / GIB:.1f} GiB are free; "
            "index fewer --splits, or a smaller --corpus"
        )
    reader = ImageReader(options.tables, policy=options.bad_images)
    ids, embeddings = embed_images(
        encoder, found.rows, reader, batch_size=options.batch_size, progress=sys.stderr.isatty()
    )
    if not ids:
        raise ValueError(f"none of the {len(found.rows)} images can be read, e.g. {reader.bad[:3]}")
    manifest = {
        "encoder": encoder.spec()["class_path"],
        "fingerprint": bundle.fingerprint(encoder),
        "corpus": options.corpus,
        "splits": sorted(options.splits),
        "absent": len(found.absent),
        "unreadable": len(reader.bad),
    }
    index = DenseIndex.build(ids, embeddings, manifest=manifest)
    index.save(options.out, overwrite=options.overwrite)
    reader.write_bad(options.out / "bad_images.jsonl")
    print(f"{len(ids):,} images, {len(reader.bad):,} unreadable (bad_images.jsonl) → {options.out}")
    return options.out


def main(arguments: list[str] | None = None) -> None:
    """Parse, build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=Path, required=True, help="canonical tables (scripts/prepare.py)")
    parser.add_argument("--encoder", type=Path, required=True, help="encoder bundle (scripts/export.py)")
    parser.add_argument(
        "--corpus",
        choices=["gold", "candidates", "full"],
        required=True,
        help="gold: images that answer a question; candidates: these and the questions' own candidates; "
        "full: every image of the splits",
    )
    parser.add_argument(
        "--splits", type=lambda text: text.split(","), required=True, help="comma-separated names of splits"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the index")
    parser.add_argument("--overwrite", action="store_true", help="replace the index that is there")
    parser.add_argument(
        "--bad-images",
        choices=["fail", "skip"],
        default="fail",
        help="unreadable or absent images: stop, or leave out and list (default: %(default)s)",
    )
    parser.add_argument("--batch-size", type=int, default=64, help="images a forward pass (%(default)s)")
    parser.add_argument("--device", default="cpu", help="torch device (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        build(options)
    except (OSError, ValueError, TypeError, MemoryError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
