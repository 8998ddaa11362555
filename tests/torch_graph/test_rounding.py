"""Rounding in torch: the numbers of the references to the bit, and the gradients that are said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch

from graphrot.ops.attention_reference import load_rows, store_rows
from graphrot.quant.activations import fake_quantize_tokens
from graphrot.quant.clip import quantize_clip
from graphrot.quant.grid import WeightGrid
from graphrot.quant.rtn import quantize_rtn
from graphrot.torch_graph.rounding import round_rows, round_tokens, round_weight

GRIDS = [WeightGrid(bits, group, symmetric) for bits in (4, 8) for group in (None, 32) for symmetric in (True, False)]
Layout = Literal["KN", "NK"]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, some of zeros, some of one sign, some halfway between codes."""
    random = np.random.default_rng(seed)
    made = (random.standard_normal(shape) * np.exp2(random.integers(-20, 8, (*shape[:-1], 1)))).astype(np.float32)
    made[0] = 0
    made[1] = np.abs(made[1]) + np.float32(0.5)
    made[2] = np.arange(shape[-1]) % 15 - 7.5
    made[3] = np.float32(1e-42)
    return made


@pytest.mark.parametrize("bits", [4, 8])
def test_tokens(bits: Literal[4, 8]) -> None:
    x = numbers(64, 80)
    assert np.array_equal(round_tokens(torch.from_numpy(x), bits).numpy(), fake_quantize_tokens(x, bits))
    wide = round_tokens(torch.from_numpy(x.astype(np.float64)), bits)
    assert wide.dtype == torch.float64
    assert np.array_equal(wide.numpy(), fake_quantize_tokens(x, bits))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("layout", ["KN", "NK"])
@pytest.mark.parametrize("solver", ["rtn", "clip"])
def test_weights(grid: WeightGrid, layout: Layout, solver: Literal["rtn", "clip"]) -> None:
    weight = numbers(24, 80, seed=1)
    expected = (quantize_rtn if solver == "rtn" else quantize_clip)(weight, grid).dequantize()
    stored = torch.from_numpy(weight.T.copy() if layout == "KN" else weight).requires_grad_()
    found = round_weight(stored, grid, layout, solver=solver)
    assert np.array_equal(found.detach().numpy(), expected.T if layout == "KN" else expected)
    with torch.no_grad():
        assert torch.equal(round_weight(stored, grid, layout, solver=solver), found)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_cache(bits: Literal[4, 8]) -> None:
    z = numbers(40, 64, seed=2)
    z[5] = 3.25
    z[6] *= np.float32(1e7)
    expected = load_rows(store_rows(z.reshape(40, 4, 16), bits), bits).astype(np.float32).reshape(z.shape)
    assert np.array_equal(round_rows(torch.from_numpy(z), bits, 16).numpy(), expected)


STRAIGHT: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: round_tokens(x, 4),
    lambda x: round_weight(x, WeightGrid(4, 32), "NK"),
    lambda x: round_weight(x, WeightGrid(4, 32), "KN", solver="clip"),
    lambda x: round_rows(x, 4, 16),
]


@pytest.mark.parametrize("rounded", STRAIGHT)
def test_the_gradient_goes_straight_through(rounded: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.from_numpy(numbers(32, 64)).requires_grad_()
    given = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    result = rounded(x)
    assert not torch.equal(result, x)
    result.backward(given)
    assert torch.equal(x.grad if x.grad is not None else x, given)


def _through_scale(
    x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | float, low: int, high: int
) -> torch.Tensor:
    """The same rounding with autograd's own rules: only the step to a whole number is straight."""
    steps = x / scale
    rounded = (torch.round(steps.detach()) + zero).clamp(low, high) - zero
    return scale * (steps + (rounded - steps).detach())


def test_the_scale_gradient_of_tokens_is_that_of_autograd() -> None:
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    given = torch.randn(16, 48, generator=torch.Generator().manual_seed(2))
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    round_tokens(one, 4, scale_gradient=True).backward(given)
    _through_scale(other, other.abs().amax(-1, keepdim=True) / 7, 0.0, -8, 7).backward(given)
    assert one.grad is not None and other.grad is not None
    assert not torch.allclose(one.grad, given, atol=1e-3)
    assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", ["KN", "NK"])
def test_the_scale_gradient_of_weights_is_that_of_autograd(symmetric: bool, layout: Layout) -> None:
    w = torch.randn(16, 80, generator=torch.Generator().manual_seed(1))
    given = torch.randn(16, 80, generator=torch.Generator().manual_seed(2))
    one, other = (w.T if layout == "KN" else w).clone().requires_grad_(), w.clone().requires_grad_()
    found = round_weight(one, WeightGrid(4, 32, symmetric), layout, scale_gradient=True)
    found.backward(given.T if layout == "KN" else given)
    parts = []
    for block in other.split([32, 32, 16], -1):
        low, high = block.amin(-1, keepdim=True), block.amax(-1, keepdim=True)
        if symmetric:
            parts.append(_through_scale(block, block.abs().amax(-1, keepdim=True) / 7, 0.0, -8, 7))
        else:
            scale = (high - low) / 15
            parts.append(_through_scale(block, scale, torch.round(-low / scale).detach(), 0, 15))
    torch.cat(parts, -1).backward(given)
    assert one.grad is not None and other.grad is not None
    grad = one.grad.T if layout == "KN" else one.grad
    assert not torch.allclose(grad, given, atol=1e-3)
    assert torch.allclose(grad, other.grad, rtol=1e-3, atol=1e-5)


def test_a_token_of_zeros_has_no_scale_to_move() -> None:
    x = torch.zeros(3, 16, requires_grad=True)
    round_tokens(x, 4, scale_gradient=True).backward(torch.ones(3, 16))
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3, 16))
