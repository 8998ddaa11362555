"""A small decoder, written by hand, with the shapes of graph that segments must cope with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphrot.analysis.types import LinearRef

DIM, HEADS, HEAD, FFN, VOCAB, LAYERS = 24, 2, 12, 40, 50, 2


class Builder:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.linears: list[LinearRef] = []

    def weight(self, name: str, *shape: int) -> str:
        noise = self.rng.standard_normal(shape)
        array = noise / np.sqrt(shape[0]) if len(shape) > 1 else 1 + 0.3 * noise
        self.weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def constant(self, name: str, values: object, dtype: type) -> str:
        value = numpy_helper.from_array(np.array(values, dtype))
        self.nodes.append(helper.make_node("Constant", [], [name], value=value))
        return name

    def op(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def linear(self, x: str, k: int, n: int, name: str) -> str:
        """A MatMul; its weight comes out of a Transpose for names that end in ``gate``."""
        if name.endswith("gate"):
            weight = self.op("Transpose", [self.weight(f"{name}.weight", n, k)], f"{name}.transposed", perm=[1, 0])
        else:
            weight = self.weight(f"{name}.weight", k, n)
        self.linears.append(LinearRef(name, "MatMul", weight, 1, x, k, n, "KN"))
        return self.op("MatMul", [x, weight], name)

    def gemm(self, x: str, k: int, n: int, name: str) -> str:
        """Reshape, Gemm (transB, bias), Reshape."""
        flat = self.op("Reshape", [x, self.constant(f"{name}.flat_shape", [-1, k], np.int64)], f"{name}.flat")
        weight, bias = self.weight(f"{name}.weight", n, k), self.weight(f"{name}.bias", n)
        self.linears.append(LinearRef(f"{name}.product", "Gemm", weight, 1, flat, k, n, "NK", bias=bias))
        product = self.op("Gemm", [flat, weight, bias], f"{name}.product", transB=1)
        width = self.constant(f"{name}.width", [n], np.int64)
        batch = self.op("Slice", [self.op("Shape", [x], f"{name}.shape"), "zero1", "two1"], f"{name}.rows")
        return self.op("Reshape", [product, self.op("Concat", [batch, width], f"{name}.full", axis=0)], name)

    def norm(self, x: str, name: str) -> str:
        squares = self.op("ReduceMean", [self.op("Mul", [x, x], f"{name}.sq"), "last1"], f"{name}.mean", keepdims=1)
        root = self.op("Sqrt", [self.op("Add", [squares, "eps"], f"{name}.eps")], f"{name}.root")
        return self.op("Mul", [self.op("Div", [x, root], f"{name}.unit"), self.weight(f"{name}.gain", DIM)], name)

    def heads(self, x: str, name: str) -> str:
        return self.op("Transpose", [self.op("Reshape", [x, "split"], f"{name}.split")], name, perm=[0, 2, 1, 3])

    def layer(self, x: str, k: int) -> str:
        p = f"layer{k}"
        h = self.norm(x, f"{p}.norm1")
        q, key, v = (self.heads(self.linear(h, DIM, DIM, f"{p}.{c}"), f"{p}.{c}.heads") for c in "qkv")
        key = self.op("Concat", [f"past.{k}.key", key], f"present.{k}.key", axis=2)
        v = self.op("Concat", [f"past.{k}.value", v], f"present.{k}.value", axis=2)
        scores = self.op("MatMul", [q, self.op("Transpose", [key], f"{p}.kt", perm=[0, 1, 3, 2])], f"{p}.scores")
        probabilities = self.op("Softmax", [self.op("Add", [scores, "mask"], f"{p}.masked")], f"{p}.p", axis=-1)
        mixed = self.op("MatMul", [probabilities, v], f"{p}.mix")
        mixed = self.op("Transpose", [mixed], f"{p}.back", perm=[0, 2, 1, 3])
        merged = self.op("Reshape", [mixed, "merge"], f"{p}.merged")
        x = self.op("Add", [x, self.linear(merged, DIM, DIM, f"{p}.o")], f"{p}.mid")
        h = self.norm(x, f"{p}.norm2")
        gate = self.op("Sigmoid", [self.linear(h, DIM, FFN, f"{p}.gate")], f"{p}.sigmoid")
        hidden = self.op("Mul", [gate, self.linear(h, DIM, FFN, f"{p}.up")], f"{p}.hidden")
        return self.op("Add", [x, self.gemm(hidden, FFN, DIM, f"{p}.down")], f"{p}.out")


@dataclass(frozen=True)
class Toy:
    """A decoder of two layers: ``model`` of ``proto``, its linears without the head, and token batches."""

    proto: onnx.ModelProto
    model: ir.Model
    linears: list[LinearRef]
    feeds: list[dict[str, np.ndarray]]


def build(seed: int = 0) -> Toy:
    b = Builder(seed)
    b.constant("eps", 1e-5, np.float32)
    for name, values in {
        "last1": [-1], "zero1": [0], "two1": [2], "one": 1, "zero": 0,
        "split": [0, 0, HEADS, HEAD], "merge": [0, 0, DIM],
    }.items():  # fmt: skip
        b.constant(name, values, np.int64)
    b.constant("huge", -1e9, np.float32)
    b.constant("nothing", 0.0, np.float32)
    length = b.op("Gather", [b.op("Shape", ["ids"], "ids.shape"), "one"], "length")
    steps = b.op("Range", ["zero", length, "one"], "steps")
    later = b.op(
        "Greater",
        [b.op("Unsqueeze", [steps, "zero1"], "columns"), b.op("Unsqueeze", [steps, "last1"], "rows")],
        "later",
    )
    b.op("Where", [later, "huge", "nothing"], "mask")
    x = b.op("Gather", [b.weight("table", VOCAB, DIM), "ids"], "embedded")
    for k in range(LAYERS):
        x = b.layer(x, k)
    b.op("MatMul", [b.norm(x, "final"), b.weight("head.weight", DIM, VOCAB)], "logits")
    caches = [f"{when}.{k}.{part}" for when in ("past", "present") for k in range(LAYERS) for part in ("key", "value")]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", HEADS, None, HEAD]) for name in caches]
    half = len(infos) // 2
    graph = helper.make_graph(
        b.nodes,
        "toy",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["b", "s"]), *infos[:half]],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "s", VOCAB]), *infos[half:]],
        b.weights,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(proto, full_check=True)
    empty = np.zeros((3, HEADS, 0, HEAD), np.float32)
    feeds = [{"ids": b.rng.integers(0, VOCAB, (3, 16))} | dict.fromkeys(caches[:half], empty) for _ in range(2)]
    return Toy(proto, ir.serde.deserialize_model(proto), b.linears, feeds)


@pytest.fixture(scope="session")
def toy() -> Toy:
    return build()
