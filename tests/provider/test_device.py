"""Tensors in a provider's memory are made, filled anew and lengthened by ONNX Runtime; here on the CPU, as on a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

from graphrot.evaluate.device import Device
from graphrot.evaluate.values import array_of, ort_value


class Far(Device):
    """Treated as a GPU; its memory, and what the models that move tensors run on, are the CPU's."""

    def __init__(self) -> None:
        super().__init__("cuda")

    @property
    def place(self) -> str:
        return "cpu"

    def open(self, model: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.float32])
@pytest.mark.parametrize("device", [Device(), Far()], ids=["cpu", "far"])
def test_tensors(device: Device, dtype: Any) -> None:
    array = np.arange(2 * 3 * 4 * 2).reshape(2, 3, 4, 2).astype(dtype)
    value = device.put(array.copy())
    found = device.take(value)
    assert found.dtype == array.dtype and (found == array).all()
    longer = device.take(device.repeated(value, 3))
    assert longer.shape == (2, 3, 12, 2) and (longer == np.concatenate([array] * 3, axis=-2)).all()
    if device.is_cpu:
        return
    device.write(value, array[::-1])
    assert (device.take(value) == array[::-1]).all()
    device.take(value)[:] = 0
    assert (device.take(value) == array[::-1]).all(), "what is taken is a copy"


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.zeros((1, 1, 2, 2), np.int8)
    value = Device().put(array)
    array[0, 0, 0, 0] = 7
    assert array_of(value)[0, 0, 0, 0] == 7
    assert Device().take(ort_value(array))[0, 0, 0, 0] == 7
