"""Layer-by-layer calibration against runs of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphrot.analysis.types import LinearRef
from graphrot.errors import InputRefused, UsageError
from graphrot.ops.hadamard import ensure_function, hadamard_node
from graphrot.plan.types import MatrixRef
from graphrot.quant.activations import EPSILON
from graphrot.quant.calibrate import CalibratedGroup, LayerwiseCalibrator
from graphrot.quant.clip import quantize_clip
from graphrot.quant.gptq import gptq_many
from graphrot.quant.grid import QuantizedTensor, WeightGrid
from graphrot.quant.linears import quantize_linears, quantize_weights
from graphrot.quant.rtn import quantize_rtn

GRID = WeightGrid(4, 16)


def whole(proto: onnx.ModelProto, names: Sequence[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run the whole model and read any of its tensors."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    known = {output.name for output in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    session = onnxruntime.InferenceSession(copy.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(list(names), feed)


def moments(proto: onnx.ModelProto, names: Sequence[str], feeds: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    total: list[np.ndarray] = [np.zeros(())] * len(names)
    for feed in feeds:
        for i, x in enumerate(whole(proto, names, feed)):
            flat = x.reshape(-1, x.shape[-1]).astype(np.float64)
            total[i] = total[i] + flat.T @ flat
    return total


def replaced(proto: onnx.ModelProto, linears: list[LinearRef], solved: dict[str, QuantizedTensor]) -> onnx.ModelProto:
    """The model with dequantized weights as new initializers."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    nodes = {node.output[0]: node for node in copy.graph.node}
    for linear in linears:
        weight = solved[linear.node].dequantize()
        name = f"{linear.node}.new"
        stored = weight.T.copy() if linear.layout == "KN" else weight
        copy.graph.initializer.append(numpy_helper.from_array(stored, name))
        nodes[linear.node].input[linear.weight_input] = name
    return copy


