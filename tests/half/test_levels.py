"""Packed matmuls in half models give the same numbers at every optimization level of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphrot
from graphrot.emit import half_constants
from graphrot.evaluate.session import open_decoder
from tests.exported import tiny_onnx
from tests.half.graphs import F16, F32, graph, made_by, narrowed, run
from tests.tiny import VOCAB

LEVELS = (
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
)

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "w4a8": ("llama_tied", "float16", {"kernels": "ort"}),
    "w4a8, a head of its own": ("qwen2", "float16", {"kernels": "ort"}),
    "w4a8 not rotated": ("llama_tied", "float16", {"kernels": "ort", "rotations": None}),
    "w4a8 by group": ("llama_tied", "float16", {"kernels": "ort", "rotations": None, "group": 32, "symmetric": False}),
    "8-bit weights": ("llama_tied", "float16", {"kernels": "ort", "weights": "int8", "rotations": None}),
    "4-bit tables": (
        "llama_tied",
        "float16",
        {"kernels": "ort", "embedding": "int4", "head": "int4", "rotations": None},
    ),
    "w4a8 in bfloat16": ("llama_tied", "bfloat16", {"kernels": "ort"}),
    "RotatedMatMul": ("llama_tied", "float16", {}),
    "RotatedMatMul, biases": ("qwen2", "float16", {}),
    "RotatedMatMul by group": ("llama_tied", "float16", {"group": 32, "symmetric": False}),
    "RotatedMatMul of 8 bits": ("llama_tied", "float16", {"weights": "int8", "symmetric": False}),
    "RotatedMatMul in bfloat16": ("llama_tied", "bfloat16", {"group": 32}),
}


def logits(path: Path, tokens: np.ndarray, level: ort.GraphOptimizationLevel) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.graph_optimization_level = level
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    sizes = {
        name: size for entry in session.get_inputs()[:1] for name, size in zip(entry.shape, tokens.shape, strict=True)
    }
    given: dict[str, Any] = {
        "input_ids": tokens,
        "attention_mask": np.ones_like(tokens),
        "position_ids": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy(),
    }
    feeds = {}
    for entry in session.get_inputs():
        if entry.name in given:
            feeds[entry.name] = ort.OrtValue.ortvalue_from_numpy(given[entry.name])
        else:
            shape = [size if isinstance(size, int) else sizes.get(size, 0) for size in entry.shape]
            kind = 16 if "bfloat16" in entry.type else 10
            empty = np.zeros(shape, np.uint16 if kind == 16 else np.float16)
            feeds[entry.name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(empty, kind)
    found: np.ndarray = session.run_with_ort_values(["logits"], feeds)[0].numpy()
    return found


@pytest.mark.parametrize(("name", "dtype", "options"), CASES.values(), ids=CASES)
def test_every_level_is_right(
    name: str, dtype: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_constants, "_SMALL", 0)  # as in large models: constants that both types read are cast
    settings = {"recipe": "w4a8", "solver": "rtn", "certificate": None} | options
    graphrot.convert(tiny_onnx(name), output=tmp_path / "single", **settings)
    graphrot.convert(tiny_onnx(name), output=tmp_path / "half", dtype=dtype, **settings)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 12))
    expected, _ = open_decoder(tmp_path / "single").run(tokens)
    for level in LEVELS:
        found = logits(tmp_path / "half" / "model.onnx", tokens, level)
        bound = 0.05 if dtype == "float16" else 0.15
        assert np.abs(found - expected).max() < bound * np.abs(expected).max(), level


ALONE = """(float[n, 32] x) => (float[n, 32] y) {
    square = Mul(x, x)
    first = com.microsoft.MatMulNBits<K = 32, N = 32, bits = 8, block_size = 16, accuracy_level = LEVEL>(square, a, s)
    bent = Relu(first)
    second = com.microsoft.MatMulNBits<K = 32, N = 32, bits = 8, block_size = 16, accuracy_level = LEVEL>(bent, b, s)
    y = Tanh(second)
}"""
"""Two packed matmuls with the same scales, between operators without a float16 kernel."""


def alone(level: int) -> ir.Model:
    numbers = np.random.default_rng(3)
    codes = numbers.integers(0, 256, (2, 32, 2, 16)).astype(np.uint8)
    scales = ((0.5 + numbers.random((32, 2))) * 1e-3).astype(np.float32)
    return graph(ALONE.replace("LEVEL", str(level)), a=codes[0], b=codes[1], s=scales)


def test_packed_matmuls_among_float32_operators_keep_float32_scales(tmp_path: Path) -> None:
    x = np.random.default_rng(4).standard_normal((3, 32)).astype(np.float16)
    expected = run(alone(4), tmp_path / "single", {"x": x})[0]
    model = narrowed(alone(4), F16, tmp_path / "store", "x", "y")
    packed = made_by(model, "MatMulNBits")
    assert len(packed) == 2
    for node in packed:
        scales = node.inputs[2]
        assert scales is not None and scales.const_value is not None and scales.const_value.dtype == F32
    found = run(model, tmp_path / "half", {"x": x})[0]
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
    level_0 = narrowed(alone(0), F16, tmp_path / "level_0", "x", "y")
    assert all(node.inputs[2] is not None and node.inputs[2].dtype == F16 for node in made_by(level_0, "MatMulNBits"))
