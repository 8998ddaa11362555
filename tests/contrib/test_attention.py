"""Attention and MultiHeadAttention of com.microsoft, with everything that they take inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from graphrot.model.fused_attention import obstacle, unfuse_attention, unpack_attention
from tests.contrib.single import graph, run, same

BATCH, LENGTH, HEADS, WIDTH, INPUT = 2, 5, 3, 8, 20
APART = {"MatMul", "Add", "Split", "MultiHeadAttention"}
LEFT = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], np.int32)
RIGHT = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
HOLES = (np.random.default_rng(1).random((BATCH, LENGTH, LENGTH)) > 0.3).astype(np.int32)
PAST = (np.random.default_rng(2).random((BATCH, 4 + LENGTH)) > 0.2).astype(np.int32)


def _attention(
    *,
    mask: np.ndarray | None = None,
    past: int = 0,
    bias: bool = True,
    values: int = WIDTH,
    scores: bool = False,
    present: bool = False,
    opset: int = 17,
    shapes: dict[str, list[Any]] | None = None,
    **attributes: Any,
) -> tuple[ir.Model, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    width = HEADS * (2 * WIDTH + values)
    constants = {"weight": rng.standard_normal((INPUT, width)).astype(np.float32)}
    if bias:
        constants["bias"] = rng.standard_normal(width).astype(np.float32)
    feeds: dict[str, np.ndarray] = {"x": rng.standard_normal((BATCH, LENGTH, INPUT)).astype(np.float32)}
    if mask is not None:
        feeds["mask"] = mask
    if past:
        feeds["past"] = rng.standard_normal((2, BATCH, HEADS, past, WIDTH)).astype(np.float32)
    if scores:
        feeds["scores"] = rng.standard_normal((1, HEADS, LENGTH, LENGTH + past)).astype(np.float32)
    operands = ["x", "weight", "bias", "mask", "past", "scores"]
    operands = [name if name in feeds or name in constants else "" for name in operands]
    if values != WIDTH:
        attributes["qkv_hidden_sizes"] = [HEADS * WIDTH, HEADS * WIDTH, HEADS * values]
    outputs = ["y", "present"] if past or present else ["y"]
    while not operands[-1]:
        operands.pop()
    node = helper.make_node("Attention", operands, outputs, domain="com.microsoft", num_heads=HEADS, **attributes)
    declared = {"mask": ["x_0"]} if mask is not None and mask.ndim == 1 else {}
    return graph(node, feeds, constants, opset=opset, shapes=declared | (shapes or {})), feeds


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"mask": LEFT},
        {"mask": RIGHT, "scale": 0.3, "mask_filter_value": -50.0},
        {"mask": np.zeros((BATCH, LENGTH), np.int32)},
        {"mask": np.array([3, 5], np.int32)},
        {"mask": HOLES},
        {"mask": LEFT, "scores": True},
        {"values": 12, "mask": RIGHT},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_the_same_numbers(options: dict[str, Any], causal: int) -> None:
    model, feeds = _attention(**options, unidirectional=causal)
    weight = model.graph.initializers["weight"]
    same(model, feeds, unfuse_attention, APART - ({"Add"} if "bias" in options else set()))
    assert model.graph.initializers["weight"] is weight


@pytest.mark.parametrize("opset", [12, 17, 21])
@pytest.mark.parametrize("mask", [None, PAST, np.array([7, 9], np.int32)], ids=["none", "padded", "lengths"])
def test_with_a_past(mask: np.ndarray | None, opset: int) -> None:
    model, feeds = _attention(mask=mask, past=4, unidirectional=1, opset=opset)
    _, present = same(model, feeds, unfuse_attention, APART | {"Gather", "Unsqueeze", "Concat"})
    assert present.shape == (2, BATCH, HEADS, 4 + LENGTH, WIDTH)


def test_a_present_without_a_past() -> None:
    model, feeds = _attention(present=True)
    same(model, feeds, unfuse_attention, APART | {"Unsqueeze", "Concat"})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"do_rotary": 1}, "rotary positions"),
        ({"past": 4, "past_present_share_buffer": 1}, "one buffer"),
        ({"mask": np.zeros((BATCH, 1), np.int32), "shapes": {"mask": ["x_0", 1]}}, "does not take"),
        ({"mask": np.zeros((BATCH, 1, 9, 9), np.int32)}, "does not take"),
        ({"mask": np.array([3, 5, 0, 2], np.int32), "shapes": {"mask": ["ends_and_starts"]}}, "ends and starts"),
        ({"values": 12, "present": True}, "different sizes"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_left_alone(options: dict[str, Any], why: str) -> None:
    model, _ = _attention(**options)
    assert why in (obstacle(model.graph.node(0)) or "")
    assert not unfuse_attention(model) and [node.op_type for node in model.graph] == ["Attention"]


def test_a_weight_that_is_an_input_is_left_alone() -> None:
    model, _ = _attention()
    weight = model.graph.initializers.pop("weight")
    model.graph.inputs.append(weight)
    weight.const_value = None
    assert "no constant matrix" in (obstacle(model.graph.node(0)) or "")


@pytest.mark.parametrize("held", [2, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_heads(held: int, bias: bool) -> None:
    """No CPU kernel takes them packed: what comes out is compared with what separate ones give."""
    rng = np.random.default_rng(3)
    parts = rng.standard_normal((BATCH, LENGTH, HEADS, 3, WIDTH)).astype(np.float32)
    names = ("q", "k", "v")
    constants = {"bias": rng.standard_normal(3 * HEADS * WIDTH).astype(np.float32)} if bias else {}
    flat = {name: parts[:, :, :, k].reshape(BATCH, LENGTH, -1) for k, name in enumerate(names)}
    mask = {"mask": LEFT}

    def build(operands: list[str], feeds: dict[str, np.ndarray]) -> ir.Model:
        operands = [*operands, "bias" if bias else "", "mask"]
        node = helper.make_node("MultiHeadAttention", operands, ["y"], domain="com.microsoft", num_heads=HEADS)
        return graph(node, feeds | mask, constants)

    (expected,) = run(build([*names], flat), flat | mask)
    feeds = {"packed": parts} if held == 3 else {"q": flat["q"], "packed": parts[:, :, :, 1:]}
    model = build(["packed", "", ""] if held == 3 else ["q", "packed", ""], feeds)
    assert unpack_attention(model) and not unpack_attention(model)
    (found,) = run(model, feeds | mask)
    assert np.abs(found - expected).max() <= 2e-6
