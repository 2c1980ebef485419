"""Jobs → pictures in tar shards, drawn on several processes: the bytes do not depend on how many."""

from __future__ import annotations

import io
import multiprocessing
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

J = TypeVar("J")
R = TypeVar("R")
CHUNK = 256  # jobs handed to a process at once


def _run_chunk(render: Callable[[J], R], jobs: Sequence[J]) -> list[R]:
    return [render(job) for job in jobs]


def render_in_order(render: Callable[[J], R], jobs: Sequence[J], *, workers: int) -> Iterator[R]:
    """`map(render, jobs)` on `workers` fresh processes (0 or 1: in this one), results in the order of `jobs`.

    At most a few chunks are in flight, so that the memory used does not grow with the number of jobs.
    """
    chunks: Iterable[Sequence[J]] = (jobs[start : start + CHUNK] for start in range(0, len(jobs), CHUNK))
    # Two chunks are drawn sooner than the processes have started.
    if workers <= 1 or len(jobs) <= 2 * CHUNK:
        for chunk in chunks:
            yield from _run_chunk(render, chunk)
        return
    # spawn: a forked copy of a process that already runs torch threads can hang.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = iter(chunks)
        pending = [pool.submit(_run_chunk, render, chunk) for chunk in islice(waiting, 3 * workers)]
        while pending:
            done = pending.pop(0).result()
            pending += [pool.submit(_run_chunk, render, chunk) for chunk in islice(waiting, 1)]
            yield from done


class TarShards:
    """Writes files into uncompressed tar shards that are read back by offset.

    The headers carry no time, user or mode of this machine: equal contents give equal bytes.
    """

    def __init__(self, directory: Path, name: str, *, per_shard: int = 4096) -> None:
        self._directory, self._name, self._per_shard = directory, name, per_shard
        self._tar: tarfile.TarFile | None = None
        self._count = 0

    def add(self, name: str, data: bytes) -> dict[str, str | int]:
        """Append one file; returns the `path` (relative to the tables), `offset` and `size` of an image."""
        if self._count % self._per_shard == 0:
            self.close()
            self._path = self._directory / f"{self._name}-{self._count // self._per_shard:04d}.tar"
            self._tar = tarfile.open(self._path, "w", format=tarfile.USTAR_FORMAT)
        assert self._tar is not None
        info = tarfile.TarInfo(name)
        info.size, info.mtime = len(data), 0
        self._tar.addfile(info, io.BytesIO(data))
        self._count += 1
        end = self._tar.offset  # past the padding to whole blocks of 512 bytes
        return {"path": self._path.name, "offset": end - -(-len(data) // 512) * 512, "size": len(data)}

    def close(self) -> None:
        """Finish the open shard."""
        if self._tar is not None:
            self._tar.close()
            self._tar = None

    def __enter__(self) -> TarShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
