"""GPTQ: against its textbook form, and against rounding, in the norm it minimizes."""

from __future__ import annotations

import numpy as np
import pytest

from graphrot.errors import InputRefused
from graphrot.quant.clip import clip_scales, quantize_clip
from graphrot.quant.gptq import BLOCK, factorize, gptq_many, row_errors, solve
from graphrot.quant.grid import QuantizedTensor, WeightGrid, dequantize
from graphrot.quant.rtn import quantize_rtn

GRIDS = [WeightGrid(4), WeightGrid(4, None, False), WeightGrid(4, 32), WeightGrid(4, 128, False), WeightGrid(8, 64)]


def problem(n: int = 30, k: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and the second moment of correlated inputs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((400, k // 3)) @ rng.standard_normal((k // 3, k)) + 0.3 * rng.standard_normal((400, k))
    x *= np.exp(rng.standard_normal(k) / 2)
    return rng.standard_t(5, (n, k)).astype(np.float32), x.T @ x


def output_error(w: np.ndarray, tensor: QuantizedTensor, hessian: np.ndarray) -> float:
    delta = w.astype(np.float64) - tensor.dequantize()
    w = w.astype(np.float64)
    return float(np.sqrt(np.sum((delta @ hessian) * delta) / np.sum((w @ hessian) * w)))


def textbook(
    w: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    grid: WeightGrid,
    damped: np.ndarray,
    order: np.ndarray,
) -> np.ndarray:
    """Frantar et al., algorithm 1, in float64: the upper Cholesky factor of the inverse, column by column."""
    u = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    group = grid.group_index(w.shape[1])
    work = w.astype(np.float64)[:, order]
    codes = np.empty(w.shape, int)
    for j, channel in enumerate(order):
        scale = scales[:, group[channel]].astype(np.float64)
        zero = np.zeros_like(scale) if zeros is None else zeros[:, group[channel]]
        code = np.clip(np.rint(work[:, j] / scale) + zero, grid.low, grid.high)
        codes[:, channel] = code
        lost = (work[:, j] - (code - zero) * scale) / u[j, j]
        work[:, j:] -= lost[:, None] * u[j, j:]
    return codes


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("act_order", [False, True])
def test_it_is_the_textbook_algorithm(grid: WeightGrid, act_order: bool) -> None:
    w, hessian = problem()
    assert w.shape[1] > 2 * BLOCK and w.shape[1] % BLOCK
    factor = factorize(hessian, damping=0.01, act_order=act_order)
    damped = hessian + 0.01 * np.diagonal(hessian).mean() * np.eye(w.shape[1])
    expected_order = np.argsort(-np.diagonal(hessian)) if act_order else np.arange(w.shape[1])
    np.testing.assert_array_equal(factor.order, expected_order)
    scales, zeros = clip_scales(w, grid)
    codes, errors = solve(w, scales, zeros, grid, factor)
    expected = textbook(w, scales, zeros, grid, damped, factor.order)
    # A rounding at the middle between two codes may fall to the other side in float32; all later channels follow.
    assert np.mean(np.any(codes != expected, axis=1)) < 0.2
    delta = w - dequantize(codes, scales, None if zeros is None else zeros.astype(np.uint8), grid).astype(np.float64)
    np.testing.assert_allclose(errors, np.sum((delta @ damped) * delta, axis=1), rtol=1e-4)
    np.testing.assert_allclose(row_errors(delta.astype(np.float32), factor), errors, rtol=1e-4)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("k", [160, 96, 576])
def test_no_worse_than_clip_and_much_better_than_rounding(grid: WeightGrid, k: int) -> None:
    w, hessian = problem(k=k)
    solved = gptq_many([w], hessian, grid)[0]
    clipped, rounded = (output_error(w, quantize(w, grid), hessian) for quantize in (quantize_clip, quantize_rtn))
    assert solved.error == pytest.approx(output_error(w, solved, hessian), rel=1e-3)
    assert solved.error < 0.7 * min(clipped, rounded)


def test_each_row_is_at_least_as_good_as_its_clip_rounding() -> None:
    """Also where corrections cannot help: damping so strong that they vanish, or two tokens only."""
    w, hessian = problem()
    grid = WeightGrid(4, 32)
    x = np.random.default_rng(3).standard_normal((2, w.shape[1]))
    for matrix, damping in ((hessian, 1e5), (x.T @ x, 0.01)):
        damped = matrix + damping * np.diagonal(matrix).mean() * np.eye(w.shape[1])
        errors = []
        for tensor in (gptq_many([w], matrix, grid, damping=damping)[0], quantize_clip(w, grid)):
            delta = w - tensor.dequantize().astype(np.float64)
            errors.append(np.sum((delta @ damped) * delta, axis=1))
        assert np.all(errors[0] <= errors[1] * (1 + 1e-4))


def test_weights_of_one_input_may_be_solved_together_or_alone() -> None:
    w, hessian = problem(n=40)
    grid = WeightGrid(4, 64, False)
    together = gptq_many([w[:8], w[8:9], w[9:]], hessian, grid)
    for tensor, rows in zip(together, (slice(0, 8), slice(8, 9), slice(9, 40)), strict=True):
        alone = gptq_many([w[rows]], hessian, grid)[0]
        # A matmul of another height may sum in another order.
        assert np.mean(np.any(tensor.codes != alone.codes, axis=1)) <= 0.2
        assert tensor.error == pytest.approx(alone.error, rel=2e-2)
        assert tensor.codes.shape == w[rows].shape


def test_the_scale_of_the_inputs_does_not_matter() -> None:
    w, hessian = problem()
    one, other = (gptq_many([w], hessian * f, WeightGrid(4))[0] for f in (1.0, 2.0**-20))
    np.testing.assert_array_equal(one.codes, other.codes)
    assert one.error == pytest.approx(other.error, rel=1e-6)


def test_quality_does_not_depend_on_the_order_of_the_channels() -> None:
    """Per output channel with act-order, permuted channels give the same codes, permuted."""
    w, hessian = problem()
    order = np.random.default_rng(5).permutation(w.shape[1])
    for act_order, tolerance in ((True, 1e-3), (False, 0.15)):
        one = gptq_many([w], hessian, WeightGrid(4), act_order=act_order)[0]
        other = gptq_many([w[:, order]], hessian[np.ix_(order, order)], WeightGrid(4), act_order=act_order)[0]
        assert other.error == pytest.approx(one.error, rel=tolerance)
        if act_order:
            assert np.mean(other.codes == one.codes[:, order]) > 0.9


def test_channels_are_reordered_only_where_few_carry_the_energy() -> None:
    even = np.diag(np.linspace(1, 9, 32))
    spiky = even.copy()
    spiky[20, 20] = 1000
    np.testing.assert_array_equal(factorize(even).order, np.arange(32))
    assert factorize(spiky).order[0] == 20
    np.testing.assert_array_equal(factorize(spiky, act_order=False).order, np.arange(32))


def test_uncorrelated_inputs_give_rounding_to_nearest() -> None:
    w, _ = problem()
    diagonal = np.diag(np.random.default_rng(2).uniform(0.5, 2, w.shape[1]))
    for grid in GRIDS:
        scales, zeros = clip_scales(w, grid)
        codes, _ = solve(w, scales, zeros, grid, factorize(diagonal))
        np.testing.assert_array_equal(codes, quantize_clip(w, grid).codes)


def test_representable_weights_are_kept() -> None:
    _, hessian = problem(k=96)
    rng = np.random.default_rng(4)
    codes = rng.integers(-7, 8, (6, 96)).astype(np.int8)
    codes[:, ::32] = 7
    w = codes * rng.uniform(0.5, 2, (6, 1)).astype(np.float32)
    tensor = gptq_many([w], hessian, WeightGrid(4, 32))[0]
    np.testing.assert_array_equal(tensor.codes, codes)
    assert tensor.error < 1e-5


@pytest.mark.parametrize("act_order", [False, True])
def test_dead_channels_are_rounded_and_disturb_nothing(act_order: bool) -> None:
    w, hessian = problem()
    dead = [0, 17, 70, 299]
    hessian[dead] = 0
    hessian[:, dead] = 0
    live = np.setdiff1d(np.arange(w.shape[1]), dead)
    factor = factorize(hessian, act_order=act_order)
    grid = WeightGrid(4)
    scales, _ = clip_scales(w, grid)
    codes, _ = solve(w, scales, None, grid, factor)
    np.testing.assert_array_equal(codes[:, dead], np.clip(np.rint(w[:, dead] / scales), -8, 7))
    small = factorize(hessian[np.ix_(live, live)], act_order=act_order)
    expected, _ = solve(w[:, live], scales, None, grid, small)
    assert np.mean(codes[:, live] == expected) > 0.95
    assert np.all(factorize(np.zeros((8, 8))).weight > 0)


def test_damping_grows_until_the_matrix_is_definite() -> None:
    w, hessian = problem()
    broken = hessian - 0.9 * np.diagonal(hessian).min() * np.eye(w.shape[1])
    assert np.linalg.eigvalsh(broken)[0] < 0
    factor = factorize(broken, damping=0.01)
    assert factor.damping in (pytest.approx(0.1), pytest.approx(1.0))
    assert factor.added == pytest.approx(factor.damping * np.diagonal(broken).mean())
    assert np.isfinite(gptq_many([w], broken, WeightGrid(4))[0].error)
    one_token = np.outer(w[0], w[0]).astype(np.float64)
    assert factorize(one_token, damping=0.0).damping > 0


def test_numbers_that_are_not_finite_are_refused() -> None:
    w, hessian = problem()
    hessian[3, 3] = np.inf
    with pytest.raises(InputRefused, match="not finite"):
        gptq_many([w], hessian, WeightGrid(4))


def test_inputs_are_left_alone() -> None:
    w, hessian = problem()
    kept = w.copy(), hessian.copy()
    gptq_many([w], hessian, WeightGrid(4, 32))
    np.testing.assert_array_equal(w, kept[0])
    np.testing.assert_array_equal(hessian, kept[1])


def test_mutants_are_seen() -> None:
    """Feedback with the wrong sign, transposed, or without its last block, is worse than the right one."""
    from dataclasses import replace

    w, hessian = problem()
    grid = WeightGrid(4)
    factor = factorize(hessian)
    scales, zeros = clip_scales(w, grid)
    cut = factor.feedback.copy()
    cut[-80:, :-80] = 0

    def quality(feedback: np.ndarray) -> float:
        codes, _ = solve(w, scales, zeros, grid, replace(factor, feedback=np.ascontiguousarray(feedback)))
        return output_error(w, QuantizedTensor(codes, scales, None, grid, 0.0), hessian)

    right = quality(factor.feedback)
    for wrong in (-factor.feedback, factor.feedback[::-1, ::-1].T, cut):
        assert quality(wrong) > 1.1 * right
