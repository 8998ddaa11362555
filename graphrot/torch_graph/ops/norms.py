"""Reductions, normalizations and softmax."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphrot.torch_graph.ops.call import MICROSOFT, Call, Op

Reduced = Callable[[torch.Tensor, list[int], bool], torch.Tensor]


def _reduction(function: Reduced) -> Op:
    def run(call: Call) -> torch.Tensor:
        x, axes = call.tensor(0), call.numbers(1, "axes")
        if not axes:
            if call.integer("noop_with_empty_axes"):
                return x
            axes = list(range(x.ndim))
        return function(x, axes, bool(call.integer("keepdims", 1)))

    return run


def _product(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _softmax(call: Call) -> torch.Tensor:
    x = call.tensor(0)
    if call.about.opset < 13:
        axis = call.axis(1)
        flat = x.flatten(axis % x.ndim) if x.ndim else x
        return torch.softmax(flat, -1).reshape(x.shape)
    return torch.softmax(x, call.axis(-1))


def _log_softmax(call: Call) -> torch.Tensor:
    return torch.log_softmax(call.tensor(0), call.axis(-1 if call.about.opset >= 13 else 1))


def layer_norm(
    x: torch.Tensor, gain: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float, axis: int = -1
) -> torch.Tensor:
    """Over the axes from ``axis`` on."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    centred = x - x.mean(axes, keepdim=True)
    result = centred * torch.rsqrt((centred * centred).mean(axes, keepdim=True) + epsilon)
    result = result if gain is None else result * gain
    return result if bias is None else result + bias


def rms_norm(x: torch.Tensor, gain: torch.Tensor | None, epsilon: float, axis: int = -1) -> torch.Tensor:
    """Over the axes from ``axis`` on."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    result = x * torch.rsqrt((x * x).mean(axes, keepdim=True) + epsilon)
    return result if gain is None else result * gain


def _layer_norm(call: Call) -> torch.Tensor:
    return layer_norm(call.tensor(0), call.maybe(1), call.maybe(2), call.floating("epsilon", 1e-5), call.axis(-1))


def _rms_norm(call: Call) -> torch.Tensor:
    return rms_norm(call.tensor(0), call.maybe(1), call.floating("epsilon", 1e-5), call.axis(-1))


def _skip(call: Call, bias_at: int) -> torch.Tensor:
    total = call.tensor(0) + call.tensor(1)
    bias = call.maybe(bias_at)
    return total if bias is None else total + bias


def _skip_rms_norm(call: Call) -> list[torch.Tensor | None]:
    total = _skip(call, 3)
    return [rms_norm(total, call.maybe(2), call.floating("epsilon", 1e-12)), None, None, total]


def _skip_layer_norm(call: Call) -> list[torch.Tensor | None]:
    total = _skip(call, 4)
    return [layer_norm(total, call.maybe(2), call.maybe(3), call.floating("epsilon", 1e-12)), None, None, total]


NORMS: dict[tuple[str, str], Op] = {
    ("", "LayerNormalization"): _layer_norm,
    ("", "LogSoftmax"): _log_softmax,
    ("", "RMSNormalization"): _rms_norm,
    ("", "ReduceL2"): _reduction(lambda x, axes, keep: torch.linalg.vector_norm(x, dim=axes, keepdim=keep)),
    ("", "ReduceMax"): _reduction(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    ("", "ReduceMean"): _reduction(lambda x, axes, keep: x.mean(axes, keepdim=keep)),
    ("", "ReduceMin"): _reduction(lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    ("", "ReduceProd"): _reduction(_product),
    ("", "ReduceSum"): _reduction(lambda x, axes, keep: x.sum(axes, keepdim=keep, dtype=x.dtype)),
    ("", "ReduceSumSquare"): _reduction(lambda x, axes, keep: (x * x).sum(axes, keepdim=keep)),
    ("", "SimplifiedLayerNormalization"): _rms_norm,
    ("", "Softmax"): _softmax,
    (MICROSOFT, "SimplifiedLayerNormalization"): _rms_norm,
    (MICROSOFT, "SkipLayerNormalization"): _skip_layer_norm,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _skip_rms_norm,
}
