"""The measure itself: what counts as equal, and how caches are exercised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphrot.errors import InputRefused
from graphrot.evaluate.compare import TOLERANCE, WINDOW, Difference, Probe, Reference, random_probes, text_probes

VOCAB = 11


class Table:
    """A decoder whose logits are rows of a table, plus the running sum of all tokens before."""

    def __init__(self, table: np.ndarray, *, forgets: bool = False) -> None:
        self.table = table
        self.forgets = forgets
        self.calls: list[tuple[int, ...]] = []

    def run(self, tokens: np.ndarray, cache: Any = None) -> tuple[np.ndarray, Any]:
        self.calls.append(tokens.shape)
        before = 0 if cache is None or self.forgets else cache
        sums = np.cumsum(tokens, axis=1) + before
        return self.table[tokens] + 0.01 * sums[..., None] * np.arange(VOCAB), sums[:, -1:]


def table(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((VOCAB, VOCAB)).astype(np.float32)


def compare(first: Table, second: Table, probes: list[Probe] | None = None) -> Difference:
    with Reference(first, probes or random_probes(VOCAB)) as reference:
        return reference.compare(second)


def test_equal_models_do_not_differ() -> None:
    found = compare(Table(table()), Table(table()))
    assert (found.max_abs, found.relative, found.top1) == (0.0, 0.0, 1.0)
    assert found.tokens == 48 + 2 * 24
    assert found.within(0.0)


def test_the_largest_difference_counts() -> None:
    changed = table()
    changed[3, 4] += 0.5
    found = compare(Table(table()), Table(changed))
    assert found.max_abs == pytest.approx(0.5, rel=1e-5)
    assert found.relative == pytest.approx(0.5 / found.scale, rel=1e-5)
    assert not found.within(TOLERANCE["float32"])


def test_a_model_that_forgets_its_cache_is_found_out() -> None:
    """Only the second chunk of a probe shows it."""
    assert compare(Table(table()), Table(table(), forgets=True)).max_abs > 0.1


def test_every_probe_runs_in_pieces() -> None:
    decoder = Table(table())
    probes = [*random_probes(VOCAB), *text_probes(np.arange(300) % VOCAB, limit=290)]
    with Reference(decoder, probes):
        pass
    assert decoder.calls == [(1, 32), (1, 16), (2, 23), (2, 1), (1, 192), (1, 64), (1, 25), (1, 9)]
    assert WINDOW == 256


def test_one_token_is_a_probe() -> None:
    (probe,) = text_probes([5], limit=1)
    assert [p.shape for p in probe.pieces()] == [(1, 1)]
    assert text_probes([], limit=10) == []


def test_not_a_number_is_infinitely_far() -> None:
    broken = table()
    broken[2, 2] = np.nan
    assert compare(Table(table()), Table(broken)).max_abs == np.inf


@pytest.mark.parametrize(
    ("gap", "ok"), [(1.9e-6, True), (2.1e-6, False)], ids=["a near tie may flip", "a clear choice may not"]
)
def test_first_choices_differ_only_at_near_ties(gap: float, ok: bool) -> None:
    assert Difference(max_abs=1e-6, scale=1.0, top1=0.99, gap=gap, tokens=100).within(1e-4) is ok


def test_a_flip_is_seen_with_the_gap_of_the_reference() -> None:
    ours = np.zeros((VOCAB, VOCAB), np.float32)
    ours[:, 1], ours[:, 2] = 5.0, 4.0
    theirs = ours.copy()
    theirs[7, 2] = 6.0
    tokens = Probe(np.asarray([[7]]), 1)
    found = compare(Table(ours), Table(theirs), [tokens])
    assert found.top1 == 0.0
    assert found.gap == pytest.approx(1.0 - 0.07, rel=1e-3)


def test_different_vocabularies_cannot_be_compared() -> None:
    class Small(Table):
        def run(self, tokens: np.ndarray, cache: Any = None) -> tuple[np.ndarray, Any]:
            logits, cache = super().run(tokens, cache)
            return logits[..., :-1], cache

    with pytest.raises(InputRefused, match="different shapes"):
        compare(Table(table()), Small(table()))


def test_the_tolerance_shrinks_with_the_type() -> None:
    assert TOLERANCE["float64"] < 1e-4 * TOLERANCE["float32"]


def _tallied(ours: np.ndarray, theirs: np.ndarray) -> Difference:
    class Fixed:
        def __init__(self, logits: np.ndarray) -> None:
            self.logits = logits

        def run(self, tokens: np.ndarray, cache: object = None) -> tuple[np.ndarray, object]:
            return self.logits[None], None

    probe = Probe(np.zeros((1, len(ours)), np.int64), len(ours))
    with Reference(Fixed(ours), [probe]) as reference:
        return reference.compare(Fixed(theirs))


@pytest.mark.parametrize("mask", [-1e5, -1e9, float(np.finfo(np.float32).min), -np.inf])
def test_forbidden_logits_neither_hide_nor_make_a_difference(mask: float) -> None:
    rng = np.random.default_rng(0)
    ours = rng.standard_normal((4, 9)).astype(np.float32)
    other = rng.standard_normal((4, 9)).astype(np.float32)
    ours[:, 6:] = other[:, 6:] = mask
    same = _tallied(ours, ours + np.float32(1e-7))
    assert same.within(TOLERANCE["float32"]) and same.scale < 10
    assert not _tallied(ours, other).within(TOLERANCE["float32"])
    freed = ours.copy()
    freed[2, 7] = 0.5
    assert not _tallied(ours, freed).within(TOLERANCE["float32"]), "a forbidden token became possible"
    assert not _tallied(freed, ours).within(TOLERANCE["float32"]), "a possible token became forbidden"


def test_numbers_that_are_none_are_a_difference() -> None:
    ours = np.ones((2, 5), np.float32)
    broken = ours.copy()
    broken[1, 3] = np.nan
    assert not _tallied(ours, broken).within(TOLERANCE["float32"])
    assert not _tallied(broken, broken).within(TOLERANCE["float32"])
