"""A small decoder layer, built node by node, with places to put something in the way.

Everything is random and nothing is neutral: gains, shifts and biases all count. Names are numbers on
purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

VOCAB = 37
HIDDEN = 24
HEADS = 4
GROUPS = 2
WIDTH = 6
FFN = 20

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64

Hook = Callable[["Builder", str], str]


class Builder:
    """Collects nodes, initializers, inputs and outputs of one graph."""

    def __init__(self, seed: int = 0, opset: int = 23) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.opset = opset
        self._count = 0

    def name(self) -> str:
        self._count += 1
        return f"t{self._count}"

    def op(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> str:
        """Add a node; returns its first output (the others follow by number)."""
        names = [self.name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, domain=domain, **attributes))
        return names[0]

    def constant(self, array: Any, dtype: type = np.float32) -> str:
        name = self.name()
        self.initializers.append(numpy_helper.from_array(np.asarray(array, dtype=dtype), name))
        return name

    def ints(self, *numbers: int) -> str:
        return self.constant(list(numbers), np.int64)

    def matrix(self, rows: int, columns: int) -> str:
        return self.constant(self.rng.standard_normal((rows, columns)) / np.sqrt(rows))

    def vector(self, size: int, *, around: float = 0.0, spread: float = 0.3) -> str:
        return self.constant(around + spread * self.rng.standard_normal(size))

    def linear(self, x: str, rows: int, columns: int, *, bias: bool = False) -> str:
        y = self.op("MatMul", x, self.matrix(rows, columns))
        return self.op("Add", y, self.vector(columns)) if bias else y

    def input(self, name: str, shape: list[Any], dtype: int = FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, shape: list[Any]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, FLOAT, shape))

    def result(self, name: str, as_name: str) -> str:
        """Give a tensor the name of a graph output."""
        for node in self.nodes:
            for place, output in enumerate(node.output):
                if output == name:
                    node.output[place] = as_name
            for place, read in enumerate(node.input):
                if read == name:
                    node.input[place] = as_name
        return as_name

    def model(self) -> ir.Model:
        graph = helper.make_graph(self.nodes, "g", self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        early = {"SimplifiedLayerNormalization", *(["LayerNormalization"] if self.opset < 17 else [])}
        if not any(node.op_type in early for node in self.nodes):  # not in the standard, or not yet
            onnx.checker.check_model(proto)
        return ir.from_proto(proto)


def rms_norm(b: Builder, x: str, size: int = HIDDEN) -> str:
    """Decomposed, with a gain."""
    squares = b.op("ReduceMean", b.op("Mul", x, x), b.ints(-1), keepdims=1)
    root = b.op("Sqrt", b.op("Add", squares, b.constant(1e-3)))
    return b.op("Mul", b.vector(size, around=1), b.op("Div", x, root))


def rms_op(b: Builder, x: str, size: int = HIDDEN) -> str:
    return b.op("RMSNormalization", x, b.vector(size, around=1), axis=-1, epsilon=1e-3)


def layer_norm(b: Builder, x: str, size: int = HIDDEN) -> str:
    """Decomposed, with gain and shift."""
    centred = b.op("Sub", x, b.op("ReduceMean", x, b.ints(-1), keepdims=1))
    variance = b.op("ReduceMean", b.op("Pow", centred, b.constant(2.0)), b.ints(-1), keepdims=1)
    root = b.op("Reciprocal", b.op("Sqrt", b.op("Add", variance, b.constant(1e-3))))
    scaled = b.op("Mul", b.op("Mul", centred, root), b.vector(size, around=1))
    return b.op("Add", scaled, b.vector(size))


def layer_op(b: Builder, x: str, size: int = HIDDEN) -> str:
    return b.op("LayerNormalization", x, b.vector(size, around=1), b.vector(size), axis=-1, epsilon=1e-3)


def simplified(b: Builder, x: str, size: int = HIDDEN) -> str:
    return b.op("SimplifiedLayerNormalization", x, b.vector(size, around=1), axis=-1, epsilon=1e-3)


def heads_of(b: Builder, x: str, heads: int) -> str:
    shaped = b.op("Reshape", x, b.ints(0, 0, heads, WIDTH))
    return b.op("Transpose", shaped, perm=[0, 2, 1, 3])


def rotary(b: Builder, x: str, positions: str) -> str:
    """Half-rotated RoPE of ``[B, H, S, D]``."""
    half = WIDTH // 2
    angles = b.op("Mul", b.op("Unsqueeze", b.op("Cast", positions, to=FLOAT), b.ints(-1)), b.vector(half, spread=1))
    angles = b.op("Unsqueeze", b.op("Concat", angles, angles, axis=-1), b.ints(1))
    first = b.op("Slice", x, b.ints(0), b.ints(half), b.ints(3))
    second = b.op("Slice", x, b.ints(half), b.ints(WIDTH), b.ints(3))
    turned = b.op("Concat", b.op("Neg", second), first, axis=3)
    return b.op("Add", b.op("Mul", x, b.op("Cos", angles)), b.op("Mul", turned, b.op("Sin", angles)))


def grouped(b: Builder, x: str) -> str:
    """Repeat key or value heads for their query heads."""
    wide = b.op("Unsqueeze", x, b.ints(2))
    shape = b.op("Shape", wide)
    target = b.op("Mul", shape, b.ints(1, 1, HEADS // GROUPS, 1, 1))
    return b.op("Reshape", b.op("Expand", wide, target), b.ints(0, HEADS, -1, WIDTH))


def attend(b: Builder, q: str, k: str, v: str) -> str:
    """Plain attention of ``[B, H, S, D]`` q with grouped k and v; ``[B, S, H*D]``."""
    scores = b.op("MatMul", b.op("Mul", q, b.constant(0.4)), b.op("Transpose", grouped(b, k), perm=[0, 1, 3, 2]))
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), grouped(b, v))
    return b.op("Reshape", b.op("Transpose", mixed, perm=[0, 2, 1, 3]), b.ints(0, 0, HEADS * WIDTH))


def decoder(
    norm: Callable[..., str] = rms_norm,
    *,
    cache: bool = True,
    rope: bool = True,
    bias: bool = False,
    residual: Hook | None = None,
    branch: Hook | None = None,
    activation: Hook | None = None,
    values: Hook | None = None,
    query: Hook | None = None,
    merged: Hook | None = None,
    embedded: Hook | None = None,
    final: Hook | None = None,
    seed: int = 0,
) -> tuple[ir.Model, Builder]:
    """One layer and a head, with hooks that may change a tensor: ``hook(builder, tensor) -> tensor``.

    Args:
        norm: one of the norms of this module.
        cache: with past and present.
        rope: rotary positions.
        bias: biases on q, k, v and the output projection.
        residual: on the residual stream behind the attention.
        branch: on what the attention adds to it.
        activation: on the input of the down projection.
        values: on the new values ``[B, H, S, D]``.
        query: on the query behind RoPE.
        merged: on the heads side by side, in front of the output projection.
        embedded: on the embedding.
        final: on the output of the final norm.
        seed: of all weights.
    """
    b = Builder(seed)
    ids = b.input("ids", ["batch", "sequence"], INT64)
    positions = b.input("positions", ["batch", "sequence"], INT64) if rope else ""
    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), ids)
    x = embedded(b, x) if embedded else x
    h = norm(b, x)
    q = heads_of(b, b.linear(h, HIDDEN, HEADS * WIDTH, bias=bias), HEADS)
    k = heads_of(b, b.linear(h, HIDDEN, GROUPS * WIDTH, bias=bias), GROUPS)
    v = heads_of(b, b.linear(h, HIDDEN, GROUPS * WIDTH, bias=bias), GROUPS)
    v = values(b, v) if values else v
    if rope:
        q, k = rotary(b, q, positions), rotary(b, k, positions)
    q = query(b, q) if query else q
    if cache:
        shape = ["batch", GROUPS, "past", WIDTH]
        k = b.op("Concat", b.input("past_k", shape), k, axis=2)
        v = b.op("Concat", b.input("past_v", shape), v, axis=2)
    side = attend(b, q, k, v)
    mixed = b.linear(merged(b, side) if merged else side, HEADS * WIDTH, HIDDEN, bias=bias)
    x = b.op("Add", x, branch(b, mixed) if branch else mixed)
    x = residual(b, x) if residual else x
    h = norm(b, x)
    gate = b.linear(h, HIDDEN, FFN)
    act = b.op("Mul", b.op("Mul", gate, b.op("Sigmoid", gate)), b.linear(h, HIDDEN, FFN))
    act = activation(b, act) if activation else act
    x = b.op("Add", x, b.linear(act, FFN, HIDDEN))
    h = norm(b, x)
    h = final(b, h) if final else h
    b.result(b.linear(h, HIDDEN, VOCAB), "logits")
    b.output("logits", ["batch", "sequence", VOCAB])
    if cache:
        b.result(k, "present_k")
        b.result(v, "present_v")
        b.output("present_k", ["batch", GROUPS, "total", WIDTH])
        b.output("present_v", ["batch", GROUPS, "total", WIDTH])
    return b.model(), b


def feeds_for(model: ir.Model, *, batch: int = 2, sequence: int = 5, past: int = 3, seed: int = 7) -> dict[str, Any]:
    """Random inputs by rank and type: ids, positions and masks are integers, caches and embeddings floats."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Any] = {}
    for value in model.graph.inputs:
        assert value.shape is not None and value.name
        if len(value.shape) == 4:
            feeds[value.name] = rng.standard_normal((batch, value.shape[1], past, value.shape[3]))
        elif value.dtype == ir.DataType.FLOAT:
            feeds[value.name] = rng.standard_normal((batch, sequence, value.shape[2]))
        elif "mask" in value.name:
            feeds[value.name] = np.ones((batch, sequence + past), dtype=np.int64)
        elif "position" in value.name:
            feeds[value.name] = np.tile(np.arange(past, past + sequence), (batch, 1))
        else:
            feeds[value.name] = rng.integers(0, VOCAB, (batch, sequence))
    return feeds
