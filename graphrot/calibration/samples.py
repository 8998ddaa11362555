"""Text that a model writes by itself: calibration without data (Liu et al., LLM-QAT, 2023)."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphrot.errors import CheckFailed, InputRefused
from graphrot.evaluate.compare import longest_run
from graphrot.evaluate.session import DecoderSession
from graphrot.progress import Progress, silent

ROWS = 8
"""Rows that are written at once."""
LENGTH = 512
"""Tokens of a row, where the model takes so many."""
_PLAIN = 4
"""Tokens behind a row's first that are the likeliest ones: they make a plausible start of a random token."""


class OwnSamples:
    """Tokens that a decoder draws from its own distribution, row after row, each from a random first token.

    The same decoder and seed give the same tokens, and more of them begin with the fewer.

    Args:
        decoder: one that was opened with one thread, since sums on several differ in their last bits.
        seed: of first tokens and draws.
        progress: told of each token of a block of rows.
    """

    def __init__(self, decoder: DecoderSession, seed: int, *, progress: Progress = silent) -> None:
        self._decoder = decoder
        self._seed = seed
        self._progress = progress
        self._rows = decoder.batch or ROWS
        length = longest_run(decoder, LENGTH, batch=decoder.batch)
        if length is None:
            raise InputRefused(
                "The model writes no samples of its own",
                where=str(decoder.path),
                why="it does not run on a single token",
                do="calibrate on a text",
            )
        self._length = length
        self._blocks: list[np.ndarray] = []

    def tokens(self, limit: int) -> np.ndarray:
        """The first ``limit`` tokens, ``[limit] int64``.

        Raises:
            CheckFailed: the model's logits are no numbers.
        """
        size = self._rows * self._length
        while len(self._blocks) * size < limit:
            self._blocks.append(self._block(len(self._blocks), -(-limit // size)))
        return np.concatenate([np.zeros(0, np.int64), *self._blocks])[:limit]

    def _block(self, number: int, count: int) -> np.ndarray:
        """One block of rows, flat."""
        generator = np.random.default_rng([self._seed, number])
        tokens = np.empty((self._rows, self._length), np.int64)
        tokens[:, 0] = generator.integers(0, self._decoder.vocabulary, self._rows)
        draws = generator.random((self._length, self._rows))
        cache: Any = self._decoder.reserve(self._rows, self._length)
        for position in range(1, self._length):
            self._progress("writing samples", number * self._length + position, count * self._length)
            logits, cache = self._decoder.run(tokens[:, position - 1 : position], cache)
            tokens[:, position] = _pick(logits[:, -1], None if position <= _PLAIN else draws[position])
        return tokens.reshape(-1)


def _pick(logits: np.ndarray, draws: np.ndarray | None) -> np.ndarray:
    """A token for each row ``[B, V]``: the likeliest, or the one at ``draws [B]`` of the summed probabilities."""
    if not np.isfinite(logits.max(axis=-1)).all():
        raise CheckFailed("The model's logits are not finite", do="check the model's weights")
    if draws is None:
        return np.asarray(logits.argmax(axis=-1))
    scores = logits.astype(np.float64)
    sums = np.cumsum(np.exp(scores - scores.max(axis=-1, keepdims=True)), axis=-1)
    return np.asarray((sums <= draws[:, None] * sums[:, -1:]).sum(axis=-1))
