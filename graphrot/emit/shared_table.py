"""The lookup in a table whose codes are the head's MatMulNBits blocks, so that both are one initializer."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.emit.nbits import BlockLayout
from graphrot.passes.quantize_nodes import NodeWriter
from graphrot.passes.quantize_tables import cut, shape_like_ids, unpack_rows
from graphrot.passes.records import QuantizedTable


def look_up_blocks(
    writer: NodeWriter,
    lookup: ir.Node,
    ids: ir.Value,
    table: QuantizedTable,
    blocks: ir.Value,
    scales: ir.Value,
    zeros: ir.Value | None,
    layout: BlockLayout,
) -> ir.Value:
    """Replace a canonical lookup by one in ``blocks``.

    Args:
        writer: adds the nodes.
        lookup: the last node of the canonical lookup; it and what only fed it go.
        ids: token ids, any shape.
        table: its record.
        blocks: ``[V, blocks, block * bits / 8]`` uint8, biased codes.
        scales: ``[V, blocks]``, or one per row ``[V]``, in the table's float type.
        zeros: uint8 zero points of the biased codes, shaped as the scales; None: the middle.
        layout: blocks of a row.

    Returns:
        The new lookup's output, ``[*ids.shape, D]``.
    """
    base, bits = f"{table.tensor}.packed", table.grid.bits
    flat = writer.op(lookup, "Reshape", [ids, writer.integers([-1], "flat")], f"{base}.flat_ids")

    def gather(source: ir.Value, part: str) -> ir.Value:
        return writer.op(lookup, "Gather", [source, flat], f"{base}.token_{part}", {"axis": 0})

    codes = gather(blocks, "blocks")
    if bits == 4:
        rows = unpack_rows(writer, lookup, codes, layout.padded, f"{base}.token")
    else:
        rows = writer.op(lookup, "Reshape", [codes, writer.integers([-1, layout.padded], "row")], f"{base}.token_codes")
    token_scales = gather(scales, "scales")
    token_zeros = None if zeros is None else gather(zeros, "zeros")
    assert scales.shape is not None
    # One scale per row is a block scale like the others once the axis of blocks is there.
    axes = None if len(scales.shape) == 2 else writer.integers([1], "axis_of_blocks")
    if axes is not None:
        token_scales = writer.op(lookup, "Unsqueeze", [token_scales, axes], f"{base}.token_scale")
    if token_zeros is None:
        token_zeros = _middle(writer, lookup, token_scales, bits, base)
    elif axes is not None:
        token_zeros = writer.op(lookup, "Unsqueeze", [token_zeros, axes], f"{base}.token_zero")
    block = {"axis": 1, "block_size": layout.block if axes is None else layout.padded}
    decoded = writer.op(lookup, "DequantizeLinear", [rows, token_scales, token_zeros], f"{base}.token_rows", block)
    if layout.padded != table.dim:
        decoded = cut(writer, lookup, decoded, table.dim, 1, f"{base}.token")
    embedded = shape_like_ids(writer, lookup, decoded, ids, table.dim, base)
    writer.take_over(lookup.outputs[0], embedded)
    return embedded


def _middle(writer: NodeWriter, anchor: ir.Node, scales: ir.Value, bits: int, base: str) -> ir.Value:
    """The biased code of zero, once for each scale."""
    shape = writer.op(anchor, "Shape", [scales], f"{base}.token_scales_shape")
    code = ir.tensor(np.array([1 << (bits - 1)], dtype=np.uint8))
    return writer.op(anchor, "ConstantOfShape", [shape], f"{base}.token_zeros", {"value": code})
