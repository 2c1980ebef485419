"""Dense search: our index against bare faiss, and compressed against exact.

python benchmarks/index.py                  # 1 M × 512: some 20 minutes on one thread, 5 GiB of memory
python benchmarks/index.py --parts flat
python benchmarks/index.py --tiny           # seconds; shows only that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from fovea.index.dense import DenseIndex
    from fovea.index.kind import IndexKind

PARTS = ("flat", "ivfpq")
CHUNK = 20_000
MANIFEST = {"encoder": "random", "fingerprint": "none", "corpus": "clustered"}
MIB = 2**20


class Clustered:
    """N vectors around C centres, made anew chunk by chunk: no more than a chunk of them is in memory.

    Vectors vary along 32 of their D directions, and by 0.1 along all. A
    vector is a centre and as much noise, so that clusters overlap (cosine about 0.5 within one); a query is a
    vector and half as much noise (cosine about 0.94 with it).
    """

    def __init__(self, count: int, width: int, centres: int) -> None:
        self.count, self.width = count, width
        rng = np.random.default_rng(0)
        directions = np.linalg.qr(rng.standard_normal((width, min(width, 32))))[0].T
        self._directions = (directions * (width / len(directions)) ** 0.5).astype(np.float32)
        self._centres = rng.standard_normal((centres, len(directions)), np.float32)

    def __iter__(self) -> Iterator[tuple[list[str], np.ndarray[Any, Any]]]:
        for start in range(0, self.count, CHUNK):
            vectors = self._chunk(start)
            yield [str(number) for number in range(start, start + len(vectors))], vectors

    def queries(self, count: int) -> np.ndarray[Any, Any]:
        """Queries from every chunk alike."""
        starts = range(0, self.count, CHUNK)
        each = -(-count // len(starts))
        rng = np.random.default_rng(1)
        parts = []
        for start in starts:
            chunk = self._chunk(start)
            some = chunk[rng.choice(len(chunk), each, replace=False)]
            noise = rng.standard_normal((len(some), len(self._directions)), np.float32)
            parts.append(some + 0.5 * noise @ self._directions)
        return rng.permutation(np.concatenate(parts))[:count]

    def _chunk(self, start: int) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng([2, start])
        size = min(CHUNK, self.count - start)
        points = self._centres[rng.integers(len(self._centres), size=size)]
        points = points + rng.standard_normal(points.shape, np.float32)
        return points @ self._directions + 0.1 * rng.standard_normal((size, self.width), np.float32)


class Size(NamedTuple):
    """What is measured on."""

    count: int
    width: int
    centres: int
    batches: tuple[int, ...]
    kind: str
    nprobes: tuple[int, ...]
    num_queries: int


FULL = Size(1_000_000, 512, 10_000, (1, 100, 1000), "", (8, 32, 64), 1000)
TINY = Size(20_000, 32, 200, (1, 10), "IVF64,PQ8np", (1, 8, 64), 100)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(%(default)s)")
    parser.add_argument("--wall", action="store_true", help="wall-clock instead of CPU seconds")
    parser.add_argument("--tiny", action="store_true", help="in miniature, without a verdict")
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.load:
        return load(Path(options.load[0]), options.load[1] == "mmap")
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts {','.join(unknown)}: choose from {','.join(PARTS)}")
    size = TINY if options.tiny else FULL
    import faiss

    from fovea.index.dense import DenseIndex

    faiss.omp_set_num_threads(1)
    clock = time.perf_counter if options.wall else time.process_time
    data = Clustered(size.count, size.width, size.centres)
    print(f"{size.count:,} × {size.width}, one thread, load {os.getloadavg()[0]:.1f}", flush=True)
    start = clock()
    flat = DenseIndex.stream(data, size.width, manifest=MANIFEST, count=size.count)
    print(f"flat: built in {clock() - start:.1f} s, of which the data are {generate(data, clock):.1f} s")
    ok = True
    if "flat" in parts:
        ok = against_faiss(flat, data, size, options.rounds, clock, verdict=not options.tiny)
    if "ivfpq" in parts:
        against_flat(flat, data, size, clock)
    return 0 if ok else 1


def generate(data: Clustered, clock: Any) -> float:
    """Seconds that making the vectors takes."""
    start = clock()
    for _ in data:
        pass
    return float(clock() - start)


def against_faiss(
    flat: DenseIndex, data: Clustered, size: Size, rounds: int, clock: Any, *, verdict: bool
) -> bool:
    """`DenseIndex.search` against `IndexFlatIP.search` on the very same vectors, by batch size."""
    from harness import compare

    queries = data.queries(max(size.batches))
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    bare = flat._index
    found, scores = flat.search(queries[:50], 20)
    bare_scores, bare_positions = bare.search(unit[:50], 20)
    if found != [[str(p) for p in row] for row in bare_positions] or abs(scores - bare_scores).max() > 1e-5:
        raise RuntimeError("DenseIndex finds something else than the bare index")
    ok = True
    for batch in size.batches:
        again = max(1, 20 // batch)  # a single query is over too soon to be timed alone

        def ours(batch: int = batch, again: int = again) -> None:
            for number in range(again):
                flat.search(queries[number : number + batch], 20)

        def other(batch: int = batch, again: int = again) -> None:
            for number in range(again):
                bare.search(unit[number : number + batch], 20)

        comparison = compare(
            f"flat: {batch} queries at once, k = 20",
            ("DenseIndex.search", ours),
            ("IndexFlatIP.search", other),
            items=batch * again,
            unit="queries",
            rounds=rounds,
            need=round(1 / 1.1, 3) if verdict else None,
            clock=clock,
        )
        print(comparison.text(), flush=True)
        ok &= comparison.ok
    return ok


def against_flat(flat: DenseIndex, data: Clustered, size: Size, clock: Any) -> None:
    """Recall, speed, memory and file of inverted files with product quantisation beside flat."""
    from fovea.index.dense import DenseIndex
    from fovea.index.kind import IndexKind

    kind = IndexKind(size.kind) if size.kind else automatic(size)
    start = clock()
    small = DenseIndex.stream(data, size.width, manifest=MANIFEST, kind=kind)
    print(f"{kind.factory}: built in {clock() - start:.1f} s, the data twice among it", flush=True)
    queries = data.queries(size.num_queries)
    start = clock()
    exact, _ = flat.search(queries, 10)
    print(f"  flat         {1000 * (clock() - start) / len(queries):8.2f} ms a query in one batch")
    for nprobe in size.nprobes:
        small.nprobe = nprobe
        start = clock()
        found, _ = small.search(queries, 100)
        batched = (clock() - start) / len(queries)
        start = clock()
        for query in queries[:100]:
            small.search(query[None], 10)
        single = (clock() - start) / 100
        pairs = list(zip(exact, found, strict=True))
        first = np.mean([a[0] == b[0] for a, b in pairs])
        ten, hundred = (np.mean([len({*a} & {*b[:k]}) / 10 for a, b in pairs]) for k in (10, 100))
        print(
            f"  nprobe {nprobe:<5d} {1000 * batched:8.2f} ms a query in one batch, {1000 * single:.2f} ms "
            f"alone; recall@1 {first:.3f}, recall@10 {ten:.3f}, exact ten among 100 {hundred:.3f}",
            flush=True,
        )
    with tempfile.TemporaryDirectory() as directory:
        for index, name in ((small, "ivfpq"), (flat, "flat")):
            root = index.save(Path(directory) / name)
            file = (root / "vectors.faiss").stat().st_size
            print(f"{name}: file {file / MIB:,.0f} MiB", flush=True)
            for mode in ("memory", "mmap"):
                command = [sys.executable, __file__, "--load", str(root), mode]
                out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                said = json.loads(out)
                print(
                    f"  {mode:<7s} opened in {said['seconds']:.2f} s; memory {said['opened']:,.0f} MiB, "
                    f"{said['searched']:,.0f} MiB after 100 queries",
                    flush=True,
                )


def automatic(size: Size) -> IndexKind:
    """What `--index auto` would take if flat did not fit."""
    from fovea.index.kind import IndexKind

    flat = IndexKind().estimate(size.count, size.width)
    return IndexKind.choose(size.count, size.width, flat.building)


def load(root: Path, mmap: bool) -> int:
    """Of a process of its own: memory (resident, MiB) that an index takes when opened and when searched."""
    from fovea.index.dense import DenseIndex

    before = resident()
    start = time.perf_counter()
    index = DenseIndex.load(root, mmap=mmap)
    seconds, opened = time.perf_counter() - start, resident()
    index.search(np.random.default_rng(3).standard_normal((100, index.manifest["width"])), 10)
    said = {"seconds": seconds, "opened": opened - before, "searched": resident() - before}
    print(json.dumps(said))
    return 0


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


if __name__ == "__main__":
    sys.exit(main())
