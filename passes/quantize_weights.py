"""Store the weights of linears as integers: DequantizeLinear in front of a MatMul.

The canonical form, and its reasons (measured with ONNX Runtime 1.20.1 and 1.32 on a CPU):

* codes are ``[K, N]`` with scales along axis 0, the form that runtimes fuse into a 4-bit matmul;
* 4 bits, one scale per output channel: stored once as ``[1, N]`` and spread over blocks by an Expand
  of constants, which every runtime folds. DequantizeLinear along axis 1 would say the same, but
  ONNX Runtime 1.20 then decodes the whole weight at each run (2 ms instead of 0.1 ms at 576 x 1536);
* 8 bits, one scale per output channel: one block that covers the axis and whose length is no power of
  two. ONNX Runtime would otherwise fuse it, which either rounds the activations or, at accuracy level 0,
  is ten times slower than decoding;
* groups: one scale per group, the last group may be short.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import LinearRef
from graphrot.errors import InputRefused
from graphrot.graph import WeightStore, node_of, read_constant, value_map
from graphrot.passes.base import GraphPass, record_provenance
from graphrot.passes.quantize_nodes import (
    NodeWriter,
    channel_block,
    float_type,
    remove_unused,
    require_opset,
    unfused_block,
)
from graphrot.passes.records import QuantizedLinear, StoredGrid
from graphrot.plan.types import RotationPlan
from graphrot.quant.grid import QuantizedTensor

_DTYPES = {
    (4, True): ir.DataType.INT4,
    (4, False): ir.DataType.UINT4,
    (8, True): ir.DataType.INT8,
    (8, False): ir.DataType.UINT8,
}


class QuantizeWeights(GraphPass):
    """Replace each linear's float weight by codes, scales and DequantizeLinear; a Gemm becomes MatMul and Add.

    Run :class:`~graphrot.passes.quantize_activations.QuantizeActivations` first: afterwards the output
    that names a Gemm is that of the Add.

    Args:
        plan: the plan (kept for the record).
        items: the linears with their quantized weights. Taken one by one, so a generator may make them
            just in time.
        store: where codes and scales go.
    """

    def __init__(
        self, plan: RotationPlan, items: Iterable[tuple[LinearRef, QuantizedTensor]], *, store: WeightStore
    ) -> None:
        super().__init__(plan)
        self._items = items
        self._store = store
        self.records: list[QuantizedLinear] = []

    def apply(self, model: ir.Model, done: set[str]) -> None:
        require_opset(model)
        values = value_map(model)
        writer = NodeWriter(model, self._store)
        for linear, tensor in self._items:
            if linear.node in done:
                self.report.skipped.append((linear.node, "quantized already"))
                continue
            self.records.append(_quantize(writer, node_of(values, linear.node), linear, tensor))
            done.add(linear.node)
            self.report.changed.append(linear.node)


def _quantize(writer: NodeWriter, node: ir.Node, linear: LinearRef, tensor: QuantizedTensor) -> QuantizedLinear:
    weight = node.inputs[linear.weight_input]
    _require_linear(node, linear, tensor)
    assert weight is not None
    base = plain_name(linear.weight)
    scales = tensor.scales
    if node.op_type == "Gemm":
        scales = scales * np.float32(_attribute(node, "alpha", 1.0))
    grid = store_grid(writer, tensor, scales, float_type(weight, "A weight"), base)
    output = dequantize_columns(writer, node, grid, tensor.in_features, base)
    return QuantizedLinear(
        node=replace_weight(writer, node, output, grid.bits),
        tensor=base,
        grid=grid,
        in_features=tensor.in_features,
        out_features=tensor.out_features,
        error=tensor.error,
        is_head=linear.is_head,
        error_without_rotation=tensor.error_without_rotation,
    )


def store_grid(
    writer: NodeWriter, tensor: QuantizedTensor, scales: np.ndarray, dtype: ir.DataType, base: str
) -> StoredGrid:
    """Write codes ``[K, N]``, scales ``[G, N]`` and zero points ``[G, N]`` of one weight.

    With 4 bits and one scale per channel, zero points are stored per block (there is no Expand of 4-bit
    types): ``[blocks, N]``.
    """
    bits = tensor.grid.bits
    code_dtype = _DTYPES[(bits, tensor.grid.symmetric)]
    codes = writer.weight(tensor.codes.T, code_dtype, f"{base}.codes")
    spread = writer.weight(scales.T, dtype, f"{base}.scales")
    zeros = None
    if tensor.zeros is not None:
        content = tensor.zeros.T
        if tensor.grid.group is None and bits == 4:
            content = np.repeat(content, -(-tensor.in_features // channel_block(tensor.in_features)), axis=0)
        zeros = writer.weight(content, code_dtype, f"{base}.zeros")
    return StoredGrid(
        codes=codes.name or "",
        scales=spread.name or "",
        zeros=None if zeros is None else zeros.name,
        bits=bits,
        group=tensor.grid.group,
        symmetric=tensor.grid.symmetric,
    )


def dequantize_columns(
    writer: NodeWriter, anchor: ir.Node, grid: StoredGrid, in_features: int, base: str, codes: ir.Value | None = None
) -> ir.Value:
    """The DequantizeLinear of a ``[K, N]`` weight (see the module's text for the blocks).

    Args:
        writer: adds the nodes.
        anchor: the node to add them before.
        grid: names of the parts.
        in_features: K.
        base: what to name things after.
        codes: the codes, where they are not the initializer itself.
    """
    initializers = writer.model.graph.initializers
    scales = initializers[grid.scales]
    unpacked = codes if codes is not None else initializers[grid.codes]
    block = grid.group
    if block is None and unpacked.dtype in (ir.DataType.INT4, ir.DataType.UINT4):
        block = channel_block(in_features)
        shape = writer.integers([-(-in_features // block), scales.shape[1]], "blocks_by_channels")  # type: ignore[index,list-item]
        scales = writer.op(anchor, "Expand", [scales, shape], f"{base}.block_scales")
    elif block is None:
        block = unfused_block(in_features)
    operands = [unpacked, scales] + ([] if grid.zeros is None else [initializers[grid.zeros]])
    return writer.op(anchor, "DequantizeLinear", operands, f"{base}.dequantized", {"axis": 0, "block_size": block})


def replace_weight(writer: NodeWriter, node: ir.Node, weight: ir.Value, bits: int) -> str:
    """Give a MatMul or Gemm the ``[K, N]`` weight; a Gemm becomes MatMul and, with a bias, Add.

    Returns:
        The name of the MatMul's output.
    """
    label = f"int{bits} weight"
    if node.op_type == "MatMul":
        record_provenance(node, label)
        old = node.inputs[1]
        node.replace_input_with(1, weight)
        remove_unused(writer.model, old)
        return node.outputs[0].name or ""
    data = node.inputs[0]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    beta = _attribute(node, "beta", 1.0)
    name = node.outputs[0].name or "gemm"
    product = writer.op(node, "MatMul", [data, weight], f"{name}.matmul")
    multiply = product.producer()
    assert multiply is not None
    record_provenance(multiply, label)
    if bias is None or beta == 0.0:
        writer.take_over(node.outputs[0], product)
        return name
    if beta != 1.0:
        numbers = read_constant(bias)
        scaled = (numbers.astype(np.float64) * beta).astype(numbers.dtype)
        bias = writer.weight(scaled, float_type(bias, "A bias"), f"{name}.bias")
    total = writer.op(node, "Add", [product, bias], f"{name}.sum")
    writer.take_over(node.outputs[0], total)
    return product.name or ""


def _require_linear(node: ir.Node, linear: LinearRef, tensor: QuantizedTensor) -> None:
    where = f"the {node.op_type} that makes {linear.node!r}"
    if node.op_type not in ("MatMul", "Gemm") or linear.weight_input != 1:
        raise InputRefused(
            "Only MatMul and Gemm with a constant second operand can be quantized",
            where=where,
            do="leave it out, or rewrite it as MatMul(x, W)",
        )
    if node.op_type == "Gemm" and _attribute(node, "transA", 0):
        raise InputRefused(
            "A Gemm that transposes its first operand cannot be quantized",
            where=where,
            why="the rows of its input are not tokens",
            do="write the transposition as a Transpose node",
        )
    expected = (linear.in_features, linear.out_features)
    if (tensor.in_features, tensor.out_features) != expected:
        raise InputRefused(
            f"The quantized weight takes {tensor.in_features} inputs to {tensor.out_features}, the linear "
            f"{expected[0]} to {expected[1]}",
            where=where,
            do="quantize the weight of this model",
        )


def _attribute(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.value)


def plain_name(tensor: str) -> str:
    """The name of a weight without the marks of earlier passes."""
    return tensor.partition("__rot")[0]
