"""Perplexity of a decoder on a text, by one fixed protocol.

The text is tokenized from its start without special tokens and cut into windows without overlap. Every
window starts from an empty cache. ``perplexity = exp(mean negative log-likelihood)`` over positions
``1 .. window - 1`` of all windows, from float32 logits summed in float64. Figures of different window
sizes or counts are not comparable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from graphrot.errors import CheckFailed, InputRefused, UsageError
from graphrot.progress import Progress, silent

_LARGEST = 700.0
"""Its exponential is still a float64."""

ROWS = 128
"""Positions whose logits are widened to float64 at a time."""


class Decoder(Protocol):
    """What is measured; :class:`graphrot.evaluate.session.DecoderSession` is one."""

    def run(self, tokens: np.ndarray, cache: Any = None) -> tuple[np.ndarray, Any]:
        """Tokens ``[B, S] int64`` -> logits ``[B, S, V]`` and a cache."""


@dataclass(frozen=True)
class Perplexity:
    """The outcome. ``tokens`` counts the tokens that were predicted."""

    perplexity: float
    tokens: int
    window: int
    windows: int
    notes: tuple[str, ...] = ()
    """What a user has to know about the figure."""


def perplexity(
    model: Decoder,
    tokens: Sequence[int] | np.ndarray,
    *,
    window: int = 1024,
    windows: int | None = 3,
    progress: Progress = silent,
) -> Perplexity:
    """Measure ``model`` on the first ``windows`` windows of ``tokens`` (None: all full windows).

    Raises:
        UsageError: a window of less than two tokens, or less than one window.
        InputRefused: the text has fewer tokens than that.
        CheckFailed: the logits are not finite, or exclude the text.
    """
    pieces = cut(tokens, window=window, windows=windows)
    total = 0.0
    for index, piece in enumerate(pieces):
        progress("perplexity", index, len(pieces))
        logits, _ = model.run(piece[None])
        total += negative_log_likelihood(logits[0, :-1], piece[1:])
    progress("perplexity", len(pieces), len(pieces))
    return finish(total, window, len(pieces))


def cut(tokens: Sequence[int] | np.ndarray, *, window: int, windows: int | None) -> list[np.ndarray]:
    """The first ``windows`` windows of ``tokens`` (None: all full windows), each ``[window] int64``.

    Raises:
        UsageError: a window of less than two tokens, or less than one window.
        InputRefused: there are fewer tokens than that.
    """
    if window < 2 or (windows is not None and windows < 1):
        raise UsageError(
            "There is nothing to predict", where=f"window {window}, windows {windows}", do="use a window of 2 or more"
        )
    ids = np.asarray(tokens, dtype=np.int64)
    there = len(ids) // window
    count = there if windows is None else windows
    if there < max(count, 1):
        raise InputRefused(
            "The text is too short",
            where=f"{len(ids)} tokens",
            why=f"{max(count, 1)} windows of {window} tokens need {max(count, 1) * window}",
            do="give a longer text, or ask for fewer or smaller windows",
        )
    return [ids[index * window : (index + 1) * window] for index in range(count)]


def finish(total: float, window: int, windows: int, *, whose: str = "The model") -> Perplexity:
    """The perplexity of a summed negative log-likelihood.

    Args:
        total: sum over all predicted tokens, in nats.
        window: tokens per window.
        windows: number of windows.
        whose: for the error.

    Raises:
        CheckFailed: the logits were not finite, or excluded the text.
    """
    predicted = windows * (window - 1)
    mean = total / predicted
    if not mean < _LARGEST:
        raise CheckFailed(
            f"{whose} has no perplexity on this text",
            where=f"mean negative log-likelihood {mean:.3g}",
            why="its logits are not finite" if not math.isfinite(mean) else "it excludes the text's tokens",
            do="check the model's weights",
        )
    return Perplexity(math.exp(mean), predicted, window, windows)


def negative_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> float:
    """Sum over positions of ``logsumexp(logits) - logits[target]``, in float64; NaN where logits are no numbers.

    Args:
        logits: ``[S, V]``.
        targets: ``[S]`` token ids.
    """
    total = 0.0
    for start in range(0, len(targets), ROWS):
        rows = logits[start : start + ROWS].astype(np.float64)
        top = rows.max(axis=-1)
        if not np.isfinite(top).all():
            return math.nan
        normalizer = top + np.log(np.exp(rows - top[:, None]).sum(axis=-1))
        picked = rows[np.arange(len(rows)), targets[start : start + ROWS]]
        total += float((normalizer - picked).sum())
    return total
