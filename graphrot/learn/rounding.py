"""Rounding errors that can be differentiated: relative squared errors of vectors on the grids that models are written on.

For given codes the error of ``x`` is ``|scale(x) * code - x|^2``, a smooth function of ``x``, and where a code changes
both sides agree: the gradient with the codes held fixed is that of the error itself, almost everywhere.
"""

from __future__ import annotations

from typing import Literal

import torch

from graphrot.quant.activations import EPSILON
from graphrot.quant.clip import clip_scales
from graphrot.quant.grid import WeightGrid

_LEAST = 1e-12
"""Least squared norm that an error is divided by."""


def token_errors(x: torch.Tensor, bits: Literal[4, 8]) -> torch.Tensor:
    """Relative squared error of each vector, rounded as activations are: symmetric, a scale for each vector.

    Args:
        x: ``[..., K]``.
        bits: of a code.

    Returns:
        ``[...]``.
    """
    scale = x.abs().amax(-1, keepdim=True).clamp_min(EPSILON) / (2 ** (bits - 1) - 1)
    codes = torch.round(x.detach() / scale.detach())
    return _relative(scale * codes - x, x)


def row_errors(x: torch.Tensor, bits: Literal[4, 8]) -> torch.Tensor:
    """Relative squared error of each vector, rounded as rows of the cache are: a scale and a minimum for each vector.

    Args:
        x: ``[..., D]``.
        bits: of a code.

    Returns:
        ``[...]``.
    """
    low = x.amin(-1, keepdim=True)
    scale = ((x.amax(-1, keepdim=True) - low) / (2**bits - 1)).clamp_min(EPSILON)
    codes = torch.round((x.detach() - low.detach()) / scale.detach())
    return _relative(scale * codes + low - x, x)


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


def _relative(error: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return error.square().sum(-1) / x.square().sum(-1).clamp_min(_LEAST)
