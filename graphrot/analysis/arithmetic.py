"""Elementwise arithmetic and reductions.

A sum of two tensors ties their channels together. A product by a run-time tensor passes if one number
multiplies the whole row; a product by a constant per channel is a *gain* and starts new channels.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.analysis.labels import Labels, coordinates, other_axes
from graphrot.analysis.visit import Visit

_FIXED = "it adds a constant that cannot be rewritten"


def add(v: Visit) -> None:
    """Add, Sub, and Sum of two.

    1. plus a constant: the constant is a producer (bias); zeros change nothing (or the sign); one number for all
       channels passes if the matrix keeps the all-ones vector;
    2. plus one number per row: passes if the matrix keeps the all-ones vector;
    3. two tensors whose channels begin at opaque nodes, used only here: a cut (RoPE ends this way);
    4. plus another tensor: channels that meet take the same coordinate.
    """
    if len(v.node.inputs) != 2:
        v.opaque()
        return
    a, b = v.labels(0), v.labels(1)
    if (a is not None and a.squared) or (b is not None and b.squared) or (a is None and b is None):
        v.opaque()
    elif a is None or b is None:
        position = 0 if a is None else 1
        labels = b if a is None else a
        assert labels is not None
        if v.constant(position):
            _add_constant(v, labels, position)
        elif not _add_row_number(v, labels, None, position):
            v.opaque()
    elif _add_row_number(v, a, b, 1) or _add_row_number(v, b, a, 0):
        return
    elif _all_opaque(v, a) and _all_opaque(v, b) and _only_here(v):
        v.opaque()
    else:
        shape = v.output_shape()
        left, right = a.broadcast(shape, v.salt), b.broadcast(shape, v.salt)
        v.edge(left, right)
        v.set(left.renamed(v.salt))


def _only_here(v: Visit) -> bool:
    return all(i is not None and v.graph.scope.single_use(i) for i in v.node.inputs)


def _all_opaque(v: Visit, labels: Labels) -> bool:
    return all(s.kind in ("opaque", "gain") for s in v.graph.table.owners(labels.channels))


def _add_constant(v: Visit, labels: Labels, position: int) -> None:
    if v.node in v.graph.folded:
        v.set(labels)
        return
    shape = v.output_shape()
    if labels.shape != shape:
        v.opaque("a constant makes its rows longer")
        return
    numbers = v.number(position)
    if numbers is not None and numbers.size <= 1 << 20 and not numbers.any():
        negated = position == 0 and v.node.op_type == "Sub"
        v.set(labels.renamed(v.salt) if negated else labels)
    elif v.add_constant(labels, position):
        v.set(labels.renamed(v.salt))
    else:
        v.opaque(_FIXED)


def add_many(v: Visit) -> None:
    """Sum of any number of inputs, and Mean, which is a sum times a number: a chain of additions.

    Tensors and constants in their full width; a constant that stands there twice has one place for two uses.
    """
    if len(v.node.inputs) == 2 and v.node.op_type == "Sum":
        add(v)
        return
    shape, positions = v.output_shape(), range(len(v.node.inputs))
    labelled = {k: x for k in positions if (x := v.labels(k)) is not None}
    constants = [k for k in positions if k not in labelled]
    first = next((x for x in labelled.values() if x.shape == shape), None)
    fixed = all(v.constant(k) for k in constants) and len({v.value(k) for k in constants}) == len(constants)
    cut = len(labelled) > 1 and all(_all_opaque(v, x) for x in labelled.values()) and _only_here(v)
    if cut or first is None or not fixed or any(x.squared or _is_row_number(first, x.shape) for x in labelled.values()):
        v.opaque()
    else:
        for labels in labelled.values():
            if labels is not first:
                v.edge(first, labels.broadcast(shape, v.salt))
        if all(v.add_constant(first, k) for k in constants):
            v.set(first.renamed(v.salt))
        else:
            v.opaque(_FIXED)


def where(v: Visit) -> None:
    """Rows of zeros in place of some rows, by a condition that is the same for all channels of a row."""
    for position in (1, 2):
        labels, zeros, size = v.labels(position), v.number(3 - position), v.shape(0)
        if labels is None or labels.squared or labels.shape != v.output_shape() or size is None:
            continue
        if v.constant(3 - position) and zeros is not None and not zeros.any() and _one_each(labels, size):
            indices = _indices(size, labels.shape)
            v.key(labels, indices, "it sets groups of channels to zero by different conditions", consumed=True)
            v.set(labels.renamed(v.salt, indices))
            return
    v.opaque()


def _add_row_number(v: Visit, labels: Labels, other: Labels | None, position: int) -> bool:
    """``labels`` plus a run-time tensor with one number for each row of channels."""
    shape, size = v.output_shape(), v.shape(position)
    if size is None or labels.shape != shape:
        return False
    if not _is_row_number(labels, size):
        return False
    v.key(labels, _indices(size, shape), "one number is added to whole rows")
    v.mean(labels)
    v.block(other, "its elements are added to whole rows of channels")
    v.set(labels.renamed(v.salt))
    return True


def _is_row_number(labels: Labels, size: tuple[int, ...]) -> bool:
    """A tensor of this size that is added meets different channels with one number."""
    padded = (1,) * (labels.rank - len(size)) + size
    return any(padded[d] == 1 and labels.varies(d) for d in range(labels.rank))


def _one_each(labels: Labels, size: tuple[int, ...]) -> bool:
    """A tensor of this size has one number for each row, the last axis with different channels."""
    varying = [d for d in range(labels.rank) if labels.varies(d)]
    padded = (1,) * (labels.rank - len(size)) + size
    return bool(varying) and padded[varying[-1]] == 1


def _indices(size: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The flat index of the element of a tensor of shape ``size`` that meets each element of ``shape``."""
    return np.broadcast_to(coordinates(size, range(len(size))), shape)


