"""How near a decoder's predictions are to those of another: Kullback-Leibler divergence and first choices.

The protocol is that of :mod:`graphrot.evaluate.perplexity`: windows without overlap, each from an empty cache, all
positions but the last, float32 logits, sums in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphrot.errors import InputRefused
from graphrot.evaluate.perplexity import ROWS, Decoder, Perplexity, cut, finish, negative_log_likelihood
from graphrot.progress import Progress, silent


@dataclass(frozen=True)
class Agreement:
    """Two models on one text.

    Attributes:
        model: perplexity of the model.
        reference: of the one it is compared with.
        kl: mean over positions of ``KL(reference || model)``, in nats; infinite where the model excludes a token that
            the reference does not.
        top1: part of the positions at which both have the same likeliest token (the first of equals).
    """

    model: Perplexity
    reference: Perplexity
    kl: float
    top1: float


def agreement(
    model: Decoder,
    reference: Decoder,
    tokens: Sequence[int] | np.ndarray,
    *,
    window: int = 1024,
    windows: int | None = 3,
    progress: Progress = silent,
) -> Agreement:
    """Measure ``model`` beside ``reference`` on the first ``windows`` windows of ``tokens`` (None: all full windows).

    Raises:
        UsageError: a window of less than two tokens, or less than one window.
        InputRefused: the text has fewer tokens than that, or the two models' logits have different shapes.
        CheckFailed: the logits of one are not finite, or exclude the text.
    """
    pieces = cut(tokens, window=window, windows=windows)
    ours = theirs = divergence = 0.0
    same = 0
    for index, piece in enumerate(pieces):
        progress("perplexity and divergence", index, len(pieces))
        found, wanted = (decoder.run(piece[None])[0][0, :-1] for decoder in (model, reference))
        if found.shape != wanted.shape:
            raise InputRefused(
                "The two models cannot be compared: their logits have different shapes",
                where=f"{list(found.shape)} and {list(wanted.shape)}",
                do="name a reference with the same vocabulary",
            )
        ours += negative_log_likelihood(found, piece[1:])
        theirs += negative_log_likelihood(wanted, piece[1:])
        divergence += kl_divergence(wanted, found)
        same += int((found.argmax(axis=-1) == wanted.argmax(axis=-1)).sum())
    progress("perplexity and divergence", len(pieces), len(pieces))
    mine = finish(ours, window, len(pieces))
    other = finish(theirs, window, len(pieces), whose="The reference")
    return Agreement(mine, other, divergence / mine.tokens, same / mine.tokens)


def kl_divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    """Sum over positions of ``KL(softmax(reference) || softmax(logits))`` in nats, in float64.

    Args:
        reference: ``[S, V]``.
        logits: ``[S, V]``.

    Returns:
        Infinity where ``logits`` exclude a token that ``reference`` does not; NaN where they are no numbers.
    """
    total = 0.0
    for start in range(0, len(reference), ROWS):
        wanted, found = (_log_softmax(rows[start : start + ROWS]) for rows in (reference, logits))
        if wanted is None or found is None:
            return math.nan
        probabilities = np.exp(wanted)
        possible = probabilities > 0
        difference = np.subtract(wanted, found, where=possible, out=np.zeros_like(wanted))
        total += float(np.multiply(probabilities, difference, where=possible, out=np.zeros_like(wanted)).sum())
    return total


def _log_softmax(rows: np.ndarray) -> np.ndarray | None:
    """Of ``[S, V]``, in float64; None where a row has no distribution."""
    rows = rows.astype(np.float64)
    top = rows.max(axis=-1, keepdims=True)
    if not np.isfinite(top).all():
        return None
    rows -= top
    return np.asarray(rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True)))
