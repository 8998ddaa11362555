"""Figures on the page, each with the place in ``graphrot.json`` that it was read from.

A path is that of the JSON: ``sizes.model_bytes``, ``quantized[3].error``, ``learning.distance["R2.3"]``. A list may be
filtered (``plan.rotations[kind=R2]``), and ``[*]`` takes all of its entries.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from markupsafe import Markup

from graphrot.words import size

_STEP = re.compile(r'\.?([A-Za-z_][^.\[\]]*)|\[(\d+)\]|\[\*\]|\[(\w+)=([^\]]*)\]|\["([^"]*)"\]')
NONE = "\u2013"
"""What stands where there is no figure."""


def _compared(entry: Mapping[str, Any]) -> bool:
    return entry.get("error_without_rotation") is not None


HOW: Mapping[str, Callable[[Any], Any]] = {
    "count": len,
    "sum": sum,
    "median": median,
    "lengths": lambda entries: sum(len(entry) for entry in entries),
    "largest": max,
    "smallest": min,
    "compared": lambda entries: sum(_compared(entry) for entry in entries),
    "smaller": lambda entries: sum(_compared(e) and e["error"] < e["error_without_rotation"] for e in entries),
    "relieved": lambda entries: sum(entry["after"] < entry["before"] for entry in entries),
}
"""What a figure made of several entries is: ``compared``, ``smaller`` and ``relieved`` count entries of one kind."""


def resolve(content: Any, path: str) -> Any:
    """What stands at a path; None where there is nothing."""
    found, many, position = content, False, 0
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None:
            raise ValueError(f"{path!r} is no path, at {position}")
        position = step.end()
        key, index, field, wanted, quoted = step.groups()
        if key is None and index is None and field is None and quoted is None:
            found, many = list(found.values()) if isinstance(found, Mapping) else found, True
        elif field is not None:
            found = [entry for entry in found or () if str(entry.get(field)) == wanted]
        elif index is not None:
            found = [_at(entry, int(index)) for entry in found or ()] if many else _at(found, int(index))
        else:
            name = quoted if key is None else key
            found = [_at(entry, name) for entry in found or ()] if many else _at(found, name)
    return [entry for entry in found or () if entry is not None] if many else found


def _at(content: Any, key: str | int) -> Any:
    if isinstance(key, int):
        return content[key] if isinstance(content, Sequence) and key < len(content) else None
    return content.get(key) if isinstance(content, Mapping) else None


def key(name: str) -> str:
    """A step into a mapping, whatever is in the name."""
    return f'["{name}"]'


class Trace:
    """Reads figures out of one record.

    Args:
        content: what stands in ``graphrot.json`` and, under ``measured``, what was measured for the page.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    def get(self, path: str) -> Any:
        """What stands at a path, or None."""
        return resolve(self.content, path)

    def figure(self, path: str, form: str = "plain", how: str = "") -> Markup:
        """A number as it is shown, marked with where it is from.

        Args:
            path: one path; two with `` / `` between them for ``how="ratio"``.
            form: one of :data:`FORMS`.
            how: one of :data:`HOW`, ``ratio``, or nothing for the number itself.
        """
        value = self.value(path, how)
        if value is None:
            return Markup(f'<span class="none">{NONE}</span>')
        made = Markup(' data-how="{}"').format(how) if how else Markup()
        made += Markup(' class="words"') if form == "text" else ""
        return Markup('<data value="{}" data-from="{}"{}>{}</data>').format(
            _plain(value), path, made, FORMS[form](value)
        )

    def value(self, path: str, how: str = "") -> Any:
        """The number behind :meth:`figure`; None where it cannot be had."""
        if how == "ratio":
            upper, lower = (self.get(part) for part in path.split(" / "))
            return None if upper is None or not lower else upper / lower
        found = self.get(path)
        if not how:
            return found
        if how == "count":
            return len(found or ())
        return HOW[how](found) if found else None


def _plain(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _significant(value: float, digits: int = 3) -> str:
    """Three digits, without an exponent where that is short."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if -4 <= exponent < 6:
        return f"{value:,.{max(0, digits - 1 - exponent)}f}"
    return f"{value:.{digits - 1}e}"


FORMS: Mapping[str, Callable[[Any], str]] = {
    "plain": lambda value: f"{value:,}" if isinstance(value, int) else str(value),
    "text": str,
    "bytes": size,
    "short": _significant,
    "two": lambda value: f"{value:.2f}",
    "three": lambda value: f"{value:.3f}",
    "power": lambda value: f"{value:.1e}",
    "percent": lambda value: f"{100 * value:.2f} %",
    "gain": lambda value: f"{100 * value:+.1f} %",
    "seconds": lambda value: f"{value:.1f} s",
    "times": lambda value: f"{_significant(value)}\u00d7",
}
"""How numbers are shown."""
