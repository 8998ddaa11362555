"""The operators in float64 NumPy: what kernels and function bodies are measured against.

Written from the definition with explicit matrices, apart from the fast transform that folds use.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray

from graphrot.errors import UsageError
from graphrot.ops.rotated_matmul import EPSILON


def hadamard_transform(x: ArrayLike, *, size: int, factor: ArrayLike, scale: float) -> NDArray[np.float64]:
    """``x @ (factor (x) S) * scale`` for every block of ``size`` channels of the last axis.

    Args:
        x: ``[..., blocks * size]``.
        size: channels per block, ``K * 2^m``.
        factor: ``[K, K]``.
        scale: factor on the result.

    Returns:
        float64, the shape of ``x``.

    Raises:
        UsageError: the sizes do not fit together.
    """
    rows = np.asarray(x, np.float64)
    mixing = np.asarray(factor, np.float64)
    order = len(mixing)
    width = size // order
    if mixing.shape != (order, order) or width * order != size or width & (width - 1):
        raise UsageError(f"A factor of shape {mixing.shape} does not divide size {size} into a power of two")
    if rows.ndim == 0 or rows.shape[-1] % size:
        raise UsageError(f"A transform of size {size} cannot act on an input of shape {rows.shape}")
    common = np.arange(width)[:, None] & np.arange(width)[None, :]
    parity = np.array([bin(word).count("1") & 1 for word in range(width)])
    sylvester = 1.0 - 2.0 * parity[common]
    blocks = rows.reshape(-1, order, width) @ sylvester
    return np.asarray(np.einsum("rkj,kl->rlj", blocks, mixing).reshape(rows.shape) * scale, np.float64)


def evaluate_hadamard(node: ir.Node, x: ArrayLike) -> NDArray[np.float64]:
    """:func:`hadamard_transform` with the attributes of a ``graphrot::HadamardTransform`` node."""
    attributes = node.attributes
    return hadamard_transform(
        x,
        size=attributes["size"].as_int(),
        factor=attributes["factor"].as_tensor().numpy(),
        scale=attributes["scale"].as_float(),
    )


def round_rows(z: ArrayLike, levels: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Whole numbers and a scale for every row: ``s = max(max|z|, EPSILON) / levels``, ``q = z / s`` half to even.

    Args:
        z: ``[..., K]``.
        levels: the largest whole number, 127 or 7.

    Returns:
        ``(q, s)``, ``[..., K]`` and ``[..., 1]``. A row that is not finite has zeros and a scale of NaN.
    """
    rows = np.asarray(z, np.float64)
    finite = np.isfinite(rows).all(axis=-1, keepdims=True)
    known = np.where(finite, rows, 0.0)
    scales = np.maximum(np.abs(known).max(axis=-1, keepdims=True, initial=0.0), EPSILON) / levels
    return np.clip(np.rint(known / scales), -levels, levels).astype(np.int64), np.where(finite, scales, np.nan)


def unpack_codes(packed: ArrayLike, bits: int) -> NDArray[np.int64]:
    """Codes of bytes along the last axis, the low half of a byte first: ``[..., n]`` to ``[..., n * 8 / bits]``."""
    content = np.asarray(packed, np.uint8).astype(np.int64)
    if bits == 8:
        return content
    return np.stack([content & 15, content >> 4], axis=-1).reshape(*content.shape[:-1], -1)


def weight_codes(codes: ArrayLike, zero_points: ArrayLike | None, *, in_features: int, bits: int) -> NDArray[np.int64]:
    """``code - zero`` for every weight, from the storage of MatMulNBits.

    Args:
        codes: ``[N, blocks, block * bits / 8]`` uint8.
        zero_points: ``[N, ceil(blocks * bits / 8)]`` uint8; None: 8 or 128.
        in_features: K; the rest of the last block does not count.
        bits: 4 or 8.

    Returns:
        ``[N, K]``.
    """
    whole = unpack_codes(codes, bits)
    rows, blocks, _ = whole.shape
    zeros = np.full((rows, blocks), 1 << (bits - 1)) if zero_points is None else unpack_codes(zero_points, bits)
    return (whole - zeros[:, :blocks, None]).reshape(rows, -1)[:, :in_features]


def integer_product(
    q: ArrayLike,
    row_scales: ArrayLike,
    weights: ArrayLike,
    scales: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    group: int = 0,
) -> NDArray[np.float64]:
    """``s * sum_g scales[n, g] * sum_k q * weight + bias``, the inner sums in integers.

    Args:
        q: ``[..., K]`` integers.
        row_scales: ``[..., 1]``.
        weights: ``[N, K]`` integers.
        scales: ``[N, ceil(K / group)]``, or ``[N]``.
        bias: ``[N]`` or None.
        group: channels that share a scale, the last group may be short; 0: all of them.

    Returns:
        float64 ``[..., N]``.
    """
    rows, columns = np.asarray(q, np.int64), np.asarray(weights, np.int64)
    factors = np.asarray(scales, np.float64).reshape(len(columns), -1)
    width = columns.shape[1]
    step = group or width
    result = np.zeros((*rows.shape[:-1], len(columns)))
    for number, start in enumerate(range(0, width, step)):
        part = slice(start, start + step)
        result += (rows[..., part] @ columns[:, part].T) * factors[:, number]
    result *= np.asarray(row_scales, np.float64)
    return result if bias is None else result + np.asarray(bias, np.float64)


def evaluate_rotated_matmul(
    node: ir.Node,
    x: ArrayLike,
    codes: ArrayLike,
    scales: ArrayLike,
    zero_points: ArrayLike | None = None,
    bias: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """What a ``graphrot::RotatedMatMul`` node answers: its attributes, and its inputs as numbers.

    Args:
        node: the node.
        x: ``[..., K]``.
        codes: ``B``.
        scales: ``[N, blocks]`` or ``[N]``.
        zero_points: packed, or None.
        bias: ``[N]`` or None.

    Returns:
        float64 ``[..., N]``.
    """
    names = ("K", "bits", "block_size", "activation_bits", "rotate")
    number = {name: node.attributes[name].as_int() for name in names}
    z = evaluate_hadamard(node, x) if number["rotate"] else np.asarray(x, np.float64)
    q, row_scales = round_rows(z, (1 << (number["activation_bits"] - 1)) - 1)
    weights = weight_codes(codes, zero_points, in_features=number["K"], bits=number["bits"])
    return integer_product(q, row_scales, weights, scales, bias, group=number["block_size"])
