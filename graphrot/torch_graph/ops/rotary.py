"""Rotary position embeddings."""

from __future__ import annotations

import torch

from graphrot.torch_graph.ops.call import MICROSOFT, Call, Op


def rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Turn pairs of channels.

    Args:
        x: ``[B, H, S, D]``.
        cos: ``[B, S, R / 2]``, R at most D; or ``[1, S, R / 2]``.
        sin: likewise.
        interleaved: pairs are neighbours; else channels ``i`` and ``i + R / 2``.
    """
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = first * cos - second * sin, second * cos + first * sin
    result = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([result, rest], -1) if rest.shape[-1] else result


def _of_heads(call: Call, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply to ``[B, H, S, D]``, or to ``[B, S, H * D]`` with the number of heads as an attribute."""
    heads, width = call.integer("num_heads"), call.integer("rotary_embedding_dim")
    flat = x.ndim == 3
    if flat:
        size = x.shape[-1] // heads if heads else 2 * cos.shape[-1]
        x = x.reshape(*x.shape[:2], -1, size).transpose(1, 2)
    if width:
        cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    result = rotate_heads(x, cos, sin, interleaved=bool(call.integer("interleaved")))
    return result.transpose(1, 2).flatten(2) if flat else result


def _standard(call: Call) -> torch.Tensor:
    cos, sin, positions = call.tensor(1), call.tensor(2), call.maybe(3)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    return _of_heads(call, call.tensor(0), cos, sin)


def _microsoft(call: Call) -> torch.Tensor:
    x, positions = call.tensor(0), call.tensor(1)
    if positions.numel() == 1:
        length = x.shape[1] if x.ndim == 3 else x.shape[2]
        positions = positions.reshape(1, 1) + torch.arange(length)
    cos, sin = call.tensor(2)[positions], call.tensor(3)[positions]
    return _of_heads(call, x, cos, sin)


ROTARY: dict[tuple[str, str], Op] = {
    ("", "RotaryEmbedding"): _standard,
    (MICROSOFT, "RotaryEmbedding"): _microsoft,
}
