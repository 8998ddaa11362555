"""Every operator against ONNX Runtime, in float64 where it has a kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import helper

from graphrot.errors import InputRefused
from graphrot.ops.hadamard import ensure_function, hadamard_node
from graphrot.ops.reference import evaluate_hadamard
from graphrot.plan.types import MatrixRef
from graphrot.torch_graph.ops.call import Call, signature
from graphrot.torch_graph.ops.table import OPERATORS, operator
from tests.torch_graph.cases import CASES, MICROSOFT, Case


def _arrays(case: Case) -> list[np.ndarray | None]:
    kind = np.float64 if case.double else np.float32
    return [a.astype(kind) if a is not None and a.dtype == np.float64 else a for a in case.inputs]


def _node(case: Case) -> ir.Node:
    arrays = _arrays(case)
    values = [
        None if a is None else ir.Value(name=f"i{k}", type=ir.TensorType(ir.DataType.from_numpy(a.dtype)),
                                        shape=ir.Shape(a.shape)) for k, a in enumerate(arrays)
    ]  # fmt: skip
    node = ir.node(case.op, values, case.attributes or None, domain=case.domain, num_outputs=case.outputs)
    for place, output in enumerate(node.outputs):
        output.name = "" if place in case.skipped else f"o{place}"
    return node


def _expected(case: Case, node: ir.Node) -> list[np.ndarray]:
    proto = ir.serde.serialize_node(node)
    fed = {f"i{k}": a for k, a in enumerate(_arrays(case)) if a is not None}
    inputs = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for k, a in fed.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in proto.output if name]
    opsets = [helper.make_opsetid("", case.opset), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(helper.make_graph([proto], "g", inputs, outputs), opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(array) for array in session.run(None, fed)]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_operator_answers_as_in_onnx_runtime(case: Case) -> None:
    node = _node(case)
    expected = _expected(case, node)
    dtype = torch.float64 if case.double else torch.float32
    tensors = [None if a is None else torch.from_numpy(a.copy()) for a in _arrays(case)]
    run = operator(case.domain, case.op)
    assert run is not None
    about = replace(signature(node, 1 if case.domain else case.opset), wanted=(True,) * case.outputs)
    result = run(Call(about, tensors, dtype))
    made = [result] if isinstance(result, torch.Tensor) else list(result)
    found = [made[place] for place in range(case.outputs) if place not in case.skipped]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None
        got = mine.numpy()
        assert got.shape == theirs.shape
        if got.dtype.kind != "f":
            assert np.array_equal(got, theirs)
            continue
        scale = max(1.0, float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0)))
        assert np.allclose(got, theirs, rtol=0, atol=(1e-13 if case.double else 2e-6) * scale, equal_nan=True)


def test_every_operator_has_a_case() -> None:
    known = {(case.domain, case.op) for case in CASES} | {(MICROSOFT, "SimplifiedLayerNormalization")}
    assert {key for key in OPERATORS if key not in known} == {("graphrot", "HadamardTransform")}
    assert len(OPERATORS) > 100


@pytest.mark.parametrize("size", [16, 48, 20, 1])
@pytest.mark.parametrize("transpose", [False, True])
def test_the_transform_is_that_of_the_reference(size: int, transpose: bool) -> None:
    x = np.random.default_rng(size).standard_normal((3, 2, 2 * size))
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(x.shape))
    node = hadamard_node(value, MatrixRef("hadamard", size), "y", transpose=transpose)
    model = ir.Model(ir.Graph([value], [node.outputs[0]], nodes=[node], opset_imports={"": 21}), ir_version=10)
    ensure_function(model)
    run = operator("graphrot", "HadamardTransform")
    assert run is not None
    found = run(Call(signature(node, 1), [torch.from_numpy(x)], torch.float64))
    assert isinstance(found, torch.Tensor)
    exact = evaluate_hadamard(node, x) / node.attributes["scale"].as_float() * size**-0.5
    assert np.abs(found.numpy() - exact).max() < 1e-14 * size


REFUSED = [
    ("Pad", {"mode": "reflect"}, "it pads by reflect"),
    ("ScatterND", {"reduction": "max"}, "neither none nor add"),
]


@pytest.mark.parametrize(("op", "attributes", "words"), REFUSED)
def test_a_form_that_is_not_followed_is_refused_by_its_node(op: str, attributes: dict[str, str], words: str) -> None:
    case = next(case for case in CASES if case.op == op)
    about = signature(_node(Case(op, case.inputs, attributes)), 21)
    tensors = [None if a is None else torch.from_numpy(a.copy()) for a in case.inputs]
    run = operator("", op)
    assert run is not None
    with pytest.raises(InputRefused, match=words) as refused:
        run(Call(about, tensors, torch.float64))
    assert "o0" in (refused.value.where or "")
