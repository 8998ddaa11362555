"""Matrix products: by a constant (consumer and producer), and of two run-time tensors (attention)."""

from __future__ import annotations

import numpy as np

from graphrot.analysis.labels import Labels, combine, coordinates, other_axes
from graphrot.analysis.visit import Consumer, Contraction, Selected, Visit

_ROWS = "it multiplies a part of the channels by its weight"


def matmul(v: Visit) -> None:
    """MatMul.

    1. ``X @ W`` with constant ``W [..., K, N]``: the channels of X are consumed along K, new ones begin
       along N;
    2. the same with a weight picked at run time (experts), on either side;
    3. two run-time tensors: :func:`contract` if both carry channels along the summed axis, :func:`mix`
       if only the second carries channels along its last axis, or the first along its last axis but one (all of it
       transposed);
    4. rows that are the same in every run, by a constant: channels begin.
    """
    a, b = v.labels(0), v.labels(1)
    left = v.value(0)
    right = v.value(1)
    assert left is not None and right is not None
    if (a is not None and a.squared) or (b is not None and b.squared):
        v.opaque()
    elif (a is not None or v.trusted(0)) and v.readable(1):
        shape = v.shape_of_constant(1)
        if len(v.output_shape()) < 2 or len(shape) < 2:
            v.opaque()
            return
        _read(v, a, len(v.output_shape()) - 1, len(shape) - 2)
        v.source("weight", axes=[-1], operand=1, operand_axis=len(shape) - 1)
    elif a is not None and right in v.graph.selected:
        chosen = v.graph.selected[right]
        _consume_selected(v, a, a.rank - 1, chosen, 0)
        v.source("weight", axes=[-1], node=chosen.node, operand=chosen.operand, operand_axis=chosen.axes[1])
    elif b is not None and left in v.graph.selected and len(v.output_shape()) >= 2:
        chosen = v.graph.selected[left]
        _consume_selected(v, b, b.rank - 2, chosen, 1)
        v.source("weight", axes=[-2], node=chosen.node, operand=chosen.operand, operand_axis=chosen.axes[0])
    elif v.constant(1) and (maker := right.producer()) is not None:
        v.opaque(f"its weight comes out of {maker.op_type} and cannot be rewritten")
    elif a is None or b is None or a.rank < 2 or b.rank < 2:
        v.opaque()
    else:
        _product(v, a, b)


def fused_matmul(v: Visit) -> None:
    """FusedMatMul of com.microsoft: ``alpha * A @ B``, or ``alpha * A @ B.T``, of constants or run-time tensors."""
    a, b = v.labels(0), v.labels(1)
    flips = [v.integer(name, 0) for name in ("transA", "transBatchA", "transBatchB")]
    if any(flips) or a is None or a.squared or a.rank < 2:
        v.opaque()
        return
    transposed = bool(v.integer("transB", 0))
    if v.readable(1):
        rank = len(v.shape_of_constant(1))
        if rank < 2:
            v.opaque()
            return
        consume(v, a, a.rank - 1, 1, rank - 1 if transposed else rank - 2)
        v.source("weight", axes=[-1], operand=1, operand_axis=rank - 2 if transposed else rank - 1)
    elif b is None or b.squared or b.rank < 2:
        v.opaque()
    else:
        _product(v, a, _turned(b) if transposed else b)


def gemm(v: Visit) -> None:
    """Gemm by a constant weight, with an optional constant bias."""
    labels = v.labels(0)
    followed = not labels.squared if labels is not None else v.trusted(0)
    if not followed or not v.readable(1) or v.integer("transA", 0):
        v.opaque()
        return
    if v.value(2) is not None and not v.readable(2):
        v.opaque("its bias is computed at run time")
        return
    transposed = v.integer("transB", 0)
    _read(v, labels, 1, 1 if transposed else 0)
    made = v.source("weight", axes=[-1], operand=1, operand_axis=0 if transposed else 1)
    if v.value(2) is not None and not v.add_constant(made, 2):
        v.block(made, "its bias cannot be rewritten")


def conv(v: Visit) -> None:
    """Conv without groups: a linear map of the channel axis, at every place of its window.

    Padding with zeros is no obstacle: a zero stays one in every basis.
    """
    labels = v.labels(0)
    shape = v.shape_of_constant(1) if v.readable(1) else ()
    if labels is None or labels.squared or len(shape) != labels.rank or v.integer("group", 1) != 1:
        v.opaque()
        return
    if v.value(2) is not None and not v.readable(2):
        v.opaque("its bias is computed at run time")
        return
    consume(v, labels, 1, 1, 1)
    made = v.source("weight", axes=[1], operand=1, operand_axis=0)
    if v.value(2) is not None:
        row = v.bias(2, (made.shape[1],))
        assert row is not None
        v.edge(made, row.reshape((-1, *[1] * (made.rank - 2))))


