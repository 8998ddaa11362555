"""GPTQ: rounding that lets later input channels make up for the error of earlier ones.

The method of Frantar et al., arXiv 2210.17323, in the form of LDLQ (Chee et al., arXiv 2307.13304, who
show that the two are the same): with ``H = X.T X = (I + U) D (I + U).T``, ``U`` strictly upper
triangular, input channel ``k`` is rounded after the errors ``E = W - W'`` of the channels before it were
added,

    W'[:, k] = round(W[:, k] + E[:, :k] @ U[:k, k]),

and the squared output error is the sum over ``k`` of ``D[k]`` times the squared last rounding error.
Nothing is inverted, and the rows of ``W`` (output channels) do not touch each other, so that any
number of them can be solved together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from graphrot.errors import InputRefused
from graphrot.quant.clip import clip_scales
from graphrot.quant.grid import QuantizedTensor, WeightGrid, dequantize, encode
from graphrot.quant.rtn import round_to

DAMPING = 0.01
"""Added to the diagonal of ``H``, as a fraction of its mean."""

BLOCK = 128
"""Input channels whose corrections are applied one by one; those of earlier blocks come as one matmul."""

ACT_ORDER_SPREAD = 25.0
"""Channels with large inputs are rounded first where the largest mean square is over this many medians.

