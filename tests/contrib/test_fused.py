"""Embeddings with a norm in them, and matmuls with what ONNX Runtime fused to them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphrot.graph import read_constant
from graphrot.model.apart import drop_idle_lookups
from graphrot.model.fused_embedding import unfuse_embeddings
from graphrot.model.fused_products import unfuse_biases, unfuse_products
from tests.contrib.single import graph, run, same

BATCH, LENGTH, HIDDEN, ROWS = 2, 5, 8, 11
MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]],
    "other numbers": [[0, 0, 2, 1, 1], [1, -1, 1, 1, 0]],
}
LOOKUPS = {"Gather", "Add", "LayerNormalization"}
PLACES = {"Shape", "Range"}


def _ids(rows: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, rows, (BATCH, length)).astype(np.int32)


def _embedding(extra: dict[str, np.ndarray], outputs: list[str], opset: int = 17, **attributes: Any) -> Any:
    rng = np.random.default_rng(0)
    tables = {"words": ROWS, "positions": 9, "kinds": 3} if "segment" in extra else {"words": ROWS, "positions": 9}
    constants = {name: rng.standard_normal((rows, HIDDEN)).astype(np.float32) for name, rows in tables.items()}
    constants |= {name: rng.standard_normal(HIDDEN).astype(np.float32) for name in ("gain", "shift")}
    feeds = {"ids": _ids(ROWS)} | extra
    order = ["ids", "segment", "words", "positions", "kinds", "gain", "shift", "mask", "places"]
    operands = [name if name in feeds or name in constants else "" for name in order]
    while not operands[-1]:
        operands.pop()
    node = helper.make_node("EmbedLayerNormalization", operands, outputs, domain="com.microsoft", **attributes)
    return graph(node, feeds, constants, opset=opset, outputs={"lengths": TensorProto.INT32}), feeds


@pytest.mark.parametrize("opset", [12, 17])
@pytest.mark.parametrize("mask", [*MASKS, None])
def test_an_embedding_with_its_lengths(mask: str | None, opset: int) -> None:
    extra = {"segment": _ids(3)} | ({"mask": np.array(MASKS[mask], np.int32)} if mask else {})
    model, feeds = _embedding(extra, ["y", "lengths", "total"], opset, epsilon=1e-3)
    counted = {"Cast", "ReduceSum", "Equal"} if mask else {"Cast", "ReduceSum", "Mul"}
    same(model, feeds, unfuse_embeddings, LOOKUPS | PLACES | counted)


@pytest.mark.parametrize("rows", [1, BATCH])
def test_an_embedding_at_given_places(rows: int) -> None:
    model, feeds = _embedding({"places": np.array([[3, 0, 1, 1, 2]] * rows, np.int32)}, ["y", "lengths"])
    same(model, feeds, unfuse_embeddings, LOOKUPS | {"Cast", "Mul", "ReduceSum"})


def test_kinds_of_text_without_a_table_are_left_alone() -> None:
    model, _ = _embedding({"segment": _ids(3)}, ["y", "lengths"])
    model.graph.node(0).replace_input_with(4, None)
    assert not unfuse_embeddings(model)


def _product(op_type: str, **attributes: Any) -> tuple[ir.Model, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (7, HIDDEN) if attributes.get("transB") else (HIDDEN, 7)
    constants = {"weight": rng.standard_normal(shape).astype(np.float32)}
    rows = (LENGTH, HIDDEN) if op_type == "FusedGemm" else (BATCH, LENGTH, HIDDEN)
    if op_type == "FusedGemm":
        constants["bias"] = rng.standard_normal(7).astype(np.float32)
    node = helper.make_node(op_type, ["x", *constants], ["y"], domain="com.microsoft", **attributes)
    feeds = {"x": rng.standard_normal(rows).astype(np.float32)}
    return graph(node, feeds, constants), feeds


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_a_fused_matmul(transposed: int, alpha: float) -> None:
    model, feeds = _product("FusedMatMul", transB=transposed, alpha=alpha)
    same(model, feeds, unfuse_products, {"MatMul", *(["Transpose"] * transposed), *(["Mul"] * (alpha != 1))})
    last = model.graph.outputs[0].producer()
    assert last is not None and last.op_type == "MatMul"
    assert read_constant(last.inputs[1]).shape == (HIDDEN, 7)


def test_a_weight_that_others_read_is_not_scaled() -> None:
    model, feeds = _product("FusedMatMul", alpha=0.3)
    weight = model.graph.initializers["weight"]
    node = ir.node("Identity", [weight])
    node.outputs[0].name, node.outputs[0].type = "copy", weight.type
    node.outputs[0].shape = weight.shape
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    same(model, feeds, unfuse_products, {"MatMul", "Mul", "Identity"})
    last = model.graph.outputs[0].producer()
    assert last is not None and last.op_type == "Mul" and last.inputs[0] is not None
    product = last.inputs[0].producer()
    assert product is not None and product.inputs[1] is weight


def test_transposed_activations_are_left_alone() -> None:
    model, _ = _product("FusedMatMul", transA=1)
    assert not unfuse_products(model)


@pytest.mark.parametrize(
    ("activation", "numbers"),
    [
        ("Relu", {}),
        ("Tanh", {}),
        ("LeakyRelu", {"activation_alpha": 0.1}),
        ("HardSigmoid", {"activation_alpha": 0.3, "activation_beta": 0.4}),
    ],
)
def test_a_fused_gemm(activation: str, numbers: dict[str, float]) -> None:
    model, feeds = _product("FusedGemm", activation=activation, transB=1, alpha=0.7, beta=0.5, **numbers)
    same(model, feeds, unfuse_products, {"Gemm", activation})


def test_an_activation_without_its_numbers_is_left_alone() -> None:
    model, _ = _product("FusedGemm", activation="LeakyRelu")
    assert not unfuse_products(model)


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _fast_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("op_type", ["GemmFastGelu", "BiasAdd", "BiasSplitGelu"])
def test_operators_of_gpus(op_type: str) -> None:
    """No CPU kernel has them: what comes out is compared with their definition."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((BATCH, LENGTH, HIDDEN)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal((HIDDEN, HIDDEN)).astype(np.float32)
    bias = rng.standard_normal(HIDDEN).astype(np.float32)
    gate = (x + bias)[..., HIDDEN // 2 :].astype(np.float64)
    constants, inputs, expected = {
        "GemmFastGelu": ({"weight": weight, "bias": bias}, ["x", "weight", "bias"], _fast_gelu(x @ weight + bias)),
        "BiasAdd": ({"bias": bias}, ["x", "bias", "y"], x + bias + y),
        "BiasSplitGelu": ({"bias": bias}, ["x", "bias"], (x + bias)[..., : HIDDEN // 2] * _gelu(gate)),
    }[op_type]
    feeds = {"x": x, "y": y} if "y" in inputs else {"x": x}
    model = graph(helper.make_node(op_type, inputs, ["z"], domain="com.microsoft"), feeds, constants)
    assert unfuse_biases(model) and not unfuse_biases(model)
    (found,) = run(model, feeds)
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("start", [None, 0])
def test_a_lookup_of_which_only_the_shape_is_read(start: int | None) -> None:
    table = np.random.default_rng(0).standard_normal((ROWS, HIDDEN)).astype(np.float32)
    feeds = {"ids": _ids(ROWS)}
    model = graph(helper.make_node("Gather", ["table", "ids"], ["rows"]), feeds, {"table": table})
    rows = model.graph.outputs.pop(0)
    shape = ir.node("Shape", [rows], {} if start is None else {"start": start})
    shape.outputs[0].name, shape.outputs[0].type = "shape", ir.TensorType(ir.DataType.INT64)
    model.graph.append(shape)
    model.graph.outputs.append(shape.outputs[0])
    (expected,) = run(model, feeds)
    assert drop_idle_lookups(model)
    assert run(model, feeds)[0].tolist() == expected.tolist() == [BATCH, LENGTH, HIDDEN]
    assert model.graph.outputs[0].producer() is not shape and not rows.uses()
