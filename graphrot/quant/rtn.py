"""Rounding to nearest: every group's grid just covers its weights."""

from __future__ import annotations

import numpy as np

from graphrot.quant.grid import QuantizedTensor, WeightGrid, dequantize, encode, range_scales

ROWS = 256
"""Output channels worked on at once; bounds the scratch memory, and the table may stay memory-mapped."""


def rtn_scales(weights: np.ndarray, grid: WeightGrid) -> tuple[np.ndarray, np.ndarray | None]:
    """Scales that cover every weight.

    Args:
        weights: ``[N, K]``, any float dtype.
        grid: the grid.

    Returns:
        ``(scales, zeros)``: ``[N, G]`` float32, and ``[N, G]`` float32 whole numbers or None.
    """
    n, k = weights.shape
    low = np.empty((n, grid.groups(k)), dtype=np.float32)
    high = np.empty_like(low)
    for start in range(0, n, ROWS):
        rows = slice(start, start + ROWS)
        part = np.asarray(weights[rows], dtype=np.float32)
        for channels, groups, size in grid.pieces(k):
            block = part[:, channels].reshape(part.shape[0], -1, size)
            low[rows, groups] = block.min(axis=2)
            high[rows, groups] = block.max(axis=2)
    return range_scales(low, high, grid)


def round_to(
    weights: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    grid: WeightGrid,
    *,
    out: np.ndarray | None = None,
) -> QuantizedTensor:
    """Round weights to the nearest code of given grids.

    Args:
        weights: ``[N, K]``, any float dtype.
        scales: ``[N, G]`` float32.
        zeros: ``[N, G]`` whole numbers, or None.
        grid: the grid.
        out: where to put the codes (``[N, K]`` of the grid's dtype, such as a memory-mapped array).

    Returns:
        The codes, with the relative Frobenius error.
    """
    n, k = weights.shape
    codes = np.empty((n, k), dtype=grid.code_dtype) if out is None else out
    stored = None if zeros is None else zeros.astype(np.uint8)
    difference = 0.0
    total = 0.0
    for start in range(0, n, ROWS):
        rows = slice(start, start + ROWS)
        part = np.asarray(weights[rows], dtype=np.float32)
        for channels, groups, size in grid.pieces(k):
            block = part[:, channels].reshape(part.shape[0], -1, size)
            zero = None if zeros is None else zeros[rows, groups, None]
            rounded = encode(block, scales[rows, groups, None], zero)
            codes[rows, channels] = np.clip(rounded, grid.low, grid.high, out=rounded).reshape(part.shape[0], -1)
        lost = part - dequantize(codes[rows], scales[rows], None if stored is None else stored[rows], grid)
        difference += float(np.vdot(lost, lost))
        total += float(np.vdot(part, part))
    error = float(np.sqrt(difference / total)) if total > 0 else 0.0
    return QuantizedTensor(codes, scales, stored, grid, error)


def quantize_rtn(weights: np.ndarray, grid: WeightGrid, *, out: np.ndarray | None = None) -> QuantizedTensor:
    """Quantize ``[N, K]`` weights by rounding to nearest.

    Args:
        weights: ``[N, K]``, any float dtype; read in chunks of rows.
        grid: the grid.
        out: where to put the codes.
    """
    scales, zeros = rtn_scales(weights, grid)
    return round_to(weights, scales, zeros, grid, out=out)
