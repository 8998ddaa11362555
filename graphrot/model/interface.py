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


def check_interface(model: ir.Model, where: Path | str) -> bool:
    """Refuse a graph that takes a branch by an input, or weights or a filled cache as inputs.

    Args:
        model: changed only if its IR version is below 4, where every weight is a graph input too: such
            inputs are taken off, which leaves the weights.
        where: the file, for messages.

    Returns:
        Whether the model was changed.

    Raises:
        InputRefused: naming the node and the input.
    """
    weights = [v for v in model.graph.inputs if v.is_initializer()] if model.ir_version < _OLD_IR else []
    for value in weights:
        model.graph.inputs.remove(value)
    if weights:
        model.ir_version = _OLD_IR
    _refuse_switch(model, where)
    _refuse_prefix(model, where)
    _refuse_defaults(model, where)
    _refuse_weights(model, where)
    return bool(weights)


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


def _refuse_prefix(model: ir.Model, where: Path | str) -> None:
    """A constant of rank 4 in front of new rows along the axis of tokens is a cache that was saved into the graph."""
    for node in model.graph.all_nodes():
        axis = node.attributes.get("axis")
        if node.op_type != "Concat" or axis is None or axis.as_int() not in (2, -2):
            continue
        made = [value for value in node.inputs if value is not None and not _is_saved(value)]
        saved = [value for value in node.inputs if value is not None and _is_saved(value)]
        if not saved or not made:
            continue
        raise InputRefused(
            "The model carries a saved prefix of keys and values",
            where=f"{where}: {_name(node)}, tensor {_source(saved[0]).name!r}",
            why="they were computed before the rotation, and a cache that starts with them cannot be told from one "
            "that starts empty",
            do="export the model with past_key_values as inputs, and let the prefix run through the rotated model once",
        )


def _is_saved(value: ir.Value) -> bool:
    source = _source(value)
    content = None if source.is_graph_input() else source.const_value
    return content is not None and content.dtype in FLOATS and len(content.shape) == 4 and content.size > 0


def _source(value: ir.Value) -> ir.Value:
    """The constant behind Expand, Cast and Identity, or the value itself."""
    for _ in range(_DEPTH):
        node = value.producer()
        if node is None or node.op_type not in ("Expand", "Cast", "Identity", "Tile") or node.inputs[0] is None:
            break
        value = node.inputs[0]
    node = value.producer()
    if node is not None and node.op_type == "Constant" and "value" in node.attributes:
        return ir.Value(name=value.name, const_value=node.attributes["value"].as_tensor())
    return value


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
