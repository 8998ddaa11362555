"""A LayerNorm's shift that lands in a bias lives in the basis of the matmul it follows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import OnlineUse, Placement, RotationSpace
from graphrot.errors import InputRefused
from graphrot.evaluate.double import to_double
from graphrot.folded import materialize
from graphrot.passes import ROTATION_PASSES, FoldRotations
from graphrot.plan.build import PlanRequest, build_plan
from graphrot.plan.types import RotationPlan

VOCAB, WIDTH, INNER = 29, 12, 16
KINDS = ("R1", "R2", "R3", "R4", "other")


def _model(form: str) -> ir.Model:
    """Embedding, then x + LayerNorm(x) W1 W2 with W1's bias in one of several forms, then norm and head; float64."""
    rng = np.random.default_rng(7)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape), name)

    weights = [
        weight("table", VOCAB, WIDTH),
        numpy_helper.from_array(1 + 0.3 * rng.standard_normal(WIDTH), "gain"),
        weight("shift", WIDTH),
        weight("w1", WIDTH, INNER),
        weight("w2", INNER, WIDTH),
        numpy_helper.from_array(1 + 0.3 * rng.standard_normal(WIDTH), "last_gain"),
        weight("head", WIDTH, VOCAB),
        numpy_helper.from_array(np.zeros(INNER), "zero"),
        weight("bias", INNER),
        numpy_helper.from_array(np.array([-1, WIDTH]), "flat"),
    ]
    first = {
        "no bias": [helper.make_node("MatMul", ["h", "w1"], ["u"])],
        "zero bias": [helper.make_node("MatMul", ["h", "w1"], ["m"]), helper.make_node("Add", ["m", "zero"], ["u"])],
        "bias": [helper.make_node("MatMul", ["h", "w1"], ["m"]), helper.make_node("Add", ["bias", "m"], ["u"])],
        "gemm": [helper.make_node("Gemm", ["h", "w1"], ["u"])],
        "gemm alpha": [helper.make_node("Gemm", ["h", "w1"], ["u"], alpha=0.5)],
        "gemm bias": [helper.make_node("Gemm", ["h", "w1", "bias"], ["u"])],
        "gemm beta": [helper.make_node("Gemm", ["h", "w1", "bias"], ["u"], beta=0.5)],
        "gemm zero bias": [helper.make_node("Gemm", ["h", "w1", "zero"], ["u"])],
    }[form]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Reshape", ["rows", "flat"], ["x"]),
        helper.make_node("LayerNormalization", ["x", "gain", "shift"], ["h"]),
        *first,
        helper.make_node("MatMul", ["u", "w2"], ["o"]),
        helper.make_node("Add", ["x", "o"], ["r"]),
        helper.make_node("LayerNormalization", ["r", "last_gain"], ["n"]),
        helper.make_node("MatMul", ["n", "head"], ["logits"]),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "tokens"])
    logits = helper.make_tensor_value_info("logits", TensorProto.DOUBLE, ["rows", VOCAB])
    graph = helper.make_graph(nodes, "g", [ids], [logits], weights)
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


FORMS = ("no bias", "zero bias", "bias", "gemm", "gemm alpha", "gemm bias", "gemm beta", "gemm zero bias")


def _run(model: ir.Model) -> np.ndarray:
    model = to_double(model)  # an online transform's function works in float32 otherwise
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"ids": np.arange(24).reshape(2, 12)})[0])


def _plan(model: ir.Model) -> RotationPlan:
    return build_plan(analyze(model), PlanRequest(kinds=KINDS, rotations="random"), source_hash="0")


@pytest.mark.parametrize("form", FORMS)
def test_the_answers_stay(form: str) -> None:
    model = _model(form)
    plan = _plan(model)
    assert any(use.tensor == "w1" for r in plan.rotations for use in r.space.producers), "the shift's basis must turn"
    scaled = form == "gemm alpha"  # the analysis leaves gains in front of it where they are
    assert any(fold.shift == "shift" for fold in plan.gain_folds) != scaled
    rotated = model.clone()
    for kind in ROTATION_PASSES:
        kind(plan)(rotated)
    materialize(rotated, None)
    expected = _run(model)
    assert np.abs(_run(rotated) - expected).max() <= 1e-11 * np.abs(expected).max()


def test_a_plan_that_does_not_fit_is_refused() -> None:
    model = _model("bias")
    plan = _plan(model)
    rotation = plan.rotations[0]
    use = rotation.space.producers[0]
    for wrong in (replace(use, axis=5), replace(use, input=9), replace(use, groups=(((0, 1, 9999),),))):
        space = replace(rotation.space, producers=(wrong, *rotation.space.producers[1:]))
        broken = replace(plan, rotations=(replace(rotation, space=space), *plan.rotations[1:]))
        with pytest.raises(InputRefused, match="does not fit"):
            FoldRotations(broken)(model.clone())


def test_an_online_site_under_a_layernorm_is_refused_by_node() -> None:
    facts = analyze(_model("bias"))
    placement: Placement = "online"
    online = (OnlineUse("act", "Mul", (((0, 1, 16),),), 16),)
    space = RotationSpace("R4.0", "R4", placement, 16, online=online, mean_preserving=True)
    request = PlanRequest(kinds=("R4",), rotations="hadamard")
    plan = build_plan(replace(facts, spaces=(space,)), request, source_hash="0")
    assert not plan.rotations
    refusal = plan.refusals[-1]
    assert (refusal.kind, refusal.node, refusal.op) == ("R4", "act", "Mul") and "LayerNorm" in refusal.reason
