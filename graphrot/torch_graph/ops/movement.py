"""Operators that move numbers, count them, or make them from sizes."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from graphrot.torch_graph.ops.call import Call, Op


def _reshape(call: Call) -> torch.Tensor:
    x, target = call.tensor(0), call.numbers(1, "shape") or []
    if not call.integer("allowzero"):
        target = [x.shape[place] if size == 0 else size for place, size in enumerate(target)]
    return x.reshape(target)


def _flatten(call: Call) -> torch.Tensor:
    x, axis = call.tensor(0), call.axis(1)
    axis = axis + x.ndim if axis < 0 else axis
    rows = 1
    for size in x.shape[:axis]:
        rows *= size
    return x.reshape(rows, -1) if x.numel() else x.reshape(rows, x.numel() // max(rows, 1))


def _transpose(call: Call) -> torch.Tensor:
    x = call.tensor(0)
    order = call.about.attributes.get("perm")
    return x.permute(list(order) if order is not None else list(reversed(range(x.ndim))))


def _squeeze(call: Call) -> torch.Tensor:
    x, axes = call.tensor(0), call.numbers(1, "axes")
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _unsqueeze(call: Call) -> torch.Tensor:
    x, axes = call.tensor(0), call.numbers(1, "axes") or []
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _concat(call: Call) -> torch.Tensor:
    parts = call.tensors()
    full = [part for part in parts if part.numel()] or parts[:1]
    return torch.cat(full, call.axis(0)) if len(full) > 1 else full[0]


def _split(call: Call) -> list[torch.Tensor]:
    x, axis, sizes = call.tensor(0), call.axis(0), call.numbers(1, "split")
    if sizes is None:
        count = call.integer("num_outputs", len(call.about.node.outputs))
        size = -(-x.shape[axis] // count)
        return list(torch.split(x, size, axis))
    return list(torch.split(x, sizes, axis))


def _slice(call: Call) -> torch.Tensor:
    x = call.tensor(0)
    starts, ends = call.numbers(1, "starts") or [], call.numbers(2, "ends") or []
    axes = call.numbers(3, "axes") or list(range(len(starts)))
    steps = call.numbers(4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        if step > 0:
            first, last, _ = slice(start, end, step).indices(size)
            index: list[slice] = [slice(None)] * x.ndim
            index[axis] = slice(first, max(first, last), step)
            x = x[tuple(index)]
        else:
            to_start = end < -size
            places = range(size)[slice(start, None if to_start else end, step)]
            x = x.index_select(axis, torch.tensor(list(places), dtype=torch.int64))
    return x


def _gather(call: Call) -> torch.Tensor:
    x, index, axis = call.tensor(0), call.tensor(1).to(torch.int64), call.axis(0)
    axis = axis + x.ndim if axis < 0 else axis
    index = torch.where(index < 0, index + x.shape[axis], index)
    if index.ndim == 0:
        return x.select(axis, int(index))
    picked = x.index_select(axis, index.reshape(-1))
    return picked.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _gather_elements(call: Call) -> torch.Tensor:
    x, index, axis = call.tensor(0), call.tensor(1).to(torch.int64), call.axis(0)
    return torch.gather(x, axis, torch.where(index < 0, index + x.shape[axis], index))


def _gather_nd(call: Call) -> torch.Tensor:
    x, index, batch = call.tensor(0), call.tensor(1).to(torch.int64), call.integer("batch_dims")
    depth = index.shape[-1]
    lead = x.shape[:batch]
    flat = x.reshape(-1, *x.shape[batch:])
    places = index.reshape(flat.shape[0] if batch else 1, -1, depth)
    if not batch:
        flat = x.unsqueeze(0)
    rows = torch.arange(flat.shape[0])[:, None].expand(places.shape[:2])
    parts = [rows, *(torch.where(p < 0, p + flat.shape[1 + at], p) for at, p in enumerate(places.unbind(-1)))]
    picked = flat[tuple(parts)]
    return picked.reshape(*lead, *index.shape[batch:-1], *x.shape[batch + depth :])


def _scatter_elements(call: Call) -> torch.Tensor:
    x, index, updates, axis = call.tensor(0), call.tensor(1).to(torch.int64), call.tensor(2), call.axis(0)
    index = torch.where(index < 0, index + x.shape[axis], index)
    reduction = call.text("reduction", "none")
    if reduction == "none":
        return x.scatter(axis, index, updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return x.scatter_reduce(axis, index, updates, names[reduction])


def _scatter_nd(call: Call) -> torch.Tensor:
    if call.text("reduction", "none") not in ("none", "add"):
        raise call.refuse("its reduction is neither none nor add")
    x, index, updates = call.tensor(0), call.tensor(1).to(torch.int64), call.tensor(2)
    parts = tuple(torch.where(p < 0, p + x.shape[at], p) for at, p in enumerate(index.unbind(-1)))
    return x.index_put(parts, updates, accumulate=call.text("reduction", "none") == "add")


def _expand(call: Call) -> torch.Tensor:
    x, target = call.tensor(0), call.numbers(1) or []
    return x.expand(np.broadcast_shapes(tuple(x.shape), tuple(target)))


def _tile(call: Call) -> torch.Tensor:
    return call.tensor(0).repeat(call.numbers(1) or [])


def _pad(call: Call) -> torch.Tensor:
    x, pads, axes = call.tensor(0), call.numbers(1, "pads") or [], call.numbers(3)
    mode = call.text("mode", "constant")
    if mode != "constant":
        raise call.refuse(f"it pads by {mode}")
    filled = call.maybe(2)
    number = filled.item() if filled is not None and filled.numel() else call.floating("value")
    along = [axis % x.ndim for axis in axes] if axes is not None else list(range(x.ndim))
    widths = [0] * (2 * x.ndim)
    for place, axis in enumerate(along):
        widths[2 * (x.ndim - 1 - axis)] = pads[place]
        widths[2 * (x.ndim - 1 - axis) + 1] = pads[place + len(along)]
    return functional.pad(x, widths, value=number)


def _trilu(call: Call) -> torch.Tensor:
    x = call.tensor(0)
    diagonal = int(call.tensor(1)) if call.has(1) else 0
    return torch.triu(x, diagonal) if call.integer("upper", 1) else torch.tril(x, diagonal)


def _shape(call: Call) -> torch.Tensor:
    sizes = list(call.tensor(0).shape)
    end = call.about.attributes.get("end")
    return torch.tensor(sizes[call.integer("start") : end], dtype=torch.int64)


def _size(call: Call) -> torch.Tensor:
    return torch.tensor(call.tensor(0).numel(), dtype=torch.int64)


def _constant_of_shape(call: Call) -> torch.Tensor:
    value = call.array("value")
    target = call.numbers(0) or []
    if value is None or value.dtype.kind == "f":
        number = 0.0 if value is None else float(value.reshape(-1)[0])
        return torch.full(target, number, dtype=call.dtype)
    return torch.from_numpy(value.reshape(-1)[:1].copy()).expand(target)


def _range(call: Call) -> torch.Tensor:
    start, end, step = (call.tensor(position) for position in range(3))
    return torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype)


def _cum_sum(call: Call) -> torch.Tensor:
    x, axis = call.tensor(0), int(call.tensor(1))
    if call.integer("reverse"):
        x = x.flip(axis)
    total = x.cumsum(axis, dtype=x.dtype)
    if call.integer("exclusive"):
        total = total - x
    return total.flip(axis) if call.integer("reverse") else total


def _one_hot(call: Call) -> torch.Tensor:
    index, depth, values = call.tensor(0).to(torch.int64), int(call.tensor(1)), call.tensor(2)
    axis = call.axis(-1)
    hot = (torch.where(index < 0, index + depth, index).unsqueeze(-1) == torch.arange(depth)).movedim(-1, axis)
    return torch.where(hot, values[1], values[0])


def _non_zero(call: Call) -> torch.Tensor:
    return torch.nonzero(call.tensor(0)).T


def _top_k(call: Call) -> list[torch.Tensor]:
    count = int(call.tensor(1))
    found = torch.topk(call.tensor(0), count, call.axis(-1), bool(call.integer("largest", 1)))
    return [found.values, found.indices]


def _arg_max(call: Call) -> torch.Tensor:
    return call.tensor(0).argmax(call.axis(0), keepdim=bool(call.integer("keepdims", 1)))


MOVEMENT: dict[tuple[str, str], Op] = {
    ("", "ArgMax"): _arg_max,
    ("", "Concat"): _concat,
    ("", "ConstantOfShape"): _constant_of_shape,
    ("", "CumSum"): _cum_sum,
    ("", "Expand"): _expand,
    ("", "Flatten"): _flatten,
    ("", "Gather"): _gather,
    ("", "GatherElements"): _gather_elements,
    ("", "GatherND"): _gather_nd,
    ("", "NonZero"): _non_zero,
    ("", "OneHot"): _one_hot,
    ("", "Pad"): _pad,
    ("", "Range"): _range,
    ("", "Reshape"): _reshape,
    ("", "ScatterElements"): _scatter_elements,
    ("", "ScatterND"): _scatter_nd,
    ("", "Shape"): _shape,
    ("", "Size"): _size,
    ("", "Slice"): _slice,
    ("", "Split"): _split,
    ("", "Squeeze"): _squeeze,
    ("", "Tile"): _tile,
    ("", "TopK"): _top_k,
    ("", "Transpose"): _transpose,
    ("", "Trilu"): _trilu,
    ("", "Unsqueeze"): _unsqueeze,
}
