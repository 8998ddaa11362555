"""Operators that only ONNX Runtime has in the standard domain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphrot.errors import InputRefused
from graphrot.model.onnxfile import open_onnx
from graphrot.passes.raise_opset import raise_opset


def _write(path: Path, op: str, opset: int, *, domain: str = "", inside: bool = False) -> Path:
    gain = numpy_helper.from_array(np.ones(4, np.float32), "gain")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])
    node = helper.make_node(op, ["x", "gain"], ["y"], domain=domain, epsilon=1e-5)
    functions, nodes = [], [node]
    opsets = [helper.make_opsetid("", opset)]
    if inside:
        opsets.append(helper.make_opsetid("local", 1))
        body = helper.make_node(op, ["x", "gain"], ["y"], domain=domain, epsilon=1e-5)
        functions = [helper.make_function("local", "Norm", ["x", "gain"], ["y"], [body], opsets[:1])]
        nodes = [helper.make_node("Norm", ["x", "gain"], ["y"], domain="local")]
    graph = helper.make_graph(nodes, "g", [x], [y], [gain])
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=8), path)
    return path


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("op", "opset"), [("SimplifiedLayerNormalization", 21), ("LayerNormalization", 14)])
def test_they_open_unchanged(op: str, opset: int, inside: bool, tmp_path: Path) -> None:
    model = open_onnx(_write(tmp_path / "x.onnx", op, opset, inside=inside))
    nodes = list(model.graph) if not inside else [node for f in model.functions.values() for node in f]
    assert [(node.domain, node.op_type) for node in nodes] == [("", op)]


@pytest.mark.parametrize("op", ["SkipSimplifiedLayerNormalization", "FancyNormalization", "RMSNormalization"])
def test_others_are_refused(op: str, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match=f"No Op registered for {op}"):
        open_onnx(_write(tmp_path / "x.onnx", op, 21))


def test_an_early_layer_norm_can_be_raised(tmp_path: Path) -> None:
    model = open_onnx(_write(tmp_path / "x.onnx", "LayerNormalization", 14))
    raise_opset(model)
    assert model.opset_imports[""] == 21
