"""Straight-through fake quantization: the numbers of the written model forwards, the identity backwards.

Rounding has no useful derivative. Backwards every rounding is taken for the identity (Bengio et al.,
arXiv:1308.3432), which leaves out how the scale moves; ``scale_gradient`` adds that: the rounding error of a group is
its scale times numbers below one half, so the scale of a group takes the gradient ``sum(g * error) / scale`` (LSQ,
arXiv:1902.08153) and hands it to the one number that it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from graphrot.analysis.types import AttentionSites, LinearRef
from graphrot.errors import UsageError
from graphrot.quant.activations import EPSILON
from graphrot.quant.clip import clip_scales
from graphrot.quant.grid import WeightGrid

_TINY = float(np.finfo(np.float32).tiny)
_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Rounding:
    """What the written model rounds.

    Args:
        linears: linears whose inputs and weights are rounded, with the names of the graph at hand
            (:func:`graphrot.passes.refs.current_linears`).
        activation_bits: of the linears' inputs, one symmetric scale per token; None: floats.
        weight_grid: of the linears' weights; None: floats.
        weight_solver: rounding to nearest, or on grids from the clip search (much slower).
        sites: attention whose new keys and values are stored in rows.
        kv_bits: of the rows; None: floats.
        scale_gradient: let the gradient know what the scales of activations and weights are made of.
    """

    linears: Sequence[LinearRef] = ()
    activation_bits: Literal[4, 8] | None = None
    weight_grid: WeightGrid | None = None
    weight_solver: Literal["rtn", "clip"] = "rtn"
    sites: AttentionSites = field(default_factory=AttentionSites)
    kv_bits: Literal[4, 8] | None = None
    scale_gradient: bool = False

    def __post_init__(self) -> None:
        if self.kv_bits is not None and not self.sites.sites:
            raise UsageError("Rows of a cache cannot be rounded without attention sites", do="give sites")

    @property
    def rounds_anything(self) -> bool:
        """Whether any number is rounded."""
        return self.kv_bits is not None or (
            bool(self.linears) and (self.activation_bits is not None or self.weight_grid is not None)
        )


def round_tokens(x: torch.Tensor, bits: Literal[4, 8], *, scale_gradient: bool = False) -> torch.Tensor:
    """:func:`graphrot.quant.activations.fake_quantize_tokens`, straight through.

    Args:
        x: ``[..., K]`` float32 or float64; the arithmetic is float32.
        bits: 4 or 8.
        scale_gradient: see :class:`Rounding`.
    """
    return _apply_tokens(x, bits, scale_gradient)


def round_weight(
    weight: torch.Tensor,
    grid: WeightGrid,
    layout: Literal["KN", "NK"],
    *,
    solver: Literal["rtn", "clip"] = "rtn",
    scale_gradient: bool = False,
) -> torch.Tensor:
    """:func:`graphrot.quant.rtn.quantize_rtn` or :func:`~graphrot.quant.clip.quantize_clip`, straight through.

    Args:
        weight: ``[K, N]`` or ``[N, K]`` float32 or float64; the arithmetic is float32.
        grid: the grid.
        layout: of the weight; groups run along K.
        solver: how the scales are found.
        scale_gradient: see :class:`Rounding`. For the clip search, the factor that it found stays.

    Returns:
        The weights that the codes stand for, of the same shape and type.
    """
    return _apply_weight(weight, grid, layout == "KN", solver, scale_gradient)


def round_rows(x: torch.Tensor, bits: Literal[4, 8], head_size: int) -> torch.Tensor:
    """What the rows of a cache stand for (:func:`graphrot.ops.attention_reference.store_rows`), straight through.

    Args:
        x: ``[..., heads * D]`` or ``[..., D]``; every ``D`` numbers are a row.
        bits: 4 or 8.
        head_size: D.
    """
    return _apply_rows(x, bits, head_size)


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bits: int, scale_gradient: bool) -> torch.Tensor:
        single = x.detach().to(torch.float32)
        high = (1 << (bits - 1)) - 1
        largest = torch.maximum(single.amax(-1, keepdim=True), -single.amin(-1, keepdim=True))
        scales = largest.clamp_min(float(np.float32(EPSILON))) / high
        codes = torch.div(single, scales).round_().clamp_(-high - 1, high).mul_(scales)
        result = codes.to(x.dtype)
        if scale_gradient:
            ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0]
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them a single time
        if not saved:
            return grad, None, None
        x, result = saved
        largest, place = x.abs().max(-1, keepdim=True)
        # d(scale) * sum(g * error) / scale, and the scale is |x[place]| / high.
        known = largest > EPSILON
        share = (grad * (result - x)).sum(-1, keepdim=True) / torch.where(known, largest, 1.0)
        share = torch.where(known, share, 0.0) * x.gather(-1, place).sign()
        return grad.scatter_add(-1, place, share.to(grad.dtype)), None, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, grid: WeightGrid, along_first: bool, solver: str, scale_gradient: bool
    ) -> torch.Tensor:
        single = weight.detach().to(torch.float32)
        k = single.shape[0 if along_first else 1]
        result = torch.empty_like(single)
        found: tuple[torch.Tensor | None, torch.Tensor | None] | None = None
        if solver == "clip":
            scales, zeros = clip_scales((single.T if along_first else single).contiguous().numpy(), grid)
            found = (torch.from_numpy(scales), None if zeros is None else torch.from_numpy(zeros))
        for channels, groups, size in grid.pieces(k):
            block = _blocks(single, channels, size, along_first)
            axis = 1 if along_first else 2
            scale: torch.Tensor | None
            if found is None:
                scale, zero = _range(block.amin(axis, keepdim=True), block.amax(axis, keepdim=True), grid)
            else:
                scale, zero = (_of_groups(part, groups, along_first) for part in found)
            assert scale is not None
            codes = torch.div(block, scale).round_()
            if zero is not None:
                codes.add_(zero)
            codes.clamp_(grid.low, grid.high)
            if zero is not None:
                codes.sub_(zero)
            codes.mul_(scale)
            _blocks(result, channels, size, along_first).copy_(codes)
        made = result.to(weight.dtype)
        ctx.grid, ctx.along_first = grid, along_first
        if scale_gradient:
            ctx.save_for_backward(weight, made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0]
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them a single time
        if not saved:
            return grad, None, None, None, None
        weight, made = saved
        grid, along_first = ctx.grid, ctx.along_first
        total = grad.clone()
        axis = 1 if along_first else 2
        for channels, _, size in grid.pieces(weight.shape[0 if along_first else 1]):
            block, rounded, given, into = (
                _blocks(part, channels, size, along_first) for part in (weight, made, grad, total)
            )
            moved = (given * (rounded - block)).sum(axis, keepdim=True)
            if grid.symmetric:
                largest, place = block.abs().max(axis, keepdim=True)
                known = largest > _TINY * grid.high
                share = torch.where(known, moved / torch.where(known, largest, 1.0), 0.0)
                into.scatter_add_(axis, place, share * block.gather(axis, place).sign())
            else:
                low, low_place = block.min(axis, keepdim=True)
                high, high_place = block.max(axis, keepdim=True)
                width = high.clamp_min(0) - low.clamp_max(0)
                known = width > _TINY * grid.high
                share = torch.where(known, moved / torch.where(known, width, 1.0), 0.0)
                into.scatter_add_(axis, high_place, torch.where(high > 0, share, 0.0))
                into.scatter_add_(axis, low_place, torch.where(low < 0, -share, 0.0))
        return total, None, None, None, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, bits: int, head_size: int) -> torch.Tensor:
        z = x.detach().to(torch.float32).reshape(*x.shape[:-1], -1, head_size)
        levels = float((1 << bits) - 1)
        low, high = z.amin(-1, keepdim=True), z.amax(-1, keepdim=True)
        step, base = (
            part.clamp(-_LARGEST_HALF, _LARGEST_HALF).to(torch.float16).to(torch.float32)
            for part in ((high - low) / levels, low + 0.0)
        )
        codes = ((z - base) / torch.where(step == 0, 1.0, step)).round_().clamp_(0, levels)
        codes = torch.where(step == 0, 0.0, codes)
        return (codes * step + base).reshape(x.shape).to(x.dtype)

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, None


_apply_tokens: Callable[..., torch.Tensor] = _Tokens.apply
_apply_weight: Callable[..., torch.Tensor] = _Weight.apply
_apply_rows: Callable[..., torch.Tensor] = _Rows.apply


def _at(part: slice, along_first: bool) -> tuple[slice, ...]:
    return (part, slice(None)) if along_first else (slice(None), part)


def _of_groups(scales: torch.Tensor | None, groups: slice, along_first: bool) -> torch.Tensor | None:
    """Of scales ``[N, G]``, those of some groups, as blocks broadcast."""
    if scales is None:
        return None
    return scales.T[groups].unsqueeze(1) if along_first else scales[:, groups].unsqueeze(2)


def _blocks(weight: torch.Tensor, channels: slice, size: int, along_first: bool) -> torch.Tensor:
    """A view ``[G, size, N]`` or ``[N, G, size]`` of some of the channels."""
    part = weight[_at(channels, along_first)]
    rows, columns = part.shape
    return part.view(-1, size, columns) if along_first else part.view(rows, -1, size)


def _range(low: torch.Tensor, high: torch.Tensor, grid: WeightGrid) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`graphrot.quant.grid.range_scales`, to the bit."""
    if grid.symmetric:
        scales = torch.maximum(-low, high) / grid.high
        return torch.where(scales < _TINY, 1.0, scales), None
    low, high = low.clamp_max(0), high.clamp_min(0)
    scales = ((high.to(torch.float64) - low) / grid.high).to(torch.float32)
    scales = torch.where(scales < _TINY, 1.0, scales)
    return scales, (-low / scales).round().clamp(0, grid.high)
