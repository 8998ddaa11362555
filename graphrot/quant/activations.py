"""Per-token symmetric rounding of activations: the numpy reference of what the written model does."""

from __future__ import annotations

from typing import Literal

import numpy as np

from graphrot.ops.rotated_matmul import EPSILON as LEAST_ROW

EPSILON = LEAST_ROW
"""Least largest magnitude of a token: keeps the scale of a token of zeros above zero, also in float16."""


def quantize_tokens(
    values: np.ndarray, bits: Literal[4, 8], *, epsilon: float = EPSILON
) -> tuple[np.ndarray, np.ndarray]:
    """One scale per token: ``max(max|x|, epsilon) / qmax``, codes rounded half to even.

    Args:
        values: ``[..., K]`` float; a token is a vector along the last axis.
        bits: 8 (qmax 127) or 4 (qmax 7).
        epsilon: least magnitude.

    Returns:
        ``(codes, scales)``: ``[..., K]`` int8 and ``[..., 1]`` float32.
    """
    x = np.asarray(values, dtype=np.float32)
    scales = _scales(x, bits, epsilon)
    return _codes(x, scales, bits).astype(np.int8), scales


def fake_quantize_tokens(values: np.ndarray, bits: Literal[4, 8], *, epsilon: float = EPSILON) -> np.ndarray:
    """The floats that :func:`quantize_tokens` codes stand for, in the dtype of ``values``."""
    x = np.asarray(values, dtype=np.float32)
    scales = _scales(x, bits, epsilon)
    codes = _codes(x, scales, bits)
    codes *= scales
    return codes.astype(values.dtype, copy=False)


def fake_quantize_blocks(values: np.ndarray, block: int) -> np.ndarray:
    """int8 rounding per token and block of input channels, as MatMulNBits does at accuracy level 4.

    Args:
        values: ``[..., K]`` float.
        block: channels that share a scale; the last block may be short.

    Returns:
        ``[..., K]`` of the same dtype. Blocks of zeros stay zero.
    """
    k = values.shape[-1]
    x = np.asarray(values, dtype=np.float32).reshape(-1, k)
    result = np.empty_like(x)
    for start in range(0, k, block):
        part = x[:, start : start + block]
        result[:, start : start + block] = fake_quantize_tokens(part, 8, epsilon=float(np.finfo(np.float32).tiny) * 127)
    return result.reshape(values.shape).astype(values.dtype, copy=False)


def _scales(x: np.ndarray, bits: Literal[4, 8], epsilon: float) -> np.ndarray:
    qmax = np.float32((1 << (bits - 1)) - 1)
    largest = np.maximum(x.max(axis=-1, keepdims=True), -x.min(axis=-1, keepdims=True))
    scales: np.ndarray = np.maximum(largest, np.float32(epsilon)) / qmax
    return scales


def _codes(x: np.ndarray, scales: np.ndarray, bits: Literal[4, 8]) -> np.ndarray:
    codes: np.ndarray = np.divide(x, scales)
    np.rint(codes, out=codes)
    high = (1 << (bits - 1)) - 1
    np.clip(codes, -high - 1, high, out=codes)
    return codes
