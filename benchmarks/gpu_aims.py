"""What the CUDA kernels are meant to reach, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def aims(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The aims that the figures of a run can tell about: ``words`` and ``reached``.

    An aim about several linears is about the worst of them.
    """
    hadamard, linears = content.get("hadamard", []), content.get("linears", [])
    found = [
        _least(
            "HadamardTransform of 4096 x 8192 float16 at {:.0%} of a copy (85 %)",
            [row for row in hadamard if (row["rows"], row["channels"]) == (4096, 8192)],
            lambda row: row["of_copy"],
            0.85,
        ),
        _most(
            "the Hadamard transform adds {:.1f} % at M = 256 (7 %)",
            [row for row in linears if row["M"] == 256],
            lambda row: row["hadamard_percent"],
            7.0,
        ),
        _least(
            "W4A8, rotated, {:.2f} times as fast as cuBLAS float16 at M = 4096 (1.5)",
            [row for row in linears if row["M"] == 4096],
            lambda row: row["to_cublas"],
            1.5,
        ),
        _least(
            "W4A8, rotated, {:.2f} times as fast as cuBLAS float16 at M = 1 (3)",
            [row for row in linears if row["M"] == 1],
            lambda row: row["to_cublas"],
            3.0,
        ),
    ]
    return [aim for aim in found if aim is not None]


def _least(words: str, rows: Sequence[Row], value: Callable[[Row], float], bound: float) -> dict[str, Any] | None:
    values = _known(rows, value)
    return {"words": words.format(min(values)), "reached": min(values) >= bound} if values else None


def _most(words: str, rows: Sequence[Row], value: Callable[[Row], float], bound: float) -> dict[str, Any] | None:
    values = _known(rows, value)
    return {"words": words.format(max(values)), "reached": max(values) <= bound} if values else None


def _known(rows: Sequence[Row], value: Callable[[Row], float]) -> list[float]:
    """Values that were measured: NaN is none."""
    return [found for found in map(value, rows) if found == found]
