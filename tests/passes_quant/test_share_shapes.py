"""Sharing shapes: fewer nodes, the same bits, and symbols that are right at every size."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from graphrot.passes.shape_values import ShapeValues
from graphrot.passes.share_shapes import ShareShapes
from graphrot.passes.sizes import Size, broadcast, const, linear, product, quotient
from tests.exported import tiny_onnx
from tests.passes_quant.graphs import PLAN

SIZES = [(1, 5, 0), (2, 3, 4), (1, 1, 7), (3, 1, 1)]
"""Batch, sequence, past."""


def feeds(inputs: list[Any], batch: int, sequence: int, past: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(batch + 10 * sequence + 100 * past)
    found: dict[str, np.ndarray] = {}
    for value in inputs:
        if value.name == "attention_mask":
            found[value.name] = np.ones((batch, past + sequence), np.int64)
        elif value.name == "position_ids":
            found[value.name] = np.tile(np.arange(past, past + sequence), (batch, 1))
        elif value.name == "input_ids":
            found[value.name] = rng.integers(3, 100, (batch, sequence))
        else:
            found[value.name] = rng.standard_normal((batch, value.shape[1], past, value.shape[3])).astype(np.float32)
    return found


def session(proto: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def load(name: str) -> ir.Model:
    return ir.external_data.load_to_model(ir.load(tiny_onnx(name)))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_the_same_bits_from_fewer_nodes(name: str) -> None:
    model = load(name)
    before, nodes = ir.to_proto(model), len(model.graph)
    step = ShareShapes(PLAN)
    assert step(model).modified
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    assert len(model.graph) < 0.75 * nodes
    assert not ShareShapes(PLAN)(model).modified
    old, new = session(before), session(after)
    for sizes in SIZES:
        data = feeds(old.get_inputs(), *sizes)
        for left, right in zip(old.run(None, data), new.run(None, data), strict=True):
            np.testing.assert_array_equal(left, right)


def value_of(size: Size, env: dict[str, int]) -> int | None:
    """The number that a size stands for; None where it holds what this function does not know."""
    kind = size[0]
    if kind == "const":
        return int(size[1])
    if kind == "dim":
        return env.get(size[1])
    if kind in ("sum", "product"):
        parts = (
            [(value_of(s, env), f) for s, f in size[1]] if kind == "sum" else [(value_of(s, env), 1) for s in size[1]]
        )
        if any(v is None for v, _ in parts):
            return None
        numbers = [v * f for v, f in parts if v is not None]
        return sum(numbers) + size[2] if kind == "sum" else int(np.prod(numbers)) * size[2]
    if kind == "quotient":
        top, bottom = value_of(size[1], env), value_of(size[2], env)
        return None if top is None or not bottom else top // bottom
    return None


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_symbols_are_right(name: str) -> None:
    """Every shape and content that is claimed, against a run with all tensors exposed."""
    model = load(name)
    found = ShapeValues(model.graph)
    named = {v.name: v for node in model.graph for v in node.outputs if v.name}
    proto = ir.to_proto(model)
    inferred = onnx.shape_inference.infer_shapes(proto)
    types = {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    known = {v.name for v in proto.graph.output}
    exposed = [n for n in named if n in types and n not in known]
    proto.graph.output.extend(
        onnx.ValueInfoProto(name=n, type=helper.make_tensor_type_proto(types[n], None)) for n in exposed
    )
    run = session(proto)
    checked = 0
    for batch, sequence, past in SIZES[:2]:
        data = feeds(run.get_inputs(), batch, sequence, past)
        env = {"batch": batch, "sequence": sequence, "past": past, "total": past + sequence}
        for output, array in zip(run.get_outputs(), run.run(None, data), strict=True):
            value = named[output.name]
            shape, content = found.shapes.get(value), found.contents.get(value)
            pairs = list(zip(shape, array.shape, strict=True)) if shape is not None else []
            pairs += list(zip(content, array.ravel().tolist(), strict=True)) if content is not None else []
            for size, real in pairs:
                claimed = value_of(size, env)
                assert claimed is None or claimed == real, (output.name, size)
                checked += claimed is not None
    assert checked > 1000


def shapes_of(first: list[Any], second: list[Any]) -> ir.Model:
    """Two inputs, each reshaped to its own ``Shape``."""
    nodes = []
    for name in ("a", "b"):
        nodes += [
            helper.make_node("Shape", [name], [f"{name}_shape"]),
            helper.make_node("Gather", [f"{name}_shape", "zero"], [f"{name}_size"]),
            helper.make_node("Concat", [f"{name}_size", "tail"], [f"{name}_target"], axis=0),
            helper.make_node("Reshape", [name, f"{name}_target"], [f"{name}_out"]),
        ]
    graph = helper.make_graph(
        nodes,
        "two",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("a", first), ("b", second))],
        [helper.make_tensor_value_info(f"{n}_out", TensorProto.FLOAT, [None, None]) for n in ("a", "b")],
        [numpy_helper.from_array(np.array([0]), "zero"), numpy_helper.from_array(np.array([-1]), "tail")],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        (["n", 2, 3], ["n", 6], 1),
        (["n", 2, 3], ["m", 6], 2),
        ([None, 2, 3], [None, 6], 2),
        ([4, 2, 3], [4, 6], 0),
    ],
)
def test_only_equal_names_are_equal(first: list[Any], second: list[Any], left: int) -> None:
    model = shapes_of(first, second)
    ShareShapes(PLAN)(model)
    assert sum(node.op_type == "Concat" for node in model.graph) == left
    run = session(ir.to_proto(model))
    rows = (4, 4) if first[0] == second[0] and first[0] is not None else (4, 5)
    out = run.run(None, {"a": np.zeros((rows[0], 2, 3), np.float32), "b": np.zeros((rows[1], 6), np.float32)})
    assert [array.shape for array in out] == [(rows[0], 6), (rows[1], 6)]


SYMBOLS = [("dim", name, True) for name in "abc"]
SMALL = st.integers(0, 6)


@given(
    st.lists(SMALL, min_size=3, max_size=3), st.lists(st.integers(-3, 3), min_size=3, max_size=3), st.integers(-4, 4)
)
def test_linear_forms(values: list[int], factors: list[int], offset: int) -> None:
    env = dict(zip("abc", values, strict=True))
    size = linear(list(zip(SYMBOLS, factors, strict=True)), offset)
    assert value_of(size, env) == offset + sum(f * v for f, v in zip(factors, values, strict=True))
    assert size == linear(list(zip(SYMBOLS, factors, strict=True))[::-1], offset)
    assert linear([(size, 1), (size, -1)]) == const(0)


@given(st.lists(st.integers(1, 6), min_size=3, max_size=3), st.integers(1, 5), st.permutations(SYMBOLS))
def test_products_and_quotients(values: list[int], factor: int, order: list[Size]) -> None:
    env = dict(zip("abc", values, strict=True))
    whole = product([const(factor), *order])
    assert whole == product([*SYMBOLS, const(factor)])
    assert value_of(whole, env) == factor * int(np.prod(values))
    assert quotient([*order, const(factor)], order) == const(factor)
    assert quotient([*order, const(factor)], [order[0], const(factor)]) == product(order[1:])


def test_broadcast() -> None:
    a, b = SYMBOLS[:2]
    assert broadcast([(a, const(1)), (const(4),)]) == (a, const(4))
    assert broadcast([(a,), (const(4),)]) == (const(4),)
    assert broadcast([(a,), (b,)]) == broadcast([(b,), (a,)]) != (a,)
