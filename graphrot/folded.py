"""Weights with pending edits: every pass adds to the list, numbers are made once, in float64.

A weight that takes a gain, then R1 on one side and R2 on the other would be rounded three times if
each pass wrote numbers. A :class:`FoldedTensor` keeps the original (memory-mapped) tensor and the
edits instead; reading it applies all of them in float64 and casts once. A weight that was written as
float32 remembers its edits (:func:`rounded_numbers`), so that a half type is one cast away from float64 too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import Runs, decode_runs
from graphrot.errors import InputRefused
from graphrot.graph import (
    WeightStore,
    add_initializer,
    drop_dead_constant,
    is_constant,
    iter_values,
    plain_shape,
    read_constant,
    unique_name,
)
from graphrot.plan.types import MatrixRef
from graphrot.progress import Progress, silent
from graphrot.rotation.orthogonal import build_matrix

_CHUNK = 4_000_000
"""Elements of a weight that are worked on at once (32 MB of float64)."""


_EDITS = "graphrot.edits"
"""``tensor.meta`` key of a written weight: the :class:`FoldedTensor` that its numbers come from."""


class Edit(Protocol):
    """One linear change of an operand along ``axis``; ``key`` is equal for equal edits."""

    @property
    def axis(self) -> int: ...

    @property
    def key(self) -> tuple[object, ...]: ...

    def apply(self, array: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class Scale:
    """Multiply position ``i`` of ``axis`` by ``factors[i]`` (float64)."""

    axis: int
    factors: tuple[float, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return ("scale", self.axis, self.factors)

    def apply(self, array: np.ndarray) -> np.ndarray:
        shape = [1] * array.ndim
        shape[self.axis] = len(self.factors)
        return array * np.asarray(self.factors, dtype=np.float64).reshape(shape)

    def transposed(self, axis: int) -> Scale:
        """The transposed map, along another axis."""
        return replace(self, axis=axis)


@dataclass(frozen=True)
class Shift:
    """Add ``values[i]`` (float64) to position ``i`` of ``axis``: a bias takes up a folded shift."""

    axis: int
    values: tuple[float, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return ("shift", self.axis, self.values)

    def apply(self, array: np.ndarray) -> np.ndarray:
        shape = [1] * array.ndim
        shape[self.axis] = len(self.values)
        return array + np.asarray(self.values, dtype=np.float64).reshape(shape)


@dataclass(frozen=True)
class Rotate:
    """``v <- v @ Q`` for each vector formed by a group of positions along ``axis``.

    This serves producers (``W @ Q``) and consumers (``Q.T @ W``) alike. ``inverse`` undoes it.
    """

    axis: int
    groups: tuple[Runs, ...]
    matrix: MatrixRef
    inverse: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        return ("rotate", self.axis, self.groups, self.matrix, self.inverse)

    def apply(self, array: np.ndarray) -> np.ndarray:
        index = np.asarray([decode_runs(group) for group in self.groups], dtype=np.int64)
        if np.unique(index).size != index.size:
            raise InputRefused("A channel stands in two blocks of one rotation", where=f"axis {self.axis}")
        matrix = build_matrix(self.matrix)
        rotate = matrix.rotate_back if self.inverse else matrix.rotate
        moved = np.moveaxis(array, self.axis, -1)
        if index.size == moved.shape[-1] and np.array_equal(index.reshape(-1), np.arange(index.size)):
            # The blocks tile the axis in order, as nearly always: no channel has to be picked.
            result = rotate(moved.reshape(*moved.shape[:-1], *index.shape), -1).reshape(moved.shape)
        else:
            result = np.array(moved, dtype=np.float64, order="C")
            result[..., index] = rotate(moved[..., index], -1)
        return np.moveaxis(result, -1, self.axis)

    def transposed(self, axis: int) -> Rotate:
        """The transposed map, along another axis."""
        return replace(self, axis=axis, inverse=not self.inverse)


@dataclass(frozen=True)
class Center:
    """``v <- v - mean(v)`` for each vector formed by a group of positions along ``axis``.

    On a producer this is ``W @ (I - 1 1^T / n)``: what it makes has no mean any more.
    """

    axis: int
    groups: tuple[Runs, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return ("center", self.axis, self.groups)

    def apply(self, array: np.ndarray) -> np.ndarray:
        result = np.moveaxis(np.array(array, dtype=np.float64), self.axis, -1)
        for group in self.groups:
            index = decode_runs(group)
            part = result[..., index]
            result[..., index] = part - part.mean(axis=-1, keepdims=True)
        return np.moveaxis(result, -1, self.axis)


class FoldedTensor(ir.LazyTensor):
    """A tensor made from ``base`` by ``edits``, in float64, with one cast at the end."""

    def __init__(self, base: ir.TensorProtocol, edits: tuple[Edit, ...], name: str) -> None:
        self.base = base
        self.edits = edits
        super().__init__(self._make, base.dtype, plain_shape(base), cache=False, name=name)

    def _make(self) -> ir.TensorProtocol:
        return ir.tensor(self.rounded(self.dtype), dtype=self.dtype, name=self.name)

    def rounded(self, dtype: ir.DataType) -> np.ndarray:
        """The numbers in a float type, rounded once, from float64."""
        source = self.base.numpy()
        result = np.empty(source.shape, dtype=dtype.numpy())
        for part in _parts(source.shape, {edit.axis for edit in self.edits}):
            work = source[part].astype(np.float64)
            for edit in self.edits:
                work = edit.apply(work)
            result[part] = round_once(work, dtype)
        return result

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for tensors that are made from the same base by the same edits."""
        return (id(self.base), *(edit.key for edit in self.edits))

    def exact(self, part: tuple[slice, ...] = ()) -> np.ndarray:
        """The numbers in float64, before the cast; ``part`` may cut along axes that no edit touches."""
        work = self.base.numpy()[part].astype(np.float64)
        for edit in self.edits:
            work = edit.apply(work)
        return work


