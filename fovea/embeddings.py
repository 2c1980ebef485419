"""Images or texts → embeddings: in memory, or of a whole corpus block by block into an `EmbeddingStore`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from fovea.images import ImageReader
from fovea.index.embedding_store import EmbeddingStore
from fovea.models.encoders import Encoder, embed_dtype
from fovea.types import FloatArray, UInt8Array


def embed_images(
    encoder: Encoder,
    rows: Iterable[dict[str, Any]],
    reader: ImageReader,
    *,
    batch_size: int = 64,
    progress: bool = False,
) -> tuple[list[str], FloatArray]:
    """Embed whole images.

    Args:
        encoder: in evaluation mode, on the device that is to do the work.
        rows: rows of the images table.
        reader: gives their pixels; bad images that it skips are left out, with their ids.
        batch_size: images a forward pass.
        progress: show a bar with rate and remaining time.

    Returns:
        N ids and float32 [N, D], normalised.
    """
    from rich.progress import track

    rows = list(rows)
    batches = _embed_batches(encoder, rows, reader, batch_size, 0)
    ids: list[str] = []
    parts = [np.zeros((0, encoder.embed_dim), np.float32)]
    count = -(-len(rows) // batch_size)
    said = f"embedding {len(rows)} images"
    for some, vectors in track(batches, description=said, total=count, disable=not progress):
        ids += some
        parts.append(vectors)
    return ids, np.concatenate(parts)


class RowBlock(NamedTuple):
    """Some consecutive rows of a corpus that are embedded by one process, and kept or lost together.

    Attributes:
        number: place in the corpus, from 0.
        key: hash of what is embedded: ids, places and sizes of the files.
        rows: rows of the images table.
        missing: ids without a file.
    """

    number: int
    key: str
    rows: list[dict[str, Any]]
    missing: list[str]


def row_blocks(rows: Sequence[dict[str, Any]], reader: ImageReader, size: int) -> list[RowBlock]:
    """Divide a corpus; whatever process does so, on whatever machine, gets the same blocks.

    An image that was replaced by one of another size, or put where there was none, changes its block's key (a
    time of change would differ between copies of a corpus).

    Args:
        rows: rows of the images table.
        reader: knows where their files are; no file is opened.
        size: rows of a block, but for the last.
    """
    sizes: dict[Path, int | None] = {}  # a shard holds many images

    def file_size(row: dict[str, Any]) -> int | None:
        path = reader.path(row)
        if path not in sizes:
            try:
                sizes[path] = path.stat().st_size
            except OSError:
                sizes[path] = None
        return sizes[path]

    blocks = []
    for number, start in enumerate(range(0, len(rows), size)):
        some = list(rows[start : start + size])
        digest = blake2b(digest_size=16)
        missing = []
        for row in some:
            place = [row["id"], row["path"], row.get("offset", -1), row.get("size", -1), file_size(row)]
            digest.update(json.dumps(place).encode())
            if place[-1] is None:
                missing.append(row["id"])
        blocks.append(RowBlock(number, digest.hexdigest(), some, missing))
    return blocks


def embed_blocks(
    encoder: Encoder,
    blocks: Iterable[RowBlock],
    reader: ImageReader,
    store: EmbeddingStore,
    *,
    batch_size: int = 64,
    workers: int = 0,
) -> Iterator[int]:
    """Embed blocks into a store, each written as soon as it is done.

    Args:
        encoder: in evaluation mode, on the device that is to do the work.
        blocks: those to do.
        reader: gives their pixels; bad images that it skips are noted with their block.
        store: takes the embeddings.
        batch_size: images a forward pass.
        workers: threads that decode images ahead of the encoder; 0: none.

    Yields:
        Number of images looked at, batch by batch.
    """
    for block in blocks:
        ids: list[str] = []
        parts = [np.zeros((0, encoder.embed_dim), np.float32)]
        left = len(block.rows)
        for some, vectors in _embed_batches(encoder, block.rows, reader, batch_size, workers):
            ids += some
            parts.append(vectors)
            yield min(batch_size, left)
            left -= min(batch_size, left)
        reasons = dict(reader.bad)
        left_out = [(row["id"], reasons[row["id"]]) for row in block.rows if row["id"] in reasons]
        store.write(block.number, block.key, ids, np.concatenate(parts), left_out)


def _embed_batches(
    encoder: Encoder,
    rows: Sequence[dict[str, Any]],
    reader: ImageReader,
    batch_size: int,
    workers: int,
) -> Iterator[tuple[list[str], FloatArray]]:
    """Ids and embeddings of each batch of rows, without the bad images."""
    _require_eval(encoder)
    for kept in _read_batches(encoder, rows, reader, batch_size, workers):
        ids = [id_ for id_, _ in kept]
        if not kept:
            yield [], np.zeros((0, encoder.embed_dim), np.float32)
            continue
        batch = torch.from_numpy(np.stack([pixels for _, pixels in kept])).to(encoder.logit_scale.device)
        with torch.inference_mode():
            pixels = encoder.transform.normalise(batch).to(embed_dtype(encoder))
            yield ids, _unit(encoder.encode_image(pixels), ids)


def _read_batches(
    encoder: Encoder,
    rows: Sequence[dict[str, Any]],
    reader: ImageReader,
    batch_size: int,
    workers: int,
) -> Iterator[list[tuple[str, UInt8Array]]]:
    """Id and pixels of each batch; threads read the next two batches meanwhile (Pillow frees the lock)."""

    def read(some: Sequence[dict[str, Any]]) -> list[tuple[str, UInt8Array]]:
        return [(row["id"], encoder.transform(image)[0]) for row, image in reader.read_many(some)]

    batches = (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))
    if workers < 1:
        yield from map(read, batches)
        return
    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[list[Future[list[tuple[str, UInt8Array]]]]] = deque()
        try:
            for batch in batches:
                ahead.append([pool.submit(read, [row]) for row in batch])
                if len(ahead) > 2:
                    yield [one for future in ahead.popleft() for one in future.result()]
            while ahead:
                yield [one for future in ahead.popleft() for one in future.result()]
        finally:  # a bad image that ends the run: nobody waits for the others
            pool.shutdown(wait=False, cancel_futures=True)


def embed_texts(encoder: Encoder, texts: Sequence[str], *, batch_size: int = 256) -> FloatArray:
    """Embed texts → float32 [Q, D], normalised.

    Args:
        encoder: in evaluation mode.
        texts: Q texts.
        batch_size: texts a forward pass.
    """
    _require_eval(encoder)
    parts = [np.zeros((0, encoder.embed_dim), np.float32)]
    for start in range(0, len(texts), batch_size):
        some = texts[start : start + batch_size]
        with torch.inference_mode():
            parts.append(
                _unit(encoder.encode_text(encoder.tokenize(some).to(encoder.logit_scale.device)), some)
            )
    return np.concatenate(parts)


def _require_eval(encoder: Encoder) -> None:
    if encoder.training:
        raise ValueError(
            "the encoder is in training mode, so dropout would change its embeddings; call .eval() first"
        )


def _unit(embeddings: torch.Tensor, names: Sequence[str]) -> FloatArray:
    """Normalise [B, D] in float32; a vector without a direction is an error that names its image or text."""
    embeddings = embeddings.float()
    lengths = embeddings.norm(dim=-1)
    bad = torch.nonzero(~torch.isfinite(lengths) | (lengths == 0)).flatten().tolist()
    if bad:
        raise ValueError(
            f"{len(bad)} of {len(names)} embeddings of a batch are NaN, infinite or zero, e.g. of "
            f"{[names[i] for i in bad[:5]]}; check the weights (and fp16 overflow)"
        )
    unit: FloatArray = functional.normalize(embeddings, dim=-1).cpu().numpy()
    return unit
