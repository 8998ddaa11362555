"""Compare the logits of two decoders: prefill from an empty cache, then go on with their own caches.

A rotated cache holds other numbers than the source's, so only caches that a model filled itself can be
compared, and only by what comes out of them. Every probe therefore runs in pieces.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from graphrot.errors import InputRefused
from graphrot.evaluate.perplexity import Decoder
from graphrot.evaluate.session import DecoderSession
from graphrot.progress import Progress, silent

TOLERANCE = {
    "bfloat16": 16 * 2.0**-7,
    "float16": 16 * float(np.finfo(np.float16).eps),
    "float32": 512 * float(np.finfo(np.float32).eps),
    "float64": 1e-9,
}
"""Largest accepted difference, as a part of the largest reference logit, by the coarser type of two models.

The coarsest type comes first.

6.1e-5 in float32, which is 2e-3 where the largest logit is 32. Two float32 runs of one decoder that round
in different bases differ by a few units in the last place for each layer (37 in all for one of 30 layers);
a left-out inverse differs by the logit itself.

In half types a bound cannot be so sharp: a float16 cast alone moves the logits by 1e-3 to 3e-3, a bfloat16 cast
by 1e-2 to 6e-2. 1.6e-2 and 0.125 accept that and see gross mistakes; small ones show in float32 only, where
the certificate measures.
"""

MASKED = 745.0
"""A logit so far below the row's largest has probability ``exp(-745) = 0``, in float64 too."""

WINDOW = 256
"""Tokens of one text probe; the last quarter runs as a second chunk on the model's own cache."""


@dataclass(frozen=True)
class Probe:
    """Tokens ``[B, T] int64`` that run in two pieces, cut at ``cut``."""

    tokens: np.ndarray
    cut: int

    @property
    def count(self) -> int:
        return int(self.tokens.size)

    def pieces(self) -> tuple[np.ndarray, ...]:
        return tuple(p for p in (self.tokens[:, : self.cut], self.tokens[:, self.cut :]) if p.shape[1])


@dataclass(frozen=True)
class Difference:
    """How far two models are apart.

    ``scale`` is the largest magnitude of the reference's logits, forbidden ones aside. ``gap`` is the
    largest distance between the reference's first and second choice at a position where the two models
    choose differently.
    """

    max_abs: float
    scale: float
    top1: float
    gap: float
    tokens: int

    @property
    def relative(self) -> float:
        return self.max_abs / self.scale if self.scale > 0 else float(self.max_abs > 0)

    def within(self, tolerance: float) -> bool:
        """Close enough, and first choices differ only where the reference's own choice was a near tie.

        A difference of ``max_abs`` can swap two logits only where they are closer than twice that.
        """
        return self.relative <= tolerance and (self.top1 == 1.0 or self.gap < 2 * self.max_abs)


