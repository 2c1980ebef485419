"""Items → results, in order, on several processes, with few items in flight: for passes over every image."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int,
    chunk: int = 1,
    initializer: Callable[..., None] | None = None,
    initargs: tuple[Any, ...] = (),
) -> Iterator[Result]:
    """Results of `function` in the order of `items`; with one worker in this process, without a pool.

    A worker that dies (out of memory, killed) raises BrokenProcessPool here, and workers end with this
    process even when it is killed.

    Args:
        function: a module-level function.
        items: read only as fast as results are taken.
        workers: processes.
        chunk: items sent at a time; more for items that take well under a millisecond.
        initializer: called once in each worker, with `initargs`.
        initargs: picklable.
    """
    if workers <= 1:
        if initializer is not None:
            initializer(*initargs)
        yield from map(function, items)
        return
    # spawn: nothing of this process (threads, torch's pool, open files) leaks into the workers.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start, (initializer, initargs))
    try:
        pending: deque[Future[list[Result]]] = deque()
        source = iter(items)
        while part := list(islice(source, chunk)):
            pending.append(pool.submit(_map, function, part))
            if len(pending) >= 4 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _map(function: Callable[[Item], Result], items: list[Item]) -> list[Result]:
    return [function(item) for item in items]


def _start(initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if initializer is not None:
        initializer(*initargs)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