def rounded(proto: onnx.ModelProto, linears: list[LinearRef], bits: int) -> onnx.ModelProto:
    """The model with the inputs of linears rounded per token, in plain operators."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    qmax = float(2 ** (bits - 1) - 1)
    for name, value in (("qmax", qmax), ("epsilon", EPSILON)):
        copy.graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
    copy.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last"))
    readers = {linear.node: linear.input for linear in linears}
    nodes = []
    done: set[str] = set()
    for node in copy.graph.node:
        x = readers.get(node.output[0])
        if x is not None and x not in done:
            done.add(x)
            for kind, inputs, output in (
                ("Abs", [x], "abs"), ("ReduceMax", ["abs", "last"], "top"), ("Max", ["top", "epsilon"], "most"),
                ("Div", ["most", "qmax"], "scale"), ("Div", [x, "scale"], "ratio"), ("Round", ["ratio"], "code"),
                ("Mul", ["code", "scale"], "rounded"),
            ):  # fmt: skip
                mine = [i if i in (x, "last", "epsilon", "qmax") else f"{x}.{i}" for i in inputs]
                nodes.append(helper.make_node(kind, mine, [f"{x}.{output}"]))
        if x is not None:
            node.input[list(node.input).index(x)] = f"{x}.rounded"
        nodes.append(node)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


def gather(toy: Any, model: ir.Model | None = None, **options: Any) -> tuple[list[CalibratedGroup], dict[Any, Any]]:
    seen: list[CalibratedGroup] = []

    def keep(group: CalibratedGroup) -> list[QuantizedTensor | None]:
        seen.append(group)
        return [None] * len(group.weights)

    calibrator = LayerwiseCalibrator(model or toy.model, toy.linears, toy.feeds, threads=1, **options)
    return seen, calibrator.run(keep)


def test_without_rounding_it_equals_a_run_of_the_whole_model(toy: Any) -> None:
    seen, result = gather(toy)
    assert result == {}
    expected = moments(toy.proto, [task.group.input for task in seen], toy.feeds)
    assert len(seen) == 8
    for task, moment in zip(seen, expected, strict=True):
        assert task.tokens == 2 * 3 * 16
        np.testing.assert_allclose(task.hessian, moment, rtol=1e-4, atol=1e-5 * np.diagonal(moment).max())
    weights = {t.name: numpy_helper.to_array(t) for t in toy.proto.graph.initializer}
    np.testing.assert_array_equal(seen[0].weights[0], weights["layer0.q.weight"].T)
    np.testing.assert_array_equal(seen[2].weights[0], weights["layer0.gate.weight"])
    np.testing.assert_array_equal(seen[3].weights[0], weights["layer0.down.weight"])


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_later_layers_see_the_error_of_earlier_ones(toy: Any, bits: int | None) -> None:
    linears, feeds = toy.linears, toy.feeds
    seen: list[CalibratedGroup] = []

    def solve(group: CalibratedGroup) -> list[QuantizedTensor]:
        seen.append(group)
        return [quantize_clip(weight, GRID) for weight in group.weights]

    result = LayerwiseCalibrator(toy.model, linears, feeds, activation_bits=bits, threads=1).run(solve)
    assert set(result) == {linear.node for linear in linears}
    proto = replaced(toy.proto, linears, result)
    names = [task.group.input for task in seen]
    if bits is not None:
        proto = rounded(proto, linears, bits)
        names = [f"{name}.rounded" for name in names]
    float_moments = moments(toy.proto, [task.group.input for task in seen], feeds)
    for k, (task, moment, plain) in enumerate(zip(seen, moments(proto, names, feeds), float_moments, strict=True)):
        # A value at the middle between two codes may fall to the other side; the step is coarser at 4 bits.
        tolerance = {None: 1e-4, 8: 2e-3, 4: 3e-2}[bits]
        assert np.linalg.norm(task.hessian - moment) < tolerance * np.linalg.norm(moment)
        if k > 0:
            assert np.linalg.norm(task.hessian - plain) > 0.01 * np.linalg.norm(plain)


def test_batches_of_other_shapes_add_up(toy: Any) -> None:
    seen, _ = gather(toy)
    feeds = [{name: x[row : row + 1] for name, x in feed.items()} for feed in toy.feeds for row in range(3)]
    singly: list[CalibratedGroup] = []
    LayerwiseCalibrator(toy.model, toy.linears, feeds, threads=1).run(
        lambda group: singly.append(group) or [None] * len(group.weights)
    )
    for one, other in zip(seen, singly, strict=True):
        np.testing.assert_allclose(one.hessian, other.hessian, rtol=1e-3, atol=1e-5 * np.diagonal(one.hessian).max())


def test_hadamard_nodes_run_in_segments(toy: Any) -> None:
    """A transform before the gated product of layer 0: the moment of what follows is Q.T H Q."""
    model = ir.serde.deserialize_model(toy.proto)
    matrix = MatrixRef("block-hadamard", 40, block=8)
    values = {value.name: value for node in model.graph for value in node.outputs}
    hidden = values["layer0.hidden"]
    readers = list(hidden.uses())
    node = hadamard_node(hidden, matrix, "layer0.turned")
    for user, index in readers:
        user.replace_input_with(index, node.outputs[0])
    model.graph.insert_after(hidden.producer(), node)
    ensure_function(model)
    plain, _ = gather(toy)
    turned, _ = gather(toy, model)
    block = np.array([[1.0]])
    for _ in range(3):
        block = np.block([[block, block], [block, -block]])
    q = np.kron(np.eye(5), block / np.sqrt(8))
    expected = q.T @ plain[3].hessian @ q
    np.testing.assert_allclose(turned[3].hessian, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


def test_gptq_through_the_whole_model_beats_rounding(toy: Any, tmp_path: Path) -> None:
    linears, feeds = toy.linears, toy.feeds
    reference = np.concatenate([whole(toy.proto, ["logits"], feed)[0] for feed in feeds])
    lost = {}
    steps: list[tuple[str, int, int]] = []
    for solver in ("rtn", "clip", "gptq"):
        solved = quantize_linears(
            toy.model, linears, grid=WeightGrid(4), solver=solver, feeds=feeds if solver == "gptq" else (),
            scratch=tmp_path / solver, threads=1, progress=lambda *step: steps.append(step),
        )  # fmt: skip
        assert set(solved) == {linear.node for linear in linears}
        assert all(isinstance(tensor.codes, np.memmap) for tensor in solved.values())
        proto = replaced(toy.proto, linears, solved)
        logits = np.concatenate([whole(proto, ["logits"], feed)[0] for feed in feeds])
        lost[solver] = np.linalg.norm(logits - reference)
    assert lost["gptq"] < 0.8 * min(lost["clip"], lost["rtn"])
    assert steps[-1] == ("quantize weights", 8, 8)


def test_solvers_without_calibration_go_tensor_by_tensor(toy: Any) -> None:
    for solver, quantize in (("rtn", quantize_rtn), ("clip", quantize_clip)):
        stream = quantize_weights(toy.model, toy.linears, grid=GRID, solver=solver)
        linear, tensor = next(stream)
        assert linear is toy.linears[0]
        weight = next(numpy_helper.to_array(t) for t in toy.proto.graph.initializer if t.name == "layer0.q.weight")
        np.testing.assert_array_equal(tensor.codes, quantize(weight.T, GRID).codes)
        assert len(list(stream)) == len(toy.linears) - 1


def test_the_model_is_only_read(toy: Any) -> None:
    before = ir.serde.serialize_model(toy.model).SerializeToString(deterministic=True)
    gather(toy, activation_bits=8)
    assert ir.serde.serialize_model(toy.model).SerializeToString(deterministic=True) == before


def test_weights_on_disk_give_the_same(toy: Any, tmp_path: Path) -> None:
    ir.save(toy.model, tmp_path / "toy.onnx", external_data="toy.data", size_threshold_bytes=0)
    seen, _ = gather(toy)
    mapped, _ = gather(toy, ir.load(tmp_path / "toy.onnx"))
    for one, other in zip(seen, mapped, strict=True):
        np.testing.assert_array_equal(one.hessian, other.hessian)


def test_one_tensor_may_also_be_read_by_others() -> None:
    """The rounded form goes to the linears only."""
    text = """
    <ir_version: 9, opset_import: ["" : 18]>
    g (float[n, 4] x) => (float[n, 4] z)
    {
       h = Neg(x)
       y = MatMul(h, w)
       s = Add(y, h)
       z = MatMul(s, w)
    }
    """
    proto = onnx.parser.parse_model(text)
    w = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    linears = [LinearRef("y", "MatMul", "w", 1, "h", 4, 4, "KN"), LinearRef("z", "MatMul", "w", 1, "s", 4, 4, "KN")]
    feeds = [{"x": np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)}]
    seen: list[CalibratedGroup] = []
    LayerwiseCalibrator(ir.serde.deserialize_model(proto), linears, feeds, activation_bits=4).run(
        lambda group: seen.append(group) or [None]
    )
    expected = moments(rounded(proto, linears, 4), ["s.rounded"], feeds)[0]
    np.testing.assert_allclose(seen[1].hessian, expected, rtol=1e-5, atol=1e-5)


def test_what_is_missing_or_wrong_is_named(toy: Any) -> None:
    with pytest.raises(UsageError, match="at least one batch"):
        LayerwiseCalibrator(toy.model, toy.linears, [])
    with pytest.raises(UsageError, match="needs calibration text"):
        quantize_linears(toy.model, toy.linears, grid=GRID, solver="gptq")
    feed = {name: x for name, x in toy.feeds[0].items() if name != "past.1.key"}
    with pytest.raises(InputRefused, match=r"graph input is missing[\s\S]*past\.1\.key"):
        LayerwiseCalibrator(toy.model, toy.linears, [feed])
    outside = [{**toy.feeds[0], "ids": toy.feeds[0]["ids"] + 1000}]
    with pytest.raises(InputRefused, match=r"does not run on the calibration text"):
        quantize_linears(toy.model, toy.linears, grid=GRID, solver="gptq", feeds=outside, threads=1)


def test_weights_that_are_not_matrices_are_refused() -> None:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 5])],
        [numpy_helper.from_array(np.zeros((2, 4, 5), np.float32), "w")],
    )  # fmt: skip
    model = ir.serde.deserialize_model(helper.make_model(graph))
    linear = LinearRef("y", "MatMul", "w", 1, "x", 4, 5, "KN")
    with pytest.raises(InputRefused, match=r"shape \[2, 4, 5\]"):
        next(quantize_weights(model, [linear], grid=GRID, solver="rtn"))


def test_gptq_many_on_gathered_moments_is_what_the_solver_answers(toy: Any) -> None:
    seen, _ = gather(toy)
    solved = quantize_linears(toy.model, toy.linears, grid=GRID, solver="gptq", feeds=toy.feeds, threads=1)
    first = gptq_many(seen[0].weights, seen[0].hessian, GRID)
    for linear, tensor in zip(seen[0].group.linears, first, strict=True):
        np.testing.assert_array_equal(solved[linear.node].codes, tensor.codes)
        assert solved[linear.node].error == tensor.error
