"""Who runs what, and what is refused before anything runs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from graphrot.errors import InputRefused
from graphrot.folded import FoldedTensor
from graphrot.graph import value_map
from graphrot.torch_graph.graph import TorchGraph
from graphrot.torch_graph.program import plan_program
from tests.torch_graph.learnable import rows, tiny_learnable

W = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)


def small(op_type: str, domain: str = "") -> ir.Model:
    """``op(x @ W)`` and, from x alone, ``Erf(x) + its own shape``."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 4]))
    folded = FoldedTensor(ir.tensor(W), (), "w")
    w = ir.Value(name="w", const_value=folded, shape=ir.Shape([4, 4]), type=ir.TensorType(ir.DataType.FLOAT))
    product = ir.node("MatMul", [x, w], name="product")
    last = ir.node(op_type, [product.outputs[0]], domain=domain, name="the last")
    alone = ir.node("Det", [x], name="alone")
    for node in (product, last, alone):
        node.outputs[0].name = f"{node.name}_out"
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [x],
        [last.outputs[0], alone.outputs[0]],
        nodes=[product, last, alone],
        initializers=[w],
        opset_imports={"": 21, "com.example": 1},
    )
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(
    ("op_type", "domain", "words"), [("Det", "", "Det"), ("Own", "com.example", "com.example::Own")]
)
def test_an_operator_that_is_not_known_is_refused_with_its_node(op_type: str, domain: str, words: str) -> None:
    with pytest.raises(InputRefused, match=f"The operator {words} is not differentiated") as refused:
        TorchGraph(small(op_type, domain))
    assert "'the last'" in (refused.value.where or "")


def test_what_depends_on_no_weight_runs_in_onnx_runtime_whatever_it_is() -> None:
    x = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)
    found = TorchGraph(small("Tanh")).run({"x": x}, ["alone_out", "the last_out"])
    assert found["alone_out"].item() == pytest.approx(float(np.linalg.det(x)), rel=1e-4)
    assert np.abs(found["the last_out"].numpy() - np.tanh(x @ W)).max() < 1e-6


def test_masks_and_rotary_tables_are_fed_and_sizes_carry_no_gradient() -> None:
    case = tiny_learnable("llama")
    values = value_map(case.model)
    roots = {v for v in case.model.graph.initializers.values() if isinstance(v.const_value, FoldedTensor)}
    program = plan_program(case.model, [values["logits"]], roots, set())
    assert {"Cos", "Sin"} <= {node.op_type for node in program.fed}
    live = [node for segment in program.segments for node in segment.nodes if node.outputs[0] in program.live]
    sized = [node for segment in program.segments for node in segment.nodes if node.outputs[0] not in program.live]
    assert {"Softmax", "MatMul"} <= {node.op_type for node in live}
    assert "MatMul" not in {node.op_type for node in sized}
    assert not {"Cos", "Shape", "Range"} & {node.op_type for node in live}


def test_one_value_crosses_from_layer_to_layer() -> None:
    case = tiny_learnable("qwen3")
    values = value_map(case.model)
    roots = {v for v in case.model.graph.initializers.values() if isinstance(v.const_value, FoldedTensor)}
    program = plan_program(case.model, [values["logits"]], roots, set())
    assert len(program.segments) == 4
    assert [len(segment.reads) for segment in program.segments] == [0, 1, 1, 1]


def test_inner_values_can_be_asked_for_and_every_run_is_alike() -> None:
    case = tiny_learnable("llama")
    graph = TorchGraph(case.model)
    feeds = case.feeds(rows())
    names = [case.linears[0].input, "logits", case.linears[-1].input]
    first = graph.run(feeds, names, matrices=case.matrices)
    again = graph.run(feeds, names, matrices=case.matrices, checkpointed=True)
    assert list(first) == names
    assert first[names[0]].shape == (2, 12, 48) and first[names[2]].shape == (2, 12, 112)
    assert all(torch.equal(first[name], again[name]) for name in names)
