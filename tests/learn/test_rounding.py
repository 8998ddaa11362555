"""The losses' rounding errors against what the written model's rounding does."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from graphrot.learn.data_free import fourth_moment
from graphrot.learn.rounding import row_errors, token_errors, weight_errors
from graphrot.quant.activations import fake_quantize_tokens
from graphrot.quant.clip import quantize_clip
from graphrot.quant.grid import WeightGrid


def samples(rows: int, width: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


@pytest.mark.parametrize(("bits", "low", "high"), [(8, 0.6, 1.05), (4, 0.55, 1.05)])
def test_expected_errors_of_tokens_are_those_of_the_rounding(bits: Literal[4, 8], low: float, high: float) -> None:
    x = samples(500, 576)
    lost = fake_quantize_tokens(x, bits) - x
    true = float(np.mean((lost**2).sum(-1) / (x**2).sum(-1)))
    expected = float(token_errors(torch.from_numpy(x), bits).mean())
    assert low * true < expected < high * true, "the four largest stand for the largest: some less than the true error"


@pytest.mark.parametrize("bits", [8, 4])
def test_expected_errors_of_rows_are_those_of_the_rounding(bits: Literal[4, 8]) -> None:
    x = samples(500, 64) + 0.5
    low = x.min(-1, keepdims=True)
    step = (x.max(-1, keepdims=True) - low) / (2**bits - 1)
    lost = np.rint((x - low) / step) * step + low - x
    true = float(np.mean((lost**2).sum(-1) / (x**2).sum(-1)))
    assert float(row_errors(torch.from_numpy(x), bits).mean()) == pytest.approx(true, rel=0.05)


@pytest.mark.parametrize("grid", [WeightGrid(4), WeightGrid(4, 32), WeightGrid(4, 32, symmetric=False), WeightGrid(8)])
def test_errors_of_weights_are_those_of_the_clip_search(grid: WeightGrid) -> None:
    weight = samples(7, 80, seed=3)
    lost = quantize_clip(weight, grid).dequantize() - weight
    true = (lost**2).sum(-1) / (weight**2).sum(-1)
    found = weight_errors(torch.from_numpy(weight), grid).numpy()
    np.testing.assert_allclose(found, true, rtol=1e-4)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: token_errors(x, 4).sum(),
        lambda x: row_errors(x, 4).sum(),
        lambda x: weight_errors(x, WeightGrid(4, 32)).sum(),
        lambda x: weight_errors(x, WeightGrid(4, 32, symmetric=False)).sum(),
        fourth_moment,
    ],
)
def test_gradients_are_those_of_finite_differences(loss: object) -> None:
    assert callable(loss)
    x = torch.from_numpy(samples(3, 64, seed=5).astype(np.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), [x])
    direction = torch.from_numpy(samples(3, 64, seed=6).astype(np.float64))
    step = 1e-4 * direction
    with torch.no_grad():
        change = float(loss(x + step) - loss(x - step)) / 2e-4
    assert change == pytest.approx(float((gradient * direction).sum()), rel=5e-2, abs=1e-5)


def test_outliers_make_every_error_larger() -> None:
    x = samples(20, 64, seed=7)
    spiked = x.copy()
    spiked[:, 3] *= 30
    for loss in (lambda t: token_errors(t, 4).mean(), lambda t: row_errors(t, 4).mean(), fourth_moment):
        assert float(loss(torch.from_numpy(spiked))) > 2 * float(loss(torch.from_numpy(x)))


def test_a_vector_of_zeros_has_no_error() -> None:
    x = torch.zeros(2, 16, requires_grad=True)
    for loss in (token_errors(x, 4).sum(), row_errors(x, 4).sum(), fourth_moment(x)):
        (gradient,) = torch.autograd.grad(loss, [x])
        assert float(loss.detach()) < 1e-3 and bool(torch.isfinite(gradient).all())
