"""Small graphs for the half types, and two ways to run them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

from graphrot.emit.half import narrow
from graphrot.graph import WeightStore
from graphrot.model.save import save_model

F16, BF16, F32 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT
HALVES = (F16, BF16)


def graph(text: str, *, opset: int = 21, **weights: np.ndarray) -> ir.Model:
    """A model from ONNX text ``(inputs) => (outputs) { nodes }``; its weights are initializers."""
    head = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1, "graphrot" : 1]>'
    model = ir.from_proto(onnx.parser.parse_model(f"{head}\ng {text}"))
    values = {v.name: v for node in model.graph.all_nodes() for v in node.inputs if v is not None}
    for name, array in weights.items():
        value = values[name]
        value.const_value = ir.tensor(array, name=name)
        value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)
        model.graph.initializers[name] = value
    return model


def narrowed(model: ir.Model, half: ir.DataType, folder: Path, *ends: str) -> ir.Model:
    """Narrow a model in place; ``ends`` are inputs and outputs of the half type."""
    narrow(model, half, dict.fromkeys(ends, half), store=WeightStore(folder))
    return model


def run(model: ir.Model, folder: Path, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """ONNX Runtime, float32 results; what is fed is cast to the inputs' types."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder / "run.onnx")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(folder / "run.onnx"), options, providers=["CPUExecutionProvider"])
    types = {v.name: v.dtype for v in model.graph.inputs}
    given = {name: _value(np.asarray(array), types[name]) for name, array in feeds.items()}
    names = [value.name for value in session.get_outputs()]
    return [value.numpy() for value in session.run_with_ort_values(names, given)]


def run_literally(model: ir.Model, folder: Path, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """``onnx.reference``: every float16 operator rounds and overflows like float16, which ONNX Runtime's may not."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder / "literal.onnx")
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(ReferenceEvaluator(onnx.load(folder / "literal.onnx")).run(None, dict(feeds)))


def made_by(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def types_of(model: ir.Model) -> dict[str, ir.DataType]:
    """Types of all values, as ONNX infers them from the finished graph: they must fit together."""
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(model), check_type=True, strict_mode=True)
    found = {t.name: ir.DataType(t.data_type) for t in proto.graph.initializer}
    for value in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
        found[value.name] = ir.DataType(value.type.tensor_type.elem_type)
    return found


def _value(array: np.ndarray, dtype: ir.DataType | None) -> Any:
    content = array.astype(dtype.numpy()) if dtype in (F16, BF16, F32) and dtype is not None else array
    if content.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(content.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(content))
