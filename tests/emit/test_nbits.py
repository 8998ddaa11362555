"""MatMulNBits storage: packed by us, read back the way the operator's documentation says."""

from __future__ import annotations

import numpy as np
import pytest

from graphrot.emit.nbits import BlockLayout, block_layout, pack_blocks, pack_zeros
from graphrot.passes.records import StoredGrid


def unpack(packed: np.ndarray, bits: int, block: int) -> np.ndarray:
    """``[N, blocks, block]`` integers, element by element."""
    n, blocks, _ = packed.shape
    result = np.zeros((n, blocks, block), dtype=np.int64)
    for index in np.ndindex(result.shape):
        row, part, place = index
        if bits == 8:
            result[index] = packed[row, part, place]
        else:
            result[index] = (int(packed[row, part, place // 2]) >> (4 * (place % 2))) & 15
    return result


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("k", "block"), [(32, 16), (37, 16), (48, 32), (5, 16)])
def test_blocks(bits: int, signed: bool, k: int, block: int) -> None:
    rng = np.random.default_rng(k)
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if signed else (0, 1 << bits)
    codes = rng.integers(low, high, (k, 7)).astype(np.int8 if signed else np.uint8)
    layout = BlockLayout(block, -(-k // block))
    packed = pack_blocks(codes, bits, layout)
    assert packed.dtype == np.uint8 and packed.shape == (7, layout.blocks, block * bits // 8)
    middle = 1 << (bits - 1)
    want = np.full((7, layout.padded), middle)
    want[:, :k] = codes.T.astype(np.int64) + (middle if signed else 0)
    np.testing.assert_array_equal(unpack(packed, bits, block).reshape(7, -1), want)


def test_many_rows_are_packed_in_parts() -> None:
    codes = np.random.default_rng(0).integers(-8, 8, (16, 9000)).astype(np.int8)
    packed = pack_blocks(codes, 4, BlockLayout(16, 1))
    biased = codes.astype(np.int64) + 8
    np.testing.assert_array_equal(packed[:, 0, 0], biased[0] | (biased[1] << 4))


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_zeros(blocks: int) -> None:
    zeros = np.arange(blocks * 5, dtype=np.uint8).reshape(blocks, 5)
    packed = pack_zeros(zeros, 4, BlockLayout(16, blocks))
    assert packed.shape == (5, -(-blocks // 2))
    for block in range(blocks):
        np.testing.assert_array_equal((packed[:, block // 2] >> (4 * (block % 2))) & 15, zeros[block])
    np.testing.assert_array_equal(pack_zeros(zeros, 8, BlockLayout(16, blocks)), zeros.T)


def test_one_zero_for_all_blocks() -> None:
    packed = pack_zeros(np.array([[3, 12]], dtype=np.uint8), 4, BlockLayout(16, 3))
    np.testing.assert_array_equal(packed, [[0x33, 0x03], [0xCC, 0x0C]])


@pytest.mark.parametrize(
    ("group", "width", "block", "blocks"),
    [
        (None, 576, 64, 9),
        (None, 1536, 256, 6),
        (None, 100, 16, 7),
        (128, 576, 128, 5),
        (32, 48, 32, 2),
        (128, 48, 16, 3),
    ],
)
def test_layout(group: int | None, width: int, block: int, blocks: int) -> None:
    grid = StoredGrid("codes", "scales", None, 4, group, True)
    assert block_layout(grid, width) == BlockLayout(block, blocks)
