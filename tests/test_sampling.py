"""datamodules.sampling: who sees what, when."""

from __future__ import annotations

import pytest

from datamodules.sampling import EpochSampler, ShardSampler


def test_ranks_share_an_epoch_without_overlap() -> None:
    """Two ranks: disjoint, even, together one permutation (the odd sample of 7 is left out)."""
    ranks = [list(EpochSampler(7, seed=1, rank=r, world_size=2)) for r in (0, 1)]
    assert [len(r) for r in ranks] == [3, 3]
    assert len(set(ranks[0]) | set(ranks[1])) == 6


def test_order_depends_on_seed_and_epoch_alone() -> None:
    """Same seed and epoch: same order; another epoch or seed: another; the index carries the epoch."""
    sampler, again, other = EpochSampler(50, seed=3), EpochSampler(50, seed=3), EpochSampler(50, seed=4)
    first = list(sampler)
    assert first == list(again) != list(other)
    sampler.set_epoch(2)
    second = list(sampler)
    assert sorted(second) == list(range(100, 150))
    assert [i % 50 for i in second] != first


def test_what_was_seen_is_left_out() -> None:
    """A resumed epoch begins where the killed one stopped; that is asked when the epoch begins."""
    seen = 0
    sampler = EpochSampler(10, seed=0, seen=lambda: seen)
    sampler.set_epoch(1)
    whole = list(sampler)
    epoch = iter(sampler)
    seen = 4
    assert list(epoch) == whole[4:]
    assert len(sampler) == 10


@pytest.mark.parametrize("size", [0, 1, 5, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_sees_every_row_once(size: int, world_size: int) -> None:
    """No padding duplicates: the shares of all ranks are the rows, each once (PITFALLS 7)."""
    seen = [i for r in range(world_size) for i in ShardSampler(size, rank=r, world_size=world_size)]
    assert sorted(seen) == list(range(size))
