"""Gains that move backward, into the linear in front of them (a gain behind a branch: LayerScale).

A gain that the residual stream reads cannot fold forward. If it multiplies what one linear alone makes, it
can go into that linear's columns and bias instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphrot.analysis.labels import Source
from graphrot.analysis.scope import Scope, constant_shape, is_standard, node_name
from graphrot.analysis.types import GainConsumer, GainFold, WeightUse, encode_runs


def fold_backward(scope: Scope, source: Source) -> GainFold | None:
    """The fold of a gain ``source`` into the MatMul or Gemm whose output nothing else reads, or None."""
    node, position = source.node, source.operand
    if node is None or position is None or not is_standard(node) or node.op_type != "Mul":
        return None
    gain, value = node.inputs[position], node.inputs[1 - position]
    width = (_shape(gain) or (0,))[-1]
    if gain is None or value is None or not gain.name or not scope.readable(gain) or not _is_vector(gain, width):
        return None
    uses: list[WeightUse] = []
    while scope.single_use(value):
        maker = value.producer()
        if maker is None or not is_standard(maker):
            return None
        found = _operands(scope, maker, width)
        if found is None:
            return None
        uses += [_use(maker, operand, axis) for operand, axis in found]
        if maker.op_type in ("MatMul", "Gemm"):
            index = encode_runs(range(width))
            consumers = tuple(GainConsumer(use, index) for use in uses)
            return GainFold(node_name(node), node.op_type, "mul", gain.name, position, consumers)
        data = 0 if not found else 1 - found[0][0]
        passed = maker.inputs[data]
        assert passed is not None
        value = passed
    return None


def _operands(scope: Scope, node: ir.Node, width: int) -> Sequence[tuple[int, int]] | None:
    """Constant operands that scale with the node's output of ``width`` channels, and their axes; None: not such a
    node."""
    inputs = node.inputs
    if node.op_type in ("Cast", "Identity"):
        return []
    if node.op_type == "Add":
        places = [k for k in (0, 1) if scope.readable(inputs[k]) and _is_vector(inputs[k], width)]
        return [(places[0], len(_shape(inputs[places[0]])) - 1)] if len(places) == 1 else None
    if node.op_type not in ("MatMul", "Gemm") or not scope.readable(inputs[1]) or len(_shape(inputs[1])) != 2:
        return None
    flags = {name: node.attributes[name].as_int() for name in ("transA", "transB") if name in node.attributes}
    axis = 0 if flags.get("transB") else 1
    if flags.get("transA") or _shape(inputs[1])[axis] != width:
        return None
    if len(inputs) < 3 or inputs[2] is None:
        return [(1, axis)]
    bias = scope.readable(inputs[2]) and _is_vector(inputs[2], width)
    return [(1, axis), (2, len(_shape(inputs[2])) - 1)] if bias else None


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    return (None if value is None else constant_shape(value)) or ()


def _is_vector(value: ir.Value | None, width: int) -> bool:
    shape = _shape(value)
    return bool(shape) and shape[-1] == width and all(n == 1 for n in shape[:-1])


def _use(node: ir.Node, operand: int, axis: int) -> WeightUse:
    value = node.inputs[operand]
    assert value is not None and value.name is not None
    return WeightUse(
        node=node_name(node),
        op=node.op_type,
        input=operand,
        tensor=value.name,
        axis=axis,
        groups=(encode_runs(range(_shape(value)[axis])),),
        role="weight" if operand == 1 and node.op_type != "Add" else "bias",
    )
