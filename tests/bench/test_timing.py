"""Turns, their order, and what is made of their seconds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from graphrot.bench import timing
from graphrot.bench.timing import CPU, WALL, Figure, Stopwatch, figure, interleaved, measured, order


def _took(cpu: float, wall: float) -> Stopwatch:
    watch = Stopwatch()
    watch.cpu, watch.wall = cpu, wall
    return watch


def test_each_turn_runs_everything_and_everyone_comes_at_every_place() -> None:
    ran: list[str] = []

    def task(name: str) -> Callable[[], Stopwatch]:
        def run() -> Stopwatch:
            ran.append(name)
            return _took(0, 0)

        return run

    interleaved([task(name) for name in "abc"], 3)
    turns = [ran[start : start + 3] for start in range(0, len(ran), 3)]
    assert len(turns) == 4  # one that does not count
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert [sorted(places) for places in zip(*turns[1:], strict=True)] == [["a", "b", "c"]] * 3
    assert {tuple(order(turn, 3)) for turn in range(3)} == {(0, 1, 2), (1, 2, 0), (2, 0, 1)}


def test_seconds_stand_under_the_task_that_took_them() -> None:
    numbers = iter(range(100))
    tasks = [lambda: _took(next(numbers), -1.0), lambda: _took(next(numbers), -2.0)]
    seconds = interleaved(tasks, 2, warm=1)
    assert seconds.shape == (2, 2, 2)
    assert seconds[..., CPU].tolist() == [
        [2, 3],
        [5, 4],
    ]  # 0 and 1 were the warm turn; the second begins with the other
    assert seconds[..., WALL].tolist() == [[-1, -2], [-1, -2]]


def test_progress_is_told_of_every_turn() -> None:
    told: list[tuple[str, int, int]] = []
    interleaved([lambda: _took(0, 0)], 2, step="work", progress=lambda *words: told.append(words))
    assert told == [("work", 0, 3), ("work", 1, 3), ("work", 2, 3)]


def test_a_figure_is_median_and_percentiles() -> None:
    assert figure(np.arange(11.0)) == Figure(5.0, 1.0, 9.0)


def test_ratios_are_taken_turn_by_turn() -> None:
    values = np.array([[1.0, 2.0], [10.0, 10.0], [2.0, 30.0]])
    first, second = measured(values)
    assert first.ratio == Figure(1.0, 1.0, 1.0)
    assert second.figure.median == 10.0
    assert second.ratio.median == 2.0  # of 2, 1 and 15; the medians' own ratio is 5
    assert set(second.to_dict()) == {"median", "p10", "p90", "ratio"}
    assert set(second.to_dict()["ratio"]) == {"median", "p10", "p90"}


def test_the_watch_counts_its_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, wall = iter([1.0, 3.0, 10.0, 11.0]), iter([0.0, 5.0, 100.0, 107.0])
    monkeypatch.setattr(timing.time, "thread_time", lambda: next(cpu))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(wall))
    watch = Stopwatch()
    for _ in range(2):
        with watch:
            pass
    assert (watch.cpu, watch.wall) == (3.0, 12.0)
