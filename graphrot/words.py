"""Figures as people read them."""

from __future__ import annotations


def size(byte_count: float) -> str:
    """Bytes in powers of 1000: ``97.3 MB``."""
    value, unit = float(byte_count), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
