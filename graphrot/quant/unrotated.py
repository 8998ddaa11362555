"""What a linear's rounding error would have been without rotation: the same solver, grid and measure in the old basis.

A rotated weight ``W' = E W`` remembers the source's ``W`` and the edits along its input channels, which are the
matrix ``E`` (gains times rotations). Its inputs are the source's in another basis: from ``x' W' = x W`` follows
``x = x' E``, and ``x = x' E + b`` where a norm's shift ``b`` was folded away. So the second moment of the source's
inputs follows from the one that was collected, without a division by gains that may be near zero,

    X.T X = E.T X'.T X' E + (s E).T b + b.T (s E) + n b.T b,    s the sum of the n rows of X'.

Both errors are thus taken on the same activations, those of the quantized model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import GainFold, LinearRef, decode_runs
from graphrot.folded import FoldedTensor, Rotate, Scale, exact_numbers, origin
from graphrot.graph import value_map
from graphrot.quant.gptq import gptq_many
from graphrot.quant.grid import Grids, QuantizedTensor, grid_of
from graphrot.quant.hessian import SecondMoment


@dataclass(frozen=True)
class SourceWeight:
    """The weight of a linear before gains and rotations.

    Args:
        numbers: ``[N, K]``, in the source's float type.
        edits: what was done along the K input channels, in order.
    """

    numbers: np.ndarray
    edits: tuple[Scale | Rotate, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for weights whose inputs changed in the same way."""
        return tuple(edit.transposed(0).key for edit in self.edits)

    def back(self, inputs: np.ndarray, axis: int) -> np.ndarray:
        """Inputs of the rotated weight, along ``axis``, in the source's basis: ``x' E``, in float64."""
        return undo(self.edits, inputs, axis)


def undo(edits: Sequence[Scale | Rotate], inputs: np.ndarray, axis: int) -> np.ndarray:
    """Inputs along ``axis`` of a weight that was made by ``edits`` along its own, as they were before: ``x' E``."""
    for edit in reversed(edits):
        inputs = edit.transposed(axis).apply(inputs)
    return inputs


def source_weight(value: ir.Value, linear: LinearRef) -> SourceWeight | None:
    """The source's weight of a linear whose weight is ``value`` now; None if no pass has touched it.

    Raises:
        ValueError: an edit is no scale and no rotation.
    """
    content = origin(value)
    edits = input_edits(value, linear)
    if content is None or edits is None:
        return None
    numbers = _numbers(content)
    return SourceWeight(numbers.T if _input_axis(linear) == 0 else numbers, edits)


def input_edits(value: ir.Value, linear: LinearRef) -> tuple[Scale | Rotate, ...] | None:
    """What was done along the input channels of a linear's weight, in order; as :func:`source_weight`, without numbers.

    Raises:
        ValueError: an edit is no scale and no rotation.
    """
    content = origin(value)
    if content is None:
        return None
    axis = _input_axis(linear)
    edits: list[Scale | Rotate] = []
    for edit in content.edits:
        if edit.axis != axis:
            continue
        if not isinstance(edit, Scale | Rotate):
            raise ValueError(f"{edit} on the input channels of {value.name!r} has no transposed map")
        edits.append(edit)
    return tuple(edits)


def _input_axis(linear: LinearRef) -> int:
    return 0 if linear.layout == "KN" else 1


def source_table(value: ir.Value) -> np.ndarray | None:
    """The numbers of an operand before any pass; None if none has touched it."""
    content = origin(value)
    return None if content is None else _numbers(content)


def _numbers(content: FoldedTensor) -> np.ndarray:
    """A copy; the file behind them is unmapped again."""
    numbers = np.array(content.base.numpy(), order="C")
    if isinstance(content.base, ir.ExternalTensor):
        with contextlib.suppress(BufferError):
            content.base.release()
    return numbers


def source_moment(moment: SecondMoment, weight: SourceWeight, shift: np.ndarray | None) -> np.ndarray:
    """``X.T X [K, K]`` of the source's inputs ``X = X' E + b``.

    Args:
        moment: of ``X'``.
        weight: knows ``E``.
        shift: ``b [K]``, or None.
    """
    result = weight.back(weight.back(moment.matrix, 1), 0)
    if shift is not None:
        cross = np.outer(weight.back(moment.total, 0), shift)
        result = result + cross + cross.T + moment.tokens * np.outer(shift, shift)
    return result


def source_shifts(folds: Sequence[GainFold], source: ir.Model, linears: Sequence[LinearRef]) -> dict[str, np.ndarray]:
    """The shifts that were folded out of the inputs of linears, ``[K]`` float64 by node.

    Args:
        folds: in the order in which they were made, from a linear's own outwards.
        source: the model that they were made in.
        linears: its linears. (A gain may also have moved backward, into output channels: that is no shift.)
    """
    axes = {linear.node: _input_axis(linear) for linear in linears}
    values = value_map(source)
    shifts: dict[str, np.ndarray] = {}
    scales: dict[str, np.ndarray] = {}
    for fold in folds:
        gain = exact_numbers(values[fold.gain]).reshape(-1)
        shift = None if fold.shift is None else exact_numbers(values[fold.shift]).reshape(-1)
        for consumer in fold.consumers:
            node, index = consumer.use.node, np.asarray(decode_runs(consumer.index))
            if axes.get(node) != consumer.use.axis or consumer.use.role != "weight":
                continue
            scale = scales.get(node, np.ones(index.size))
            if shift is not None:
                shifts[node] = shifts.get(node, np.zeros(index.size)) + scale * _spread(shift, index)
            scales[node] = scale * _spread(gain, index)
    return shifts


def _spread(numbers: np.ndarray, index: np.ndarray) -> np.ndarray:
    return numbers[index] if numbers.size > 1 else np.repeat(numbers, index.size)


def gptq_errors(
    linears: Sequence[LinearRef],
    values: Mapping[str, ir.Value],
    moment: SecondMoment,
    tensors: Sequence[QuantizedTensor],
    grid: Grids,
    shifts: Mapping[str, np.ndarray],
) -> list[float]:
    """The errors that GPTQ leaves on the source's weights of linears that read one tensor.

    Args:
        linears: the group.
        values: name -> value of the rotated model.
        moment: of the group's inputs, rotated.
        tensors: the group's solved weights; a linear that no pass has touched has their error.
        grid: the grid of all, or of each by its node.
        shifts: see :func:`source_shifts`.
    """
    errors = [tensor.error for tensor in tensors]
    together: dict[tuple[object, ...], list[tuple[int, SourceWeight]]] = {}
    for position, linear in enumerate(linears):
        found = source_weight(values[linear.weight], linear)
        if found is not None:
            shift = shifts.get(linear.node)
            key = (*found.key, None if shift is None else shift.tobytes())
            together.setdefault(key, []).append((position, found))
    for members in together.values():
        shift = shifts.get(linears[members[0][0]].node)
        matrix = source_moment(moment, members[0][1], shift)
        grids = [grid_of(grid, linears[position].node) for position, _ in members]
        solved = gptq_many([found.numbers for _, found in members], matrix, grids)
        for (position, _), tensor in zip(members, solved, strict=True):
            errors[position] = tensor.error
    return errors
