"""Tables × encoder → index of one corpus, for coarse retrieval.

python scripts/build_index.py --tables TABLES --encoder BUNDLE --corpus gold --splits test-0 --out INDEX
python scripts/build_index.py … --index IVF4096,PQ64np --nprobe 64          # compressed; `auto` chooses
torchrun --nproc_per_node 8 scripts/build_index.py … --device cuda          # or under srun: a share each

Run it again after a kill: what was embedded is kept in INDEX.embeddings, with any number of processes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from fovea.embeddings import RowBlock
    from fovea.index.embedding_store import EmbeddingStore
    from fovea.index.kind import IndexKind

GIB = 2**30


def build(options: argparse.Namespace) -> None:
    """Choose the corpus, say what it will cost, embed this process's share; rank 0 writes the index."""
    from fovea import bundle
    from fovea.bad_images import bad_line
    from fovea.embeddings import row_blocks
    from fovea.images import ImageReader
    from fovea.index.dense import DenseIndex
    from fovea.index.embedding_store import EmbeddingStore
    from fovea.ranks import own_device, rank_and_size
    from fovea.retrieve import corpus
    from fovea.tables import Tables

    rank, world_size = rank_and_size()
    if rank == 0 and options.out.exists() and any(options.out.iterdir()) and not options.overwrite:
        raise FileExistsError(f"{options.out} is not empty; pass --overwrite to replace the index in it")
    found = corpus(Tables(options.tables), options.corpus, splits=options.splits)
    if found.absent and options.bad_images == "fail":
        raise ValueError(
            f"{len(found.absent)} images of the corpus are not in {options.tables}, e.g. {found.absent[:5]}; "
            "pass --bad-images skip to leave them out (their queries then count as not retrieved)"
        )
    reader = ImageReader(options.tables, policy=options.bad_images)
    # The size must not depend on the number of processes: another number goes on with the same blocks.
    size = options.block_size or min(4096, max(options.batch_size, len(found.rows) // 256))
    blocks = row_blocks(found.rows, reader, size)
    missing = [id_ for block in blocks for id_ in block.missing]
    if missing and options.bad_images == "fail":
        raise ValueError(
            f"{len(missing)} images have no file, e.g. {missing[:5]}; --bad-images skip leaves them out"
        )
    device = own_device(options.device)
    encoder = bundle.open_encoder(options.encoder)
    made_by = describe(encoder, options.dtype)
    store = EmbeddingStore(
        options.embeddings or options.out.with_name(f"{options.out.name}.embeddings"),
        made_by,
        width=encoder.embed_dim,
        dtype=options.embedding_dtype,
    )
    if rank == 0:
        print(
            f"corpus {options.corpus} of {', '.join(options.splits)}: {len(found.rows):,} images, "
            f"{len(found.absent):,} absent"
        )
        kind = plan(options, len(found.rows), encoder.embed_dim, store)
    import torch

    encoder = encoder.to(device, getattr(torch, options.dtype))
    embed(options, encoder, reader, store, blocks[rank::world_size], f"rank {rank} of {world_size}")
    if rank != 0:
        return
    wait(store, blocks, options.patience)
    keys = [block.key for block in blocks]
    bad = store.left_out(keys)
    if bad and options.bad_images == "fail":  # of a run that left them out
        raise ValueError(
            f"{len(bad)} images cannot be read: {bad[0][0]}: {bad[0][1]}; --bad-images skip leaves them out"
        )
    if len(bad) == len(found.rows):
        raise ValueError(f"none of the {len(found.rows)} images can be read, e.g. {bad[:3]}")
    manifest = made_by | {
        "corpus": options.corpus,
        "splits": sorted(options.splits),
        "absent": len(found.absent),
        "unreadable": len(bad),
    }
    index = DenseIndex.stream(
        store.blocks(keys),
        encoder.embed_dim,
        manifest=manifest,
        kind=kind,
        count=len(found.rows),
        gpu=options.gpu,
    )
    index.save(options.out, overwrite=options.overwrite)
    (options.out / "bad_images.jsonl").write_text("".join(map(bad_line, bad)))
    store.clean()
    print(
        f"{len(index):,} images, {len(bad):,} unreadable (bad_images.jsonl) → {options.out}; "
        f"{store.directory} serves another --index, and may be deleted"
    )


def describe(encoder: Any, dtype: str) -> dict[str, Any]:
    """What decides the embeddings, before the weights are cast."""
    from dataclasses import asdict

    from fovea import bundle

    return {
        "encoder": encoder.spec()["class_path"],
        "fingerprint": bundle.fingerprint(encoder),
        "transform": asdict(encoder.transform),
        "precision": dtype,
    }


def plan(options: argparse.Namespace, count: int, width: int, store: EmbeddingStore) -> IndexKind:
    """The kind of index, after saying what it takes; refuses what does not fit, before the work."""
    from fovea.index import kind as kinds
    from fovea.index.dense import require_gpus

    if options.gpu:
        require_gpus()
    free = kinds.free_bytes()
    if options.index == "auto":
        kind = kinds.IndexKind.choose(count, width, free, nprobe=options.nprobe, seed=options.seed)
    else:
        kind = kinds.IndexKind(options.index, options.nprobe, options.train_size, options.seed)
    index = kind.make(width)
    if kind.num_training(index):
        kind.require_enough(index, min(count, kind.num_training(index)))
    cost = kind.estimate(count, width)
    there = next(path for path in (store.directory, *store.directory.absolute().parents) if path.exists())
    disk = shutil.disk_usage(there).free
    known = "unknown" if free is None else f"{free / GIB:.1f} GiB"
    print(
        f"index {kind.factory}: {cost}; free: memory {known}, disk {disk / GIB:.1f} GiB; embeddings "
        f"{store.estimate_bytes(count) / GIB:.3f} GiB on disk"
    )
    if free is not None and cost.building > free:
        raise MemoryError(
            f"an index of kind {kind.factory} needs {cost.building / GIB:.3f} GiB while it is built and "
            f"{free / GIB:.3f} GiB are free; give --index auto, fewer --splits, or a smaller --corpus"
        )
    needed = cost.disk + max(0, store.estimate_bytes(count) - store.bytes_there())
    if needed > disk:
        raise OSError(
            f"{needed / GIB:.3f} GiB of disk are needed for embeddings and index, {disk / GIB:.3f} GiB are "
            f"free at {there}; --embeddings names another place, --embedding-dtype float16 halves them"
        )
    return kind


def embed(
    options: argparse.Namespace,
    encoder: Any,
    reader: Any,
    store: EmbeddingStore,
    own: Sequence[RowBlock],
    name: str,
) -> None:
    """Embed those of this process's blocks that the store lacks."""
    from tqdm import tqdm

    from fovea.embeddings import embed_blocks

    todo = [block for block in own if not store.has(block.number, block.key)]
    outdated = sum(store.path(block.number).exists() for block in todo)
    images = sum(len(block.rows) for block in todo)
    print(
        f"{name}: {len(own) - len(todo):,} of {len(own):,} blocks are in {store.directory}; "
        f"{len(todo):,} to embed, {images:,} images"
        + (f" ({outdated:,} blocks are damaged or of other images, and are made again)" if outdated else ""),
        flush=True,
    )
    done = embed_blocks(encoder, todo, reader, store, batch_size=options.batch_size, workers=options.workers)
    with tqdm(total=images, unit=" images", desc=name, mininterval=0.5) as bar:
        for count in done:
            bar.update(count)


def wait(store: EmbeddingStore, blocks: Sequence[RowBlock], patience: float) -> None:
    """Until the other processes have done their shares.

    Raises:
        TimeoutError: no block came for `patience` minutes.
    """
    missing = [block for block in blocks if not store.has(block.number, block.key)]
    if missing:
        print(f"waiting for {len(missing):,} blocks of other processes", flush=True)
    last = time.monotonic()
    while missing:
        time.sleep(0.2 if time.monotonic() - last < 10 else 2)
        left = [block for block in missing if not store.has(block.number, block.key)]
        if len(left) < len(missing):
            missing, last = left, time.monotonic()
        if missing and time.monotonic() - last > 60 * patience:
            raise TimeoutError(
                f"no process added a block for {patience:g} minutes and {len(missing):,} of {len(blocks):,} "
                "are missing; run the same command again: what is there is kept"
            )


def main(arguments: list[str] | None = None) -> None:
    """Parse, build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tables", type=Path, required=True, help="canonical tables (scripts/prepare.py)")
    add("--encoder", type=Path, required=True, help="encoder bundle (scripts/export.py), or encoder YAML")
    add(
        "--corpus",
        choices=["gold", "candidates", "full"],
        required=True,
        help="gold: images that answer a question; candidates: these and the questions' own candidates; "
        "full: every image of the splits",
    )
    add("--splits", type=lambda text: text.split(","), required=True, help="comma-separated names of splits")
    add("--out", type=Path, required=True, help="directory of the index")
    add("--overwrite", action="store_true", help="replace the index that is there")
    add(
        "--index",
        default="auto",
        help="`flat` (exact), a FAISS factory string such as IVF4096,PQ64np, or `auto`: flat while it fits "
        "into memory with a margin, else IVF with PQ (%(default)s)",
    )
    add("--nprobe", type=int, default=32, help="cells of an IVF that a search looks into (%(default)s)")
    add("--train-size", type=int, help="vectors that an IVF or PQ learns from (default: 40 a cell)")
    add("--seed", type=int, default=0, help="of their choice (%(default)s)")
    add("--gpu", action="store_true", help="learn an IVF's cells on all GPUs (needs faiss-gpu)")
    add(
        "--bad-images",
        choices=["fail", "skip"],
        default="fail",
        help="unreadable or absent images: stop, or leave out and list (default: %(default)s)",
    )
    add("--batch-size", type=int, default=64, help="images a forward pass (%(default)s)")
    add("--workers", type=int, default=1, help="threads a process that decode images ahead (%(default)s)")
    add("--device", default="cpu", help="torch device; `cuda` is each process's own (%(default)s)")
    add(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        default="float32",
        help="of the encoder's weights and work (%(default)s)",
    )
    add("--embeddings", type=Path, help="where embeddings are kept (default: OUT.embeddings)")
    add(
        "--embedding-dtype",
        choices=["float32", "float16"],
        default="float32",
        help="as which they are kept (%(default)s)",
    )
    add("--block-size", type=int, help="images that are kept or lost together (default: by the corpus)")
    add(
        "--patience",
        type=float,
        default=30,
        metavar="MINUTES",
        help="how long rank 0 waits for a block of another process (%(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        for name in ("batch_size", "block_size", "workers"):
            if (value := getattr(options, name)) is not None and value < (name != "workers"):
                raise ValueError(f"--{name.replace('_', '-')} {value}: too small")
        build(options)
    except (OSError, ValueError, TypeError, MemoryError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
