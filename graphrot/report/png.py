"""Pictures of numbers as PNG files with a palette, written by hand: nothing has to be installed for them."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np

LEVELS = 256


def ramp(stops: Sequence[str]) -> np.ndarray:
    """``[256, 3] uint8``: colours from the first ``#rrggbb`` to the last, evenly spaced."""
    known = np.asarray([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops], np.float64)
    places = np.linspace(0, len(stops) - 1, LEVELS)
    channels = [np.interp(places, np.arange(len(stops)), known[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=1).round().astype(np.uint8)


def png(levels: np.ndarray, palette: np.ndarray) -> bytes:
    """A PNG of ``levels [H, W] uint8`` in the colours of ``palette [256, 3] uint8``."""
    height, width = levels.shape
    rows = np.zeros((height, width + 1), np.uint8)  # a filter byte, 0, in front of each row
    rows[:, 1:] = levels
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = (
        (b"IHDR", header),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, content) for name, content in parts)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def data_uri(content: bytes) -> str:
    """A PNG inside of a page."""
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")
