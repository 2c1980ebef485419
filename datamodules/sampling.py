"""Dataset size → indices of this rank: seeded, resumable inside an epoch, never padded in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler


class EpochSampler(Sampler[int]):
    """Indices of one rank for one epoch, as `epoch · size + index`, so that a worker knows the epoch of each
    sample.

    All ranks permute alike and take every `world_size`-th index. The last incomplete round is dropped, so
    ranks stay even. The order is a function of (seed, epoch) alone: a resumed run skips what the killed one
    had seen.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seen: Callable[[], int] = int,
    ) -> None:
        """`seen`: samples of this rank that a killed run had seen of an epoch, asked when that begins."""
        self.size, self.seed, self.rank, self.world_size, self.shuffle = size, seed, rank, world_size, shuffle
        self.epoch = 0
        self.seen = seen

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size // self.world_size

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.size)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.size, generator=generator)
        mine = order[self.rank :: self.world_size][: len(self)]
        yield from (self.epoch * self.size + mine[self.seen() :]).tolist()


class ShardSampler(Sampler[int]):
    """This rank's contiguous share of the indices: every index once over all ranks (PITFALLS 7)."""

    def __init__(self, size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.indices = range(size * rank // world_size, size * (rank + 1) // world_size)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


class ResumableLoader(DataLoader[Any]):
    """Tells Lightning that the loader resumes inside an epoch, which `EpochSampler.seen` sees to.

    The place in the epoch is part of the trainer's own progress, so there is no state to keep here. Lightning
    makes an iterator before it has restored that progress (to count the steps of a schedule), and keeps it:
    so sampler and workers start when the first batch is asked for.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of an epoch, decided on when the first is asked for."""
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: see the class."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: see the class."""
