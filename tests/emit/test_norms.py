"""Residual norms in one node: the same numbers, and nothing fused that is something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from graphrot.emit.norms import fuse_residual_norms
from graphrot.passes.quantize_nodes import NodeWriter

WIDTH, EPSILON = 24, 1e-2


class Builder:
    """``residual + update`` normalized, twice in a row."""

    def __init__(self, dtype: type = np.float32, shapes: tuple[list[Any], list[Any]] | None = None) -> None:
        self.dtype = dtype
        self.shapes = shapes or (["batch", "tokens", WIDTH], ["batch", "tokens", WIDTH])
        self.nodes: list[onnx.NodeProto] = []
        self.constants = {
            "two": np.array(2, dtype),
            "three": np.array(3, dtype),
            "one": np.array(1, dtype),
            "epsilon": np.array([EPSILON], dtype),
            "last": np.array([-1]),
            "middle": np.array([1]),
            "gain": np.random.default_rng(3).standard_normal(WIDTH).astype(dtype),
        }
        self.outputs = ["y"]

    def op(self, kind: str, inputs: str, output: str, **attributes: Any) -> None:
        self.nodes.append(helper.make_node(kind, inputs.split(), [output], **attributes))

    def norm(self, x: str, output: str, *, form: str = "div", gain: bool = False, **changes: str) -> None:
        """``form``: ``div``, ``reciprocal`` or ``one over``; ``changes``: other operands."""
        normalized = f"{output}.plain" if gain else output
        self.op("Pow", f"{x} {changes.get('power', 'two')}", f"{output}.square")
        self.op("ReduceMean", f"{output}.square {changes.get('axes', 'last')}", f"{output}.mean")
        self.op("Add", f"epsilon {output}.mean", f"{output}.shifted")
        self.op("Sqrt", f"{output}.shifted", f"{output}.root")
        if form == "div":
            self.op("Div", f"{x} {output}.root", normalized)
        else:
            kind, operands = ("Reciprocal", f"{output}.root") if form == "reciprocal" else ("Div", f"one {output}.root")
            self.op(kind, operands, f"{output}.inverse")
            self.op("Mul", f"{output}.inverse {x}", normalized)
        if gain:
            self.op("Mul", f"gain {normalized}", output)

    def model(self) -> ir.Model:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        graph = helper.make_graph(
            self.nodes,
            "norms",
            [helper.make_tensor_value_info(n, kind, s) for n, s in zip(("a", "b"), self.shapes, strict=True)],
            [helper.make_tensor_value_info(n, kind, [None] * len(self.shapes[0])) for n in self.outputs],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        onnx.checker.check_model(proto, full_check=True)
        return ir.from_proto(proto)


def fused(model: ir.Model) -> int:
    return fuse_residual_norms(model, NodeWriter(model))


def run(proto: onnx.ModelProto, dtype: type) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {}
    for value in proto.graph.input:
        dims = [d.dim_value or {"batch": 2, "tokens": 5}[d.dim_param] for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.standard_normal(dims).astype(dtype)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, feeds)
    return found


def two_layers(dtype: type = np.float32, *, gain: bool = False, form: str = "div") -> Builder:
    builder = Builder(dtype)
    builder.op("Add", "a b", "sum1")
    builder.norm("sum1", "n1", form=form, gain=gain)
    builder.op("Tanh", "n1", "t")
    builder.op("Add", "sum1 t", "sum2")
    builder.norm("sum2", "n2", form=form, gain=gain)
    builder.op("Mul", "n2 sum2", "y")
    return builder


@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("form", ["div", "reciprocal", "one over"])
def test_same_numbers(form: str, gain: bool) -> None:
    model = two_layers(gain=gain, form=form).model()
    want = run(ir.to_proto(model), np.float32)
    assert fused(model) == 2
    ops = [node.op_type for node in model.graph]
    assert ops == ["SkipSimplifiedLayerNormalization", "Tanh", "SkipSimplifiedLayerNormalization", "Mul"]
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    np.testing.assert_allclose(run(proto, np.float32)[0], want[0], rtol=2e-5, atol=1e-5)
    assert fused(model) == 0


def test_float16() -> None:
    model = two_layers(np.float16).model()
    want = run(ir.to_proto(model), np.float16)
    assert fused(model) == 2
    np.testing.assert_allclose(run(ir.to_proto(model), np.float16)[0], want[0], rtol=2e-2, atol=2e-2)


def test_parts_and_names() -> None:
    model = two_layers(gain=True).model()
    fused(model)
    first = next(iter(model.graph))
    assert [value.name for value in first.inputs if value is not None] == ["a", "b", "gain"]
    assert [value.name for value in first.outputs] == ["n1", "", "", "sum1"]
    assert first.attributes["epsilon"].as_float() == pytest.approx(EPSILON)
    assert {"epsilon", "two"}.isdisjoint(model.graph.initializers)


def test_a_gain_that_is_computed_after_the_sum() -> None:
    builder = Builder()
    builder.op("Add", "a b", "sum")
    builder.constants["offset"] = builder.constants.pop("gain")
    builder.op("Add", "offset one", "gain")
    builder.norm("sum", "n", gain=True)
    builder.op("Mul", "n sum", "y")
    model = builder.model()
    want = run(ir.to_proto(model), np.float32)
    assert fused(model) == 1
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    np.testing.assert_allclose(run(proto, np.float32)[0], want[0], rtol=2e-5, atol=1e-5)


def _parallel(builder: Builder, first: bool, second: bool) -> Builder:
    """Two norms of one sum, each with the gain or without."""
    builder.op("Add", "a b", "sum")
    builder.norm("sum", "n1", gain=first)
    builder.op("Tanh", "n1", "t")
    builder.norm("sum", "n2", gain=second)
    builder.op("Add", "t n2", "both")
    builder.op("Mul", "both sum", "y")
    return builder


@pytest.mark.parametrize("gain", [True, False])
def test_two_norms_of_one_sum_are_one(gain: bool) -> None:
    model = _parallel(Builder(), gain, gain).model()
    want = run(ir.to_proto(model), np.float32)
    assert fused(model) == 2
    assert [node.op_type for node in model.graph].count("SkipSimplifiedLayerNormalization") == 1
    assert {"Pow", "Sqrt"}.isdisjoint(node.op_type for node in model.graph)
    assert "n2" in {value.name for node in model.graph for value in node.outputs}
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    np.testing.assert_allclose(run(proto, np.float32)[0], want[0], rtol=2e-5, atol=1e-5)


def test_two_norms_of_one_sum_that_differ() -> None:
    model = _parallel(Builder(), True, False).model()
    want = run(ir.to_proto(model), np.float32)
    assert fused(model) == 1
    assert [node.op_type for node in model.graph].count("Pow") == 1
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    np.testing.assert_allclose(run(proto, np.float32)[0], want[0], rtol=2e-5, atol=1e-5)


def _other_power(builder: Builder) -> None:
    builder.op("Add", "a b", "sum")
    builder.norm("sum", "n", power="three")
    builder.op("Mul", "n sum", "y")


def _other_axis(builder: Builder) -> None:
    builder.op("Add", "a b", "sum")
    builder.norm("sum", "n", axes="middle")
    builder.op("Mul", "n sum", "y")


def _another_reader(builder: Builder) -> None:
    builder.op("Add", "a b", "sum")
    builder.norm("sum", "n")
    builder.op("Mul", "n n.mean", "y")


def _sum_is_an_output(builder: Builder) -> None:
    builder.op("Add", "a b", "y")
    builder.norm("y", "n")
    builder.op("Identity", "n", "z")
    builder.outputs.append("z")


def _norm_is_an_output(builder: Builder) -> None:
    builder.op("Add", "a b", "sum")
    builder.norm("sum", "y")


def _not_a_sum(builder: Builder) -> None:
    builder.op("Mul", "a b", "product")
    builder.norm("product", "n")
    builder.op("Mul", "n product", "y")


@pytest.mark.parametrize(
    "build", [_other_power, _other_axis, _another_reader, _sum_is_an_output, _norm_is_an_output, _not_a_sum]
)
def test_left_alone(build: Any) -> None:
    builder = Builder()
    build(builder)
    model = builder.model()
    nodes = len(model.graph)
    assert fused(model) == 0 and len(model.graph) == nodes


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [
        (np.float32, (["batch", "tokens", WIDTH], ["batch", 1, WIDTH])),
        (np.float32, (["batch", "tokens", WIDTH], ["batch", "other", WIDTH])),
        (np.float32, (["batch", "tokens", "width"], ["batch", "tokens", "width"])),
        (np.float32, (["batch", 2, "tokens", WIDTH], ["batch", 2, "tokens", WIDTH])),
        (np.float64, None),
    ],
)
def test_left_alone_for_its_shape_or_type(dtype: type, shapes: Any) -> None:
    builder = Builder(dtype, shapes)
    builder.op("Add", "a b", "sum")
    builder.norm("sum", "n")
    builder.op("Mul", "n sum", "y")
    assert fused(builder.model()) == 0


def test_a_gain_that_is_more_than_a_vector_stays() -> None:
    builder = Builder()
    builder.constants["gain"] = np.ones((5, WIDTH), np.float32)
    builder.op("Add", "a b", "sum")
    builder.norm("sum", "n", gain=True)
    builder.op("Mul", "n sum", "y")
    model = builder.model()
    assert fused(model) == 1
    assert [node.op_type for node in model.graph] == ["SkipSimplifiedLayerNormalization", "Mul", "Mul"]
