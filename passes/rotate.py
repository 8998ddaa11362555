"""Put one edit of the plan into the weights it names. Shared by the passes that rotate and that centre."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from graphrot.analysis.types import Runs, WeightUse, decode_runs
from graphrot.errors import InputRefused
from graphrot.folded import Edit, Rotate, edit_operand
from graphrot.graph import is_constant, node_of, read_constant
from graphrot.passes.base import record_provenance
from graphrot.passes.fold_gains import SHIFT_BIAS
from graphrot.plan.types import Rotation


def rotate_operands(model: ir.Model, rotation: Rotation, values: Mapping[str, ir.Value], names: set[str]) -> list[str]:
    """Edit all producers and consumers of a rotation.

    Args:
        model: changed in place.
        rotation: taken from the plan.
        values: the model's values by name, from before the pass.
        names: value names in use; extended.

    Returns:
        First outputs of the nodes whose operands changed.

    Raises:
        InputRefused: a node or operand that the plan names is not there, or is not constant.
    """

    def edit(axis: int, groups: tuple[Runs, ...]) -> Edit:
        return Rotate(axis, groups, rotation.matrix)

    space = rotation.space
    return edit_operands(model, space.id, edit, space.producers, space.consumers, values=values, names=names)


def edit_operands(
    model: ir.Model,
    item: str,
    edit: Callable[[int, tuple[Runs, ...]], Edit],
    producers: Sequence[WeightUse],
    consumers: Sequence[WeightUse] = (),
    *,
    values: Mapping[str, ir.Value],
    names: set[str],
) -> list[str]:
    """Make one kind of edit on operands, and on the shifts that were folded into biases of producers.

    Args:
        model: changed in place.
        item: the plan item that asks for it.
        edit: the edit for an axis and groups of positions along it.
        producers: operands whose outputs change.
        consumers: operands that read changed channels.
        values: the model's values by name, from before the pass.
        names: value names in use; extended.

    Returns:
        First outputs of the nodes whose operands changed.

    Raises:
        InputRefused: a node or operand that the plan names is not there, or is not constant.
    """
    changed: list[str] = []
    for use in (*producers, *consumers):
        node = node_of(values, use.node)
        _check(node, use)
        edit_operand(model, node, use.input, edit(use.axis, use.groups), names)
        record_provenance(node, item)
        changed.append(use.node)
    planned = {(use.node, use.input) for use in producers}
    for use in producers:
        shift = _shift_place(model, use, values, planned)
        if shift is not None:
            edit_operand(model, *shift, edit(0, use.groups), names)
    return changed


def _check(node: ir.Node, use: WeightUse) -> None:
    """The plan may come from a file: its numbers must fit the operand."""
    operand = node.inputs[use.input] if 0 <= use.input < len(node.inputs) else None
    shape = None if operand is None else _shape(operand)
    highest = max((max(decode_runs(group), default=-1) for group in use.groups), default=-1)
    if operand is None or shape is None or not 0 <= use.axis < len(shape) or highest >= shape[use.axis]:
        raise InputRefused(
            "The plan does not fit this model",
            where=f"input {use.input}, axis {use.axis} of the {node.op_type} that makes {use.node!r}",
            do="make the plan again from this model",
        )


def _shape(operand: ir.Value) -> tuple[int, ...] | None:
    if operand.const_value is not None:
        return tuple(int(d) for d in operand.const_value.shape.numpy())
    return read_constant(operand).shape if is_constant(operand) else None


def _shift_place(
    model: ir.Model, use: WeightUse, values: Mapping[str, ir.Value], planned: set[tuple[str, int]]
) -> tuple[ir.Node, int] | None:
    """A folded shift in a bias that the plan does not list lives in the same basis as its matmul."""
    place: tuple[str, int] | None = node_of(values, use.node).meta.get(SHIFT_BIAS)
    if use.role != "weight" or place is None or place in planned:
        return None
    name, index = place
    holder = next((o.producer() for n in model.graph for o in n.outputs if o.name == name), None)
    assert holder is not None
    return holder, index
