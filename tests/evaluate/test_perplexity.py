"""Perplexity against the formula and against torch, and the texts that are too short."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from graphrot.errors import InputRefused, UsageError
from graphrot.evaluate.perplexity import Perplexity, negative_log_likelihood, perplexity
from graphrot.evaluate.session import open_decoder
from tests.exported import tiny_onnx
from tests.tiny import VOCAB, tiny


class _Fixed:
    """A decoder whose logits for the next token depend on the current one by a table."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table
        self.runs: list[list[int]] = []

    def run(self, tokens: np.ndarray, cache: Any = None) -> tuple[np.ndarray, Any]:
        assert cache is None, "every window starts anew"
        self.runs.append(tokens[0].tolist())
        return self.table[tokens], object()


def test_known_probabilities() -> None:
    """After 0 comes 1 with 3/4, after 1 comes 0 with 1/2: two of each are predicted in 0 1 0 | 1 0 1."""
    model = _Fixed(np.log(np.array([[0.25, 0.75], [0.5, 0.5]], dtype=np.float32)))
    found = perplexity(model, [0, 1, 0, 1, 0, 1, 0], window=3, windows=None)
    assert model.runs == [[0, 1, 0], [1, 0, 1]]
    assert found == Perplexity(pytest.approx((0.75 * 0.5) ** -0.5, rel=1e-7), 4, 3, 2)


def test_equal_logits_give_the_vocabulary() -> None:
    assert perplexity(_Fixed(np.zeros((7, 7), np.float32)), list(range(7)), window=7, windows=1).perplexity == (
        pytest.approx(7)
    )


def test_equals_torch_window_by_window() -> None:
    tokens = np.random.default_rng(0).integers(0, VOCAB, 70)
    model = tiny("llama")
    losses = []
    with torch.no_grad():
        for start in (0, 33):
            window = torch.tensor(tokens[start : start + 33])[None]
            logits = model(input_ids=window).logits.double()
            losses.append(torch.nn.functional.cross_entropy(logits[0, :-1], window[0, 1:]).item())
    seen: list[tuple[str, int, int]] = []
    found = perplexity(
        open_decoder(tiny_onnx("llama")), tokens, window=33, windows=2, progress=lambda *a: seen.append(a)
    )
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / 2), rel=1e-5)
    assert (found.tokens, found.windows) == (64, 2)
    assert seen == [("perplexity", 0, 2), ("perplexity", 1, 2), ("perplexity", 2, 2)]


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[1e4, 0.0], [-1e4, 0.0]], dtype=np.float32)
    assert negative_log_likelihood(logits, np.array([0, 1])) == 0.0
    assert negative_log_likelihood(logits, np.array([1, 0])) == pytest.approx(2e4)


def test_long_windows_are_summed_over_all_rows() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((300, 5)).astype(np.float32)
    targets = rng.integers(0, 5, 300)
    one_by_one = sum(negative_log_likelihood(logits[i : i + 1], targets[i : i + 1]) for i in range(300))
    assert negative_log_likelihood(logits, targets) == pytest.approx(one_by_one, rel=1e-12)


@pytest.mark.parametrize(("tokens", "windows"), [(9, 1), (29, 3), (9, None)])
def test_short_texts_are_refused(tokens: int, windows: int | None) -> None:
    with pytest.raises(InputRefused, match="The text is too short") as caught:
        perplexity(_Fixed(np.zeros((9, 9))), list(range(tokens)), window=10, windows=windows)
    assert f"{tokens} tokens" in str(caught.value) and f"need {10 * (windows or 1)}" in str(caught.value)


@pytest.mark.parametrize(("window", "windows"), [(1, 1), (10, 0)])
def test_nothing_to_predict_is_refused(window: int, windows: int) -> None:
    with pytest.raises(UsageError, match="nothing to predict"):
        perplexity(_Fixed(np.zeros((9, 9))), [1] * 100, window=window, windows=windows)
