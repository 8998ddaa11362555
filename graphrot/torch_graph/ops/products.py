"""Matrix products, and the Hadamard transform."""

from __future__ import annotations

import functools

import numpy as np
import torch

from graphrot.torch_graph.ops.call import GRAPHROT, MICROSOFT, Call, Op


def _matmul(call: Call) -> torch.Tensor:
    return torch.matmul(call.tensor(0), call.tensor(1))


def _gemm(call: Call) -> torch.Tensor:
    a, b, c = call.tensor(0), call.tensor(1), call.maybe(2)
    product = (a.T if call.integer("transA") else a) @ (b.T if call.integer("transB") else b)
    alpha, beta = call.floating("alpha", 1.0), call.floating("beta", 1.0)
    if alpha != 1.0:
        product = product * alpha
    if c is None or beta == 0.0:
        return product
    return product + (c if beta == 1.0 else c * beta)


def _fused_matmul(call: Call) -> torch.Tensor:
    parts = []
    for position, side in enumerate("AB"):
        x = call.tensor(position)
        if call.integer(f"transBatch{side}"):
            x = x.movedim(0, -2)
        if call.integer(f"trans{side}") and x.ndim > 1:
            x = x.transpose(-1, -2)
        parts.append(x)
    product = torch.matmul(*parts)
    alpha = call.floating("alpha", 1.0)
    return product if alpha == 1.0 else product * alpha


def _einsum(call: Call) -> torch.Tensor:
    return torch.einsum(call.text("equation"), *call.tensors())


def _matmul_nbits(call: Call) -> torch.Tensor:
    """Integer weights are constant; the arithmetic is that of floats, at any accuracy level."""
    x, bias = call.tensor(0), call.maybe(5)
    if call.has(4):
        raise call.refuse("its groups are given by g_idx")
    weight = _unpacked(call)
    product = x @ weight.T
    return product if bias is None else product + bias


def _unpacked(call: Call) -> torch.Tensor:
    """``[N, K]`` floats."""
    bits, block = call.integer("bits", 4), call.integer("block_size")
    n, k = call.integer("N"), call.integer("K")
    if bits not in (2, 4, 8):
        raise call.refuse(f"its weights have {bits} bits")
    packed, scales, zeros = call.tensor(1), call.tensor(2), call.maybe(3)
    blocks = -(-k // block)
    codes = _codes(packed.reshape(n, blocks, -1), bits)[..., :block].to(call.dtype)
    if zeros is None:
        offset = torch.full((n, blocks, 1), float(1 << (bits - 1)), dtype=call.dtype)
    elif zeros.dtype == torch.uint8:
        offset = _codes(zeros.reshape(n, -1), bits)[:, :blocks, None].to(call.dtype)
    else:
        offset = zeros.reshape(n, blocks, 1)
    return ((codes - offset) * scales.reshape(n, blocks, 1)).reshape(n, -1)[:, :k]


def _codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of a byte, the low ones first."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    parts = [packed >> shift & mask for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)


def _hadamard(call: Call) -> torch.Tensor:
    """``x @ (factor (x) S) / sqrt(size)`` for blocks of the last axis; S = left (x) right."""
    x = call.tensor(0)
    size = call.integer("size")
    factor, left, right = (call.array(name) for name in ("factor", "left", "right"))
    assert factor is not None and left is not None and right is not None
    scale = call.floating("scale") if factor.dtype.kind == "f" else size**-0.5
    blocks = x.reshape(-1, len(factor), len(left) * len(right))
    if len(left) * len(right) > 1:
        sylvester = _matrix(_key(np.kron(left, right)), call.dtype, scale)
        blocks = blocks @ sylvester
        scale = 1.0
    if len(factor) > 1:
        blocks = _matrix(_key(factor.T), call.dtype, scale) @ blocks
    return blocks.reshape(x.shape)


def _key(array: np.ndarray) -> tuple[bytes, str, tuple[int, ...]]:
    plain = np.ascontiguousarray(array)
    return plain.tobytes(), plain.dtype.str, plain.shape


@functools.lru_cache(maxsize=64)
def _matrix(key: tuple[bytes, str, tuple[int, ...]], dtype: torch.dtype, scale: float) -> torch.Tensor:
    content, kind, shape = key
    array = np.frombuffer(content, np.dtype(kind)).reshape(shape).astype(np.float64) * scale
    return torch.from_numpy(array).to(dtype)


PRODUCTS: dict[tuple[str, str], Op] = {
    ("", "Einsum"): _einsum,
    ("", "Gemm"): _gemm,
    ("", "MatMul"): _matmul,
    (MICROSOFT, "FusedMatMul"): _fused_matmul,
    (MICROSOFT, "MatMulNBits"): _matmul_nbits,
    (GRAPHROT, "HadamardTransform"): _hadamard,
}
