"""Reads the weights of linears as ``[N, K]`` and writes quantized ones back into their own layout."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import LinearRef
from graphrot.errors import InputRefused
from graphrot.graph import read_constant


def load_weight(values: Mapping[str, ir.Value], linear: LinearRef) -> np.ndarray:
    """The weight of a linear, in memory; a mapping of its file is dropped again.

    Args:
        values: name -> value of the main graph.
        linear: which.

    Returns:
        ``[N, K]`` float32, contiguous.

    Raises:
        InputRefused: the weight is not there, not constant, or not ``[K, N]`` / ``[N, K]`` as stated.
    """
    value = values.get(linear.weight)
    if value is None:
        raise InputRefused("The weight of a linear is not in the graph", where=f"tensor {linear.weight!r}")
    array = read_constant(value)
    k, n = linear.in_features, linear.out_features
    stored = (k, n) if linear.layout == "KN" else (n, k)
    if array.shape != stored:
        raise InputRefused(
            f"A weight of shape {list(array.shape)} cannot be quantized where {list(stored)} is expected",
            where=f"tensor {linear.weight!r}",
        )
    result = np.array(array.T if linear.layout == "KN" else array, dtype=np.float32, order="C")
    del array
    drop_mapping(value)
    return result


def drop_mapping(value: ir.Value) -> None:
    """Unmap the file behind a constant (it is mapped again when read), unless someone looks at it."""
    if isinstance(value.const_value, ir.ExternalTensor):
        with contextlib.suppress(BufferError):
            value.const_value.release()
    node = value.producer()
    for operand in node.inputs if node is not None else ():
        if operand is not None:
            drop_mapping(operand)


def stored_layout(weight: np.ndarray, linear: LinearRef, dtype: np.dtype[np.generic]) -> np.ndarray:
    """``[N, K]`` numbers in the layout and dtype that the linear's node takes, contiguous."""
    return np.ascontiguousarray(weight.T if linear.layout == "KN" else weight, dtype=dtype)
