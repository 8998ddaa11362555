"""Function bodies: nodes in standard operators that refer to the attributes of the calling node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

_FORMS = {
    ir.AttributeType.INT: "value_int",
    ir.AttributeType.INTS: "value_ints",
    ir.AttributeType.FLOAT: "value_float",
    ir.AttributeType.TENSOR: "value",
}
"""The attribute of Constant that holds a value of each type."""


class FunctionBody:
    """Collects the nodes of a function body, or of a branch in one.

    Args:
        attributes: the names and types of the function's attributes.
        prefix: in front of all names, for branches: they see the names around them.
    """

    def __init__(self, attributes: Mapping[str, ir.AttributeType], prefix: str = "") -> None:
        self.nodes: list[ir.Node] = []
        self._attributes = attributes
        self._prefix = prefix

    def add(
        self,
        op_type: str,
        name: str,
        inputs: Sequence[ir.Value | None],
        attributes: Sequence[ir.Attr] = (),
        *,
        domain: str = "",
    ) -> ir.Value:
        """A node; returns its output, which gets this name."""
        output = ir.Value(name=f"{self._prefix}{name}")
        self.nodes.append(ir.Node(domain, op_type, inputs, attributes, outputs=[output]))
        return output

    def reference(self, to: str, name: str | None = None) -> ir.Attr:
        """The attribute ``name`` of an inner node that has the value of the calling node's attribute ``to``."""
        return ir.RefAttr(name or to, to, self._attributes[to])

    def attribute(self, name: str) -> ir.Value:
        """A Constant whose value is the attribute ``name`` of the calling node."""
        form = _FORMS[self._attributes[name]]
        return self.add("Constant", name, [], [self.reference(name, form)])

    def constant(self, numbers: np.ndarray, name: str) -> ir.Value:
        return self.add("Constant", name, [], [ir.AttrTensor("value", ir.tensor(numbers))])

    def cast(self, value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
        return self.add("Cast", name, [value], [ir.AttrInt64("to", int(dtype))])

    def choose(
        self,
        name: str,
        condition: ir.Value,
        then: Callable[[FunctionBody], ir.Value],
        otherwise: Callable[[FunctionBody], ir.Value],
    ) -> ir.Value:
        """An If; runtimes that know the condition when they load the model keep one branch only."""
        branches = []
        for key, make in (("then_branch", then), ("else_branch", otherwise)):
            branch = FunctionBody(self._attributes, f"{self._prefix}{name}_{key[:4]}_")
            output = make(branch)
            branches.append(ir.AttrGraph(key, ir.Graph([], [output], nodes=branch.nodes, name=f"{name}_{key}")))
        return self.add("If", name, [condition], branches)
