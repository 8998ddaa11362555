"""Target ``ort``: canonical form to ``com.microsoft::MatMulNBits``, ONNX Runtime's packed matmul.

Which accuracy level (0: float inputs, 4: inputs rounded to 8 bits per token and block):

* 4-bit weights: level 4 where activations are 8-bit (their QuantizeLinear chain goes), else 0. 4-bit
  activations keep their chain in front of level 0;
* 8-bit weights: always level 4; level 0 has no kernel for them and is a hundred times slower.

One scale per output channel, 4 bits: MatMulNBits wants a scale per block, so it gets ones, shared by all
linears of one shape, and a Mul follows. Repeating the scales would take 4.5 bits per weight for 576 inputs; an
Expand of constants keeps the file small, but ONNX Runtime holds its result in memory beside the packed
copy (5 MiB of 119 for SmolLM2-135M). With 8 bits the repeated scales are stored, relatively few. Where the
model is narrowed to float16 afterwards, sums without their scale would overflow: the ones become a power
of two that no scale but extreme ones is below, and the Mul does the rest.

Scales are always initializers: when they come from an Expand that was not folded, MatMulNBits of level 4
returns wrong numbers (ONNX Runtime 1.32; level 0 is right). Narrowing keeps to that, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphrot.emit.half_rules import needs_constant_scales, runs_alone
from graphrot.emit.nbits import BlockLayout, block_layout, column_codes, pack_blocks, pack_zeros
from graphrot.emit.norms import fuse_residual_norms
from graphrot.emit.report import EmitReport, bits_per_weight, entries
from graphrot.emit.shared_table import look_up_blocks
from graphrot.graph import WeightStore, drop_unused_initializers, node_of, value_map
from graphrot.passes.quantize_nodes import NodeWriter
from graphrot.passes.records import QuantizedActivation, QuantizedLinear, QuantizedTable
from graphrot.passes.share_shapes import share_shapes

DOMAIN = "com.microsoft"

_BLOCK_NOTE = (
    "8-bit activations are rounded inside MatMulNBits, per token and block of at most 256 channels: finer than "
    "one scale per token"
)
_INT4_NOTE = "4-bit activations are rounded in float and multiplied at float speed in this target"
_FLOAT_NOTE = "8-bit activations in front of float weights are rounded and multiplied in float: they run at float speed"
_LEVEL_NOTE = (
    "ONNX Runtime rounds the inputs of 8-bit weights to 8 bits: {count} of these have float activations in the recipe"
)
_VERSION_NOTE = "8-bit weights need ONNX Runtime 1.22 or later"


def emit_ort(
    model: ir.Model,
    *,
    store: WeightStore,
    linears: Sequence[QuantizedLinear] = (),
    tables: Sequence[QuantizedTable] = (),
    activations: Sequence[QuantizedActivation] = (),
    float16: bool = False,
) -> EmitReport:
    """Lower a model in canonical form, in place. Lookups in tables of their own stay as they are.

    Args:
        model: what the quantizing passes left.
        store: where repacked codes go.
        linears: records of ``QuantizeWeights`` and of the shared heads of ``QuantizeTables``.
        tables: records of ``QuantizeTables``.
        activations: records of ``QuantizeActivations``.
        float16: the model is narrowed to float16 afterwards.

    Raises:
        InputRefused: the records are of another model.
    """
    share_shapes(model)
    writer = NodeWriter(model, store)
    fuse_residual_norms(model, writer)
    values = value_map(model)
    rounded = {record.output: record for record in activations}
    shared = {table.head: table for table in tables if table.head is not None}
    lowered = [_lower(writer, values, linear, rounded, shared.get(linear.node), float16) for linear in linears]
    left = [record for record in activations if values[record.output].uses()]
    drop_unused_initializers(model)
    _drop_inferred_types(model)
    single = {v for x in lowered if needs_constant_scales(x.node) and runs_alone(x.node) for v in x.parts}
    if lowered:
        model.opset_imports.setdefault(DOMAIN, 1)
    return EmitReport(
        target="ort",
        notes=_notes(lowered, left),
        quantized=entries(linears, tables),
        linear_bits_per_weight=bits_per_weight(
            ((x.linear, x.parts) for x in lowered if not x.linear.is_head), float16=float16, single=single
        ),
    )


@dataclass(frozen=True)
class _Lowered:
    """One linear as MatMulNBits: its initializers, and how it treats its input."""

    linear: QuantizedLinear
    parts: tuple[ir.Value, ...]
    node: ir.Node
    level: int
    rounding: QuantizedActivation | None


def _lower(
    writer: NodeWriter,
    values: dict[str, ir.Value],
    linear: QuantizedLinear,
    rounded: dict[str, QuantizedActivation],
    table: QuantizedTable | None,
    float16: bool,
) -> _Lowered:
    node = node_of(values, linear.node)
    data = node.inputs[0]
    assert data is not None
    rounding = rounded.get(data.name or "")
    inside = rounding is not None and rounding.bits == 8
    level = 4 if inside or linear.grid.bits == 8 else 0
    layout = block_layout(linear.grid, linear.in_features)
    parts = _store(writer, linear, layout)
    if table is not None:
        lookup = node_of(values, table.node)
        zeros = _row_zeros(writer, table, parts)
        ids = values[table.ids]
        values[table.node] = look_up_blocks(writer, lookup, ids, table, parts[0], parts[1], zeros, layout)
    scales, channel_scales = _scales(writer, linear, parts[1], layout, float16)
    operands = [values[rounding.input] if rounding is not None and inside else data, parts[0], scales, *parts[2:]]
    attributes = {
        "K": linear.in_features,
        "N": linear.out_features,
        "bits": linear.grid.bits,
        "block_size": layout.block,
        "accuracy_level": level,
    }
    product = writer.op(node, "MatMulNBits", operands, f"{linear.node}.nbits", attributes, domain=DOMAIN)
    packed = product.producer()
    assert packed is not None
    if channel_scales is not None:
        product = writer.op(node, "Mul", [product, channel_scales], f"{linear.node}.scaled")
    writer.take_over(node.outputs[0], product)
    values[linear.node] = product
    return _Lowered(linear, (*parts, scales), packed, level, rounding)


def _store(writer: NodeWriter, linear: QuantizedLinear, layout: BlockLayout) -> tuple[ir.Value, ...]:
    """Codes, scales (``[N, blocks]``, or ``[N]`` for :func:`_scales`) and, for an asymmetric grid, zero points."""
    initializers = writer.model.graph.initializers
    grid = linear.grid
    codes = column_codes(initializers, grid, linear.in_features)
    parts = [writer.weight(pack_blocks(codes, grid.bits, layout), ir.DataType.UINT8, f"{linear.tensor}.blocks")]
    scales = initializers[grid.scales].const_value
    assert scales is not None
    rows = scales.numpy().T
    if rows.shape[1] != layout.blocks:
        afterwards = grid.bits == 4 and scales.dtype == ir.DataType.FLOAT
        rows = rows[:, 0] if afterwards else np.repeat(rows, layout.blocks, axis=1)
    parts.append(writer.weight(rows, scales.dtype, f"{linear.tensor}.row_scales"))
    if grid.zeros is not None and not grid.symmetric:
        zeros = initializers[grid.zeros].const_value
        assert zeros is not None
        packed = pack_zeros(zeros.numpy(), grid.bits, layout)
        parts.append(writer.weight(packed, ir.DataType.UINT8, f"{linear.tensor}.row_zeros"))
    return tuple(parts)


def _row_zeros(writer: NodeWriter, table: QuantizedTable, parts: tuple[ir.Value, ...]) -> ir.Value | None:
    """Zero points of a shared table, one for each scale and a byte each; None where they are the middle."""
    if table.grid.symmetric:
        return None
    if table.grid.bits == 8:
        return parts[2]
    content = writer.model.graph.initializers[table.grid.zeros or ""].const_value
    assert content is not None
    rows = content.numpy().T
    if parts[1].shape is not None and len(parts[1].shape) == 1:
        rows = rows[:, 0]
    return writer.weight(rows, ir.DataType.UINT8, f"{table.tensor}.token_zeros")


def _scales(
    writer: NodeWriter, linear: QuantizedLinear, stored: ir.Value, layout: BlockLayout, float16: bool
) -> tuple[ir.Value, ir.Value | None]:
    """What MatMulNBits takes for scales, ``[N, blocks]``, and what must be multiplied afterwards, ``[N]``."""
    if stored.shape is not None and len(stored.shape) == 2:
        return stored, None
    assert stored.dtype is not None and stored.const_value is not None
    shape, dtype = (linear.out_features, layout.blocks), stored.dtype.numpy()
    if not float16:
        return writer.constant(np.ones(shape, dtype), "ones"), stored
    numbers = stored.const_value.numpy()
    common = _common_scale(numbers)
    rest = writer.weight(numbers / common, stored.dtype, f"{linear.tensor}.channel_scales")
    return writer.constant(np.full(shape, common, dtype), "common_scales"), rest


def _common_scale(scales: np.ndarray) -> np.float32:
    """The largest power of two that is not above the smallest scale; scales far below the others do not count."""
    sizes = np.abs(scales[scales != 0])
    if not sizes.size:
        return np.float32(1)
    least = max(float(sizes.min()), float(np.median(sizes)) / 64)
    return np.float32(2.0 ** np.floor(np.log2(least)))


def _drop_inferred_types(model: ir.Model) -> None:
    """Forget types and shapes that ONNX Runtime infers anyway: it keeps those of the file in memory (3 MiB)."""
    made = (value for node in model.graph for value in node.outputs)
    for value in (*made, *model.graph.initializers.values()):
        if not value.is_graph_input() and not value.is_graph_output():
            value.type = value.shape = None


def _notes(lowered: Sequence[_Lowered], left: Sequence[QuantizedActivation]) -> tuple[str, ...]:
    """What to say; ``left`` are the activations that are still rounded by nodes of their own."""
    notes: list[str] = []
    if any(x.rounding is not None and x.rounding.bits == 8 for x in lowered):
        notes.append(_BLOCK_NOTE)
    if any(record.bits == 4 for record in left):
        notes.append(_INT4_NOTE)
    if any(record.bits == 8 for record in left):
        notes.append(_FLOAT_NOTE)
    eight = [x for x in lowered if x.linear.grid.bits == 8]
    free = sum(x.rounding is None for x in eight)
    if free:
        notes.append(_LEVEL_NOTE.format(count=free))
    if eight:
        notes.append(_VERSION_NOTE)
    return tuple(notes)