Such an order helps where few channels carry the energy, and costs accuracy where a rotation has spread it
(SmolLM2-135M, 4 bits per channel, 8-bit activations: perplexity 33 instead of 41 before rotation, 21.2
instead of 20.0 after). Inputs rotated over their whole width lie below 8 there, by heads below 21; unrotated
ones lie at 35 to 5000 in the median.
"""

ROWS = 2048
"""Output channels solved together; bounds the scratch memory."""


@dataclass(frozen=True)
class Factor:
    """``H[order][:, order] = (I + U) D (I + U).T``.

    Args:
        order: ``[K]`` input channels in the order they are rounded.
        feedback: ``[K, K]`` float32, ``U.T`` (strictly lower triangular, rows contiguous).
        weight: ``[K]`` float64, the diagonal of ``D``.
        damping: the fraction of the mean diagonal that was added in the end.
        added: what was added to each element of the diagonal.
    """

    order: np.ndarray
    feedback: np.ndarray
    weight: np.ndarray
    damping: float
    added: float


def factorize(hessian: np.ndarray, *, damping: float = DAMPING, act_order: bool | None = None) -> Factor:
    """Factor the second moment of a layer's inputs.

    Input channels that were always zero get a 1 on the diagonal: they are rounded to nearest and
    correct nothing. Damping grows tenfold until the matrix is positive definite.

    Args:
        hessian: ``[K, K]`` symmetric float64 ``X.T X``, any scale; it is not changed.
        damping: fraction of the mean (live) diagonal that is added to the diagonal.
        act_order: round channels with large inputs first; None: by :data:`ACT_ORDER_SPREAD`.

    Raises:
        InputRefused: the matrix has numbers that are not finite, or no damping makes it definite.
    """
    if not np.isfinite(hessian).all():
        raise InputRefused(
            "The calibration inputs of a layer are not finite",
            why="an activation overflowed, or the text drove the model out of range",
            do="check the source model in float32, or give another calibration text",
        )
    diagonal = np.diagonal(hessian).copy()
    live = diagonal > 0
    mean = float(diagonal[live].mean()) if live.any() else 1.0
    if act_order is None:
        act_order = bool(live.any() and diagonal.max() > ACT_ORDER_SPREAD * np.median(diagonal[live]))
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(diagonal.size)
    # H = R R.T with R upper triangular is the Cholesky factor of H with rows and columns reversed.
    work = hessian[np.ix_(order[::-1], order[::-1])]
    base = np.where(live, diagonal, mean)[order[::-1]]
    while damping < 1e6:
        np.fill_diagonal(work, base + damping * mean)
        try:
            lower = np.linalg.cholesky(work)
        except np.linalg.LinAlgError:
            damping = max(damping, 1e-6) * 10
            continue
        upper = lower[::-1, ::-1]
        pivots = np.diagonal(upper)
        feedback = np.ascontiguousarray((upper / pivots).T, dtype=np.float32)
        np.fill_diagonal(feedback, 0)
        return Factor(order, feedback, pivots**2, damping, damping * mean)
    raise InputRefused("The second moment of a layer's inputs is not positive definite under any damping")


def solve(
    weights: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, grid: WeightGrid, factor: Factor
) -> tuple[np.ndarray, np.ndarray]:
    """Round weights on given grids, each input channel after the errors of those before it.

    Args:
        weights: ``[N, K]`` float32.
        scales: ``[N, G]`` float32.
        zeros: ``[N, G]`` whole numbers, or None.
        grid: the grid; groups are runs of channels in the *original* order.
        factor: of the damped second moment.

    Returns:
        ``(codes, errors)``: ``[N, K]`` codes and ``[N]`` float64 squared output errors, damping
        included.
    """
    n, k = weights.shape
    order = factor.order
    original = np.ascontiguousarray(weights.T[order], dtype=np.float32)
    residual = np.empty_like(original)
    codes = np.empty((k, n), dtype=grid.code_dtype)
    group = grid.group_index(k)[order]
    scale_rows = np.ascontiguousarray(scales.T)
    zero_rows = None if zeros is None else np.ascontiguousarray(zeros.T, dtype=np.float32)
    errors = np.zeros(n, dtype=np.float64)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        target = original[start:stop].copy()
        if start:
            target += factor.feedback[start:stop, :start] @ residual[:start]
        for j in range(start, stop):
            wanted = target[j - start]
            if j > start:
                wanted += factor.feedback[j, start:j] @ residual[start:j]
            scale = scale_rows[group[j]]
            zero = None if zero_rows is None else zero_rows[group[j]]
            code = encode(wanted, scale, zero)
            np.clip(code, grid.low, grid.high, out=code)
            codes[j] = code
            if zero is not None:
                code -= zero
            code *= scale
            np.subtract(original[j], code, out=residual[j])
            code -= wanted
            np.square(code, out=code)
            errors += factor.weight[j] * code
    result = np.empty((n, k), dtype=grid.code_dtype)
    result[:, order] = codes.T
    return result, errors


def row_errors(difference: np.ndarray, factor: Factor) -> np.ndarray:
    """Squared output errors of weight errors, damping included: ``diag(E H E.T)`` without cancellation.

    Args:
        difference: ``[N, K]`` float32, ``W - W'``.
        factor: of the damped second moment.

    Returns:
        ``[N]`` float64.
    """
    ordered = difference[:, factor.order]
    corrected = ordered + ordered @ factor.feedback.T
    np.square(corrected, out=corrected)
    errors: np.ndarray = corrected @ factor.weight
    return errors


def gptq_many(
    weights: Sequence[np.ndarray],
    hessian: np.ndarray,
    grid: WeightGrid | Sequence[WeightGrid],
    *,
    damping: float = DAMPING,
    act_order: bool | None = None,
) -> list[QuantizedTensor]:
    """Quantize weights that share their inputs.

    Grids come from the clip search. An output channel for which rounding to nearest has the smaller
    output error keeps that instead, so that no tensor is worse than its clip-searched rounding.

    Args:
        weights: ``[N_i, K]`` float32 each.
        hessian: ``[K, K]`` float64 second moment of the inputs, ``X.T X``; it is not changed.
        grid: the grid of all, or one for each weight; groups are fixed before channels are reordered.
        damping: fraction of the mean diagonal that is added to the diagonal.
        act_order: round channels with large inputs first; None: by :data:`ACT_ORDER_SPREAD`.

    Returns:
        One tensor per weight; ``error`` is ``sqrt(tr(E H E.T) / tr(W H W.T))``.

    Raises:
        InputRefused: the second moment is not finite.
    """
    factor = factorize(hessian, damping=damping, act_order=act_order)
    grids = [grid] * len(weights) if isinstance(grid, WeightGrid) else list(grid)
    members: dict[WeightGrid, list[int]] = {}
    for position, own in enumerate(grids):
        members.setdefault(own, []).append(position)
    solved: dict[int, QuantizedTensor] = {}
    for own, positions in members.items():
        tensors = _solve_alike([weights[position] for position in positions], own, factor)
        solved.update(zip(positions, tensors, strict=True))
    return [solved[position] for position in range(len(weights))]


def _solve_alike(weights: Sequence[np.ndarray], grid: WeightGrid, factor: Factor) -> list[QuantizedTensor]:
    stacked = np.concatenate([np.asarray(weight, dtype=np.float32) for weight in weights])
    parts = [_solve_rows(stacked[start : start + ROWS], grid, factor) for start in range(0, stacked.shape[0], ROWS)]
    solved = _Rows(*(np.concatenate(field) for field in zip(*parts, strict=True)))
    ends = np.cumsum([weight.shape[0] for weight in weights])
    return [solved.tensor(slice(end - weight.shape[0], end), grid) for weight, end in zip(weights, ends, strict=True)]


class _Rows(NamedTuple):
    """Solved output channels; ``zeros`` has no columns for symmetric grids."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    lost: np.ndarray
    total: np.ndarray

    def tensor(self, rows: slice, grid: WeightGrid) -> QuantizedTensor:
        total = float(self.total[rows].sum())
        error = float(np.sqrt(max(float(self.lost[rows].sum()), 0.0) / total)) if total > 0 else 0.0
        zeros = None if grid.symmetric else self.zeros[rows]
        return QuantizedTensor(self.codes[rows], self.scales[rows], zeros, grid, error)


def _solve_rows(weight: np.ndarray, grid: WeightGrid, factor: Factor) -> _Rows:
    """The better of :func:`solve` and of rounding to nearest, row by row."""
    scales, zeros = clip_scales(weight, grid)
    nearest = round_to(weight, scales, zeros, grid)
    codes, errors = solve(weight, scales, zeros, grid, factor)
    plain = row_errors(weight - nearest.dequantize(), factor)
    codes[plain < errors] = nearest.codes[plain < errors]
    stored = np.empty((weight.shape[0], 0), dtype=np.uint8) if nearest.zeros is None else nearest.zeros
    difference = weight - dequantize(codes, scales, nearest.zeros, grid)
    lost = np.minimum(plain, errors) - factor.added * np.einsum("nk,nk->n", difference, difference)
    total = row_errors(weight, factor) - factor.added * np.einsum("nk,nk->n", weight, weight)
    return _Rows(codes, scales, stored, lost, total)
