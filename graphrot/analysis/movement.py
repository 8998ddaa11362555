"""Operations that move elements without changing them: they act on labels as on numbers.

Where an index depends on data (a token picked at run time), the labels may only pass if every place it
could point to carries the same channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphrot.analysis.labels import Labels, combine, concatenate, coordinates
from graphrot.analysis.visit import Selected, Visit
from graphrot.graph import FLOATS


def keep(v: Visit) -> None:
    """Identity, Dropout, Cast and CastLike to a float type."""
    labels = v.labels(0)
    seen = v.graph.probe.seen(v.node.outputs[0])
    if labels is None or seen is None or not seen.is_float:
        v.opaque("it turns the values into another type")
        return
    v.set(labels)


def negate(v: Visit) -> None:
    labels = v.labels(0)
    if labels is None or labels.squared:
        v.opaque()
        return
    v.set(labels.renamed(v.salt))


def reshape(v: Visit) -> None:
    """Reshape, Flatten, Squeeze, Unsqueeze: same elements in the same order."""
    labels = v.labels(0)
    if labels is None or (v.value(1) is not None and not v.trusted(1)):
        v.opaque("its target shape depends on data")
        return
    v.set(labels.reshape(v.output_shape()))


def transpose(v: Visit) -> None:
    labels = v.labels(0)
    if labels is None:
        v.opaque()
        return
    v.set(labels.transpose(v.integers("perm") or list(reversed(range(labels.rank)))))


def expand(v: Visit) -> None:
    """Expand of labels makes copies; Expand of a constant vector makes a producer of it."""
    labels = v.labels(0)
    if not v.trusted(1):
        v.opaque("its target shape depends on data")
    elif labels is not None:
        v.set(labels.broadcast(v.output_shape(), v.salt))
    else:
        _grow(v)


def _grow(v: Visit) -> None:
    """A constant that is repeated."""
    if v.readable(0) and v.operand_is_float(0):
        _table(v)
    else:
        v.opaque()


def tile(v: Visit) -> None:
    """Each repetition is a copy of its own; a constant becomes a producer, as by :func:`expand`."""
    labels, repeats = v.labels(0), v.number(1)
    if labels is None and repeats is not None and repeats.size and repeats[-1] == 1:
        _grow(v)
        return
    if labels is None or repeats is None:
        v.opaque("how often it repeats depends on data")
        return
    shape = v.output_shape()
    round_ = np.zeros((1,) * len(shape), dtype=np.int64)
    for axis, size in enumerate(labels.shape):
        turn = np.arange(shape[axis]) // max(size, 1)
        round_ = round_ * int(repeats[axis]) + turn.reshape([-1 if d == axis else 1 for d in range(len(shape))])
    copies = combine(np.tile(labels.copies, repeats), round_, v.salt)
    v.set(Labels(np.tile(labels.ids, repeats), copies, labels.squared))


def split(v: Visit) -> None:
    labels = v.labels(0)
    if labels is None or (v.value(1) is not None and not v.trusted(1)):
        v.opaque("its parts depend on data")
        return
    axis, start = v.integer("axis", 0) % labels.rank, 0
    for position in range(len(v.node.outputs)):
        if not v.has_output(position):
            v.opaque("one of its parts is not read, so the size is not known")
            return
        stop = start + v.output_shape(position)[axis]
        v.set(labels[(slice(None),) * axis + (slice(start, stop),)], position)
        start = stop


def slice_(v: Visit) -> None:
    labels = v.labels(0)
    if labels is None and not v.readable(0):
        v.opaque()
        return
    bounds = _slices(v, labels.rank if labels is not None else len(v.output_shape()))
    if labels is None:
        if v.operand_is_float(0) and bounds is not None and _rows_only(bounds):
            _table(v)
        else:
            v.opaque()
        return
    if bounds is not None:
        v.set(labels[bounds])
        return
    numbers = v.number(3) if v.value(3) is not None else None
    if numbers is None:
        v.opaque("its bounds depend on data")
        return
    _pick(v, labels, [int(a) % labels.rank for a in np.atleast_1d(numbers)])


def _slices(v: Visit, rank: int) -> tuple[slice, ...] | None:
    """The slices of a Slice node, or None if a bound depends on data."""
    if v.integers("starts") is not None:
        starts, ends, axes = v.integers("starts") or [], v.integers("ends") or [], v.integers("axes")
        steps: list[int] | None = None
    else:
        read: list[list[int] | None] = []
        for position in range(1, 5):
            if v.value(position) is None:
                read.append(None)
                continue
            numbers = v.number(position)
            if numbers is None:
                return None
            read.append([int(n) for n in np.atleast_1d(numbers)])
        if read[0] is None or read[1] is None:
            return None
        starts, ends, axes, steps = read[0], read[1], read[2], read[3]
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    result = [slice(None)] * rank
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        stop = None if step < 0 and end < -(1 << 30) else end
        result[axis % rank] = slice(start, stop, step)
    return tuple(result)


def _rows_only(bounds: Sequence[slice]) -> bool:
    return bounds[-1] == slice(None) and len(bounds) >= 2


def gather(v: Visit) -> None:
    """1. rows or columns of a constant table: new channels; 2. known index: taken; 3. index from data: same channels
    everywhere, or cut."""
    labels = v.labels(0)
    axis = v.integer("axis", 0)
    if labels is None:
        if not (v.readable(0) and v.operand_is_float(0)):
            v.opaque()
        elif len(v.shape_of_constant(0)) == 2 and axis == 0:
            _table(v)
        elif len(v.shape_of_constant(0)) == 2 and axis in (1, -1) and v.shape_of_constant(0)[0] > 1:
            v.source("table", axes=[0], operand=0, operand_axis=0)
        elif len(v.shape_of_constant(0)) >= 3 and axis == 0:
            _select(v)
        else:
            v.opaque()
        return
    axis %= labels.rank
    index = v.number(1)
    if index is not None:
        v.set(labels.take(index, axis).distinct(v.salt))
        return
    _pick(v, labels, [axis])


def gather_nd(v: Visit) -> None:
    """As :func:`gather`, for index tuples."""
    labels = v.labels(0)
    if labels is None:
        index = v.shape(1)
        if not (v.readable(0) and v.operand_is_float(0)) or not index or v.integer("batch_dims", 0):
            v.opaque()
        elif len(v.shape_of_constant(0)) == 2 and index[-1] == 1:
            _table(v)
        elif len(v.shape_of_constant(0)) - index[-1] >= 2:
            _select(v)
        else:
            v.opaque()
        return
    numbers = v.number(1)
    if numbers is None or v.integer("batch_dims", 0):
        v.opaque("its index depends on data")
        return
    v.set(labels[tuple(numbers[..., k] for k in range(numbers.shape[-1]))].distinct(v.salt))


def concat(v: Visit) -> None:
    """Joined labels, unless channels that begin at opaque nodes are joined into wider rows.

    In that case the row is a better place for an online rotation than its parts: a cut. Along another axis than the
    last, where no transform could stand, the parts stay apart.
    """
    parts = [v.labels(k) for k in range(len(v.node.inputs))]
    labelled = [p for p in parts if p is not None and not p.squared]
    if len(labelled) != len(parts):
        v.opaque("it joins tensors of different kinds")
        return
    rank = labelled[0].rank
    axis = v.integer("axis", 0) % rank
    along = axis == rank - 1 and all(_static(v, k, axis) for k in range(len(parts)))
    if along and any(p.varies(axis) for p in labelled) and any(_any_opaque(v, p) for p in labelled):
        v.opaque("it joins channels that do not come from one matmul")
        return
    v.set(concatenate(labelled, axis).distinct(v.salt))


def pad(v: Visit) -> None:
    """Rows of zeros in front or behind: a zero is one in every basis, so the new rows may carry any channels.

    Where elements are added beside different channels, the row has become a longer one.
    """
    labels = v.labels(0)
    amounts = v.integers("pads") if v.value(1) is None else v.number(1)
    axes = None if v.value(3) is None else v.number(3)
    filled = v.number(2) if v.value(2) is not None else np.asarray(v.real("value", 0.0))
    mode = v.node.attributes.get("mode")
    plain = mode is None or mode.as_string() == "constant"
    if labels is None or amounts is None or not plain or filled is None or filled.any() or labels.squared:
        v.opaque()
        return
    numbers = [int(n) for n in np.asarray(amounts).reshape(-1)]
    chosen = range(labels.rank) if axes is None else [int(a) % labels.rank for a in np.atleast_1d(axes)]
    half = len(numbers) // 2
    for axis, front, back in zip(chosen, numbers[:half], numbers[half:], strict=True):
        if front == 0 and back == 0:
            continue
        size = labels.shape[axis]
        if not size or not labels.uniform(axis):
            v.opaque("it adds zeros beside different channels")
            return
        labels = labels.take(np.clip(np.arange(-front, size + back), 0, size - 1), axis)
    v.set(labels.distinct(v.salt))


def _static(v: Visit, position: int, axis: int) -> bool:
    value = v.value(position)
    seen = None if value is None else v.graph.probe.seen(value)
    return seen is not None and seen.static[axis]


def _any_opaque(v: Visit, labels: Labels) -> bool:
    return any(s.kind == "opaque" for s in v.graph.table.owners(labels.channels))


def _pick(v: Visit, labels: Labels, axes: Sequence[int]) -> None:
    """Indices along ``axes`` are chosen at run time: every index must carry the same channels."""
    if labels.squared or not all(labels.uniform(a) for a in axes):
        v.opaque("it picks channels at run time")
        return
    shape = v.output_shape()
    grown = len(shape) - labels.rank + 1
    ids, copies = labels.ids, labels.copies
    for axis in axes:
        ids, copies = np.take(ids, [0], axis=axis), np.take(copies, [0], axis=axis)
    if grown != 1:
        axis = axes[0]
        narrow = (*ids.shape[:axis], *([1] * grown), *ids.shape[axis + 1 :])
        ids, copies = ids.reshape(narrow), copies.reshape(narrow)
    picked = range(axes[0], axes[0] + grown) if len(axes) == 1 else axes
    fresh = combine(np.broadcast_to(copies, shape), coordinates(shape, picked), v.salt)
    v.set(Labels(np.broadcast_to(ids, shape), fresh))


def _table(v: Visit) -> None:
    """Rows of a constant: channels on its last axis."""
    rank = len(v.shape_of_constant(0))
    if rank == 0 or v.output_shape()[-1] != v.shape_of_constant(0)[-1] or v.output_shape()[-1] == 1:
        v.opaque()
        return
    v.source("table", axes=[-1], operand=0, operand_axis=rank - 1)


def _select(v: Visit) -> None:
    rank = len(v.shape_of_constant(0))
    if len(v.output_shape()) < 2:
        v.opaque()
        return
    v.graph.selected[v.node.outputs[0]] = Selected(v.node, 0, (rank - 2, rank - 1))


def passed_selection(v: Visit) -> bool:
    """Weights picked at run time pass Transpose of their matrix axes, Unsqueeze in front, Cast, Identity."""
    value = v.value(0)
    chosen = None if value is None else v.graph.selected.get(value)
    if chosen is None:
        return False
    op = v.node.op_type
    if op in ("Identity", "Cast"):
        seen = v.graph.probe.seen(v.node.outputs[0])
        if seen is None or not seen.is_float or v.node.outputs[0].dtype not in (*FLOATS, None):
            return False
    elif op == "Transpose":
        order = v.integers("perm") or []
        rank = len(order)
        if sorted(order[-2:]) != [rank - 2, rank - 1]:
            return False
        if order[-1] == rank - 2:
            chosen = Selected(chosen.node, chosen.operand, (chosen.axes[1], chosen.axes[0]))
    elif op in ("Unsqueeze", "Reshape", "Squeeze"):
        before, after = v.shape(0), v.output_shape()
        if before is None or before[-2:] != after[-2:]:
            return False
    else:
        return False
    v.graph.selected[v.node.outputs[0]] = chosen
    return True
