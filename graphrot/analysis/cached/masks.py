"""What a mask hides, told from its own numbers: tokens to come, those beyond a window, and padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphrot.analysis.cached.cut import LONGEST, Cut, CutFailed
from graphrot.analysis.cached.meaning import apply_mask, visible
from graphrot.analysis.cached.reading import Reader
from graphrot.analysis.probe_sizes import Run
from graphrot.analysis.types import AttentionSite

PADDING = "attention_mask"
"""The graph input that says which tokens are padding."""

_HIDDEN = -1e3
_RUNS = (Run(3, 4, 0), Run(3, 2, 5), Run(3, 1, 7), Run(1, 6, 3))
_LONG_RUNS = (Run(1, 600, 0), Run(2, 70, 90), Run(1, 6, 900))
"""Sizes at which rules differ that are alike for a few tokens: prefixes, blocks, windows of some heads only."""


@dataclass(frozen=True)
class Mask:
    """A mask as a rule.

    Args:
        causal: tokens to come are hidden.
        window: tokens that a query sees at most; -1: all.
        pads: tokens are hidden where :data:`PADDING` is 0.
    """

    causal: bool
    window: int
    pads: bool


class Masks:
    """The masks of a graph; sites that share one share the answer.

    Args:
        reader: the graph.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._padding = next((v for v in reader.model.graph.inputs if v.name == PADDING), None)
        self._known: dict[tuple[object, ...], Mask | None] = {}

    def rule(self, site: AttentionSite) -> Mask | None:
        """The rule that equals a site's mask together with its own; None: none does."""
        values = tuple(self._reader.read(term.place) for term in site.mask)
        key = (*values, *((t.kind, t.factor, t.number, t.place.form) for t in site.mask), site.causal, site.window)
        if key not in self._known:
            self._known[key] = self._rule(site, values)
        return self._known[key]

    def _rule(self, site: AttentionSite, values: Sequence[ir.Value]) -> Mask | None:
        made = [value for value in values if value.producer() is not None]
        if len(made) != len(values) and any(v is not self._padding for v in values if v.producer() is None):
            return None
        cut = _Masked(self._reader, site, values, self._padding)
        if not cut.by_padding:
            return None
        try:
            window = cut.window()
            for causal in (True, False):
                rule = Mask(causal, window, cut.reads_padding)
                if all(
                    cut.agrees(rule, run, padding) for run, padding in _tried(window, cut.longest, cut.reads_padding)
                ):
                    return rule
        except CutFailed:
            return None
        return None


def _tried(window: int, longest: int, padded: bool) -> Iterator[tuple[Run, np.ndarray]]:
    """Sizes, and which tokens are padding there: none, some on the left, some on the right, some anywhere.

    Where the graph takes ``longest`` tokens at most, long sizes are made as much shorter as that asks.
    """
    runs = [
        *_RUNS,
        *(_shorter(run, longest) for run in _LONG_RUNS),
        *([Run(2, 3, window), Run(2, 4, max(window - 2, 0))] if window >= 0 else []),
    ]
    rng = np.random.default_rng(0)
    for run in runs:
        total = run.past + run.sequence
        whole = np.ones((run.batch, total), np.int64)
        yield run, whole
        if padded:
            slots, cuts = np.arange(total), np.arange(run.batch)[:, None]
            yield run, (slots >= cuts).astype(np.int64)
            yield run, (slots < total - cuts).astype(np.int64)
            yield run, np.maximum(rng.integers(0, 2, whole.shape), slots == 0)


def _shorter(run: Run, longest: int) -> Run:
    total = run.past + run.sequence
    if total <= longest:
        return run
    return Run(run.batch, max(run.sequence * longest // total, 1), run.past * longest // total)


class _Masked:
    """The mask of one site as numbers."""

    def __init__(
        self, reader: Reader, site: AttentionSite, values: Sequence[ir.Value], padding: ir.Value | None
    ) -> None:
        self._site = site
        self._values = values
        self._padding = padding
        made = [value for value in dict.fromkeys(values) if value.producer() is not None]
        self._made = made
        self._cut = Cut(reader.scope, reader.probe, made) if made else None
        read = set(values) if self._cut is None else self._cut.by_value | (set(values) - set(made))
        self.reads_padding = padding in read
        self.longest = 0
        """Tokens, past and new ones, at which the mask was seen to run; :meth:`window` finds it."""
        self.by_padding = all(value is padding for value in read) and not (self._cut is not None and self._cut.products)

    def window(self) -> int:
        """What one new token sees of a long past, if that is less than all of it; -1: all."""
        most = LONGEST if self._cut is None else self._cut.affordable(self._padding_feeds)
        low, high = -1, most
        past = high
        scores = None
        while True:
            try:
                run = Run(1, 1, past)
                scores = self._scores(run, np.ones((1, past + 1), np.int64))
                low = past
            except CutFailed:
                if past == 0:
                    raise
                high = past
            if low == most or high - low <= 1:
                break
            past = (low + high) // 2
        assert scores is not None
        if low < 0:
            raise CutFailed("it runs at no size")
        self.longest = low + 1
        scores = self._scores(Run(1, 1, low), np.ones((1, low + 1), np.int64))
        seen = int((scores[0, 0, 0] > _HIDDEN).sum())
        mine = self._site.window
        window = seen if seen < low + 1 else -1
        return mine if window < 0 or 0 <= mine < window else window

    def agrees(self, rule: Mask, run: Run, padding: np.ndarray) -> bool:
        """Whether a rule hides what the mask hides, and the mask changes nothing else."""
        scores = self._scores(run, padding)
        length, total = run.sequence, run.past + run.sequence
        own = visible(length, total, self._site.causal, self._site.window)
        shown = (scores > _HIDDEN) & own
        wanted = visible(length, total, rule.causal, rule.window) & np.ones_like(shown)
        if rule.pads:
            wanted &= (padding != 0)[:, None, None, :]
        some = wanted.any(axis=-1, keepdims=True)
        plain = (scores == 0.0) | ~shown
        return bool((((shown == wanted) & plain) | ~some).all())

    def _feeds(self, padding: np.ndarray) -> dict[ir.Value, np.ndarray]:
        if self._padding is None:
            return {}
        assert self._padding.dtype is not None
        return {self._padding: padding.astype(self._padding.dtype.numpy())}

    def _padding_feeds(self, run: Run) -> dict[ir.Value, np.ndarray]:
        return self._feeds(np.ones((run.batch, run.past + run.sequence), np.int64))

    def _scores(self, run: Run, padding: np.ndarray) -> np.ndarray:
        """The mask, added to zeros ``[B, H, S, T]``."""
        feeds = self._feeds(padding)
        made = {} if self._cut is None else dict(zip(self._made, self._cut.run(run, feeds), strict=True))
        heads = self._site.heads if any(t.place.form == "stacked" for t in self._site.mask) else 1
        scores = np.zeros((run.batch, heads, run.sequence, run.past + run.sequence))
        for term, value in zip(self._site.mask, self._values, strict=True):
            mask = made[value] if value in made else feeds[value]
            try:
                scores = apply_mask(scores, term, mask)
            except ValueError as error:
                raise CutFailed("its mask has another form") from error
        if scores.shape[2:] != (run.sequence, run.past + run.sequence):
            raise CutFailed("its mask has another form")
        return scores
