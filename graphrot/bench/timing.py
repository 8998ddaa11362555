"""Time several things in turns, and say it as medians and paired ratios.

A machine has neighbours, and its clock changes. So everything that is compared runs in the same turn, in an order that
rotates, and a ratio is taken turn by turn before its median.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from graphrot.progress import Progress, silent

CPU, WALL = 0, 1
"""Positions in what :func:`interleaved` returns."""

RESOLUTION = tuple(time.get_clock_info(name).resolution for name in ("thread_time", "perf_counter"))
"""The least seconds that the two clocks tell from none."""


class Stopwatch:
    """Adds up the time of the calling thread's ``with`` blocks: CPU time of this thread, and wall time."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0

    def __enter__(self) -> Self:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cpu += time.thread_time() - self._cpu
        self.wall += time.perf_counter() - self._wall


@dataclass(frozen=True)
class Figure:
    """Median, and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    def to_dict(self) -> dict[str, float]:
        return {"median": self.median, "p10": self.p10, "p90": self.p90}


@dataclass(frozen=True)
class Measured:
    """A figure, and its ratio to that of the first: both of the same turn, then the median. None: there is no first."""

    figure: Figure
    ratio: Figure | None

    def to_dict(self) -> dict[str, Any]:
        return {**self.figure.to_dict(), "ratio": None if self.ratio is None else self.ratio.to_dict()}


def figure(values: np.ndarray) -> Figure:
    """The figure of values ``[turns]``."""
    low, median, high = np.percentile(values, [10, 50, 90])
    return Figure(float(median), float(low), float(high))


def measured(values: np.ndarray) -> list[Measured]:
    """The figures of values ``[turns, things]``, each with its ratio to the first thing."""
    return [Measured(figure(column), figure(column / values[:, 0])) for column in values.T]


def order(turn: int, count: int) -> list[int]:
    """Who runs when: each begins, and comes at every other place, once in ``count`` turns."""
    return [(position + turn) % count for position in range(count)]


def interleaved(
    tasks: Sequence[Callable[[], Stopwatch]],
    turns: int,
    *,
    step: str = "measuring",
    progress: Progress = silent,
    warm: int = 1,
) -> np.ndarray:
    """Run all tasks in each turn.

    Args:
        tasks: each runs once and returns what it took.
        turns: that count.
        step: for ``progress``.
        progress: told of each turn.
        warm: turns in front that do not count.

    Returns:
        Seconds ``[turns, tasks, 2]``: CPU time of the calling thread, and wall time.
    """
    seconds = np.zeros((turns, len(tasks), 2))
    for turn in range(-warm, turns):
        progress(step, turn + warm, turns + warm)
        for index in order(turn, len(tasks)):
            watch = tasks[index]()
            if turn >= 0:
                seconds[turn, index] = watch.cpu, watch.wall
    return seconds
