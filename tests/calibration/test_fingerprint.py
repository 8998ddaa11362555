"""A shared passage is found, wherever it stands; what only looks alike is none."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrot.calibration.fingerprint import RUN, WINDOW, fingerprint, overlap

SURE = RUN + WINDOW - 1


def tokens(count: int, seed: int, vocabulary: int = 50_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, count)


@given(
    length=st.integers(SURE, 200), before=st.integers(0, 90), after=st.integers(0, 90), start=st.integers(0, 300),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_a_passage_is_always_found(length: int, before: int, after: int, start: int, seed: int) -> None:
    known = tokens(500, seed)
    start = min(start, 500 - length)
    text = np.concatenate([tokens(before, seed + 1), known[start : start + length], tokens(after, seed + 2)])
    found = overlap(text, fingerprint(known))
    assert found is not None and before <= found.first <= before + WINDOW - 1


@given(length=st.integers(0, RUN - 1), start=st.integers(0, 400), seed=st.integers(0, 10**6))
def test_a_phrase_never_is(length: int, start: int, seed: int) -> None:
    known = tokens(450, seed)
    text = np.concatenate([tokens(60, seed + 1), known[start : start + length], tokens(60, seed + 2)])
    assert overlap(text, fingerprint(known)) is None


def test_the_same_text_is_found_whole() -> None:
    text = tokens(300, 0)
    found = overlap(text, fingerprint(text))
    assert found is not None and 300 / WINDOW - 2 <= found.runs <= 40


@pytest.mark.parametrize("count", [RUN, RUN + 1, SURE - 1])
def test_short_texts_are_found_too(count: int) -> None:
    text = tokens(count, 0)
    assert overlap(np.concatenate([tokens(9, 1), text, tokens(9, 2)]), fingerprint(text)) is not None


def test_too_short_for_a_run() -> None:
    assert fingerprint(tokens(RUN - 1, 0)) == "" and overlap(tokens(100, 0), "") is None
    assert overlap(tokens(RUN - 1, 0), fingerprint(tokens(500, 0))) is None


def test_one_token_more_or_less_breaks_a_run() -> None:
    known = tokens(RUN, 0)
    for change in (np.delete(known, 16), np.insert(known, 16, 5), np.where(np.arange(RUN) == 31, 7, known)):
        assert overlap(change, fingerprint(known)) is None


def test_order_counts() -> None:
    known = tokens(100, 0)
    assert overlap(known[::-1].copy(), fingerprint(known)) is None


def test_rules_and_dots_say_nothing() -> None:
    dots = np.tile([5, 6, 7], 100)
    assert fingerprint(dots) == ""
    both = np.concatenate([dots, tokens(100, 0), dots])
    assert overlap(np.concatenate([tokens(50, 1), dots]), fingerprint(both)) is None
    assert overlap(tokens(100, 0), fingerprint(both)) is not None


def test_it_is_small() -> None:
    kept = len(base64.b64decode(fingerprint(tokens(16_384, 0)))) // 8
    assert 16_384 / 20 < kept < 16_384 / 14


def test_the_numbers_are_fixed() -> None:
    """A fingerprint is compared with texts years later: this is what version 0.1 writes."""
    text = np.arange(RUN) * 37 % 101
    assert fingerprint(text) == "VXRJsaK4Lpg="


@pytest.mark.parametrize("known", ["a", "!!!!", "AAAA"])
def test_what_is_no_fingerprint(known: str) -> None:
    with pytest.raises(ValueError):
        overlap(tokens(100, 0), known)
