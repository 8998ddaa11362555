"""What rounding does to vectors, in forms that can be learned from: relative squared errors on the models' own grids.

A scale follows the largest numbers of a vector, and with ``s`` between two codes the expected squared error of a
number is ``s^2 / 12``. This is what is learned from for activations and caches: the true error of a vector jumps about
that figure with every code that changes, and its gradient is mostly noise. For the same reason the largest magnitude
is taken as the mean of the few largest squares: a gradient that only knows the one largest number of each vector goes
from one number to the next. Weights are fewer and their scales come from a search: there it is the true error with the
codes held fixed. Where a code changes both sides agree, so that its gradient is right almost everywhere.
"""

from __future__ import annotations

from typing import Literal

import torch

from graphrot.quant.clip import clip_scales
from graphrot.quant.grid import WeightGrid

LARGEST = 4
"""Magnitudes that stand for the largest one."""

_LEAST = 1e-12
"""Least squared norm that an error is divided by."""


def token_errors(x: torch.Tensor, bits: Literal[4, 8]) -> torch.Tensor:
    """Expected relative squared error of each vector, rounded as activations are: symmetric, a scale for each vector.

    Args:
        x: ``[..., K]``.
        bits: of a code.

    Returns:
        ``[...]``.
    """
    count = min(LARGEST, x.shape[-1])
    peak = x.abs().topk(count, -1).values.square().mean(-1)
    return _expected(peak / (2 ** (bits - 1) - 1) ** 2, x)


def row_errors(x: torch.Tensor, bits: Literal[4, 8]) -> torch.Tensor:
    """Expected relative squared error of each vector, rounded as the cache's rows are: with a scale and a minimum each.

    Args:
        x: ``[..., D]``.
        bits: of a code.

    Returns:
        ``[...]``.
    """
    spread = x.amax(-1) - x.amin(-1)
    return _expected(spread.square() / (2**bits - 1) ** 2, x)


def weight_errors(weight: torch.Tensor, grid: WeightGrid) -> torch.Tensor:
    """Relative squared error of each output channel, rounded to nearest on scales from the clip search.

    Args:
        weight: ``[N, K]``.
        grid: its grid.

    Returns:
        ``[N]``.
    """
    n, k = weight.shape
    found, zeros = clip_scales(weight.detach().numpy(), grid)
    lost = weight.new_zeros(n)
    for channels, groups, size in grid.pieces(k):
        block = weight[:, channels].reshape(n, -1, size)
        fixed = torch.from_numpy(found[:, groups])[:, :, None].to(weight)
        zero = 0.0 if zeros is None else torch.from_numpy(zeros[:, groups])[:, :, None].to(weight)
        codes = torch.clamp(torch.round(block.detach() / fixed) + zero, grid.low, grid.high) - zero
        # The search answers a fraction of the range, which goes on following the range.
        width = block.abs().amax(-1, keepdim=True)
        if zeros is not None:
            width = block.amax(-1, keepdim=True).clamp_min(0) - block.amin(-1, keepdim=True).clamp_max(0)
        scale = width * (fixed / width.detach().clamp_min(_LEAST))
        lost = lost + (scale * codes - block).square().sum((-1, -2))
    return lost / weight.square().sum(-1).clamp_min(_LEAST)


def _expected(step: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``s^2 / 12`` over the mean square; ``step`` is ``s^2 [...]``."""
    return step / 12 / x.square().mean(-1).clamp_min(_LEAST)
