"""Clip search: shrink every group's range to where the squared rounding error is least."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphrot.quant.grid import QuantizedTensor, WeightGrid, encode, range_scales
from graphrot.quant.rtn import round_to

SHRINKS = tuple(1.0 - 0.04 * k for k in range(14))
"""Factors on the range that are tried: 1.00, 0.96, ... 0.48."""

_CHUNK = 1 << 17
"""Weights worked on at once, so that the passes over them stay in the second-level cache."""


def clip_scales(
    weights: np.ndarray,
    grid: WeightGrid,
    *,
    importance: np.ndarray | None = None,
    shrinks: Sequence[float] = SHRINKS,
) -> tuple[np.ndarray, np.ndarray | None]:
    """The scales, among shrunk ranges, with the least (weighted) squared error per group.

    Args:
        weights: ``[N, K]``, any float dtype.
        grid: the grid.
        importance: ``[K]`` non-negative weights of the input channels' squared errors, such as the
            diagonal of the inputs' second moment; None: all equal.
        shrinks: factors on the range, the preferred one first (ties keep the earlier).

    Returns:
        ``(scales, zeros)``: ``[N, G]`` float32, and ``[N, G]`` float32 whole numbers or None.
    """
    n, k = weights.shape
    scales = np.empty((n, grid.groups(k)), dtype=np.float32)
    zeros = None if grid.symmetric else np.empty_like(scales)
    step = max(1, _CHUNK // max(k, 1))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        part = np.asarray(weights[rows], dtype=np.float32)
        for channels, groups, size in grid.pieces(k):
            block = part[:, channels].reshape(part.shape[0], -1, size)
            weight = None if importance is None else importance[channels].astype(np.float32).reshape(-1, size)
            found, zero = _search(block, grid, weight, shrinks)
            scales[rows, groups] = found
            if zeros is not None and zero is not None:
                zeros[rows, groups] = zero
    return scales, zeros


def _search(
    block: np.ndarray, grid: WeightGrid, importance: np.ndarray | None, shrinks: Sequence[float]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Best scales of ``[rows, groups, size]`` weights; importance is ``[groups, size]``."""
    low, high = block.min(axis=2), block.max(axis=2)
    best_scale, best_zero = range_scales(low * np.float32(shrinks[0]), high * np.float32(shrinks[0]), grid)
    best = squared_error(block, best_scale, best_zero, grid, importance)
    for shrink in shrinks[1:]:
        scale, zero = range_scales(low * np.float32(shrink), high * np.float32(shrink), grid)
        error = squared_error(block, scale, zero, grid, importance)
        better = error < best
        best = np.where(better, error, best)
        best_scale = np.where(better, scale, best_scale)
        if zero is not None and best_zero is not None:
            best_zero = np.where(better, zero, best_zero)
    return best_scale, best_zero


def squared_error(
    block: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, grid: WeightGrid, importance: np.ndarray | None
) -> np.ndarray:
    """Squared error of rounding ``[rows, groups, size]`` weights, ``[rows, groups]`` float32."""
    scale = scale[:, :, None]
    zero = None if zero is None else zero[:, :, None]
    rounded = encode(block, scale, zero)
    np.clip(rounded, grid.low, grid.high, out=rounded)
    if zero is not None:
        rounded -= zero
    rounded *= scale
    rounded -= block
    np.square(rounded, out=rounded)
    total: np.ndarray = rounded.sum(axis=2) if importance is None else np.einsum("rgs,gs->rg", rounded, importance)
    return total


def quantize_clip(
    weights: np.ndarray, grid: WeightGrid, *, importance: np.ndarray | None = None, out: np.ndarray | None = None
) -> QuantizedTensor:
    """Quantize ``[N, K]`` weights by rounding on clip-searched grids.

    Args:
        weights: ``[N, K]``, any float dtype; read in chunks of rows.
        grid: the grid.
        importance: ``[K]`` weights of the squared errors, or None.
        out: where to put the codes.
    """
    scales, zeros = clip_scales(weights, grid, importance=importance)
    return round_to(weights, scales, zeros, grid, out=out)
