"""Bring references up to date after passes have renamed operands and bypassed nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import onnx_ir as ir

from graphrot.analysis.types import LinearRef
from graphrot.graph import node_of, value_map


def current_linears(model: ir.Model, linears: Iterable[LinearRef]) -> tuple[LinearRef, ...]:
    """The same linears with the names of node, weight, bias and input as ``model`` has them now.

    Raises:
        InputRefused: a linear is not in this model.
    """
    values = value_map(model)
    current: list[LinearRef] = []
    for linear in linears:
        node = node_of(values, linear.node)
        weight, data = node.inputs[linear.weight_input], node.inputs[1 - linear.weight_input]
        assert weight is not None and weight.name and data is not None and data.name
        bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
        current.append(
            replace(
                linear,
                node=node.outputs[0].name or linear.node,
                weight=weight.name,
                input=data.name,
                bias=bias.name if bias is not None else linear.bias,
            )
        )
    return tuple(current)
