"""Items → results on several processes: order, few items in flight, and a dead worker is an error, not a
hang.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool

import pytest

from datamodules.workers import ordered_map

_added = 0


def _set(amount: int) -> None:
    global _added
    _added = amount


def _add(item: int) -> int:
    if item < 0:
        os._exit(9)  # as the kernel ends a process that takes too much memory
    return item + _added


def test_order_chunks_and_initializer() -> None:
    """Results come in order, with one process or two, one by one or in chunks; each worker is set up."""
    for workers, chunk in ((1, 1), (2, 1), (2, 7)):
        found = ordered_map(_add, range(40), workers=workers, chunk=chunk, initializer=_set, initargs=(100,))
        assert list(found) == list(range(100, 140))
    _set(0)


def test_few_items_in_flight_and_a_dead_worker() -> None:
    """Of an endless source only some items are taken ahead; a worker that dies raises."""
    taken = 0

    def source() -> Iterator[int]:
        nonlocal taken
        while True:
            yield taken if taken < 30 else -1
            taken += 1

    results = ordered_map(_add, source(), workers=2)
    assert [next(results) for _ in range(5)] == list(range(5)) and taken <= 5 + 8
    with pytest.raises(BrokenProcessPool):
        list(results)
