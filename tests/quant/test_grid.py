"""Grids, rounding to nearest and the clip search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrot.errors import UsageError
from graphrot.quant.clip import clip_scales, quantize_clip
from graphrot.quant.grid import QuantizedTensor, WeightGrid, dequantize, range_scales
from graphrot.quant.rtn import quantize_rtn, round_to, rtn_scales
from graphrot.quant.tables import quantize_table

GRIDS = [WeightGrid(b, group, symmetric) for b in (4, 8) for group in (None, 32, 128) for symmetric in (True, False)]
SHAPES = [(7, 576), (3, 40), (300, 24), (1, 128)]


def weights(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(5, shape).astype(np.float32)


def naive(w: np.ndarray, grid: WeightGrid) -> np.ndarray:
    """Rounding to nearest in float64, one group at a time."""
    out = np.empty(w.shape)
    size = grid.group or w.shape[1]
    for n in range(w.shape[0]):
        for start in range(0, w.shape[1], size):
            part = w[n, start : start + size].astype(np.float64)
            if grid.symmetric:
                scale, zero = np.abs(part).max() / grid.high, 0.0
            else:
                low, high = min(part.min(), 0), max(part.max(), 0)
                scale = (high - low) / grid.high
                zero = np.rint(-low / scale)
            codes = np.clip(np.rint(part / scale) + zero, grid.low, grid.high)
            out[n, start : start + size] = (codes - zero) * scale
    return out


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounding_equals_a_naive_loop(grid: WeightGrid, shape: tuple[int, int]) -> None:
    w = weights(shape)
    tensor = quantize_rtn(w, grid)
    expected = naive(w, grid)
    # float32 scales may move a weight that lies on the middle between two codes to the other one.
    step = np.repeat(tensor.scales, grid.group or shape[1], axis=1)[:, : shape[1]]
    off = np.abs(tensor.dequantize() - expected)
    assert np.all(off <= 1.01 * step)
    assert np.mean(off > 1e-5) < 2e-3
    assert tensor.error == pytest.approx(np.linalg.norm(w - expected) / np.linalg.norm(w), rel=1e-2)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("quantize", [quantize_rtn, quantize_clip])
def test_weights_that_the_grid_can_hold_are_kept(grid: WeightGrid, quantize: Any) -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(-grid.high if grid.symmetric else 0, grid.high + 1, (9, 576)).astype(grid.code_dtype)
    for start in range(0, 576, grid.group or 576):
        codes[:, start] = grid.high
        codes[:, start + 1] = -grid.high if grid.symmetric else 0
    scales = rng.uniform(0.5, 2, (9, grid.groups(576))).astype(np.float32)
    zeros = None if grid.symmetric else rng.integers(1, grid.high, scales.shape).astype(np.uint8)
    w = dequantize(codes, scales, zeros, grid)
    tensor = quantize(w, grid)
    np.testing.assert_array_equal(tensor.codes, codes)
    np.testing.assert_allclose(tensor.dequantize(), w, rtol=3e-7, atol=3e-7 * np.abs(w).max())
    assert tensor.error < 1e-6


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_short_last_group_has_its_own_scale(grid: WeightGrid) -> None:
    w = weights((4, 576))
    w[:, 512:] *= 1e-3
    tensor = quantize_rtn(w, grid)
    tail = np.linalg.norm((tensor.dequantize() - w)[:, 512:]) / np.linalg.norm(w[:, 512:])
    if grid.group is None:
        assert tail > 0.9 if grid.bits == 4 else tail > 0.05
    else:
        assert tail < 0.2
        assert tensor.scales.shape == (4, {32: 18, 128: 5}[grid.group])
        np.testing.assert_allclose(tensor.scales[:, -1], rtn_scales(w[:, 512:], grid)[0][:, -1])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("quantize", [quantize_rtn, quantize_clip])
def test_rows_of_zeros_and_tiny_rows_stay_finite(grid: WeightGrid, quantize: Any) -> None:
    w = weights((3, 64))
    w[0] = 0
    w[1] = 1e-42
    tensor = quantize(w, grid)
    assert np.all(np.isfinite(tensor.scales)) and np.all(tensor.scales >= np.finfo(np.float32).tiny)
    assert np.all(tensor.dequantize()[:2] == 0)
    assert quantize(np.zeros((2, 64), np.float32), grid).error == 0


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_clip_search_never_loses_to_rounding_and_wins_on_heavy_tails(grid: WeightGrid) -> None:
    w = weights((50, 576))
    rounded, clipped = quantize_rtn(w, grid), quantize_clip(w, grid)
    per_row = [np.linalg.norm(t.dequantize() - w, axis=1) for t in (rounded, clipped)]
    assert np.all(per_row[1] <= per_row[0] * (1 + 1e-6))
    if grid.bits == 4:
        assert clipped.error < 0.99 * rounded.error


def test_importance_moves_the_error_to_where_it_does_not_matter() -> None:
    w = weights((20, 64))
    w[:, 32:] *= 8
    importance = np.repeat([1.0, 0.0], 32)
    grid = WeightGrid(4)
    plain = quantize_clip(w, grid).dequantize()
    aimed = quantize_clip(w, grid, importance=importance).dequantize()
    assert np.linalg.norm((aimed - w)[:, :32]) < 0.8 * np.linalg.norm((plain - w)[:, :32])


@given(scale=st.floats(1e-6, 1e6), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_scaling_the_weights_scales_the_answer(scale: float, seed: int) -> None:
    w = weights((3, 40), seed)
    power = np.float32(2.0 ** round(np.log2(scale)))
    for grid in (WeightGrid(4, 32), WeightGrid(8, None, False)):
        one, other = quantize_clip(w, grid), quantize_clip(w * power, grid)
        np.testing.assert_array_equal(one.codes, other.codes)
        np.testing.assert_array_equal(one.scales * power, other.scales)


@given(seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_rows_do_not_see_each_other(seed: int) -> None:
    w = weights((600, 32), seed)
    order = np.random.default_rng(seed).permutation(600)
    for grid in (WeightGrid(4, 16), WeightGrid(4, None, False)):
        np.testing.assert_array_equal(quantize_clip(w[order], grid).codes, quantize_clip(w, grid).codes[order])


def test_negating_symmetric_weights_negates_the_codes() -> None:
    w = weights((6, 96))
    tensor, negated = (quantize_rtn(x, WeightGrid(4, 32)) for x in (w, -w))
    np.testing.assert_array_equal(tensor.codes, -negated.codes)


def test_asymmetric_grids_hold_one_sided_weights_better() -> None:
    w = np.abs(weights((8, 128)))
    assert quantize_rtn(w, WeightGrid(4, None, False)).error < 0.6 * quantize_rtn(w, WeightGrid(4)).error


def test_bits_per_weight_counts_codes_scales_and_zero_points() -> None:
    w = weights((10, 576))
    assert quantize_rtn(w, WeightGrid(4)).bits_per_weight() == pytest.approx(4 + 32 / 576)
    assert quantize_rtn(w, WeightGrid(4, 128)).bits_per_weight(scale_bits=16) == pytest.approx(4 + 16 * 5 / 576)
    assert quantize_rtn(w, WeightGrid(4, 32, False)).bits_per_weight() == pytest.approx(4 + 36 / 32)
    assert quantize_rtn(w, WeightGrid(8, 64, False)).bits_per_weight() == pytest.approx(8 + 40 / 64)


def test_range_scales_cover_the_range() -> None:
    low, high = np.array([-3.0, 1.0, -2.0], np.float32), np.array([1.0, 4.0, -1.0], np.float32)
    scales, zeros = range_scales(low, high, WeightGrid(4, None, False))
    assert zeros is not None
    np.testing.assert_allclose((0 - zeros) * scales, np.minimum(low, 0), atol=scales.max() / 2)
    np.testing.assert_allclose((15 - zeros) * scales, np.maximum(high, 0), atol=scales.max() / 2)


def test_codes_go_where_they_are_told() -> None:
    w = weights((5, 32))
    grid = WeightGrid(8)
    out = np.empty(w.shape, np.int8)
    tensor = quantize_table(w, grid, out=out)
    assert tensor.codes is out
    np.testing.assert_array_equal(out, quantize_rtn(w, grid).codes)


def test_a_table_may_be_half_precision_and_transposed() -> None:
    w = weights((40, 300)).astype(np.float16)
    for solver in ("rtn", "clip"):
        tensor = quantize_table(w.T, WeightGrid(4, 32), solver=solver)
        plain = quantize_table(np.ascontiguousarray(w.T, dtype=np.float32), WeightGrid(4, 32), solver=solver)
        np.testing.assert_array_equal(tensor.codes, plain.codes)


@pytest.mark.parametrize(("bits", "group"), [(3, None), (4, 48), (4, 8)])
def test_grids_that_no_runtime_takes_are_refused(bits: int, group: int | None) -> None:
    with pytest.raises(UsageError, match="not supported"):
        WeightGrid(bits, group)


def test_parts_that_do_not_fit_are_refused() -> None:
    tensor = quantize_rtn(weights((5, 64)), WeightGrid(4, 32))
    with pytest.raises(ValueError, match="do not fit"):
        QuantizedTensor(tensor.codes, tensor.scales[:, :1], None, tensor.grid, 0.0)
    with pytest.raises(ValueError, match="do not fit"):
        QuantizedTensor(tensor.codes.astype(np.uint8), tensor.scales, None, tensor.grid, 0.0)
    with pytest.raises(ValueError, match="zero points"):
        QuantizedTensor(tensor.codes, tensor.scales, tensor.scales.astype(np.uint8), tensor.grid, 0.0)


def test_a_wrong_scale_is_seen() -> None:
    """The mutant: scales of one group too far right."""
    w = weights((4, 96)) * np.repeat([1.0, 10.0, 100.0], 32).astype(np.float32)
    grid = WeightGrid(4, 32)
    scales, zeros = clip_scales(w, grid)
    assert round_to(w, np.roll(scales, 1, axis=1), zeros, grid).error > 3 * round_to(w, scales, zeros, grid).error
