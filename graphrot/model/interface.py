"""Inputs of a graph that hold what a rotation would have to change, and cannot: they lie outside the graph.

Told apart by where they go, never by their names: a switch decides an ``If``, an adapter's weight is the
second operand of a matmul, a saved cache is the default of an input.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.graph import FLOATS

_WEIGHT_OPERANDS = {"MatMul": 1, "Gemm": 1, "MatMulInteger": 1, "MatMulNBits": 1, "FusedMatMul": 1}
_PASSING = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Mul", "DequantizeLinear"})
_PASSING_SWITCH = frozenset({"Identity", "Cast", "Squeeze", "Reshape", "Not", "Gather"})
_DEPTH = 6
_OLD_IR = 4
"""From this IR version on, a weight need not be a graph input too."""


def check_interface(model: ir.Model, where: Path | str) -> None:
    """Refuse a graph that takes a branch by an input, or weights or a filled cache as inputs.

    Args:
        model: changed only if its IR version is below 4, where every weight is a graph input too: such
            inputs are taken off, which leaves the weights.
        where: the file, for messages.

    Raises:
        InputRefused: naming the node and the input.
    """
    if model.ir_version < _OLD_IR:
        for value in [v for v in model.graph.inputs if v.is_initializer()]:
            model.graph.inputs.remove(value)
    _refuse_switch(model, where)
    _refuse_defaults(model, where)
    _refuse_weights(model, where)


def _refuse_switch(model: ir.Model, where: Path | str) -> None:
    for node in model.graph:
        if node.op_type != "If" or not node.inputs:
            continue
        source = _origin(node.inputs[0], _PASSING_SWITCH)
        if source is not None and source.is_graph_input():
            raise InputRefused(
                "The model is a merged decoder: one graph for the first step and one for the others",
                where=f"{where}: {_name(node)}, input {source.name!r}",
                why=f"the If takes one of its graphs by the input {source.name!r}, and rotations "
                "are not followed into such graphs",
                do="give decoder_with_past_model.onnx beside it, or export again without merging "
                "(optimum-cli export onnx --no-post-process)",
            )


def _refuse_defaults(model: ir.Model, where: Path | str) -> None:
    """An input with a default is an old cache, or a weight that may be exchanged; empty ones hold nothing."""
    for value in model.graph.inputs:
        content = value.const_value if value.is_initializer() else None
        if content is None or content.dtype not in FLOATS or len(content.shape) < 2:
            continue
        if 0 in content.shape.numpy():
            continue
        cache = len(content.shape) == 4
        raise InputRefused(
            "The model carries a filled key/value cache" if cache else "A weight of the model is also its input",
            where=f"{where}: input {value.name!r} with a default of {list(content.shape.numpy())}",
            why=(
                "its keys and values were computed before the rotation, and whoever gives others gives them so too"
                if cache
                else "whoever gives another one gives it as it was before the rotation"
            ),
            do=(
                "take the default off the input, and let the prefix run through the rotated model once"
                if cache
                else "export it without weights as inputs (keep_initializers_as_inputs=False), adapters merged"
            ),
        )


def _refuse_weights(model: ir.Model, where: Path | str) -> None:
    inputs = {value for value in model.graph.inputs if len(value.shape or ()) in (2, 3)}
    for node in model.graph.all_nodes():
        position = _WEIGHT_OPERANDS.get(node.op_type)
        if position is None or len(node.inputs) <= position:
            continue
        source = _origin(node.inputs[position], _PASSING)
        if source is None or source not in inputs:
            continue
        raise InputRefused(
            "The model takes weights of an adapter (LoRA) as inputs",
            where=f"{where}: input {source.name!r}, the weight of {_name(node)}",
            why="they are made for the model before the rotation and lie outside of the graph: with rotated "
            "activations they would silently give other numbers",
            do="merge the adapter into the model before the export, or export the base model without adapter inputs",
        )


def _origin(value: ir.Value | None, passing: frozenset[str]) -> ir.Value | None:
    """The value that ``value`` is made from by operators that only pass their first input on."""
    for _ in range(_DEPTH):
        node = None if value is None else value.producer()
        if node is None or node.op_type not in passing:
            break
        value = next((i for i in node.inputs if i is not None and not _constant(i)), None)
    return value


def _constant(value: ir.Value) -> bool:
    if value.is_initializer():
        return not value.is_graph_input()
    node = value.producer()
    return node is not None and node.op_type == "Constant"


def _name(node: ir.Node) -> str:
    return f"{node.op_type} node {node.name or node.outputs[0].name!r}"
