"""Put one rotation of the plan into the weights it names. Shared by the two rotation passes."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphrot.analysis.types import WeightUse, decode_runs
from graphrot.errors import InputRefused
from graphrot.folded import Rotate, edit_operand
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
    changed: list[str] = []
    for use in (*rotation.space.producers, *rotation.space.consumers):
        node = node_of(values, use.node)
        _check(node, use)
        edit_operand(model, node, use.input, Rotate(use.axis, use.groups, rotation.matrix), names)
        record_provenance(node, rotation.space.id)
        changed.append(use.node)
    planned = {(use.node, use.input) for use in rotation.space.producers}
    for use in rotation.space.producers:
        _rotate_shift(model, rotation, use, values, planned, names)
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


def _rotate_shift(
    model: ir.Model,
    rotation: Rotation,
    use: WeightUse,
    values: Mapping[str, ir.Value],
    planned: set[tuple[str, int]],
    names: set[str],
) -> None:
    """A folded shift in a bias that the plan does not list lives in the same basis as its matmul."""
    place: tuple[str, int] | None = node_of(values, use.node).meta.get(SHIFT_BIAS)
    if use.role != "weight" or place is None or place in planned:
        return
    name, index = place
    holder = next((o.producer() for n in model.graph for o in n.outputs if o.name == name), None)
    assert holder is not None
    edit_operand(model, holder, index, Rotate(0, use.groups, rotation.matrix), names)
