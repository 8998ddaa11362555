"""Put nodes into a graph that stands already: fresh names, shared constants, operators as old opsets have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphrot.graph import add_initializer, iter_values, unique_name

MICROSOFT = "com.microsoft"
_AXES_ARE_INPUTS = 13
"""From this opset on Split, Unsqueeze and ReduceSum take sizes and axes as inputs."""


class Rewriter:
    """Inserts nodes in front of others. What it makes is named after the first output of the node that it makes
    way for.

    Args:
        model: its main graph is changed.
        prefix: begins the names of new constants.
    """

    def __init__(self, model: ir.Model, prefix: str) -> None:
        self.model = model
        self.opset = opset_of(model)
        self._names = {value.name for value in iter_values(model) if value.name}
        self._names |= {node.name for node in model.graph if node.name}
        self._prefix = prefix
        self._constants: dict[tuple[int, ...] | int, ir.Value] = {}

    def constant(self, numbers: tuple[int, ...] | int) -> ir.Value:
        """Integers as an initializer (int64); equal ones are one."""
        if numbers not in self._constants:
            content = np.asarray(numbers, dtype=np.int64)
            name = f"{self._prefix}_" + "_".join(str(n) for n in content.reshape(-1).tolist())
            self._constants[numbers] = add_initializer(self.model, unique_name(self._names, name), content)
        return self._constants[numbers]

    def number(self, content: float, name: str, dtype: ir.DataType) -> ir.Value:
        """A scalar as an initializer of its own."""
        return add_initializer(self.model, unique_name(self._names, name), np.asarray(content, dtype.numpy()))

    def op(
        self,
        before: ir.Node,
        op_type: str,
        operands: Sequence[ir.Value | None],
        label: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
    ) -> ir.Value:
        """Insert a node with one output in front of ``before``; returns the output."""
        return self.ops(before, op_type, operands, [label], attributes, domain=domain)[0]

    def ops(
        self,
        before: ir.Node,
        op_type: str,
        operands: Sequence[ir.Value | None],
        labels: Sequence[str],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """Insert a node with an output for each label."""
        base = next((output.name for output in before.outputs if output.name), before.name)
        given = list(operands)
        while given and given[-1] is None:
            given.pop()
        node = ir.node(
            op_type,
            given,
            dict(attributes or {}),
            domain=domain,
            num_outputs=len(labels),
            name=unique_name(self._names, f"{base}.{labels[0]}.node"),
        )
        for output, label in zip(node.outputs, labels, strict=True):
            output.name = unique_name(self._names, f"{base}.{label}")
        self.model.graph.insert_before(before, node)
        return node.outputs

    def split(
        self, before: ir.Node, value: ir.Value, sizes: Sequence[int], labels: Sequence[str], axis: int
    ) -> Sequence[ir.Value]:
        """Parts of known sizes along ``axis``."""
        if self.opset >= _AXES_ARE_INPUTS:
            return self.ops(before, "Split", [value, self.constant(tuple(sizes))], labels, {"axis": axis})
        return self.ops(before, "Split", [value], labels, {"axis": axis, "split": list(sizes)})

    def along(
        self, before: ir.Node, op_type: str, value: ir.Value, axis: int, label: str, **attributes: int
    ) -> ir.Value:
        """Unsqueeze, Squeeze or ReduceSum along one axis."""
        if self.opset >= _AXES_ARE_INPUTS:
            return self.op(before, op_type, [value, self.constant((axis,))], label, attributes)
        return self.op(before, op_type, [value], label, {"axes": [axis], **attributes})

    def replace(self, node: ir.Node, made: Mapping[int, ir.Value]) -> None:
        """Put new values in the place of outputs of ``node``, under their names, and take the node out.

        Args:
            node: in the main graph; outputs that are not in ``made`` are read by nothing.
            made: position of an output -> what it is now.
        """
        for position, value in made.items():
            old = node.outputs[position]
            name = old.name
            value.type, value.shape = old.type, old.shape
            old.replace_all_uses_with(value, replace_graph_outputs=True)
            old.name = None
            value.name = name
        self.model.graph.remove(node, safe=True)


def opset_of(model: ir.Model) -> int:
    """The version of the standard operators."""
    return max(model.opset_imports.get("", 0), model.opset_imports.get("ai.onnx", 0))


def operand(node: ir.Node, position: int) -> ir.Value | None:
    """An input, None where it is left out."""
    return node.inputs[position] if position < len(node.inputs) else None


def is_read(node: ir.Node, position: int) -> bool:
    """Whether an output is there and used."""
    if position >= len(node.outputs):
        return False
    output = node.outputs[position]
    return bool(output.name) and (bool(output.uses()) or output.is_graph_output())


def integer(node: ir.Node, name: str, default: int = 0) -> int:
    """An attribute."""
    return node.attributes[name].as_int() if name in node.attributes else default


def kept(node: ir.Node, *names: str) -> dict[str, ir.Attr]:
    """Those of the named attributes that the node has."""
    return {name: node.attributes[name] for name in names if name in node.attributes}
