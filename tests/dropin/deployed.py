"""A decoder as somebody has deployed it, with everything that a file may carry beside its operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.analysis.graphs import (
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    WIDTH,
    Builder,
    Hook,
    attend,
    heads_of,
    rms_norm,
    rotary,
)
from tests.tiny import VOCAB

INT32, INT64, FLOAT = TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT
DOMAIN = "acme.models"
"""Of the model's own functions."""

IDLE = "token_type_ids"
"""An input that no node reads."""

METADATA = {"owner": "search team", "acme.build": "2024-11-03", "path": "s3://models/7"}


def deployed(opset: int = 17, *, residual: Hook | None = None) -> onnx.ModelProto:
    """One layer with a cache; ``residual`` may put something on the residual stream.

    Token ids are int32; the mask decides an If, a Loop and a Scan sum it up, all three reading tensors from
    outside; the gate of the feed-forward network is a function of the model's own. Outputs stand in an order of their
    own, and among them are an initializer and an input.
    """
    b = Builder(opset=opset)
    b.input("input_ids", ["batch", "tokens"], INT32)
    b.input("attention_mask", ["batch", "all tokens"], INT64)
    b.input("position_ids", ["batch", "tokens"], INT64)
    b.input(IDLE, ["batch", "tokens"], INT64)
    shape = ["batch", GROUPS, "cached", WIDTH]
    past_key, past_value = (b.input(f"past_key_values.0.{kind}", shape) for kind in ("key", "value"))

    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), "input_ids")
    h = _norm(b, x)
    q = rotary(b, heads_of(b, b.linear(h, HIDDEN, HEADS * WIDTH, bias=True), HEADS), "position_ids")
    k = rotary(b, heads_of(b, b.linear(h, HIDDEN, GROUPS * WIDTH, bias=True), GROUPS), "position_ids")
    v = heads_of(b, b.linear(h, HIDDEN, GROUPS * WIDTH, bias=True), GROUPS)
    k, v = b.op("Concat", past_key, k, axis=2), b.op("Concat", past_value, v, axis=2)
    q = b.op("Mul", q, _temperature(b))
    x = b.op("Add", x, b.linear(attend(b, q, k, v), HEADS * WIDTH, HIDDEN))
    x = residual(b, x) if residual else x
    h = _norm(b, x)
    act = b.op("Gate", b.linear(h, HIDDEN, FFN), b.linear(h, HIDDEN, FFN), domain=DOMAIN)
    x = b.op("Add", x, b.linear(act, FFN, HIDDEN))
    b.result(b.linear(_norm(b, x), HIDDEN, VOCAB), "logits")
    b.result(k, "present.0.key")
    b.result(v, "present.0.value")
    release = b.constant([3.0, 1.0])
    for name, of in (("present.0.value", [*shape[:2], "all", WIDTH]), ("logits", ["batch", "tokens", VOCAB])):
        b.output(name, of)
    b.output(release, [2])
    b.output("present.0.key", [*shape[:2], "all", WIDTH])
    b.outputs.append(helper.make_tensor_value_info("position_ids", INT64, ["batch", "tokens"]))
    return _model(b)


def _norm(b: Builder, x: str) -> str:
    """The axes of a reduction are an attribute before opset 18."""
    if b.opset >= 18:
        return rms_norm(b, x)
    squares = b.op("ReduceMean", b.op("Mul", x, x), keepdims=1, axes=[-1])
    root = b.op("Sqrt", b.op("Add", squares, b.constant(1e-3)))
    return b.op("Mul", b.vector(HIDDEN, around=1), b.op("Div", x, root))


def _temperature(b: Builder) -> str:
    """One number for the whole run, made of the mask by an If, a Loop and a Scan."""
    mask = b.op("Cast", "attention_mask", to=FLOAT)
    length = b.op("ReduceMax", mask, keepdims=0)
    one = b.constant(1.0)
    branches = []
    for operator in ("Add", "Max"):
        name = b.name()
        node = helper.make_node(operator, [length, one], [name], name=f"branch {operator}")
        branches.append(helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, FLOAT, [])]))
    chosen = b.op("If", b.op("Greater", length, one), then_branch=branches[0], else_branch=branches[1])
    summed = b.op("Loop", b.constant(3, np.int64), "", chosen, body=_loop_body(b, length))
    columns = b.op("Transpose", mask, perm=[1, 0])
    start = b.op("ReduceMin", columns, keepdims=1, **({"axes": [0]} if b.opset < 18 else {}))
    if b.opset >= 18:
        start = b.op("ReduceMin", columns, b.ints(0), keepdims=1)
    start = b.op("Squeeze", start, b.ints(0))
    last = b.op("Scan", start, columns, outputs=2, num_scan_inputs=1, body=_scan_body(b, length))
    total = b.op("Add", summed, b.op("ReduceMax", last, keepdims=0))
    return b.op("Div", total, b.op("Add", total, b.constant(2.0)))


