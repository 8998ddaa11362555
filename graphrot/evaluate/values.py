"""Tensors of ONNX Runtime and NumPy arrays: their types, and the way from one to the other."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "tensor(double)": np.float64,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
}
"""By the names that ONNX Runtime gives them."""
_BFLOAT16 = 16
"""Its number in ONNX."""


def ort_value(array: np.ndarray) -> Any:
    """An ``onnxruntime.OrtValue`` over the memory of ``array``, which is contiguous; no copy."""
    import onnxruntime as ort

    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def array_of(value: Any) -> np.ndarray:
    """The numbers of a tensor; ONNX Runtime itself has no NumPy type for bfloat16."""
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    shape = tuple(value.shape())
    raw = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape))) if np.prod(shape) else b""
    return np.frombuffer(raw, ml_dtypes.bfloat16).reshape(shape)
