"""How long steps tell their caller where they are."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as ``progress(step, done, total)``: the step in words, and how many of its units are done."""


def silent(step: str, done: int, total: int) -> None:
    """A :data:`Progress` that says nothing."""
