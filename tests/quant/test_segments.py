"""Cutting a graph between its linears."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphrot.analysis.types import LinearRef
from graphrot.errors import InputRefused
from graphrot.quant import segments
from graphrot.quant.segments import cut, group_linears, reads


def test_linears_of_one_input_form_a_group_in_graph_order(toy: Any) -> None:
    groups = group_linears(toy.model, toy.linears[::-1])
    names = [sorted(linear.node for linear in group.linears) for group in groups]
    layer = [["{p}.k", "{p}.q", "{p}.v"], ["{p}.o"], ["{p}.gate", "{p}.up"], ["{p}.down.product"]]
    assert names == [[n.format(p=f"layer{k}") for n in group] for k in range(2) for group in layer]


def test_every_needed_node_runs_once_and_reads_only_what_is_known(toy: Any) -> None:
    groups = group_linears(toy.model, toy.linears)
    segments = cut(toy.model, groups)
    known = {value.name for value in toy.model.graph.inputs}
    initializers = set(toy.model.graph.initializers)
    weights = {linear.weight for linear in toy.linears}
    seen: list[str] = []
    solved: set[str] = set()
    for segment in segments:
        assert set(segment.inputs) <= known
        assert set(segment.initializers) <= initializers - weights
        made: set[str] = set()
        for node in segment.nodes:
            for name in reads(node):
                assert name in made or name in segment.inputs or name in segment.initializers or name in weights
            made |= {value.name for value in node.outputs}
            if node.op_type not in ("Constant", "Transpose"):
                seen.append(node.outputs[0].name)
        linears = made & {linear.node for linear in toy.linears}
        assert linears <= solved
        solved |= {linear.node for linear in segment.group.linears}
        assert set(segment.outputs) <= made
        known = (known | set(segment.outputs)) - set(segment.drop)
        assert segment.group.input in known | set(segment.drop)
    assert len(seen) == len(set(seen))
    assert not known, "the last segment leaves nothing behind"
    # The last linear and what follows it are not needed; the shared mask is made once.
    assert "logits" not in seen and "layer1.down.product" not in seen
    assert sum("mask" in segment.outputs for segment in segments) == 1


def test_weights_behind_a_transpose_are_not_read(toy: Any) -> None:
    segments = cut(toy.model, group_linears(toy.model, toy.linears))
    touched = {name for segment in segments for name in segment.initializers}
    assert "layer0.gate.weight" not in touched


def _chain(layers: int) -> tuple[ir.Model, list[LinearRef]]:
    """``x`` and a sum ``big`` of it; every layer multiplies, adds a slice of ``big``, and takes a shape."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["big"]),
        helper.make_node("Constant", [], ["axis"], value_ints=[1]),
        helper.make_node("Constant", [], ["start"], value_ints=[0]),
        helper.make_node("Constant", [], ["end"], value_ints=[4]),
    ]
    linears = []
    name = "x"
    for k in range(layers):
        nodes.append(helper.make_node("Slice", ["big", "start", "end", "axis"], [f"part{k}"]))
        nodes.append(helper.make_node("MatMul", [name, f"w{k}"], [f"y{k}"]))
        nodes.append(helper.make_node("Add", [f"y{k}", f"part{k}"], [f"z{k}"]))
        linears.append(LinearRef(f"y{k}", "MatMul", f"w{k}", 1, name, 4, 4, "KN"))
        name = f"z{k}"
    weights = [numpy_helper.from_array(np.eye(4, dtype=np.float32), f"w{k}") for k in range(layers)]
    graph = helper.make_graph(
        nodes, "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4])],
        weights,
    )  # fmt: skip
    return ir.serde.deserialize_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])), linears


def test_nodes_run_as_late_as_they_can() -> None:
    """Otherwise the parts of all layers would be made, and kept, at the start."""
    model, linears = _chain(6)
    segments = cut(model, group_linears(model, linears))
    for k, segment in enumerate(segments[1:]):
        assert {node.outputs[0].name for node in segment.nodes if node.op_type == "Slice"} == {f"part{k}"}
        assert len(segment.outputs) <= 2


def _lines_run(function: Callable[[], object]) -> int:
    """Number of lines of ``graphrot.quant.segments`` that run, loop turns counted: work, without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        nonlocal count
        if frame.f_code.co_filename != segments.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_cutting_takes_work_in_proportion_to_the_nodes() -> None:
    def work_for(layers: int) -> int:
        model, linears = _chain(layers)
        groups = group_linears(model, linears)
        return _lines_run(lambda: cut(model, groups))

    work = [work_for(50), work_for(200)]
    assert 3.5 * work[0] < work[1] < 4.2 * work[0]


def test_what_a_subgraph_captures_is_carried_along() -> None:
    text = """
    <ir_version: 9, opset_import: ["" : 18]>
    g (float[n, 2] x, bool c) => (float[n, 2] y)
    {
       a = Neg(x)
       h = MatMul(x, w)
       t = If (c) <
          then_branch = then () => (float[n, 2] p) { p = Mul(a, h) },
          else_branch = other () => (float[n, 2] r) { q = Neg(h) r = Add(q, v) }
       >
       y = MatMul(t, w)
    }
    """
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.eye(2, dtype=np.float32), "w"))
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "v"))
    model = ir.serde.deserialize_model(proto)
    node = next(node for node in model.graph if node.op_type == "If")
    assert set(reads(node)) == {"c", "a", "h", "v"}
    linears = [LinearRef("h", "MatMul", "w", 1, "x", 2, 2, "KN"), LinearRef("y", "MatMul", "w", 1, "t", 2, 2, "KN")]
    segments = cut(model, group_linears(model, linears))
    assert [n.op_type for n in segments[1].nodes] == ["Neg", "MatMul", "If"]
    assert segments[1].inputs == ("x", "c") and segments[1].initializers == ("v",)


def test_a_linear_that_is_not_there_is_refused(toy: Any) -> None:
    ghost = LinearRef("ghost", "MatMul", "w", 1, "embedded", 24, 24, "KN")
    with pytest.raises(InputRefused, match="not in the graph"):
        cut(toy.model, group_linears(toy.model, [ghost]))


def test_nodes_out_of_order_are_refused() -> None:
    model, linears = _chain(2)
    nodes = list(model.graph)
    model.graph.remove(nodes[0])
    model.graph.append(nodes[0])
    with pytest.raises(InputRefused, match=r"topological order[\s\S]*big"):
        cut(model, group_linears(model, linears))
