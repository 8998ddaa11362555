"""Integer grids for weights: codes, scales, zero points, and what they cost in bits.

All weights are ``[N, K]`` (output channels by input channels). A *group* is a run of consecutive
input channels of one output channel that share a scale; without groups the whole row does. The last
group may be short (576 = 4 * 128 + 64).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from graphrot.errors import UsageError

Bits = Literal[4, 8]

_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class WeightGrid:
    """How weights are rounded.

    Symmetric: ``w ~ scale * q`` with signed codes (-8..7 or -128..127); the scale is made from 7 or
    127. Asymmetric: ``w ~ scale * (q - zero)`` with unsigned codes (0..15 or 0..255).

    Args:
        bits: 4 or 8.
        group: input channels that share a scale, a power of two from 16; None: all of them.
        symmetric: without or with zero points.

    Raises:
        UsageError: other bits or group sizes.
    """

    bits: Bits
    group: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise UsageError(f"{self.bits} bits per weight are not supported", do="use 4 or 8")
        if self.group is not None and (self.group < 16 or self.group & (self.group - 1)):
            raise UsageError(
                f"A group of {self.group} weights is not supported",
                why="runtimes take powers of two from 16",
                do="use 32, 64, 128 or one scale per output channel",
            )

    @property
    def low(self) -> int:
        """Smallest code."""
        return -(1 << (self.bits - 1)) if self.symmetric else 0

    @property
    def high(self) -> int:
        """Largest code."""
        return (1 << (self.bits - 1)) - 1 if self.symmetric else (1 << self.bits) - 1

    @property
    def code_dtype(self) -> np.dtype[np.int8] | np.dtype[np.uint8]:
        return np.dtype(np.int8) if self.symmetric else np.dtype(np.uint8)

    def groups(self, in_features: int) -> int:
        """How many groups a row of ``in_features`` weights has."""
        return 1 if self.group is None else -(-in_features // self.group)

    def group_index(self, in_features: int) -> np.ndarray:
        """``[K]`` int64: the group of every input channel."""
        return np.arange(in_features) // (self.group or max(in_features, 1))

    def pieces(self, in_features: int) -> Iterator[tuple[slice, slice, int]]:
        """Cut a row into runs of equal groups: at most one of full groups and one short last group.

        Yields:
            ``(channels, groups, size)``: the channels ``w[:, channels]`` are ``len(groups)`` groups
            of ``size`` weights each.
        """
        size = in_features if self.group is None else min(self.group, in_features)
        full = in_features // size
        yield slice(0, full * size), slice(0, full), size
        if full * size < in_features:
            yield slice(full * size, in_features), slice(full, full + 1), in_features - full * size


Grids = WeightGrid | Mapping[str, WeightGrid]
"""One grid for all linears, or one for each by its node (first output)."""


def grid_of(grids: Grids, node: str) -> WeightGrid:
    """The grid of one linear."""
    return grids if isinstance(grids, WeightGrid) else grids[node]


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight on a grid.

    Args:
        codes: ``[N, K]`` int8 (symmetric) or uint8 (asymmetric), one code per element (it may be
            memory-mapped).
        scales: ``[N, G]`` float32, positive.
        zeros: ``[N, G]`` uint8 for asymmetric grids, else None.
        grid: the grid.
        error: relative error, a ratio of norms: ``|W - W'| / |W|``, or ``|X W.T - X W'.T| / |X W.T|``
            when calibration inputs ``X`` were used.
        error_without_rotation: the same measure of the source's weight, in the source's basis, after the same
            solver on the same grid; None: not asked for.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    grid: WeightGrid
    error: float
    error_without_rotation: float | None = None

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        expected = (n, self.grid.groups(k))
        shapes = [self.scales.shape] + ([] if self.zeros is None else [self.zeros.shape])
        if self.codes.dtype != self.grid.code_dtype or any(shape != expected for shape in shapes):
            raise ValueError(f"codes {self.codes.dtype}{self.codes.shape} and scales {shapes} do not fit {self.grid}")
        if (self.zeros is None) != self.grid.symmetric:
            raise ValueError(f"zero points do not fit {self.grid}")

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.codes.shape[0])

    @property
    def in_features(self) -> int:
        """K."""
        return int(self.codes.shape[1])

    def dequantize(self) -> np.ndarray:
        """The weights that the codes stand for, ``[N, K]`` float32."""
        return dequantize(self.codes, self.scales, self.zeros, self.grid)

    def bits_per_weight(self, *, scale_bits: int = 32) -> float:
        """Stored bits per weight: codes, scales of ``scale_bits`` and, if any, packed zero points."""
        zero_bits = 0 if self.zeros is None else self.grid.bits
        return self.grid.bits + (scale_bits + zero_bits) * self.scales.size / max(self.codes.size, 1)


def dequantize(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, grid: WeightGrid) -> np.ndarray:
    """``scale * (code - zero)``.

    Args:
        codes: ``[N, K]``.
        scales: ``[N, G]`` float32.
        zeros: ``[N, G]`` or None.
        grid: the grid of the codes.

    Returns:
        ``[N, K]`` float32.
    """
    n, k = codes.shape
    result = np.empty((n, k), dtype=np.float32)
    for channels, groups, size in grid.pieces(k):
        block = codes[:, channels].reshape(n, -1, size).astype(np.float32)
        if zeros is not None:
            block -= zeros[:, groups, None]
        block *= scales[:, groups, None]
        result[:, channels] = block.reshape(n, -1)
    return result


def encode(weights: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """Nearest codes, before clipping: ``round(w / scale) + zero``, ties to even, in float32.

    Args:
        weights: ``[..., size]`` float32; it is not changed.
        scales: broadcasts against ``weights``.
        zeros: broadcasts against ``weights``, or None.
    """
    codes: np.ndarray = np.divide(weights, scales, dtype=np.float32)
    np.rint(codes, out=codes)
    if zeros is not None:
        codes += zeros
    return codes


def range_scales(low: np.ndarray, high: np.ndarray, grid: WeightGrid) -> tuple[np.ndarray, np.ndarray | None]:
    """Scales (and zero points) that cover ``[low, high]``.

    A range of zero width (a row of zeros) gets scale 1, so that every scale is positive and normal.

    Args:
        low: smallest weight per group, any shape.
        high: largest weight per group.
        grid: the grid.

    Returns:
        ``(scales, zeros)``: float32 scales of that shape; float32 whole zero points, or None.
    """
    if grid.symmetric:
        scales = (np.maximum(-low, high) / grid.high).astype(np.float32)
        return np.where(scales < _TINY, np.float32(1), scales), None
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scales = ((high.astype(np.float64) - low) / grid.high).astype(np.float32)
    scales = np.where(scales < _TINY, np.float32(1), scales)
    return scales, np.clip(np.rint(-low / scales), 0, grid.high).astype(np.float32)
