"""Models of one attention node with a cache of fixed capacity: RotatedAttention, and GroupQueryAttention.

Each has the same keys and values behind it, in its own form, and past and present in one buffer, as a decoder's loop
binds them: nobody copies a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from common import bound, place, session

from graphrot.ops.attention_reference import store_rows
from graphrot.ops.hadamard import transform_attributes
from graphrot.ops.rotated_attention import AttentionForm, ensure_rotated_attention, rotated_attention_node, row_bytes
from graphrot.rotation.hadamard import decomposition, dense
from graphrot.rotation.orthogonal import choose_matrix

Kind = Literal["rotated", "gqa"]


@dataclass(frozen=True)
class Caches:
    """A cache of ``context`` slots, the last ``tokens`` of which are new; the same numbers for everyone who asks."""

    kv_heads: int
    group: int
    head_size: int
    context: int
    tokens: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def contender(self, kind: Kind, bits: int, *, threads: int = 1, isa: str | None = None) -> Contender:
        """One attention node with a cache of ``bits`` (32: float), ready to run."""
        model = self._rotated(bits) if kind == "rotated" else self._gqa(bits)
        past = [self._stored(kind, bits, which) for which in ("key", "value")]
        new = [_place(array) for array in self._new()]
        lengths = [_place(np.array([self.context - 1], np.int32)), _place(np.array(self.context, np.int32))]
        output = _place(np.zeros((1, self.tokens, self.heads * self.head_size), np.float32))
        names = [str(value.name) for value in model.graph.inputs]
        inputs = dict(zip(names, [*new, *past, *lengths, *self._scales(kind, bits)], strict=True))
        outputs = dict(zip(("output", "present_key", "present_value"), [output, *past], strict=True))
        return Contender(bound(session(model, isa=isa, threads=threads), inputs, outputs), output)

    def _new(self) -> list[np.ndarray]:
        rng = np.random.default_rng(1)
        widths = (self.heads, self.kv_heads, self.kv_heads)
        return [rng.normal(size=(1, self.tokens, w * self.head_size)).astype(np.float32) for w in widths]

    def _past(self, which: str) -> np.ndarray:
        rng = np.random.default_rng(2 if which == "key" else 3)
        return rng.standard_normal((1, self.kv_heads, self.context, self.head_size), np.float32)

    def _stored(self, kind: Kind, bits: int, which: str) -> ort.OrtValue:
        past = self._past(which)
        if kind == "rotated":
            return _place(store_rows(past @ self._rotation() if which == "key" else past, bits))
        if bits == 32:
            return _place(past)
        codes = np.rint(past / self._scale(bits))
        if bits == 8:
            return _place(codes.astype(np.int8))
        biased = (codes + 8).astype(np.uint8)
        return _place(biased[..., ::2] | biased[..., 1::2] << 4)

    def _rotation(self) -> np.ndarray:
        return np.asarray(dense(decomposition(self.head_size)), np.float32)

    def _scale(self, bits: int) -> np.float32:
        largest = max(np.abs(self._past(which)).max() for which in ("key", "value"))
        return np.float32(max(largest, 6.0) / (2 ** (bits - 1) - 1))

    def _scales(self, kind: Kind, bits: int) -> list[ort.OrtValue]:
        return [] if kind == "rotated" or bits == 32 else [_place(np.array([self._scale(bits)], np.float32))] * 2

    def _inputs(self, cache: ir.DataType, width: int) -> list[ir.Value]:
        numbers, sizes = ir.DataType.FLOAT, [self.heads, self.kv_heads, self.kv_heads]
        made = [
            _value(name, numbers, [1, self.tokens, heads * self.head_size])
            for name, heads in zip(("query", "key", "value"), sizes, strict=True)
        ]
        made += [_value(f"past_{name}", cache, [1, self.kv_heads, self.context, width]) for name in ("key", "value")]
        return [*made, _value("lengths", ir.DataType.INT32, [1]), _value("total", ir.DataType.INT32, [])]

    def _rotated(self, bits: int) -> ir.Model:
        if bits not in (4, 8):
            raise ValueError(f"no cache of {bits} bits")
        form = AttentionForm(self.heads, self.kv_heads, self.head_size, bits, self.head_size**-0.5)
        inputs = self._inputs(ir.DataType.UINT8, row_bytes(self.head_size, bits))
        rotation = transform_attributes(choose_matrix(self.head_size, rotations="hadamard", seed=None))
        names = ("output", "present_key", "present_value")
        node = rotated_attention_node(*inputs, names, form, rotation=rotation)
        model = _model(inputs, node)
        ensure_rotated_attention(model)
        return model

    def _gqa(self, bits: int) -> ir.Model:
        cache = {32: ir.DataType.FLOAT, 8: ir.DataType.INT8, 4: ir.DataType.UINT8}[bits]
        inputs = self._inputs(cache, self.head_size // 2 if bits == 4 else self.head_size)
        attributes = [ir.AttrInt64("num_heads", self.heads), ir.AttrInt64("kv_num_heads", self.kv_heads)]
        taken: list[ir.Value | None] = list(inputs)
        if bits < 32:
            scales = [_value(f"{name}_scale", ir.DataType.FLOAT, [1]) for name in ("key", "value")]
            inputs += scales
            taken += [None] * 5 + scales
            attributes += [ir.AttrString(f"{which}_quant_type", "PER_TENSOR") for which in "kv"]
            attributes.append(ir.AttrInt64("kv_cache_bit_width", bits))
        outputs = [ir.Value(name="output", type=ir.TensorType(ir.DataType.FLOAT), shape=inputs[0].shape)]
        outputs += [
            ir.Value(name=f"present_{name}", type=inputs[3].type, shape=inputs[3].shape) for name in ("key", "value")
        ]
        return _model(inputs, ir.Node("com.microsoft", "GroupQueryAttention", taken, attributes, outputs=outputs))


@dataclass(frozen=True)
class Contender:
    """A node that is ready to run, and where its answer will be."""

    run: Callable[[], None]
    output: ort.OrtValue

    def answer(self) -> np.ndarray:
        self.run()
        return np.array(self.output.numpy())


def _place(array: np.ndarray) -> ort.OrtValue:
    return place(array, ir.DataType.from_numpy(array.dtype))


def _value(name: str, dtype: ir.DataType, shape: list[int]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _model(inputs: list[ir.Value], node: ir.Node) -> ir.Model:
    imports = {"": 21, node.domain: 1}
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports=imports, name="attention")
    return ir.Model(graph, ir_version=10)
