"""The storage of ``com.microsoft::MatMulNBits``: codes by rows and blocks, biased to be unsigned.

``B [N, blocks, block * bits / 8]`` uint8: row ``n`` holds the weights of output channel ``n``, padded at
the end; 4-bit codes lie two to a byte, the even one low. Zero points, where there are any,
``[N, ceil(blocks * bits / 8)]``, packed alike; without them 8 (128) means zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphrot.passes.quantize_nodes import channel_block
from graphrot.passes.records import StoredGrid

_ROWS = 4096
"""Output channels that are packed at once."""


@dataclass(frozen=True)
class BlockLayout:
    """How ``in_features`` weights are cut into blocks.

    Args:
        block: weights in a block.
        blocks: blocks in a row; the last one may be padded.
    """

    block: int
    blocks: int

    @property
    def padded(self) -> int:
        """Weights in a row, padding included."""
        return self.block * self.blocks


def block_layout(grid: StoredGrid, in_features: int, *, most: int = 256) -> BlockLayout:
    """Groups are blocks; one scale for all of a row leaves the choice free (``channel_block``), up to ``most``."""
    one = grid.group is None or grid.group >= in_features
    block = channel_block(in_features, most=most) if one or grid.group is None else grid.group
    return BlockLayout(block, -(-in_features // block))


def column_codes(initializers: Mapping[str, ir.Value], grid: StoredGrid, in_features: int) -> np.ndarray:
    """``[K, N]`` codes of a linear or shared table in canonical form: int8, or uint8 biased codes."""
    content = initializers[grid.codes].const_value
    assert content is not None
    codes = content.numpy()
    if content.dtype in (ir.DataType.INT4, ir.DataType.UINT4):
        return codes.astype(np.int8 if content.dtype == ir.DataType.INT4 else np.uint8)
    if grid.bits == 4:
        pairs = np.stack([codes & 15, codes >> 4], axis=1)
        return pairs.reshape(-1, codes.shape[1])[:in_features]
    return codes


def pack_blocks(codes: np.ndarray, bits: int, layout: BlockLayout) -> np.ndarray:
    """``B`` from ``[K, N]`` codes.

    Args:
        codes: int8 (signed) or uint8 (biased); may be memory-mapped.
        bits: 4 or 8.
        layout: blocks of a row.

    Returns:
        ``[N, blocks, block * bits / 8]`` uint8; padding holds the code of zero.
    """
    k, n = codes.shape
    middle = 1 << (bits - 1)
    packed = np.empty((n, layout.padded * bits // 8), dtype=np.uint8)
    for start in range(0, n, _ROWS):
        part = codes[:, start : start + _ROWS].T
        rows = np.full((part.shape[0], layout.padded), middle, dtype=np.uint8)
        rows[:, :k] = (part.astype(np.int16) + middle) if part.dtype == np.int8 else part
        packed[start : start + _ROWS] = _nibbles(rows) if bits == 4 else rows
    return packed.reshape(n, layout.blocks, -1)


def pack_zeros(zeros: np.ndarray, bits: int, layout: BlockLayout) -> np.ndarray:
    """Zero points from ``[G, N]`` uint8, one per block, or one per channel repeated.

    Returns:
        ``[N, ceil(blocks * bits / 8)]`` uint8.
    """
    rows = zeros.T.astype(np.uint8)
    if rows.shape[1] != layout.blocks:
        rows = np.repeat(rows[:, :1], layout.blocks, axis=1)
    return _nibbles(rows) if bits == 4 else np.ascontiguousarray(rows)


def _nibbles(rows: np.ndarray) -> np.ndarray:
    """``[N, K]`` codes below 16 to ``[N, ceil(K/2)]`` bytes, even code low."""
    packed = rows[:, 0::2].copy()
    packed[:, : rows.shape[1] // 2] |= rows[:, 1::2] << 4
    return packed
