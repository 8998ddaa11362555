"""Half inputs and outputs of a model that is float32 inside."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphrot.folded import used_names
from graphrot.graph import unique_name
from graphrot.model.floats import is_standard

_FLOAT = ir.DataType.FLOAT


def restore_ends(model: ir.Model, ends: Mapping[str, ir.DataType]) -> None:
    """Give inputs and outputs their half types back, by a cast behind each input and in front of each output.

    Args:
        model: float32; changed in place.
        ends: types of float graph inputs and outputs by name; float32 ones stay as they are.
    """
    graph = model.graph
    names = used_names(model) | {node.name for node in graph if node.name}
    for value in graph.inputs:
        half = ends.get(value.name or "", _FLOAT)
        if value.dtype == _FLOAT and half != _FLOAT:
            _restore_input(graph, value, half, names)
    for index, value in enumerate(graph.outputs):
        half = ends.get(value.name or "", _FLOAT)
        if value.dtype == _FLOAT and half != _FLOAT:
            graph.outputs[index] = _restored_output(graph, value, half, names)
    graph.sort()


def _restore_input(graph: ir.Graph, value: ir.Value, half: ir.DataType, names: set[str]) -> None:
    uses = list(value.uses())
    value.type = ir.TensorType(half)
    if value.const_value is not None:
        value.const_value = ir.tensor(value.const_value.numpy().astype(half.numpy()), name=value.name)
    if not uses:
        return
    wide = _node(graph, value, _FLOAT, unique_name(names, f"{value.name}.float"))
    for use in uses:
        use.node.replace_input_with(use.idx, wide)


def _restored_output(graph: ir.Graph, value: ir.Value, half: ir.DataType, names: set[str]) -> ir.Value:
    maker = value.producer()
    if maker is not None and maker.op_type == "Cast" and is_standard(maker) and not value.uses():
        maker.attributes["to"] = ir.AttrInt64("to", int(half))
        value.type = ir.TensorType(half)
        return value
    name = value.name or ""
    value.name = unique_name(names, f"{name}.float")
    return _node(graph, value, half, name)


def _node(graph: ir.Graph, value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
    node = ir.node("Cast", [value], {"to": int(dtype)}, name=name)
    result = node.outputs[0]
    result.name, result.type, result.shape = name, ir.TensorType(dtype), value.shape
    graph.append(node)
    return result
