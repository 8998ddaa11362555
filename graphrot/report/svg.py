"""Charts as SVG text: axes, points, lines. Colours are those of the page's style sheet, so they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Scale:
    """From numbers to places on an axis; ``log`` takes positive numbers only."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, here = (math.log10(max(v, 1e-300)) if self.log else v for v in (self.low, self.high, value))
        share = (here - low) / (high - low) if high > low else 0.5
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round numbers within the range."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            step = max(1, math.ceil(len(powers) / 8))
            return [10.0**power for power in powers][::step]
        width = self.high - self.low
        if width <= 0:
            return [self.low]
        unit = 10.0 ** math.floor(math.log10(width / 4))
        step_size = next(unit * factor for factor in (1, 2, 5, 10) if width / (unit * factor) <= 5)
        first = math.ceil(self.low / step_size - 1e-9)
        return [step_size * number for number in range(first, math.floor(self.high / step_size + 1e-9) + 1)]


def label(value: float) -> str:
    """A number under a tick."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.6g}"


def decades(values: Iterable[float]) -> tuple[float, float]:
    """The powers of ten around positive numbers."""
    known = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    return 10.0**low, 10.0 ** max(high, low + 1)


class Drawing:
    """A picture of fixed proportions that is as wide as its place.

    Args:
        width: of the drawing, in its own units.
        height: likewise.
        title: what the picture shows, for people who do not see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self._title = title
        self._parts: list[str] = []

    def add(self, markup: str) -> None:
        self._parts.append(markup)

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", style: str = "tick") -> None:
        self.add(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{style}">{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self.add(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{style}"/>')

    def rows(self, scale: Scale, left: float, right: float) -> None:
        """Lines across for the ticks of the upright axis, with their numbers."""
        for tick in scale.ticks():
            y = scale.at(tick)
            self.line(left, y, right, y, "grid")
            self.text(left - 6, y + 3.5, label(tick), anchor="end")

    def point(self, x: float, y: float, style: str, *, source: str = "", words: str = "", radius: float = 3) -> None:
        """A dot; ``source`` is the path of its number in the record, ``words`` show when it is pointed at."""
        origin = f' data-from="{escape(source)}"' if source else ""
        inside = f"<title>{escape(words)}</title>" if words else ""
        self.add(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{style}"{origin}>{inside}</circle>')

    def path(self, points: Sequence[tuple[float, float]], style: str) -> None:
        if points:
            steps = " ".join(f"{x:g},{y:g}" for x, y in points)
            self.add(f'<polyline points="{steps}" class="{style}"/>')

    def markup(self) -> str:
        """The finished ``svg`` element."""
        inside = "".join(self._parts)
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self._title)}" '
            f'xmlns="http://www.w3.org/2000/svg"><title>{escape(self._title)}</title>{inside}</svg>'
        )
