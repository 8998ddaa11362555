"""Pending edits: exact in float64, one cast, shared where equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.errors import InputRefused
from graphrot.folded import FoldedTensor, Rotate, Scale, Shift, edit_operand, exact_numbers, exact_sample, materialize
from graphrot.graph import WeightStore, add_initializer
from graphrot.plan.types import MatrixRef

HADAMARD_12 = MatrixRef("hadamard", 12, seed=3)


def _model(weight: np.ndarray) -> ir.Model:
    x = ir.Value(name="x", shape=ir.Shape(["n", weight.shape[0]]), type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21}, name="g")
    model = ir.Model(graph, ir_version=10)
    value = add_initializer(model, "w", weight)
    first, second = ir.node("MatMul", [x, value]), ir.node("MatMul", [x, value])
    for node, name in ((first, "a"), (second, "b")):
        node.outputs[0].name = name
        graph.append(node)
        graph.outputs.append(node.outputs[0])
    return model


def _groups(*starts: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    return tuple(((start, 1, 12),) for start in starts)


def test_rotating_both_sides_and_back_is_the_identity() -> None:
    weight = np.random.default_rng(0).standard_normal((24, 36)).astype(np.float32)
    edits = (
        Scale(0, tuple(np.linspace(0.5, 2, 24))),
        Rotate(0, _groups(0, 12), HADAMARD_12),
        Rotate(1, _groups(12, 24), HADAMARD_12),
        Rotate(1, _groups(12, 24), HADAMARD_12, inverse=True),
        Rotate(0, _groups(0, 12), HADAMARD_12, inverse=True),
        Scale(0, tuple(1 / np.linspace(0.5, 2, 24))),
    )
    tensor = FoldedTensor(ir.tensor(weight), edits, "w")
    assert np.abs(tensor.exact() - weight).max() < 1e-12
    rotated = FoldedTensor(ir.tensor(weight), edits[:3], "w")
    assert np.abs(rotated.exact() - weight).max() > 0.1
    assert np.array_equal(rotated.numpy(), rotated.exact().astype(np.float32))


def test_one_cast_is_better_than_three() -> None:
    weight = np.random.default_rng(1).standard_normal((12, 12)).astype(np.float32)
    edits = (Scale(0, tuple(np.geomspace(1e-3, 1e3, 12))), Rotate(0, _groups(0), HADAMARD_12))
    exact = FoldedTensor(ir.tensor(weight), edits, "w").exact()
    once = FoldedTensor(ir.tensor(weight), edits, "w").numpy()
    stepwise = FoldedTensor(ir.tensor(FoldedTensor(ir.tensor(weight), edits[:1], "w").numpy()), edits[1:], "w").numpy()
    assert np.array_equal(once, exact.astype(np.float32))
    assert np.abs(stepwise - exact).max() > np.abs(once - exact).max()


def test_groups_of_a_strided_axis() -> None:
    weight = np.random.default_rng(2).standard_normal((24, 5)).astype(np.float64)
    strided = (((0, 2, 12),), ((1, 2, 12),))
    rotated = FoldedTensor(ir.tensor(weight), (Rotate(0, strided, HADAMARD_12),), "w").exact()
    plain = FoldedTensor(ir.tensor(weight[0::2].copy()), (Rotate(0, _groups(0), HADAMARD_12),), "w").exact()
    assert np.allclose(rotated[0::2], plain, atol=1e-14)


def test_a_channel_in_two_blocks_is_refused() -> None:
    tensor = FoldedTensor(ir.tensor(np.ones((18, 2))), (Rotate(0, _groups(0, 6), HADAMARD_12),), "w")
    with pytest.raises(InputRefused, match="two blocks"):
        tensor.exact()


def test_large_tensors_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(3).standard_normal((50, 12)).astype(np.float32)
    edits = (Rotate(1, _groups(0), HADAMARD_12),)
    whole = FoldedTensor(ir.tensor(weight), edits, "w").numpy()
    monkeypatch.setattr("graphrot.folded._CHUNK", 36)
    assert np.array_equal(FoldedTensor(ir.tensor(weight), edits, "w").numpy(), whole)


def test_an_edit_touches_one_user_only(tmp_path: Path) -> None:
    weight = np.random.default_rng(4).standard_normal((12, 7)).astype(np.float32)
    model = _model(weight)
    names = {"x", "w", "a", "b"}
    first, second = list(model.graph)
    edit_operand(model, first, 1, Rotate(0, _groups(0), HADAMARD_12), names)
    untouched = second.inputs[1]
    assert untouched is not None and untouched.name == "w"
    assert np.array_equal(exact_numbers(untouched), weight.astype(np.float64))
    edit_operand(model, second, 1, Rotate(0, _groups(0), HADAMARD_12), names)
    assert "w" not in model.graph.initializers
    assert materialize(model, WeightStore(tmp_path)) == 1, "equal edits of one tensor must become one initializer"
    assert first.inputs[1] is second.inputs[1]


def test_different_edits_stay_apart(tmp_path: Path) -> None:
    model = _model(np.eye(12, dtype=np.float32))
    names = {"x", "w", "a", "b"}
    first, second = list(model.graph)
    edit_operand(model, first, 1, Rotate(0, _groups(0), HADAMARD_12), names)
    edit_operand(model, second, 1, Rotate(1, _groups(0), HADAMARD_12), names)
    assert materialize(model, WeightStore(tmp_path)) == 2


def test_shift_and_sample() -> None:
    base = np.arange(24, dtype=np.float32).reshape(8, 3)
    tensor = FoldedTensor(ir.tensor(base), (Shift(1, (1.0, 2.0, 3.0)),), "b")
    assert np.array_equal(tensor.exact(), base + [1, 2, 3])
    value = ir.Value(name="b", const_value=tensor, shape=ir.Shape([8, 3]), type=ir.TensorType(ir.DataType.FLOAT))
    assert np.array_equal(exact_sample(value, 0, count=4), (base + [1, 2, 3])[::2])
