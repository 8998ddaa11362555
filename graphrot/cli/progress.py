"""Progress on stderr: a bar with time left on a terminal, one line per longer step elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from graphrot.cli.stop import STOP

LONG = 2.0
"""Seconds from which a finished step leaves a line."""


class StepBars:
    """A :data:`graphrot.progress.Progress` that shows one bar, for the step that runs now."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._step: str | None = None
        self._task = TaskID(0)
        self._start = 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()
        self._bars.stop()

    def __call__(self, step: str, done: int, total: int) -> None:
        STOP.check()
        if step != self._step:
            self._finish()
            self._step, self._start = step, time.perf_counter()
            self._task = self._bars.add_task(step, total=None)
        if done:
            self._bars.update(self._task, total=total, completed=done)

    def _finish(self) -> None:
        if self._step is None:
            return
        self._bars.remove_task(self._task)
        seconds = time.perf_counter() - self._start
        if seconds >= LONG:
            self._console.print(f"{self._step}: {seconds:.1f} s")
        self._step = None
