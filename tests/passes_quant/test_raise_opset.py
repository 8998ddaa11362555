"""Raising the opset keeps every result, or says which operator is in the way."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from graphrot.errors import InputRefused
from graphrot.passes.raise_opset import RaiseOpset, raise_opset
from tests.passes_quant.graphs import PLAN


def build(
    nodes: list[onnx.NodeProto], opset: int, functions: list[onnx.FunctionProto] | None = None, rank: int = 2
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "old",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)],
    )
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid("local", 1)] if functions else [])
    proto = helper.make_model(graph, opset_imports=imports, functions=functions or [], ir_version=8)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run(proto: onnx.ModelProto) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": x})[0]
    return result


def old_nodes() -> list[onnx.NodeProto]:
    """Every reduction with axes as an attribute, and a Split into equal parts."""
    reductions = ["ReduceMean", "ReduceMax", "ReduceL2", "ReduceProd", "ReduceSumSquare", "ReduceLogSumExp"]
    nodes = [helper.make_node("Split", ["x"], ["left", "right"], axis=1)]
    nodes += [helper.make_node(op, ["left"], [op], axes=[1], keepdims=0) for op in reductions]
    nodes.append(helper.make_node("ReduceMin", ["right"], ["ReduceMin"], keepdims=1))
    nodes.append(helper.make_node("Sum", [*reductions, "ReduceMin"], ["y"]))
    return nodes


@pytest.mark.parametrize("opset", [13, 14, 17])
def test_old_reductions_and_splits(opset: int) -> None:
    proto = build(old_nodes(), opset)
    want = run(proto)
    model = ir.from_proto(proto)
    step = RaiseOpset(PLAN)
    assert step(model).modified
    assert len(step.report.changed) == 7
    raised = ir.to_proto(model)
    onnx.checker.check_model(raised, full_check=True)
    assert (model.opset_imports[""], raised.ir_version) == (21, 10)
    np.testing.assert_array_equal(run(raised), want)
    assert not RaiseOpset(PLAN)(model).modified


def test_subgraphs_and_functions() -> None:
    branch = [
        helper.make_graph(
            [helper.make_node("ReduceMax", ["x"], [name], axes=[axis], keepdims=1)],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None])],
        )
        for name, axis in (("rows", 1), ("columns", 0))
    ]
    function = helper.make_function(
        "local",
        "Norm",
        ["a"],
        ["b"],
        [helper.make_node("ReduceMean", ["a"], ["m"], axes=[1]), helper.make_node("Sub", ["a", "m"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
        helper.make_node("Greater", ["largest", "largest"], ["no"]),
        helper.make_node("If", ["no"], ["z"], then_branch=branch[0], else_branch=branch[1]),
        helper.make_node("Norm", ["x"], ["centred"], domain="local"),
        helper.make_node("Add", ["centred", "z"], ["y"]),
    ]
    proto = build(nodes, 17, [function])
    want = run(proto)
    model = ir.from_proto(proto)
    assert len(raise_opset(model)) == 3
    raised = ir.to_proto(model)
    onnx.checker.check_model(raised, full_check=True)
    assert [i.version for i in raised.functions[0].opset_import if i.domain == ""] == [21]
    np.testing.assert_array_equal(run(raised), want)


def test_new_enough_is_left_alone() -> None:
    model = ir.from_proto(build([helper.make_node("Relu", ["x"], ["y"])], 23))
    assert raise_opset(model) == [] and model.opset_imports[""] == 23


def test_refuses_by_name_and_changes_nothing() -> None:
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1]),
        helper.make_node("DFT", ["mean4"], ["f"], axis=1),
        helper.make_node("Unsqueeze", ["mean", "axes"], ["mean4"]),
        helper.make_node("Constant", [], ["axes"], value_ints=[2]),
        helper.make_node("ReduceMean", ["f"], ["y"], axes=[0]),
    ]
    nodes = [nodes[0], nodes[3], nodes[2], nodes[1], nodes[4]]
    model = ir.from_proto(build(nodes, 17, rank=3))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with pytest.raises(InputRefused, match="cannot be moved from opset 17 to 21") as caught:
        raise_opset(model)
    assert "DFT (makes 'f')" in str(caught.value)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_refuses_before_thirteen() -> None:
    model = ir.from_proto(build([helper.make_node("Relu", ["x"], ["y"])], 12))
    with pytest.raises(InputRefused, match="from opset 12"):
        raise_opset(model)
