"""Quantized weights are read back as the numbers that ONNX Runtime computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphrot.errors import InputRefused
from graphrot.model.dequantize import dequantize, write_float
from graphrot.model.onnxfile import refuse_quantized

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def _graph(node: Any, shapes: dict[str, tuple[int, list[Any]]], constants: dict[str, Any]) -> ir.Model:
    initializers = [
        content if isinstance(content, TensorProto) else numpy_helper.from_array(content, name)
        for name, content in constants.items()
    ]
    inputs = [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in shapes.items()]
    nodes = node if isinstance(node, list) else [node]
    ends = [helper.make_tensor_value_info("y", FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, ends, initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def _run(model: ir.Model | Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = str(model) if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    return np.asarray(ort.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(["y"], feeds)[0])


def _same(model: ir.Model, feeds: dict[str, np.ndarray], tmp_path: Path, left: set[str]) -> ir.Model:
    expected = _run(model, feeds)
    losses = dequantize(model)
    assert losses is not None
    refuse_quantized(model, tmp_path / "x.onnx")
    made, path = write_float(model, tmp_path / "float")
    assert {node.op_type for node in made.graph} == left
    found = _run(path, feeds)
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()
    return made


@pytest.mark.parametrize(
    ("bits", "block", "length", "zeros"),
    [
        *((4, 16, 40, zeros) for zeros in ("none", "packed", "float")),
        *((4, 32, 96, zeros) for zeros in ("none", "packed", "float")),
        *((8, 32, 48, zeros) for zeros in ("none", "packed")),
        *((2, 16, 40, zeros) for zeros in ("none", "packed", "float")),
    ],
)
def test_matmul(bits: int, block: int, length: int, zeros: str, tmp_path: Path) -> None:
    rows, blocks = 6, -(-length // block)
    rng = np.random.default_rng(bits)
    constants: dict[str, Any] = {
        "codes": rng.integers(0, 256, (rows, blocks, block * bits // 8), dtype=np.uint8),
        "scales": rng.uniform(0.01, 0.1, (rows, blocks)).astype(np.float32),
    }
    if zeros == "packed":
        constants["zeros"] = rng.integers(0, 256, (rows, -(-blocks * bits // 8)), dtype=np.uint8)
    elif zeros == "float":
        constants["zeros"] = rng.uniform(0, (1 << bits) - 1, (rows, blocks)).astype(np.float32)
    operands = ["x", *constants]
    node = helper.make_node(
        "MatMulNBits", operands, ["y"], domain="com.microsoft", K=length, N=rows, bits=bits, block_size=block
    )
    model = _graph(node, {"x": (FLOAT, ["M", length])}, constants)
    data = rng.integers(-127, 128, (5, length)).astype(np.float32)
    data[:, ::block] = 127  # inputs that 8 bits hold exactly: ONNX Runtime rounds them for 8-bit weights
    _same(model, {"x": data}, tmp_path, {"MatMul"})


def test_matmul_with_a_bias(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    constants: dict[str, Any] = {
        "codes": rng.integers(0, 256, (4, 1, 16), dtype=np.uint8),
        "scales": np.full(4, 0.1, np.float32),
        "bias": rng.standard_normal(4).astype(np.float32),
    }
    node = helper.make_node(
        "MatMulNBits", ["x", "codes", "scales", "", "", "bias"], ["y"], domain="com.microsoft", K=32, N=4, block_size=32
    )
    model = _graph(node, {"x": (FLOAT, ["M", 32])}, constants)
    _same(model, {"x": rng.standard_normal((5, 32)).astype(np.float32)}, tmp_path, {"MatMul", "Add"})


@pytest.mark.parametrize("kind", ["uint8", "int4", "uint4"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_lookup(kind: str, zeros: bool, bits: int, tmp_path: Path) -> None:
    if kind != "uint8" and bits == 8:
        bits = 4
    rng = np.random.default_rng(1)
    rows, width, block = 7, 48, 16
    dtype = {"uint8": np.uint8, "int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}[kind]
    low, high = (-8, 8) if kind == "int4" else (0, 16)
    constants: dict[str, Any] = {}
    if kind == "uint8":
        constants["codes"] = rng.integers(0, 256, (rows, width * bits // 8), dtype=np.uint8)
    else:
        constants["codes"] = numpy_helper.from_array(rng.integers(low, high, (rows, width)).astype(dtype), "codes")
    constants["scales"] = rng.uniform(0.01, 0.1, (rows, width // block)).astype(np.float32)
    if zeros and kind == "uint8":
        constants["zeros"] = rng.integers(0, 256, (rows, -(-(width // block) * bits // 8)), dtype=np.uint8)
    elif zeros:
        points = rng.integers(low, high, (rows, width // block)).astype(dtype)
        constants["zeros"] = numpy_helper.from_array(points, "zeros")
    operands = ["codes", "ids", *list(constants)[1:]]
    attributes = {"block_size": block, "gather_axis": 0, "quantize_axis": 1} | ({"bits": bits} if bits == 8 else {})
    node = helper.make_node("GatherBlockQuantized", operands, ["y"], domain="com.microsoft", **attributes)
    _same(
        _graph(node, {"ids": (INT64, ["B", "S"])}, constants), {"ids": np.array([[0, 3], [6, 1]])}, tmp_path, {"Gather"}
    )


@pytest.mark.parametrize("form", ["tensor", "channel", "blocks"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize("axis", [0, 1])
def test_constant_weight(form: str, dtype: type, axis: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    shape, block = (32, 64), 16
    half = 1 << (int(ml_dtypes.iinfo(dtype).bits) - 1)
    low = 0 if dtype in (np.uint8, ml_dtypes.uint4) else -half
    sizes = {
        "tensor": (),
        "channel": (shape[axis],),
        "blocks": tuple(n // block if k == axis else n for k, n in enumerate(shape)),
    }
    scales = rng.uniform(0.01, 0.1, sizes[form]).astype(np.float32)
    zeros = rng.integers(low, low + 2 * half, sizes[form]).astype(dtype)
    constants = {
        "codes": numpy_helper.from_array(rng.integers(low, low + 2 * half, shape).astype(dtype), "codes"),
        "scales": numpy_helper.from_array(np.asarray(scales), "scales"),
        "zeros": numpy_helper.from_array(np.asarray(zeros), "zeros"),
    }
    attributes = {"axis": axis} | ({"block_size": block} if form == "blocks" else {})
    nodes = [
        helper.make_node("DequantizeLinear", list(constants), ["w"], **attributes),
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ]
    model = _graph(nodes, {"x": (FLOAT, ["M", 64])}, constants)
    _same(model, {"x": rng.standard_normal((3, 64)).astype(np.float32)}, tmp_path, {"Transpose", "MatMul"})


def test_the_note_judges_what_was_lost(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((64, 256)).astype(np.float32)
    grouped = weight.reshape(64, 8, 32)
    scales = np.abs(grouped).max(-1) / 7
    codes = (np.clip(np.round(grouped / scales[..., None]), -8, 7) + 8).astype(np.uint8)
    true = np.sqrt((((codes.astype(np.float32) - 8) * scales[..., None] - grouped) ** 2).sum() / (weight**2).sum())
    node = helper.make_node(
        "MatMulNBits", ["x", "codes", "scales"], ["y"],
        domain="com.microsoft", K=256, N=64, bits=4, block_size=32, accuracy_level=4,
    )  # fmt: skip
    constants = {"codes": codes[..., 0::2] | codes[..., 1::2] << 4, "scales": scales.astype(np.float32)}
    model = _graph(node, {"x": (FLOAT, ["M", 256])}, constants)
    losses = dequantize(model)
    assert losses is not None
    write_float(model, tmp_path)
    first, second = losses.notes()
    assert "1 of 4 bits with one scale for 32 weights" in first and "no more accurate than the source" in first
    told = float(first.split("about ")[1].split("%")[0]) / 100
    assert abs(told - true) < 0.15 * true
    assert "accuracy_level 4" in second


def test_what_is_not_understood_is_refused(tmp_path: Path) -> None:
    node = helper.make_node(
        "MatMulNBits", ["x", "codes", "scales", "", "order"], ["y"], domain="com.microsoft", K=32, N=4, block_size=32
    )
    constants = {
        "codes": np.zeros((4, 1, 16), np.uint8), "scales": np.ones(4, np.float32), "order": np.zeros(32, np.int32),
    }  # fmt: skip
    model = _graph(node, {"x": (FLOAT, ["M", 32])}, constants)
    assert dequantize(model) is None
    with pytest.raises(InputRefused, match="already quantized"):
        refuse_quantized(model, tmp_path)


def test_a_float_model_stays() -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = _graph(node, {"x": (FLOAT, ["M", 4])}, {"w": np.ones((4, 3), np.float32)})
    assert dequantize(model) is None and len(model.graph) == 1
