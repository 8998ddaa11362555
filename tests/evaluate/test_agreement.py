"""Divergence and first choices against the formula and against torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from graphrot.errors import CheckFailed, InputRefused, UsageError
from graphrot.evaluate.agreement import agreement, kl_divergence
from graphrot.evaluate.perplexity import perplexity


class _Fixed:
    """A decoder whose logits for the next token depend on the current one by a table."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table.astype(np.float32)

    def run(self, tokens: np.ndarray, cache: Any = None) -> tuple[np.ndarray, Any]:
        assert cache is None, "every window starts anew"
        return self.table[tokens], object()


def test_known_numbers() -> None:
    """Reference 3/4, 1/4 and 1/2, 1/2; model 1/2, 1/2 and 1/4, 3/4; three positions behind 0, one behind 1."""
    reference = _Fixed(np.log([[0.25, 0.75], [0.5, 0.5]]))
    model = _Fixed(np.log([[0.5, 0.5], [0.25, 0.75]]))
    found = agreement(model, reference, [0, 0, 1, 0, 1, 1, 7], window=3, windows=2)
    first = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    second = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.kl == pytest.approx((3 * first + second) / 4, rel=1e-6)
    assert found.top1 == 0.0, "of equals the first: 1 against 0, and 0 against 1"
    assert found.model == perplexity(model, [0, 0, 1, 0, 1, 1], window=3, windows=2)
    assert found.reference == perplexity(reference, [0, 0, 1, 0, 1, 1], window=3, windows=2)


def test_equals_torch() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = (rng.standard_normal((300, 50)).astype(np.float32) * 4 for _ in range(2))
    expected = torch.nn.functional.kl_div(
        torch.log_softmax(torch.from_numpy(theirs).double(), -1),
        torch.log_softmax(torch.from_numpy(ours).double(), -1),
        reduction="sum",
        log_target=True,
    )
    assert kl_divergence(ours, theirs) == pytest.approx(expected.item(), rel=1e-12)
    assert kl_divergence(ours, theirs) != pytest.approx(kl_divergence(theirs, ours), rel=1e-3)


def test_of_a_model_from_itself() -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((9, 9))
    found = agreement(_Fixed(table), _Fixed(table + 100), rng.integers(0, 9, 40), window=10, windows=4)
    assert abs(found.kl) < 1e-6 and found.top1 == 1.0


def test_first_choices_are_counted() -> None:
    reference = np.eye(4)
    model = np.eye(4)
    model[3] = [2, 0, 0, 1]
    found = agreement(_Fixed(model), _Fixed(reference), [0, 1, 2, 3, 0], window=5, windows=1)
    assert found.top1 == 0.75


def test_forbidden_tokens() -> None:
    """What both forbid adds nothing; what only the model forbids is infinitely far."""
    plain, forbidding = np.zeros((1, 3)), np.array([[0.0, 0.0, -np.inf]])
    assert kl_divergence(forbidding, forbidding) == 0.0
    assert kl_divergence(plain, forbidding) == math.inf
    assert kl_divergence(forbidding, plain) == pytest.approx(math.log(1.5))


def test_logits_that_are_no_numbers() -> None:
    tables = [np.zeros((3, 3)), np.full((3, 3), np.nan)]
    for ours, theirs, who in ((0, 1, "The reference"), (1, 0, "The model")):
        with pytest.raises(CheckFailed, match=f"{who} has no perplexity"):
            agreement(_Fixed(tables[ours]), _Fixed(tables[theirs]), [0, 1, 2], window=3, windows=1)


def test_other_vocabularies() -> None:
    with pytest.raises(InputRefused, match="different shapes") as caught:
        agreement(_Fixed(np.zeros((3, 3))), _Fixed(np.zeros((3, 4))), [0, 1, 2], window=3, windows=1)
    assert "[2, 3] and [2, 4]" in str(caught.value)


def test_texts_that_are_too_short() -> None:
    table = _Fixed(np.zeros((3, 3)))
    with pytest.raises(InputRefused, match="too short"):
        agreement(table, table, [0, 1, 2], window=4, windows=1)
    with pytest.raises(UsageError, match="nothing to predict"):
        agreement(table, table, [0, 1, 2], window=1, windows=1)
