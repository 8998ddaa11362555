"""Types of the values of a graph, read off the operators where the file does not say.

Emitters leave values without a type, and the operators of ``com.microsoft`` have no schema in ``onnx``.
"""

from __future__ import annotations

import onnx.defs
import onnx_ir as ir

from graphrot.graph import FLOATS

STANDARD = ("", "ai.onnx")

_FLOAT = ir.DataType.FLOAT
_CACHED = ("GroupQueryAttention", "RotatedAttention")
_NAMED = {dtype.name.lower(): dtype for dtype in ir.DataType}


def is_standard(node: ir.Node) -> bool:
    """Whether a node is of the standard domain."""
    return node.domain in STANDARD


def float_values(model: ir.Model) -> set[ir.Value]:
    """All float32 values of the main graph."""
    return {value for value, dtype in value_types(model).items() if dtype == _FLOAT}


def value_types(model: ir.Model) -> dict[ir.Value, ir.DataType | None]:
    """Element types of the values of the main graph; None where they are not known."""
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))
    types: dict[ir.Value, ir.DataType | None] = {}
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        types[value] = value.const_value.dtype if value.const_value is not None else value.dtype
    for node in model.graph:
        for index, output in enumerate(node.outputs):
            if output.type is None or isinstance(output.type, ir.TensorType):
                types[output] = output.dtype or _output(node, index, types, opset)
    return types


def takes_half(node: ir.Node, index: int, opset: int, half: ir.DataType) -> bool:
    """Whether the standard lets input ``index`` of a node have a half type; True where there is no schema."""
    schema = schema_of(node, opset)
    if schema is None or not schema.inputs:
        return True
    formal = schema.inputs[min(index, len(schema.inputs) - 1)]
    return f"tensor({half.name.lower()})" in formal.types


def schema_of(node: ir.Node, opset: int) -> onnx.defs.OpSchema | None:
    """The definition of a standard operator in an opset; None for others, and where there is none."""
    if not is_standard(node):
        return None
    try:
        return onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def _output(node: ir.Node, index: int, types: dict[ir.Value, ir.DataType | None], opset: int) -> ir.DataType | None:
    named = _named(node)
    if named is not None and index == 0:
        return named
    schema = schema_of(node, opset)
    if schema is None:
        return _contributed(node, index, types)
    if not schema.outputs:
        return None
    formal = schema.outputs[min(index, len(schema.outputs) - 1)]
    if formal.type_str.startswith("tensor("):
        return _NAMED.get(formal.type_str[len("tensor(") : -1])
    for place, value in enumerate(node.inputs):
        like = schema.inputs[min(place, len(schema.inputs) - 1)]
        if value is not None and like.type_str == formal.type_str:
            return types.get(value)
    if "tensor(float)" in formal.types or node.op_type == "QuantizeLinear":
        return _default(node, types)
    return _only(formal)


def _only(formal: onnx.defs.OpSchema.FormalParameter) -> ir.DataType | None:
    """The type of an output that allows one only: what comparisons, counts and indices make."""
    allowed = [name[len("tensor(") : -1] for name in formal.types if name.startswith("tensor(")]
    return _NAMED.get(allowed[0]) if len(allowed) == 1 == len(formal.types) else None


def _named(node: ir.Node) -> ir.DataType | None:
    """The type that an attribute of the node names."""
    for name in ("to", "dtype", "output_dtype"):
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.type == ir.AttributeType.INT and attribute.as_int():
            return ir.DataType(attribute.as_int())
    content = node.attributes.get("value")
    if node.op_type in ("Constant", "ConstantOfShape") and content is not None:
        return content.as_tensor().dtype
    if node.op_type == "Constant":
        return ir.DataType.INT64 if "value_int" in node.attributes or "value_ints" in node.attributes else _FLOAT
    return None


def _default(node: ir.Node, types: dict[ir.Value, ir.DataType | None]) -> ir.DataType | None:
    if node.op_type == "QuantizeLinear":
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        return ir.DataType.UINT8 if zero is None else types.get(zero)
    if node.op_type == "DequantizeLinear" and node.inputs[1] is not None:
        return types.get(node.inputs[1])
    return _FLOAT


def _contributed(node: ir.Node, index: int, types: dict[ir.Value, ir.DataType | None]) -> ir.DataType | None:
    """Other domains: caches have the type of the cache that went in, the rest that of the first float input."""
    if node.op_type in _CACHED and index > 0 and len(node.inputs) > 2 + index:
        past = node.inputs[2 + index]
        if past is not None:
            return types.get(past)
    found = (types.get(value) for value in node.inputs if value is not None)
    return next((dtype for dtype in found if dtype in FLOATS), None)
