"""The parts of a packed matmul as initializers: codes, scales, zero points.

RotatedMatMul takes one scale per output channel as it is. For 4 bits MatMulNBits wants a scale per block, so it gets
ones, shared by all linears of one shape, and a Mul follows. Repeating the scales would take 4.5 bits per weight for 576
inputs; an Expand of constants keeps the file small, but ONNX Runtime holds its result in memory beside the packed copy
(5 MiB of 119 for SmolLM2-135M). With 8 bits the repeated scales are stored, relatively few. Where the model is narrowed
to float16 afterwards, sums without their scale would overflow: the ones become a power of two that no scale but extreme
ones is below, and the Mul does the rest. On CUDA a Mul is a kernel of its own behind each matmul: there 4-bit scales
are repeated, too (4.25 bits per weight for 576 inputs in float16).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.emit.nbits import BlockLayout, column_codes, pack_blocks, pack_zeros
from graphrot.emit.rotated import scale_group
from graphrot.passes.quantize_nodes import NodeWriter
from graphrot.passes.records import QuantizedLinear, QuantizedTable


def store_parts(
    writer: NodeWriter, linear: QuantizedLinear, layout: BlockLayout, *, one_scale: bool, repeated: bool = False
) -> tuple[ir.Value, ...]:
    """Codes, scales and, for an asymmetric grid, zero points.

    Scales are ``[N, blocks]``; where a channel has one, ``[N]`` if ``one_scale`` or, unless they are to be
    ``repeated``, for :func:`split_scales`.
    """
    initializers = writer.model.graph.initializers
    grid = linear.grid
    codes = column_codes(initializers, grid, linear.in_features)
    parts = [writer.weight(pack_blocks(codes, grid.bits, layout), ir.DataType.UINT8, f"{linear.tensor}.blocks")]
    scales = initializers[grid.scales].const_value
    assert scales is not None
    rows = scales.numpy().T
    if one_scale and scale_group(linear) == 0:
        rows = rows[:, 0]
    elif rows.shape[1] != layout.blocks:
        afterwards = grid.bits == 4 and scales.dtype == ir.DataType.FLOAT and not repeated
        rows = rows[:, 0] if afterwards else np.repeat(rows, layout.blocks, axis=1)
    parts.append(writer.weight(rows, scales.dtype, f"{linear.tensor}.row_scales"))
    if grid.zeros is not None and not grid.symmetric:
        zeros = initializers[grid.zeros].const_value
        assert zeros is not None
        packed = pack_zeros(zeros.numpy(), grid.bits, layout)
        parts.append(writer.weight(packed, ir.DataType.UINT8, f"{linear.tensor}.row_zeros"))
    return tuple(parts)


def row_zeros(writer: NodeWriter, table: QuantizedTable, parts: tuple[ir.Value, ...]) -> ir.Value | None:
    """Zero points of a shared table, one for each scale and a byte each; None where they are the middle."""
    if table.grid.symmetric:
        return None
    by_row = parts[1].shape is not None and len(parts[1].shape) == 1
    if table.grid.bits == 8 and not by_row:
        return parts[2]
    content = writer.model.graph.initializers[table.grid.zeros or ""].const_value
    assert content is not None
    rows = content.numpy().T
    if by_row:
        rows = rows[:, 0]
    return writer.weight(rows, ir.DataType.UINT8, f"{table.tensor}.token_zeros")


def split_scales(
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
