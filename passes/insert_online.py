"""Put the online rotations (R3, R4) in as ``graphrot::HadamardTransform`` and fold their inverses.

The transform and its folded inverse are one decision and one pass: a model with only one of them
answers nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphrot.analysis.types import decode_runs
from graphrot.errors import InputRefused
from graphrot.folded import used_names
from graphrot.graph import unique_name, value_map
from graphrot.ops.hadamard import ensure_function, hadamard_node
from graphrot.passes.base import GraphPass, record_provenance
from graphrot.passes.rotate import rotate_operands
from graphrot.plan.types import Rotation


class InsertOnline(GraphPass):
    """For every online rotation of the plan: transform the run-time tensors, rotate the operands.

    Where a contraction (q.k) joins two transformed tensors the rotation cancels by itself and there
    is nothing to fold (QuaRot, section 4.2, arXiv:2404.00456).
    """

    def apply(self, model: ir.Model, done: set[str]) -> None:
        names, values = used_names(model), value_map(model)
        inserted = False
        for rotation in self.plan.rotations:
            if rotation.placement != "online":
                continue
            if rotation.space.id in done:
                self.report.skipped.append((rotation.space.id, "inserted already"))
                continue
            self._check(values, rotation)
            for use in rotation.space.online:
                self._insert(model, values[use.tensor], rotation, names)
                inserted = True
            self.report.changed += [use.tensor for use in rotation.space.online]
            self.report.changed += rotate_operands(model, rotation, values, names)
            done.add(rotation.space.id)
        if inserted:
            ensure_function(model)

    def _check(self, values: Mapping[str, ir.Value], rotation: Rotation) -> None:
        for use in rotation.space.online:
            expected = [
                list(range(start, start + rotation.matrix.dim)) for start in range(0, use.width, rotation.matrix.dim)
            ]
            if sorted(decode_runs(group) for group in use.groups) != expected:
                raise InputRefused(
                    "An online rotation needs blocks that tile the last axis in order",
                    where=f"tensor {use.tensor!r}, made by {use.op}",
                    do="leave this site out with --only",
                )
            if use.tensor not in values or values[use.tensor].producer() is None:
                raise InputRefused(
                    "The plan names a tensor that this model does not have",
                    where=f"tensor {use.tensor!r}",
                    do="make the plan again from this model",
                )

    def _insert(self, model: ir.Model, value: ir.Value, rotation: Rotation, names: set[str]) -> None:
        producer = value.producer()
        assert producer is not None
        node = hadamard_node(value, rotation.matrix, unique_name(names, f"{value.name}__hadamard"))
        for user, index in list(value.uses()):
            if user is not node:
                user.replace_input_with(index, node.outputs[0])
        record_provenance(node, rotation.space.id)
        model.graph.insert_after(producer, node)
