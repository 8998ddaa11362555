"""Linears, embeddings, the head: what quantization and tying need to know."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from graphrot.analysis.probe import Probe
from graphrot.analysis.scope import Scope, constant_dtype, constant_shape, is_standard
from graphrot.analysis.types import EmbeddingRef, LinearRef
from graphrot.graph import FLOATS

_TO_OUTPUT = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Tanh"})
_BY_CONSTANT = frozenset({"Add", "Sub", "Mul", "Div"})


def find_linears(scope: Scope, probe: Probe, caches: Iterable[str]) -> tuple[LinearRef, ...]:
    """Every MatMul and Gemm by a constant matrix, in graph order.

    Args:
        scope: the graph.
        probe: its shapes.
        caches: names of the cache outputs.
    """
    cache_names = set(caches)
    return tuple(linear for node in scope.nodes if (linear := _linear(scope, probe, node, cache_names)) is not None)


def _linear(scope: Scope, probe: Probe, node: ir.Node, caches: set[str]) -> LinearRef | None:
    if not is_standard(node) or node.op_type not in ("MatMul", "Gemm") or len(node.inputs) < 2:
        return None
    data, weight = node.inputs[0], node.inputs[1]
    if data is None or weight is None or not scope.readable(weight) or scope.trusted(data):
        return None
    shape = constant_shape(weight)
    if shape is None or len(shape) != 2 or constant_dtype(weight) not in FLOATS or not data.name or not weight.name:
        return None
    if node.op_type == "Gemm" and _flag(node, "transA"):
        return None
    transposed = node.op_type == "Gemm" and _flag(node, "transB")
    output = node.outputs[0]
    assert output.name
    return LinearRef(
        node=output.name,
        op=node.op_type,
        weight=weight.name,
        weight_input=1,
        input=data.name,
        in_features=shape[1] if transposed else shape[0],
        out_features=shape[0] if transposed else shape[1],
        layout="NK" if transposed else "KN",
        bias=_bias(scope, node),
        is_head=_reaches_output(scope, probe, output, caches),
    )


def _flag(node: ir.Node, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].as_int())


def _bias(scope: Scope, node: ir.Node) -> str | None:
    """The Gemm's own bias, or the constant of the one Add that follows."""
    if node.op_type == "Gemm":
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return bias.name if bias is not None else None
    uses = scope.uses(node.outputs[0])
    if len(uses) != 1 or uses[0][0].op_type != "Add" or not is_standard(uses[0][0]):
        return None
    other = uses[0][0].inputs[1 - uses[0][1]]
    if other is None or not scope.readable(other):
        return None
    shape = constant_shape(other)
    return other.name if shape is not None and len(shape) == 1 else None


def _reaches_output(scope: Scope, probe: Probe, value: ir.Value, caches: set[str]) -> bool:
    """The value is a graph output, save for casts, shapes, slices, softcaps, scalars and biases on the way.

    A cache is no such output, and neither is one that the values reach in another width.
    """
    seen = probe.seen(value)
    width = seen.shape[-1] if seen is not None and seen.shape else 0
    stack, visited = [value], {value}
    while stack:
        current = stack.pop()
        if current.is_graph_output() and current.name not in caches:
            end = probe.seen(current)
            if end is not None and end.shape and end.shape[-1] == width:
                return True
        for user, position in scope.uses(current):
            if is_standard(user) and _passes_on(scope, user, position):
                fresh = [o for o in user.outputs if o not in visited]
                visited.update(fresh)
                stack.extend(fresh)
    return False


def _passes_on(scope: Scope, node: ir.Node, position: int) -> bool:
    """The node hands its input ``position`` on, changed by nothing but constants."""
    if node.op_type in _TO_OUTPUT:
        return position == 0
    others = [i for k, i in enumerate(node.inputs) if k != position and i is not None]
    return node.op_type in _BY_CONSTANT and all(scope.trusted(i) for i in others)


def find_embeddings(scope: Scope, linears: Iterable[LinearRef]) -> tuple[EmbeddingRef, ...]:
    """Lookups of table rows by token ids.

    A lookup of which only the shape is read is none. A table of learned positions is looked up in the same way.
    The token table is the one with as many rows as the head has outputs; without such a table, the one with the
    most rows.
    """
    found: list[EmbeddingRef] = []
    for node in scope.nodes:
        if (
            node.op_type != "Gather"
            or not is_standard(node)
            or ("axis" in node.attributes and node.attributes["axis"].as_int())
            or (not scope.uses(node.outputs[0]) and not node.outputs[0].is_graph_output())
        ):
            continue
        table, index = node.inputs[0], node.inputs[1]
        if table is None or index is None or not scope.readable(table) or scope.trusted(index):
            continue
        shape = constant_shape(table)
        if shape is None or len(shape) != 2 or constant_dtype(table) not in FLOATS or not table.name:
            continue
        name = node.outputs[0].name
        assert name
        found.append(EmbeddingRef(node=name, table=table.name, table_input=0, rows=shape[0], dim=shape[1]))
    heads = {linear.out_features for linear in linears if linear.is_head}
    tokens = [e for e in found if e.rows in heads]
    if tokens or not found:
        return tuple(tokens)
    most = max(e.rows for e in found)
    return tuple(e for e in found if e.rows == most)