def text_probes(tokens: Sequence[int] | np.ndarray, *, limit: int, window: int = WINDOW) -> list[Probe]:
    """Windows of ``window`` tokens, at most ``limit`` tokens in all."""
    ids = np.asarray(tokens, dtype=np.int64)[:limit]
    windows = [ids[start : start + window] for start in range(0, len(ids), window)]
    return [Probe(w[None], max(1, len(w) * 3 // 4)) for w in windows if len(w)]


def random_probes(vocabulary: int, *, batch: int | None = None, seed: int = 0, window: int = WINDOW) -> list[Probe]:
    """Random tokens: one long row in two chunks, and a batch of two that ends with a single step.

    Args:
        vocabulary: token ids below it are drawn.
        batch: the only batch that both models take; None: any.
        seed: of the draw.
        window: the longest row.
    """
    rng = np.random.default_rng(seed)
    long, short = min(48, window), min(24, window)
    return [
        Probe(rng.integers(0, vocabulary, (batch or 1, long)), max(1, long * 2 // 3)),
        Probe(rng.integers(0, vocabulary, (batch or 2, short)), max(1, short - 1)),
    ]


def longest_run(decoder: Decoder, most: int, *, batch: int | None = None) -> int | None:
    """The longest row, up to ``most`` tokens, that a decoder takes: some have a table of few positions.

    Args:
        decoder: is run about ten times, if it does not take ``most`` tokens at once.
        most: tokens.
        batch: rows; None: one.

    Returns:
        The length; None if it does not even take one token.
    """

    def runs(count: int) -> bool:
        try:
            decoder.run(np.zeros((batch or 1, count), np.int64))
        except InputRefused:
            return False
        return True

    if runs(most):
        return most
    taken, refused = 0, most
    while refused - taken > 1:
        middle = (taken + refused) // 2
        taken, refused = (middle, refused) if runs(middle) else (taken, middle)
    return taken or None


def fitting(probes: Sequence[Probe], decoder: DecoderSession) -> list[Probe]:
    """The probes, cut so that ``decoder`` can run them: one token at the end if it takes no more after a cache."""
    if decoder.continues:
        return list(probes)
    return [replace(probe, cut=max(1, probe.tokens.shape[1] - 1)) for probe in probes]


class Reference:
    """The reference's logits for a list of probes, kept in a scratch file.

    The file lets the reference's session be closed before the other model is loaded. Use it as a
    context manager; the file goes when the context ends.
    """

    def __init__(
        self,
        decoder: Decoder,
        probes: Sequence[Probe],
        *,
        progress: Progress = silent,
        step: str = "running the reference",
    ) -> None:
        self.probes = tuple(probes)
        self._file = tempfile.TemporaryFile(prefix="graphrot-logits-")  # noqa: SIM115 - closed in __exit__ and below
        self._shapes: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        try:
            for done, probe in enumerate(self.probes):
                progress(step, done, len(self.probes))
                for logits in _run(decoder, probe):
                    self._shapes.append((logits.shape, logits.dtype))
                    self._file.write(np.ascontiguousarray(logits).data)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def compare(
        self, decoder: Decoder, *, count: int | None = None, progress: Progress = silent, step: str = "comparing"
    ) -> Difference:
        """Run ``decoder`` on the first ``count`` probes (None: all).

        Raises:
            InputRefused: the two models' logits have different shapes.
        """
        probes = self.probes[:count]
        self._file.seek(0)
        tally = _Tally()
        piece = 0
        for done, probe in enumerate(probes):
            progress(step, done, len(probes))
            for logits in _run(decoder, probe):
                shape, dtype = self._shapes[piece]
                piece += 1
                data = self._file.read(int(np.prod(shape)) * dtype.itemsize)
                reference = np.frombuffer(data, dtype=dtype).reshape(shape)
                if logits.shape != shape:
                    raise InputRefused(
                        "The two models cannot be compared: their logits have different shapes",
                        where=f"{list(shape)} and {list(logits.shape)}",
                    )
                tally.add(reference, logits)
        return tally.result()


class _Tally:
    def __init__(self) -> None:
        self._max_abs = self._scale = self._gap = 0.0
        self._agree = self._tokens = 0

    def add(self, reference: np.ndarray, logits: np.ndarray) -> None:
        for ours, theirs in zip(_rows(reference), _rows(logits), strict=True):
            live, error = _error(ours, theirs)
            self._max_abs = max(self._max_abs, error)
            self._scale = max(self._scale, float(np.abs(ours[live]).max(initial=0.0)))
            first = int(ours.argmax())
            same = first == int(theirs.argmax())
            self._agree += same
            self._tokens += 1
            if not same:
                best = np.partition(ours, -2)[-2:]
                self._gap = max(self._gap, float(best[1] - best[0]))

    def result(self) -> Difference:
        return Difference(self._max_abs, self._scale, self._agree / max(self._tokens, 1), self._gap, self._tokens)


def _error(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, float]:
    """Which logits of a row count, and the largest difference among them.

    A logit more than :data:`MASKED` below the row's largest has probability zero (padded and forbidden
    entries of a vocabulary, often -1e9 or -inf). It says nothing about size or rounding of the others and
    is left out, if the other model forbids it as well; if not, the error is infinite, as it is with NaN.
    """
    if np.isnan(ours).any() or np.isnan(theirs).any() or not np.isfinite(ours.max()) or not np.isfinite(theirs.max()):
        return np.zeros(ours.shape, dtype=bool), math.inf
    live, alive = ours > ours.max() - MASKED, theirs > theirs.max() - MASKED
    both = live & alive
    if (
        not np.array_equal(live, alive)
        and max(
            float((ours - ours.max())[live & ~both].max(initial=-math.inf)),
            float((theirs - theirs.max())[alive & ~both].max(initial=-math.inf)),
        )
        > -MASKED / 2
    ):
        return live, math.inf
    return live, float(np.abs(theirs[both] - ours[both]).max(initial=0.0))


def _rows(logits: np.ndarray) -> np.ndarray:
    return logits.reshape(-1, logits.shape[-1])


def _run(decoder: Decoder, probe: Probe) -> Iterator[np.ndarray]:
    cache: Any = None
    for tokens in probe.pieces():
        logits, cache = decoder.run(tokens, cache)
        yield logits