def _parts(shape: tuple[int, ...], edited: set[int]) -> Iterator[tuple[slice, ...]]:
    """Cut along an axis that no edit touches, so that the float64 work stays small."""
    free = [axis for axis in range(len(shape)) if axis not in edited and shape[axis] > 1]
    if not free:
        yield (slice(None),) * len(shape)
        return
    axis = max(free, key=lambda a: shape[a])
    size = int(np.prod(shape, dtype=np.int64))
    step = max(1, _CHUNK * shape[axis] // max(size, 1))
    for start in range(0, shape[axis], step):
        yield (slice(None),) * axis + (slice(start, start + step),)


def round_once(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """Cast floats to a float type with one rounding, to nearest, ties to even; too large numbers become inf.

    NumPy casts float64 to float16 in one step, but ml_dtypes goes to bfloat16 by float32. That first
    rounding is made towards odd here, which keeps on which side of a tie a number lies.
    """
    with np.errstate(over="ignore", under="ignore"):
        if dtype != ir.DataType.BFLOAT16 or array.dtype != np.float64:
            return array.astype(dtype.numpy(), copy=False)
        single = array.astype(np.float32)
        back = single.astype(np.float64)
        inexact = (back != array) & np.isfinite(array) & np.isfinite(single)
        single = np.where(inexact & (np.abs(back) > np.abs(array)), np.nextafter(single, np.float32(0)), single)
        bits = single.view(np.uint32) | inexact.astype(np.uint32)
        return np.asarray(bits.view(np.float32).astype(dtype.numpy()))


def origin(value: ir.Value) -> FoldedTensor | None:
    """The original tensor and the edits that a weight is made by, pending or written; None for an untouched one."""
    content = value.const_value
    if content is not None and not isinstance(content, FoldedTensor):
        content = content.meta.get(_EDITS)
    return content if isinstance(content, FoldedTensor) else None


def rounded_numbers(tensor: ir.TensorProtocol, dtype: ir.DataType) -> np.ndarray:
    """The numbers of a weight in another float type; those of a rotated one straight from float64."""
    content = tensor if isinstance(tensor, FoldedTensor) else tensor.meta.get(_EDITS)
    if isinstance(content, FoldedTensor):
        return content.rounded(dtype)
    return round_once(tensor.numpy(), dtype)


def exact_numbers(value: ir.Value) -> np.ndarray:
    """A constant operand in float64; pending edits are applied without an intermediate cast."""
    if isinstance(value.const_value, FoldedTensor):
        return value.const_value.exact()
    return read_constant(value).astype(np.float64)


def exact_sample(value: ir.Value, axis: int, *, count: int = 257) -> np.ndarray:
    """About ``count`` evenly spaced slices along ``axis`` (which no edit may touch), in float64."""
    content = value.const_value
    folded = content if isinstance(content, FoldedTensor) else None
    numbers = folded.base.numpy() if folded is not None else read_constant(value)
    step = max(1, numbers.shape[axis] // count)
    part = (slice(None),) * axis + (slice(None, None, step),)
    return folded.exact(part) if folded is not None else numbers[part].astype(np.float64)


def edit_operand(model: ir.Model, node: ir.Node, index: int, edit: Edit, names: set[str]) -> ir.Value:
    """Give ``node`` a new operand with one more edit. The old one stays for its other users.

    Args:
        model: the model that owns ``node``.
        index: which input of ``node``.
        edit: the change.
        names: all value names in use; the new name is added.

    Returns:
        The new initializer's value.

    Raises:
        InputRefused: the operand is not constant.
    """
    value = node.inputs[index]
    if value is None or not is_constant(value):
        raise InputRefused(
            "A weight was expected to be constant and is computed at run time",
            where=f"input {index} of the {node.op_type} that makes {node.outputs[0].name!r}",
        )
    content = value.const_value
    if isinstance(content, FoldedTensor):
        base, edits = content.base, content.edits
    else:
        base = content if content is not None else ir.tensor(np.asarray(read_constant(value), order="C"))
        edits = ()
    name = unique_name(names, f"{(value.name or 'weight').partition('__rot')[0]}__rot")
    fresh = add_initializer(model, name, FoldedTensor(base, (*edits, edit), name))
    node.replace_input_with(index, fresh)
    drop_dead_constant(model, value)
    return fresh


def materialize(model: ir.Model, store: WeightStore | None, *, progress: Progress = silent) -> int:
    """Turn every pending tensor into numbers; equal ones become one initializer.

    Args:
        model: changed in place.
        store: takes the numbers; None keeps them in memory (small models).
        progress: told after every tensor.

    Returns:
        How many tensors were written.
    """
    made: dict[tuple[object, ...], ir.Value] = {}
    pending = [(name, v) for name, v in model.graph.initializers.items() if isinstance(v.const_value, FoldedTensor)]
    for done, (name, value) in enumerate(pending):
        progress("rotating the weights", done, len(pending))
        content = value.const_value
        assert isinstance(content, FoldedTensor)
        twin = made.get(content.key)
        if twin is not None:
            value.replace_all_uses_with(twin)
            del model.graph.initializers[name]
            continue
        numbers = content.numpy()
        written = ir.tensor(numbers, name=name) if store is None else store.put(name, numbers, content.dtype)
        written.meta[_EDITS] = content
        value.const_value = written
        made[content.key] = value
    return len(made)


def used_names(model: ir.Model) -> set[str]:
    """All value names of the main graph."""
    return {value.name for value in iter_values(model) if value.name}