def multiply(v: Visit) -> None:
    """Mul and Div."""
    division = v.node.op_type == "Div"
    if not division and v.value(0) is v.value(1):
        square(v)
        return
    for position in (0, 1):
        labels = v.labels(position)
        if labels is None or labels.squared or labels.shape != v.output_shape() or (division and position == 1):
            continue
        if v.constant(1 - position):
            _multiply_constant(v, labels, 1 - position)
            return
        if _multiply_rows(v, labels, 1 - position):
            return
    v.opaque()


def _multiply_constant(v: Visit, labels: Labels, position: int) -> None:
    if v.node in v.graph.folded:
        v.set(labels)
        return
    numbers = v.number(position)
    if numbers is not None and numbers.size and (numbers == numbers.reshape(-1)[0]).all():
        v.set(labels.renamed(v.salt))
        return
    reason = "it multiplies each channel by its own constant"
    size = v.shape(position)
    if size is not None and numbers is not None:
        padded = (1,) * (labels.rank - len(size)) + size
        if not any(padded[d] > 1 and labels.varies(d) for d in range(labels.rank)):
            v.key(labels, _indices(size, labels.shape), reason, consumed=True)
            v.set(labels.renamed(v.salt, _indices(size, labels.shape)))
            return
    if v.node.op_type == "Mul" and v.readable(position):
        data = v.value(1 - position)
        if v.node in v.graph.open and data is not None:
            v.leave(labels, data, v.node)
        else:
            v.block(labels, reason)
        v.source("gain", operand=position)
        return
    v.opaque(reason)


def _multiply_rows(v: Visit, labels: Labels, position: int) -> bool:
    """By a run-time tensor. It passes if it has one number for the row, and the row is the last axis
    with different channels; a product along heads only (RoPE's cosine) would pass too, but it hides the
    better place behind it."""
    size = v.shape(position)
    if size is None or not _one_each(labels, size):
        return False
    indices = _indices(size, labels.shape)
    v.key(labels, indices, "it multiplies groups of channels by different numbers", consumed=True)
    v.block(v.labels(position), "its elements multiply whole rows of channels")
    v.set(labels.renamed(v.salt, indices))
    return True


def square(v: Visit) -> None:
    """Squares on their way into a sum; squares that go elsewhere (an activation) start new channels."""
    labels = v.labels(0)
    if labels is None or labels.squared or labels.shape != v.output_shape() or not _only_summed(v, v.node):
        v.opaque()
        return
    v.set(labels.square(v.salt))


def _only_summed(v: Visit, node: ir.Node) -> bool:
    stack = [node.outputs[0]]
    while stack:
        value = stack.pop()
        if value.is_graph_output():
            return False
        for user, _ in v.graph.scope.uses(value):
            if user.op_type in ("Cast", "Identity"):
                stack.append(user.outputs[0])
            elif user.op_type not in ("ReduceMean", "ReduceSum"):
                return False
    return True


def power(v: Visit) -> None:
    exponent = v.number(1)
    if exponent is not None and exponent.size and (exponent == 2).all():
        square(v)
    else:
        v.opaque()


def reduce(v: Visit) -> None:
    """ReduceMean, ReduceSum, ReduceL2, ReduceSumSquare.

    1. of squares: a rotation within the reduced rows changes nothing;
    2. a mean or sum over channels: if the matrix keeps the all-ones vector;
    3. a mean or sum over an axis with the same channels everywhere: passes.
    """
    labels = v.labels(0)
    op = v.node.op_type
    if labels is None:
        v.opaque()
        return
    axes = v.axes()
    if axes is None and v.value(1) is None and not v.integer("noop_with_empty_axes", 0):
        axes = list(range(labels.rank))
    if not axes:
        v.opaque()
        return
    axes = sorted(a % labels.rank for a in axes)
    rows = other_axes(labels.rank, *axes)
    squares = op in ("ReduceL2", "ReduceSumSquare")
    if squares and labels.squared:
        v.opaque()
    elif squares or labels.squared:
        v.key_rows(labels, rows, "it sums squares over a part of the channels")
        v.source("opaque")
    elif any(labels.varies(a) for a in axes) or len(axes) != 1:
        v.key_rows(labels, rows, "it sums over a part of the channels")
        v.mean(labels)
        v.source("opaque")
    else:
        _sum_copies(v, labels, axes[0])


def _sum_copies(v: Visit, labels: Labels, axis: int) -> None:
    first = labels.take([0], axis)
    if not labels.uniform(axis):
        v.opaque()
        return
    v.key_rows(labels, [axis], "it sums rows")
    kept = first.renamed(v.salt)
    v.set(kept if v.integer("keepdims", 1) else kept.reshape(v.output_shape()))
