"""Tell whether two token sequences share a passage, from a few hashes of one of them.

Winnowing (Schleimer, Wilkerson and Aiken, SIGMOD 2003): of every :data:`WINDOW` consecutive runs of :data:`RUN` tokens
the one with the smallest hash is kept, about one in seventeen. A shared passage of ``RUN + WINDOW - 1`` tokens is
always found, one of ``RUN`` tokens sometimes, and a shorter one never: phrases and headings are no overlap.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np

RUN = 32
"""Tokens of a run."""
WINDOW = 32
"""Consecutive runs of which one is kept."""
_DISTINCT = 8
"""A run with fewer different tokens (rules, dots, padding) says nothing."""
_NONE = np.uint64(2**64 - 1)
_FACTOR = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Overlap:
    """``runs`` of the evaluated tokens are known, the first at token ``first``."""

    runs: int
    first: int


def fingerprint(tokens: np.ndarray) -> str:
    """Hashes of a text's runs, little endian, in base64; empty for fewer than :data:`RUN` tokens.

    Args:
        tokens: ``[T] int64``.
    """
    hashes = _hashes(tokens)
    if not len(hashes):
        return ""
    width = min(WINDOW, len(hashes))
    kept = np.unique(np.lib.stride_tricks.sliding_window_view(hashes, width).min(axis=-1))
    return base64.b64encode(kept[kept != _NONE].astype("<u8").tobytes()).decode("ascii")


def overlap(tokens: np.ndarray, known: str) -> Overlap | None:
    """Where ``tokens`` share runs with the text of a fingerprint; None: nowhere.

    Args:
        tokens: ``[T] int64``.
        known: what :func:`fingerprint` said of the other text.

    Raises:
        ValueError: ``known`` is not a fingerprint.
    """
    raw = base64.b64decode(known, validate=True)
    if len(raw) % 8:
        raise ValueError(f"a fingerprint of {len(raw)} bytes")
    shared = np.flatnonzero(np.isin(_hashes(tokens), np.frombuffer(raw, "<u8")))
    return Overlap(len(shared), int(shared[0])) if len(shared) else None


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """One hash ``[T - RUN + 1] uint64`` for each run; :data:`_NONE` for one that says nothing."""
    count = len(tokens) - RUN + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    mixed = _mix(tokens.astype(np.uint64))
    total = np.zeros(count, np.uint64)
    for position in range(RUN):
        total += mixed[position : position + count] * np.uint64(pow(_FACTOR, position + 1, 2**64))
    total = _mix(total)
    runs = np.sort(np.lib.stride_tricks.sliding_window_view(tokens, RUN), axis=-1)
    total[(np.diff(runs, axis=-1) != 0).sum(axis=-1) + 1 < _DISTINCT] = _NONE
    return total


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64."""
    values = values + np.uint64(_FACTOR)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))