def _loop_body(b: Builder, outer: str) -> onnx.GraphProto:
    i, go, carried = (b.name() for _ in range(3))
    on, grown = b.name(), b.name()
    nodes = [
        helper.make_node("Identity", [go], [on]),
        helper.make_node("Add", [carried, outer], [grown], name="adds from outside"),
    ]
    inputs = [
        helper.make_tensor_value_info(i, INT64, []),
        helper.make_tensor_value_info(go, TensorProto.BOOL, []),
        helper.make_tensor_value_info(carried, FLOAT, []),
    ]
    outputs = [helper.make_tensor_value_info(on, TensorProto.BOOL, []), helper.make_tensor_value_info(grown, FLOAT, [])]
    return helper.make_graph(nodes, "loop body", inputs, outputs, doc_string="three rounds")


def _scan_body(b: Builder, outer: str) -> onnx.GraphProto:
    state, column, made, kept = (b.name() for _ in range(4))
    nodes = [
        helper.make_node("Add", [state, column], [made]),
        helper.make_node("Div", [made, outer], [kept]),
    ]
    ends = [helper.make_tensor_value_info(n, FLOAT, ["batch"]) for n in (state, column, made, kept)]
    return helper.make_graph(nodes, "scan body", ends[:2], ends[2:])


def _model(b: Builder) -> onnx.ModelProto:
    graph = helper.make_graph(b.nodes, "acme decoder", b.inputs, b.outputs, b.initializers, doc_string="seventh try")
    graph.value_info.append(helper.make_tensor_value_info(b.nodes[0].output[0], FLOAT, ["batch", "tokens", HIDDEN]))
    gate = helper.make_function(
        DOMAIN,
        "Gate",
        ["x", "y"],
        ["z"],
        [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["t"]),
         helper.make_node("Mul", ["t", "y"], ["z"])],
        [helper.make_opsetid("", b.opset)],
        doc_string="SwiGLU",
    )  # fmt: skip
    opsets = {"": b.opset, "com.microsoft": 1, DOMAIN: 1, "acme.unused": 4}
    proto = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
        functions=[gate],
        ir_version=10,
        producer_name="acme exporter",
        producer_version="7.1",
        domain="com.acme",
        model_version=42,
        doc_string="the seventh model",
    )
    helper.set_model_props(proto, METADATA)
    for number, node in enumerate(graph.node):
        node.name = f"step {number}"
    for holder in (proto.graph, *proto.graph.node[:3], *proto.functions):
        entry = holder.metadata_props.add()
        entry.key, entry.value = "acme.note", "keep"
    proto.graph.input[0].doc_string = "tokens of the acme tokenizer"
    onnx.checker.check_model(proto, full_check=True)
    return proto


def write(proto: onnx.ModelProto, path: Path, *, data: str | None = None) -> Path:
    """Write the model, with its weights in a file ``data`` of their own if that is given."""
    options: dict[str, Any] = {}
    if data is not None:
        options = {"save_as_external_data": True, "location": data, "size_threshold": 100}
    onnx.save_model(proto, str(path), **options)
    return path


def feeds(step: int, cache: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """What the deployed script feeds: five tokens first, then one more on the cache."""
    rng = np.random.default_rng(step)
    count, past = (5, 0) if cache is None else (1, 5)
    empty = np.zeros((2, GROUPS, 0, WIDTH), np.float32)
    return {
        "input_ids": rng.integers(0, VOCAB, (2, count)).astype(np.int32),
        "attention_mask": np.ones((2, past + count), np.int64),
        "position_ids": np.tile(np.arange(past, past + count), (2, 1)),
        IDLE: np.zeros((2, count), np.int64),
        **{
            f"past_key_values.0.{kind}": empty if cache is None else cache[f"present.0.{kind}"]
            for kind in ("key", "value")
        },
    }
