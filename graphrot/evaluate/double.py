"""Cast a whole float32 graph to float64, so that a certificate can see an error of 1e-10.

Where every operator has a float64 kernel, rounding is so small that any difference left over between
the source and the rotated model is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from graphrot.folded import FoldedTensor

_FLOAT, _DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE


def to_double(model: ir.Model) -> ir.Model:
    """A float64 twin of ``model``: initializers, constants, casts, inputs and outputs.

    Meant for small models: all weights are held in memory. Function bodies are cast too, and the scale
    ``1 / sqrt(size)`` of a Hadamard transform, a float32 attribute, is computed anew.

    Args:
        model: left as it is. Its weights must be numbers, not pending edits.

    Returns:
        A model whose inputs, outputs and tensor names are the same, with float64 for float32.
    """
    twin = model.clone()
    for value in twin.graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype == _FLOAT:
            if isinstance(value.const_value, FoldedTensor):
                raise TypeError(f"{value.name!r} still has pending edits")
            value.const_value = _wider(value.const_value)
    for graph in twin.graphs():
        for value in _values(graph):
            if value.dtype == _FLOAT:
                value.type = ir.TensorType(_DOUBLE)  # a clone shares its type objects with the original
        for node in graph:
            _widen_attributes(node)
    for function in twin.functions.values():
        _exact_scale(function)
        for node in function:
            _widen_attributes(node)
    return twin


def exact_in_double(model: ir.Model) -> bool:
    """Whether the model's Hadamard transforms are exact in float64: whole-number factors only."""
    return all(
        attribute.as_tensor().dtype != _FLOAT
        for node in model.graph
        if node.domain == "graphrot"
        for attribute in node.attributes.values()
        if attribute.type == ir.AttributeType.TENSOR
    )


def _values(graph: ir.Graph) -> Iterable[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _wider(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float64), name=tensor.name)


def _widen_attributes(node: ir.Node) -> None:
    """Constants, and attributes that name float32 as a type."""
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _FLOAT:
            node.attributes[name] = ir.AttrTensor(name, _wider(attribute.as_tensor()))
        elif name in ("to", "dtype") and attribute.as_int() == _FLOAT:
            node.attributes[name] = ir.AttrInt64(name, int(_DOUBLE))
        elif node.op_type == "Constant" and name in ("value_float", "value_floats"):
            number = attribute.as_float() if name == "value_float" else list(attribute.as_floats())
            del node.attributes[name]
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.asarray(number, dtype=np.float64)))


def _exact_scale(function: ir.Function) -> None:
    """Replace the constant that reads attribute ``scale`` by ``1 / sqrt(size)`` in float64."""
    for node in list(function):
        scale_of = node.attributes.get("value_float") if node.op_type == "Constant" else None
        if scale_of is None or scale_of.ref_attr_name != "scale":
            continue
        size = ir.node("Constant", [], {"value_int": ir.RefAttr("value_int", "size", ir.AttributeType.INT)})
        cast = ir.node("Cast", [size.outputs[0]], {"to": int(_DOUBLE)})
        root = ir.node("Sqrt", [cast.outputs[0]])
        scale = ir.node("Reciprocal", [root.outputs[0]])
        for number, fresh in enumerate((size, cast, root, scale)):
            fresh.outputs[0].name = f"exact_scale_{number}"
            function.insert_before(node, fresh)
        node.outputs[0].replace_all_uses_with(scale.outputs[0])
        function.remove(node, safe=True)
