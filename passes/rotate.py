"""Put one rotation of the plan into the weights it names. Shared by the two rotation passes."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphrot.analysis.types import WeightUse
from graphrot.folded import Rotate, edit_operand
from graphrot.graph import node_of, value_map
from graphrot.passes.base import record_provenance
from graphrot.passes.fold_gains import SHIFT_BIAS
from graphrot.plan.types import Rotation


def rotate_operands(
    model: ir.Model, rotation: Rotation, values: Mapping[str, ir.Value], names: set[str]
) -> list[str]:
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
        edit_operand(model, node, use.input, Rotate(use.axis, use.groups, rotation.matrix), names)
        record_provenance(node, rotation.space.id)
        changed.append(use.node)
    for use in rotation.space.producers:
        _rotate_shift(model, rotation, use, values, names)
    return changed


def _rotate_shift(
    model: ir.Model, rotation: Rotation, use: WeightUse, values: Mapping[str, ir.Value], names: set[str]
) -> None:
    """A bias that a folded shift put behind this producer lives in the same basis."""
    added = node_of(values, use.node).meta.get(SHIFT_BIAS)
    if use.role != "weight" or added is None:
        return
    add = node_of(value_map(model), added)
    edit_operand(model, add, 1, Rotate(0, use.groups, rotation.matrix), names)
