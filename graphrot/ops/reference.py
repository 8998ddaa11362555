"""The operators in float64 NumPy: what kernels and function bodies are measured against.

Written from the definition with explicit matrices, apart from the fast transform that folds use.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray

from graphrot.errors import UsageError


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
