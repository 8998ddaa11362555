"""One operator in a graph of its own, before and after it is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

_KINDS = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
}


def graph(
    node: Any,
    feeds: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray],
    *,
    opset: int = 17,
    outputs: Mapping[str, int] | None = None,
    shapes: Mapping[str, list[Any]] | None = None,
) -> ir.Model:
    """A graph of one node.

    Args:
        node: an ``onnx.NodeProto``.
        feeds: the inputs; ranks and types are theirs.
        constants: the initializers.
        opset: of the standard domain.
        outputs: element types of outputs that are not float32.
        shapes: declared shapes of inputs, where not ``[name_0, name_1, ...]``.
    """
    inputs = [
        helper.make_tensor_value_info(
            name, _KINDS[array.dtype], (shapes or {}).get(name, [f"{name}_{k}" for k in range(array.ndim)])
        )
        for name, array in feeds.items()
    ]
    kinds = outputs or {}
    ends = [helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), None) for n in node.output if n]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_graph([node], "g", inputs, ends, initializers)
    return ir.from_proto(helper.make_model(made, opset_imports=opsets, ir_version=8))


def run(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """All outputs, in the order of the graph."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(array) for array in session.run(None, dict(feeds))]


def same(
    model: ir.Model, feeds: Mapping[str, np.ndarray], rewrite: Callable[[ir.Model], bool], made: set[str]
) -> list[np.ndarray]:
    """Rewrite the model, see which operators it has then, and that it answers as before; returns the answers.

    A second rewrite must find nothing.
    """
    ends = [value.name for value in model.graph.outputs]
    before = run(model, feeds)
    assert rewrite(model)
    assert {node.op_type for node in model.graph} == made
    assert [value.name for value in model.graph.outputs] == ends
    after = run(model, feeds)
    for old, new in zip(before, after, strict=True):
        assert old.shape == new.shape and old.dtype == new.dtype
        assert np.abs(old - new).max() <= 2e-6 * max(1.0, float(np.abs(old).max()))
    assert not rewrite(model)
    return after
