"""How long steps tell their caller where they are, and how long they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Called as ``progress(step, done, total)``: the step in words, and how many of its units are done."""


def silent(step: str, done: int, total: int) -> None:
    """A :data:`Progress` that says nothing."""


class Timed:
    """Work in steps, with its clock; ``seconds`` holds the wall time of every step that was finished."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step."""
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)
