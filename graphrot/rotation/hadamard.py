"""Hadamard transforms ``x @ (F (x) S)`` of any size, in float64 and O(n log n).

A size is split into ``n = K * 2^m``: F is a factor of order K with ``F @ F.T == K * I`` and S is
Sylvester's matrix of order 2^m. F is a Hadamard matrix of the smallest order that can be constructed;
where there is none, Hartley's matrix of the odd part takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphrot.errors import UsageError
from graphrot.rotation.construct import construct

Float64Array = NDArray[np.float64]

MAX_FACTOR = 1024
"""Largest order of a dense factor: it costs K multiplications per element and K*K numbers in the file."""

_CHUNK = 1 << 19  # elements transformed at once: 4 MiB of float64
_GEMM_LEVELS = 5  # the inner levels of Sylvester's matrix are one product with S_32


@dataclass(frozen=True)
class Decomposition:
    """``size = order * 2**levels`` and how the factor of that order is constructed."""

    size: int
    order: int
    levels: int
    construction: str
    """``sylvester`` (order 1), ``paley1(q)``, ``paley2(q)``, ``williamson(m)`` or ``hartley(k)``."""

    @property
    def is_hadamard(self) -> bool:
        """All entries are +-1 before scaling (False for Hartley's matrix)."""
        return not self.construction.startswith("hartley")


@lru_cache(maxsize=256)
def hadamard_decomposition(size: int) -> Decomposition | None:
    """The split with the smallest constructible Hadamard factor, or None where there is none."""
    if size < 1:
        raise UsageError(f"A transform needs a positive size, not {size}")
    power = (size & -size).bit_length() - 1
    odd = size >> power
    if odd == 1:
        return Decomposition(size, 1, power, "sylvester")
    for t in range(2, power + 1):
        order = odd << t
        if order > MAX_FACTOR:
            break
        built = _hadamard_factor(order)
        if built is not None:
            return Decomposition(size, order, power - t, built[0])
    return None


def decomposition(size: int) -> Decomposition:
    """:func:`hadamard_decomposition`, or Hartley's matrix of the odd part in its place.

    Raises:
        UsageError: the odd part is larger than :data:`MAX_FACTOR`.
    """
    split = hadamard_decomposition(size)
    if split is not None:
        return split
    power = (size & -size).bit_length() - 1
    odd = size >> power
    if odd > MAX_FACTOR:
        raise UsageError(
            f"There is no fast orthogonal transform of size {size}",
            why=f"its odd part {odd} is larger than {MAX_FACTOR}",
            do="choose block-hadamard or random rotations for this size",
        )
    return Decomposition(size, odd, power, f"hartley({odd})")


@lru_cache(maxsize=64)
def _hadamard_factor(order: int) -> tuple[str, NDArray[np.int8]] | None:
    built = construct(order)
    if built is not None:
        built[1].flags.writeable = False
    return built


@lru_cache(maxsize=64)
def _factor(order: int, construction: str) -> NDArray[np.int8] | Float64Array:
    matrix: NDArray[np.int8] | Float64Array
    if construction == "sylvester":
        matrix = np.ones((1, 1), np.int8)
    elif construction.startswith("hartley"):
        angle = 2 * np.pi / order * (np.outer(np.arange(order), np.arange(order)) % order)
        matrix = np.cos(angle) + np.sin(angle)
    else:
        built = _hadamard_factor(order)
        if built is None or built[0] != construction:
            raise UsageError(f"There is no construction {construction!r} of order {order}")
        matrix = built[1]
    matrix.flags.writeable = False
    return matrix


def factor_matrix(split: Decomposition) -> NDArray[np.int8] | Float64Array:
    """The factor F with ``F @ F.T == K * I``: ``[K, K]``, int8 of +-1, or float64 for Hartley. Read-only."""
    return _factor(split.order, split.construction)


@lru_cache(maxsize=32)
def sylvester(levels: int) -> NDArray[np.int8]:
    """Sylvester's matrix ``[2**levels, 2**levels] int8``: entry (i, j) is (-1)^popcount(i & j). Read-only."""
    matrix = np.ones((1, 1), np.int8)
    for _ in range(levels):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix.flags.writeable = False
    return matrix


def _sylvester_in_place(rows: Float64Array, levels: int) -> Float64Array:
    """``rows @ S`` for ``[r, 2**levels]`` float64; may overwrite ``rows``."""
    inner = min(levels, _GEMM_LEVELS)
    if inner:
        shape = rows.shape
        rows = (rows.reshape(-1, 1 << inner) @ sylvester(inner).astype(np.float64)).reshape(shape)
    for level in range(inner, levels):
        pairs = rows.reshape(-1, 2, 1 << level)
        low, high = pairs[:, 0], pairs[:, 1]
        difference = low - high
        low += high
        high[...] = difference
    return rows


def _transform_rows(rows: Float64Array, split: Decomposition, *, transpose: bool) -> Float64Array:
    """Unscaled ``rows @ (F (x) S)`` (or its transpose) for ``[r, size]`` float64; may overwrite ``rows``."""
    count, width = len(rows), 1 << split.levels
    rows = _sylvester_in_place(rows.reshape(-1, width), split.levels).reshape(count, split.size)
    if split.order == 1:
        return rows
    factor = factor_matrix(split).astype(np.float64)
    mixed = rows.reshape(count, split.order, width).swapaxes(1, 2) @ (factor.T if transpose else factor)
    return np.ascontiguousarray(mixed.swapaxes(1, 2)).reshape(count, split.size)


def transform(
    array: ArrayLike,
    split: Decomposition,
    *,
    axis: int = -1,
    scale: float | None = None,
    transpose: bool = False,
    signs: Float64Array | None = None,
) -> Float64Array:
    """Every vector v along ``axis`` becomes ``scale * (v * signs) @ (F (x) S)``.

    The default scale 1/sqrt(size) makes the transform orthogonal, and ``transpose=True`` its inverse,
    ``scale * (v @ (F (x) S).T) * signs``. Works in chunks of a few MiB; the n x n matrix is never formed,
    and no other copy of the array is made.

    Args:
        array: floats of any dtype; ``axis`` holds ``blocks * split.size`` elements, transformed block by block.
        split: the decomposition of the block's size.
        axis: where the vectors lie.
        scale: factor on the result.
        transpose: use the transposed matrix.
        signs: one factor per element of the axis; None: ones.

    Returns:
        A new float64 array of the same shape (contiguous with ``axis`` moved last).

    Raises:
        UsageError: the axis is not a multiple of the size.
    """
    source = np.moveaxis(np.asarray(array), axis, -1)
    width = source.shape[-1]
    if width % split.size:
        raise UsageError(
            f"A transform of size {split.size} cannot act on {width} channels",
            where=f"axis {axis} of shape {np.shape(array)}",
        )
    factor = split.size**-0.5 if scale is None else scale
    result = np.empty(source.shape, np.float64)
    rows_in, rows_out = source.reshape(-1, width), result.reshape(-1, width)
    step = max(1, _CHUNK // max(width, 1))
    for start in range(0, len(rows_out), step):
        chunk = rows_in[start : start + step].astype(np.float64, order="C")
        chunk *= factor if signs is None or transpose else factor * signs
        done = _transform_rows(chunk.reshape(-1, split.size), split, transpose=transpose).reshape(-1, width)
        rows_out[start : start + step] = done * signs if signs is not None and transpose else done
    return np.moveaxis(result, -1, axis)


def dense(split: Decomposition) -> Float64Array:
    """The orthogonal matrix ``(F (x) S) / sqrt(size)`` written out, ``[size, size] float64``."""
    factor = factor_matrix(split).astype(np.float64) * split.size**-0.5
    return np.asarray(np.kron(factor, sylvester(split.levels).astype(np.float64)), np.float64)
