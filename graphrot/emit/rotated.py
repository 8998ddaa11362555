"""Linears with rounded inputs as ``graphrot::RotatedMatMul``: what stands before and behind them goes in."""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.emit.nbits import BlockLayout
from graphrot.graph import is_constant, read_constant
from graphrot.model.floats import is_standard
from graphrot.ops.hadamard import ATTRIBUTES as TRANSFORM_ATTRIBUTES
from graphrot.ops.hadamard import DOMAIN
from graphrot.ops.hadamard import OP_TYPE as TRANSFORM
from graphrot.ops.rotated_matmul import GROUPS, OP_TYPE, PackedWeight, ensure_rotated_matmul, rotated_matmul_node
from graphrot.passes.base import PROVENANCE, record_provenance
from graphrot.passes.quantize_nodes import NodeWriter
from graphrot.passes.records import QuantizedLinear

_SHAPED = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Operators that keep the numbers and their order."""


def takes(linear: QuantizedLinear) -> bool:
    """Whether the operator has the groups of the linear's weight."""
    return scale_group(linear) in (0, *GROUPS)


def scale_group(linear: QuantizedLinear) -> int:
    """Channels that share a scale; 0: all of them."""
    group = linear.grid.group
    return 0 if group is None or group >= linear.in_features else group


def multiply(
    writer: NodeWriter,
    node: ir.Node,
    x: ir.Value,
    linear: QuantizedLinear,
    parts: tuple[ir.Value, ...],
    layout: BlockLayout,
    activation_bits: Literal[4, 8],
) -> tuple[ir.Value, ir.Value]:
    """Put the operator in the place of a canonical linear, and of the Add of a bias behind it.

    Args:
        writer: adds the node.
        node: the MatMul.
        x: what it reads, before it is rounded.
        linear: its record.
        parts: codes, scales (``[N]`` for one scale per channel) and, if any, zero points.
        layout: blocks of a row of codes.
        activation_bits: of the rounding.

    Returns:
        ``(old, new)``: the output that the operator stands in for, that of the MatMul or of the Add, and its own.
    """
    old, bias = node.outputs[0], None
    found = bias_behind(old, linear.out_features)
    if found is not None:
        add, numbers = found
        node, old = add, add.outputs[0]
        bias = writer.constant(numbers.astype(np.float32), f"{linear.tensor}.bias")
    zeros = parts[2] if len(parts) > 2 else None
    if zeros is None and bias is not None:
        zeros = _middle(writer, linear, layout)
    weight = PackedWeight(
        codes=parts[0],
        scales=parts[1],
        zeros=zeros,
        in_features=linear.in_features,
        out_features=linear.out_features,
        bits=linear.grid.bits,
        block_size=scale_group(linear),
        block=layout.block,
    )
    ensure_rotated_matmul(writer.model)
    made = rotated_matmul_node(x, weight, f"{linear.node}.rotated", activation_bits=activation_bits, bias=bias)
    return old, writer.put(node, made)


def bias_behind(product: ir.Value, width: int) -> tuple[ir.Node, np.ndarray] | None:
    """The Add behind a product that adds one constant to each channel, if that is all that reads it."""
    uses = list(product.uses())
    if len(uses) != 1 or product.is_graph_output():
        return None
    add = uses[0].node
    other = add.inputs[1 - uses[0].idx] if add.op_type == "Add" and is_standard(add) else None
    if other is None or other is product or not is_constant(other):
        return None
    numbers = read_constant(other)
    return (add, numbers) if numbers.shape == (width,) else None


def _middle(writer: NodeWriter, linear: QuantizedLinear, layout: BlockLayout) -> ir.Value:
    """Zero points that say what none would say: ONNX Runtime 1.20 crashes on a missing input before another one."""
    bits = linear.grid.bits
    packed = -(-layout.blocks * bits // 8)
    code = 0x88 if bits == 4 else 0x80
    return writer.constant(np.full((linear.out_features, packed), code, np.uint8), "middle_zeros")


def absorb_transforms(model: ir.Model) -> None:
    """Let the operators do the transforms in front of them, and drop each transform that nothing else needs.

    A transform acts on blocks of channels that lie one after the other, so it is the same before and behind a Reshape.
    """
    for node in list(model.graph):
        if (node.domain, node.op_type) != (DOMAIN, TRANSFORM):
            continue
        readers = _readers(node.outputs[0], node.attributes["size"].as_int())
        if not readers:
            continue
        for reader in readers:
            for name in TRANSFORM_ATTRIBUTES:
                reader.attributes[name] = node.attributes[name]
            reader.attributes["rotate"] = ir.AttrInt64("rotate", 1)
            for item in node.metadata_props.get(PROVENANCE, "").split(","):
                record_provenance(reader, item)
        data = node.inputs[0]
        assert data is not None
        node.outputs[0].replace_all_uses_with(data)
        model.graph.remove(node, safe=True)
    if not any((node.domain, node.op_type) == (DOMAIN, TRANSFORM) for node in model.graph.all_nodes()):
        model.functions.pop((DOMAIN, TRANSFORM, ""), None)


def _readers(value: ir.Value, size: int) -> list[ir.Node] | None:
    """Our operators that multiply ``value``, in any shape; None where something else reads its numbers."""
    if value.is_graph_output():
        return None
    found: list[ir.Node] = []
    for use in value.uses():
        node = use.node
        if (node.domain, node.op_type, use.idx) == (DOMAIN, OP_TYPE, 0):
            if node.attributes["rotate"].as_int() or node.attributes["K"].as_int() % size:
                return None
            found.append(node)
        elif is_standard(node) and node.op_type in _SHAPED and use.idx == 0:
            behind = _readers(node.outputs[0], size)
            if behind is None:
                return None
            found += behind
        elif not (is_standard(node) and node.op_type == "Shape"):
            return None
    return found
