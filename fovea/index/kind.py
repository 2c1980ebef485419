"""N vectors of width D and the free memory → which FAISS index to build, and what it costs.

`flat` is exact and keeps every float32. What does not fit becomes `IVF{nlist},PQ{m}np`: a search looks into
`nprobe` of `nlist` cells and compares codes of `m` bytes, and the file is memory-mapped.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import faiss

FLAT = "flat"
_GIB = 2**30
CHUNK = 16_384  # vectors that are normalised and added at a time
_ID_BYTES = 32  # an id and its offset
_MARGIN = 0.8  # of the free memory that an index may take: the system and the encoder need some as well
_PER_CELL = 40  # training vectors for each cell: faiss asks for 39
_PQ_MIN = 256  # one for each of a sub-quantiser's 256 centroids


class Cost(NamedTuple):
    """What an index takes, in bytes.

    Attributes:
        building: memory while it is built from a stream of blocks, ids included.
        disk: its directory.
        search: memory when it is loaded whole; memory-mapped it takes only what the searches touch.
    """

    building: int
    disk: int
    search: int

    def __str__(self) -> str:
        building, disk, search = (f"{value / _GIB:.3f} GiB" for value in self)
        return f"{building} while building, {disk} on disk, {search} at search"


@dataclass(frozen=True)
class IndexKind:
    """Which FAISS index.

    Attributes:
        factory: `flat`, or a FAISS factory string of inverted files or codes, e.g. `IVF4096,PQ64np`,
            `OPQ64,IVF1024,PQ64np`, `SQ8`. `PQ64` without `np` trains polysemous codes, which takes hours and
            is of no use here: refused.
        nprobe: cells that a search looks into; no more than there are. Plays no part without cells.
        train_size: vectors that cells and codes are learned from; default 40 for each cell, at least 10,240.
        seed: of the sample.
    """

    factory: str = FLAT
    nprobe: int = 32
    train_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that no index can have."""
        if self.nprobe < 1 or (self.train_size is not None and self.train_size < 1):
            raise ValueError(f"nprobe={self.nprobe}, train_size={self.train_size}: from 1")
        if re.search(r"(?<!O)PQ\d+(x\d+)?(?!\w)", self.factory):
            fixed = re.sub(r"(?<!O)(PQ\d+(x\d+)?)(?!\w)", r"\1np", self.factory)
            raise ValueError(
                f"index {self.factory!r}: a PQ without `np` trains polysemous codes for hours; use {fixed!r}"
            )

    def make(self, width: int) -> Any:
        """The empty FAISS index, for inner products of vectors of width D.

        Raises:
            ValueError: faiss knows no such index, it does not go with this width, or vectors cannot be read
                back from it or mapped (graphs).
        """
        if self.factory == FLAT:
            return faiss.IndexFlatIP(width)
        hint = f"give `{FLAT}` or a FAISS factory string such as {_ivf_pq(width, 1_000_000)!r}"
        try:
            index = faiss.index_factory(width, self.factory, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            reason = str(error).split("Error: ")[-1].split(".cpp:")[-1].lstrip("0123456789: ")
            raise ValueError(f"index {self.factory!r} of width {width}: {reason}; {hint}") from error
        cells = inverted_file(index)
        if cells is None and not isinstance(_codes(index), faiss.IndexFlatCodes):
            kind = type(_codes(index)).__name__
            raise ValueError(f"index {self.factory!r}: {kind} has neither inverted files nor codes; {hint}")
        if cells is not None:
            cells.nprobe = min(self.nprobe, cells.nlist)
        return index

    def num_training(self, index: Any) -> int:
        """Vectors to learn from; 0 where there is nothing to learn."""
        if index.is_trained:
            return 0
        cells = inverted_file(index)
        return self.train_size or max(_PER_CELL * (1 if cells is None else int(cells.nlist)), 10_240)

    def require_enough(self, index: Any, count: int) -> None:
        """Refuse to learn from fewer vectors than there are cells or codes to tell apart."""
        cells = inverted_file(index)
        need = max(1 if cells is None else int(cells.nlist), _PQ_MIN if "PQ" in self.factory else 1)
        if count < need:
            raise ValueError(
                f"index {self.factory!r} learns from at least {need:,} vectors and there are {count:,}; "
                f"use `{FLAT}`, or fewer cells"
            )

    def estimate(self, count: int, width: int) -> Cost:
        """What N vectors of width D take, to about 20 %.

        Inverted files grow by doubling while they are filled: half as much again on the average.
        """
        index = self.make(width)
        cells = inverted_file(index)
        bytes_each = int(_codes(index).code_size) if cells is None else int(cells.code_size) + 8
        fixed = (
            4
            * width
            * ((_PQ_MIN if "PQ" in self.factory else 0) + (0 if cells is None else int(cells.nlist)))
        )
        search = fixed + bytes_each * count
        # Two chunks (read, and normalised); ids as they came and joined, and two hashes of each.
        work = 2 * 4 * width * min(count, CHUNK) + (2 * _ID_BYTES + 16) * count
        sample = 4 * width * min(count, self.num_training(index))  # given back before vectors are added
        building = fixed + work + max(sample, int((1.0 if cells is None else 1.5) * bytes_each * count))
        return Cost(building, search + _ID_BYTES * count, search)

    @classmethod
    def choose(
        cls, count: int, width: int, free: int | None, *, nprobe: int = 32, seed: int = 0
    ) -> IndexKind:
        """`flat` while building it takes at most 80 % of the free memory, else inverted files of codes.

        Then nlist is the power of two nearest to 4 √N (but leaves 40 vectors a cell), and a code has D / 8
        bytes (or the largest divisor of D below that): 32 times smaller than float32.

        Args:
            count: N.
            width: D.
            free: bytes of memory, or None where that is unknown: `flat`.
            nprobe: see `IndexKind`.
            seed: see `IndexKind`.

        Raises:
            MemoryError: neither fits; names both needs.
        """
        flat = cls(nprobe=nprobe, seed=seed)
        if free is None or flat.estimate(count, width).building <= _MARGIN * free:
            return flat
        small = cls(_ivf_pq(width, count), nprobe, None, seed)
        needs = small.estimate(count, width).building
        if needs > _MARGIN * free or count < _PER_CELL * _PQ_MIN:
            room = f"{free / _GIB:.3f} GiB are free, of which {_MARGIN:.0%} may be used"
            raise MemoryError(
                f"{count:,} vectors of width {width} need {flat.estimate(count, width).building / _GIB:.3f} "
                f"GiB while a flat index is built and {needs / _GIB:.3f} GiB as {small.factory}, and {room}; "
                "index fewer --splits or a smaller --corpus, or take a larger machine"
            )
        return small


def free_bytes() -> int | None:
    """Memory that can still be used, page cache included; None where the system does not say.

    The machine's, or that of this process's control group (a container, a SLURM job) where it is less.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    try:
        own = Path("/proc/self/cgroup").read_text().split("::", 1)[1].splitlines()[0]
        group = Path(f"/sys/fs/cgroup{own}")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        cache = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.M)
        free.append(limit - used + (int(cache[1]) if cache else 0))
    except (OSError, ValueError, IndexError):  # no such groups, or `max`: no limit
        pass
    return max(0, min(free)) if free else None


def _ivf_pq(width: int, count: int) -> str:
    cells = 2 ** round(math.log2(max(1.0, 4 * math.sqrt(count))))
    while cells > 1 and cells * _PER_CELL > count:
        cells //= 2
    code = next(m for m in range(max(1, width // 8), 0, -1) if width % m == 0)
    return f"IVF{cells},PQ{code}np"


def _codes(index: Any) -> Any:
    """The part of an index that keeps the vectors, behind any rotation."""
    index = faiss.downcast_index(index)
    return faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index


def inverted_file(index: Any) -> Any:
    """The inverted file in an index, or None."""
    codes = _codes(index)
    return codes if isinstance(codes, faiss.IndexIVF) else None
