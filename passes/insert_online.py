"""Put the online rotations in as ``graphrot::HadamardTransform`` and fold their inverses.

The transforms and the folded (or, at the ends of a stream, inserted) inverses are one decision and one pass: a model
with only one of them answers nonsense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from graphrot.analysis.norms import NORM_OPS
from graphrot.analysis.types import OnlineExit, OnlineUse, decode_runs, places
from graphrot.errors import InputRefused
from graphrot.folded import used_names
from graphrot.graph import RENAMED, add_initializer, node_of, unique_name, value_map
from graphrot.ops.hadamard import ensure_function, hadamard_node
from graphrot.passes.base import GraphPass, record_provenance
from graphrot.passes.rotate import rotate_operands
from graphrot.passes.split_gains import SCALED, behind_gain
from graphrot.plan.types import Rotation
from graphrot.rotation.orthogonal import random_signs


class InsertOnline(GraphPass):
    """For every online rotation of the plan: transform the run-time tensors, rotate the operands.

    Where a contraction (q.k) joins two transformed tensors the rotation cancels by itself and there
    is nothing to fold (QuaRot, section 4.2, arXiv:2404.00456). Random signs (R1) stand in front of the transform as a
    product by a constant; where a stream is left, the inverse transform stands in front of the signs.

    A linear behind merged heads may take up two inverses, ``H.T Q.T W``: that of R2, whose matrix meets the
    values first, and that of O, which stands behind it. So transforms across heads come last, in whichever
    order a plan names them.
    """

    def apply(self, model: ir.Model, done: set[str]) -> None:
        names, values = used_names(model), value_map(model)
        inserted = False
        for rotation in sorted(self.plan.rotations, key=lambda r: r.space.kind == "O"):
            if rotation.placement != "online":
                continue
            if rotation.space.id in done:
                self.report.skipped.append((rotation.space.id, "inserted already"))
                continue
            self._check(values, rotation)
            transform = _Transform(model, rotation, names)
            for end in rotation.space.exits:
                transform.leave(values, end)
            for use in rotation.space.online:
                transform.enter(_present(model, use.tensor), use)
            inserted = inserted or bool(rotation.space.exits or rotation.space.online)
            self.report.changed += places(rotation.space)
            self.report.changed += rotate_operands(model, rotation, values, names)
            done.add(rotation.space.id)
        if inserted:
            ensure_function(model)

    def _check(self, values: Mapping[str, ir.Value], rotation: Rotation) -> None:
        places: list[OnlineUse | OnlineExit] = [*rotation.space.online, *rotation.space.exits]
        for place in places:
            expected = [
                list(range(start, start + rotation.matrix.dim)) for start in range(0, place.width, rotation.matrix.dim)
            ]
            if sorted(decode_runs(group) for group in place.groups) != expected:
                raise InputRefused(
                    "An online rotation needs blocks that tile the last axis in order",
                    where=f"tensor {place.tensor!r}, made by {place.op}",
                    do="leave this site out with --only",
                )
            if place.tensor not in values:
                raise InputRefused(
                    "The plan names a tensor that this model does not have",
                    where=f"tensor {place.tensor!r}",
                    do="make the plan again from this model",
                )


def _present(model: ir.Model, tensor: str) -> ir.Value:
    value = behind_gain(model, tensor)
    assert value is not None, tensor
    return value


class _Transform:
    """Inserts one rotation's transforms."""

    def __init__(self, model: ir.Model, rotation: Rotation, names: set[str]) -> None:
        self._model = model
        self._rotation = rotation
        self._names = names
        self._plain = replace(rotation.matrix, seed=None)
        self._signs: dict[int, ir.Value] = {}

    def enter(self, value: ir.Value, use: OnlineUse) -> None:
        """From ``value`` on, all readers get the rotated tensor."""
        users = list(value.uses())
        nodes: list[ir.Node] = []
        data = value
        if self._rotation.matrix.seed is not None:
            nodes.append(self._times_signs(data, f"{value.name}__signed", use.width))
            data = nodes[-1].outputs[0]
        nodes.append(self._hadamard(data, f"{value.name}__hadamard", transpose=False))
        for user, index in users:
            user.replace_input_with(index, nodes[-1].outputs[0])
        self._insert(value, nodes)

    def leave(self, values: Mapping[str, ir.Value], end: OnlineExit) -> None:
        """The readers that the exit names get the tensor in its own basis."""
        value = values[end.tensor] if end.node else _present(self._model, end.tensor)
        nodes = [self._hadamard(value, f"{value.name}__back", transpose=True)]
        if self._rotation.matrix.seed is not None:
            nodes.append(self._times_signs(nodes[-1].outputs[0], f"{value.name}__unsigned", end.width))
        result = nodes[-1].outputs[0]
        if not end.node:
            self._rename(value, result)
        elif end.op in NORM_OPS:
            value.replace_all_uses_with(result)
            nodes[0].replace_input_with(0, value)
        else:
            reader = node_of(values, end.node)
            for index, operand in enumerate(reader.inputs):
                if operand is value:
                    reader.replace_input_with(index, result)
        self._insert(value, nodes)

    def _rename(self, value: ir.Value, result: ir.Value) -> None:
        """The graph output keeps its name, so the rotated tensor behind it takes another one."""
        name = value.name
        assert name is not None
        result.name, value.name = name, unique_name(self._names, f"{name}__rotated")
        scaled: dict[str, str] = self._model.meta.setdefault(SCALED, {})
        if name in scaled.values():
            scaled.update({norm: value.name for norm, product in scaled.items() if product == name})
        else:
            self._model.meta.setdefault(RENAMED, {})[name] = value.name
        outputs = self._model.graph.outputs
        for index, output in enumerate(outputs):
            if output is value:
                outputs[index] = result

    def _hadamard(self, value: ir.Value, name: str, *, transpose: bool) -> ir.Node:
        node = hadamard_node(value, self._plain, unique_name(self._names, name), transpose=transpose)
        record_provenance(node, self._rotation.space.id)
        return node

    def _times_signs(self, value: ir.Value, name: str, width: int) -> ir.Node:
        node = ir.node("Mul", [value, self._signs_for(width)], name=unique_name(self._names, name))
        output = node.outputs[0]
        output.name, output.type, output.shape = node.name, value.type, value.shape
        record_provenance(node, self._rotation.space.id)
        return node

    def _signs_for(self, width: int) -> ir.Value:
        matrix = self._rotation.matrix
        if width not in self._signs:
            assert matrix.seed is not None
            signs = np.tile(random_signs(matrix.dim, matrix.seed), width // matrix.dim)
            name = unique_name(self._names, f"{self._rotation.space.id}__signs")
            self._signs[width] = add_initializer(self._model, name, signs.astype(self._dtype()))
        return self._signs[width]

    def _dtype(self) -> np.dtype:
        """The float type of the weights that the stream meets."""
        use = (*self._rotation.space.consumers, *self._rotation.space.producers)[0]
        operand = node_of(value_map(self._model), use.node).inputs[use.input]
        assert operand is not None
        tensor = operand.const_value
        return np.dtype(np.float32) if tensor is None else tensor.dtype.numpy()

    def _insert(self, value: ir.Value, nodes: Iterable[ir.Node]) -> None:
        producer = value.producer()
        if producer is None:
            self._model.graph.insert_before(self._model.graph[0], nodes)
        else:
            self._model.graph.insert_after(producer, nodes)
