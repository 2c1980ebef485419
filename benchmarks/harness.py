"""Two ways to do one job → a ratio, measured in one run and turn about: a slow machine hits both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """What was measured.

    Attributes:
        title: the job.
        names: ours, and the alternative it is compared with.
        seconds: per round, of ours and of the alternative.
        items: units of work in a round.
        unit: what an item is, e.g. `images`.
        need: smallest ratio that passes, or None when there is no demand.
    """

    title: str
    names: tuple[str, str]
    seconds: tuple[tuple[float, ...], tuple[float, ...]]
    items: int
    unit: str
    need: float | None

    @property
    def ratios(self) -> list[float]:
        """Speed of ours over speed of the alternative, round by round: above 1, ours is faster."""
        return [other / ours for ours, other in zip(*self.seconds, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of `ratios`: each compares neighbours in time."""
        return statistics.median(self.ratios)

    @property
    def ok(self) -> bool:
        """The ratio is what it needs to be."""
        return self.need is None or self.ratio >= self.need

    def text(self) -> str:
        """Three lines: ours, the alternative, the ratio; each with median, least and greatest."""
        lines = [self.title]
        width = max(map(len, self.names))
        for name, seconds in zip(self.names, self.seconds, strict=True):
            speeds = [self.items / s for s in seconds]
            spread = f"{_speed(min(speeds))} – {_speed(max(speeds))}"
            lines.append(
                f"  {name:<{width}}  {_speed(statistics.median(speeds)):>10} {self.unit}/s  ({spread})"
            )
        demand = "" if self.need is None else f"; needed ≥ {self.need:.3g}×: {'ok' if self.ok else 'MISSED'}"
        spread = f"{min(self.ratios):.3f} – {max(self.ratios):.3f}"
        lines.append(
            f"  {'ratio':<{width}}  {self.ratio:10.3f}×  ({spread}, {len(self.ratios)} rounds){demand}"
        )
        return "\n".join(lines)


def _speed(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 else f"{value:.4f}"


def compare(
    title: str,
    ours: tuple[str, Callable[[], object]],
    other: tuple[str, Callable[[], object]],
    *,
    items: int,
    unit: str,
    rounds: int = 7,
    need: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Run both once to warm up, then turn about: ours, other, other, ours, ours, other, …

    Args:
        title: the job.
        ours: name and a function that does the job once.
        other: the same of the alternative.
        items: units of work that each call does.
        unit: what an item is.
        rounds: pairs of timed calls.
        need: smallest acceptable ratio.
        clock: seconds; `time.process_time` is steadier on a busy machine, for jobs on a single thread.
    """
    jobs = (ours[1], other[1])
    seconds: tuple[list[float], list[float]] = ([], [])
    for job in jobs:
        job()
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            start = clock()
            jobs[side]()
            seconds[side].append(clock() - start)
    return Comparison(title, (ours[0], other[0]), (tuple(seconds[0]), tuple(seconds[1])), items, unit, need)
