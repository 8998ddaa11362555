"""Rewrite what ONNX Runtime's CUDA provider has no kernel for into operators that it has, before a model is narrowed.

* Inputs that are rounded per token by QuantizeLinear with blocks: its CUDA kernel takes blocks of 4-bit numbers only. A
  Div and a Round make the same whole numbers, which stay floats.
* Lookups in integer tables, and 8-bit weights of target portable: DequantizeLinear with blocks takes no 8-bit numbers
  there. Cast, Sub and Mul decode them; weights once, when the model is loaded.
* Codes of 4 bits, two to a byte: there is no BitwiseAnd and no BitShift. Integer Div, Mul and Sub take them apart.
* MatMulNBits of 8 bits whose float16 scales would get a cast on the CPU: there its level 4 returns wrong numbers with
  scales that are computed, so that it has level 0. On CUDA the level means nothing.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.emit.half_rules import needs_constant_scales, runs_alone
from graphrot.graph import drop_unused_initializers, is_constant, read_constant
from graphrot.model.floats import is_standard, value_types
from graphrot.passes.quantize_nodes import NodeWriter
from graphrot.passes.shape_values import ShapeValues
from graphrot.passes.sizes import number

_FLOAT, _INT32, _UINT8 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.UINT8


def lower_for_cuda(model: ir.Model) -> int:
    """Rewrite a float32 model in place.

    Args:
        model: as an emitter left it.

    Returns:
        How many nodes were rewritten.
    """
    model.graph.sort()
    lowering = _Lowering(model)
    for node in list(model.graph):
        if node.graph is not None and (node.op_type == "DequantizeLinear" or not _is_fixed(node)):
            lowering.visit(node)
    drop_unused_initializers(model)
    model.graph.sort()
    return lowering.count


def _is_fixed(node: ir.Node) -> bool:
    """Made of constants alone: computed when the model is loaded, or a weight that a matmul decodes."""
    return all(value is None or is_constant(value) for value in node.inputs)


class _Lowering:
    def __init__(self, model: ir.Model) -> None:
        self._writer = NodeWriter(model)
        self._types = value_types(model)
        self._shapes = ShapeValues(model.graph)
        self.count = 0

    def visit(self, node: ir.Node) -> None:
        """Rewrite one node, if there is a rule for it."""
        made = None
        if node.op_type == "MatMulNBits" and needs_constant_scales(node) and runs_alone(node):
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
            self.count += 1
        elif not is_standard(node):
            return
        elif node.op_type == "DequantizeLinear":
            made = self._whole(node) or self._decoded(node)
        elif node.op_type in ("BitwiseAnd", "BitShift"):
            made = self._half_byte(node)
        if made is not None:
            self._writer.take_over(node.outputs[0], made)
            self.count += 1

    def _whole(self, node: ir.Node) -> ir.Value | None:
        """Whole numbers of a tensor that is rounded by blocks, where a scale of one decodes them."""
        codes, one = node.inputs[0], node.inputs[1]
        maker = None if codes is None else codes.producer()
        if maker is None or maker.op_type != "QuantizeLinear" or "block_size" not in maker.attributes:
            return None
        if not _is_number(one, 1) or len(maker.inputs) > 2 or len(node.inputs) > 2:
            return None
        ratio = self._op(node, "Div", [maker.inputs[0], maker.inputs[1]], "ratio")
        return self._op(node, "Round", [ratio], "rounded")

    def _decoded(self, node: ir.Node) -> ir.Value | None:
        """``(codes - zeros) * scales`` of 8-bit codes ``[T, D]`` or ``[D, T]`` with blocks."""
        codes, scales = node.inputs[0], node.inputs[1]
        if codes is None or scales is None or "block_size" not in node.attributes:
            return None
        if self._types.get(codes) not in (_UINT8, ir.DataType.INT8):
            return None
        width = self._width(codes, node.attributes["axis"].as_int())
        if width is None:
            return None
        zeros = node.inputs[2] if len(node.inputs) > 2 else None
        whole = self._cast(node, codes, _FLOAT)
        if zeros is not None:
            spread = self._spread(node, self._cast(node, zeros, _FLOAT), width)
            whole = self._op(node, "Sub", [whole, spread], "centred")
        return self._op(node, "Mul", [whole, self._spread(node, scales, width)], "decoded")

    def _spread(self, node: ir.Node, parts: ir.Value, width: int) -> ir.Value:
        """One number for each code of a block, out of one for each block; one block needs no more than a broadcast."""
        axis, block = node.attributes["axis"].as_int(), node.attributes["block_size"].as_int()
        if width <= block:
            return parts
        places = self._writer.integers((np.arange(width) // block).tolist(), "block_of_channel")
        return self._op(node, "Gather", [parts, places], "spread", {"axis": axis})

    def _width(self, codes: ir.Value, axis: int) -> int | None:
        """Codes along the axis of blocks; None where the graph leaves them open."""
        shape = self._shapes.shape(codes)
        return None if shape is None else number(shape[axis])

    def _half_byte(self, node: ir.Node) -> ir.Value | None:
        """The low or the high four bits of bytes."""
        packed, other = node.inputs[0], node.inputs[1]
        if packed is None or self._types.get(packed) != _UINT8:
            return None
        wanted = {"BitwiseAnd": 15, "BitShift": 4}[node.op_type]
        if not _is_number(other, wanted):
            return None
        wide = self._cast(node, packed, _INT32)
        sixteen = self._writer.constant(np.array(16, np.int32), "sixteen")
        high = self._op(node, "Div", [wide, sixteen], "high")
        if node.op_type == "BitShift":
            return self._cast(node, high, _UINT8)
        rest = self._op(node, "Mul", [high, sixteen], "high_part")
        return self._cast(node, self._op(node, "Sub", [wide, rest], "low"), _UINT8)

    def _cast(self, node: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self._op(node, "Cast", [value], f"{dtype.name.lower()}", {"to": int(dtype)})

    def _op(
        self,
        node: ir.Node,
        op_type: str,
        inputs: list[ir.Value | None] | list[ir.Value],
        name: str,
        attributes: dict[str, int] | None = None,
    ) -> ir.Value:
        return self._writer.op(node, op_type, inputs, f"{node.outputs[0].name}.{name}", attributes)


def _is_number(value: ir.Value | None, number: int) -> bool:
    if value is None or not is_constant(value):
        return False
    array = read_constant(value)
    return array.size == 1 and bool(array.reshape(()) == number)