def _read(v: Visit, labels: Labels | None, axis: int, operand_axis: int) -> None:
    """Consume ``labels``; rows that are the same in every run stay as they are, since nothing rounds them."""
    if v.trusted(0):
        v.block(labels, "its rows are the same in every run and stay as they are")
    elif labels is not None:
        consume(v, labels, axis, 1, operand_axis)


def consume(v: Visit, labels: Labels, axis: int, operand: int, operand_axis: int) -> None:
    """``labels`` are summed along ``axis`` against ``operand_axis`` of a constant operand of the node."""
    _consume(v, labels, axis, Consumer(labels, axis, v.node, operand, operand_axis))


def _consume_selected(v: Visit, labels: Labels, axis: int, chosen: Selected, side: int) -> None:
    _consume(v, labels, axis, Consumer(labels, axis, chosen.node, chosen.operand, chosen.axes[side]))


def _consume(v: Visit, labels: Labels, axis: int, consumer: Consumer) -> None:
    v.key_rows(labels, other_axes(labels.rank, axis), _ROWS, consumed=True)
    rows = labels.rows(axis)
    v.edge(rows, rows[:1], consumed=True)
    v.record.consumers.append(consumer)


def _product(v: Visit, a: Labels, b: Labels) -> None:
    if _channels(v, a, a.rank - 1) and _channels(v, b, b.rank - 2):
        contract(v, a, _turned(b))
        v.source("opaque")
    elif _channels(v, b, b.rank - 1) and not _channels(v, b, b.rank - 2):
        v.block(a, "it weighs rows of channels")
        v.set(mix(v, b, v.output_shape()))
    elif _channels(v, a, a.rank - 2) and not _channels(v, a, a.rank - 1):
        v.block(b, "it weighs rows of channels")
        v.set(_turned(mix(v, _turned(a), _turned_shape(v.output_shape()))))
    else:
        v.opaque()


def _turned(labels: Labels) -> Labels:
    return labels.transpose((*range(labels.rank - 2), labels.rank - 1, labels.rank - 2))


def _turned_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _channels(v: Visit, labels: Labels, axis: int) -> bool:
    """Different channels of one source and one copy stand next to each other along ``axis``."""
    if not labels.varies(axis):
        return False
    ids, copies = np.moveaxis(labels.ids, axis, -1), np.moveaxis(labels.copies, axis, -1)
    near = (ids[..., 1:] != ids[..., :-1]) & (copies[..., 1:] == copies[..., :-1])
    owners = v.graph.table.index_of(ids)
    return bool((near & (owners[..., 1:] == owners[..., :-1])).any())


def contract(v: Visit, a: Labels, b: Labels) -> None:
    """``a [..., M, K]`` and ``b [..., N, K]`` are multiplied and summed along K (q and k of attention).

    Rotating both by one matrix changes nothing, so their channels take the same coordinates.
    """
    reason = "it contracts a part of the channels"
    v.key_rows(a, range(a.rank - 1), reason)
    v.key_rows(b, range(b.rank - 1), reason)
    v.edge(a[..., :, None, :], b[..., None, :, :])
    v.record.contractions.append(Contraction(np.union1d(a.channels, b.channels)))


def refuse_contraction(v: Visit, parts: list[Labels], reason: str) -> None:
    """The node contracts these, but not in a way that a rotation could cancel."""
    for labels in parts:
        v.block(labels, reason)
    ids = np.unique(np.concatenate([p.channels for p in parts]))
    v.record.contractions.append(Contraction(ids, refused=reason))


def mix(v: Visit, values: Labels, shape: tuple[int, ...]) -> Labels:
    """Rows ``values [..., T, D]`` are averaged over T with run-time weights; the result has ``shape [..., S, D]``.

    All T rows must carry the same channels in the same basis; the mean carries them too.
    """
    lead = coordinates(values.shape, range(values.rank - 2))
    v.key(values, lead, "it averages a part of the channels")
    first = values.take([0], values.rank - 2)
    v.edge(values, first)
    v.record.mixed.append(values.channels)
    own = (1,) * (len(shape) - values.rank) + values.shape
    grown = [d for d in range(len(shape) - 2) if own[d] == 1 and shape[d] > 1]
    target = (*shape[:-2], shape[-2], values.shape[-1])
    copies = combine(np.broadcast_to(first.copies, target), coordinates(target, [*grown, len(shape) - 2]), v.salt)
    return Labels(np.broadcast_to(first.ids, target), copies)
