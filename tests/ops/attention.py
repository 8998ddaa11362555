"""Models of one RotatedAttention node, inputs for them, and what they have to answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from graphrot.ops.attention_reference import attend_stored, evaluate_rotated_attention, load_rows, store_rows
from graphrot.ops.hadamard import transform_attributes
from graphrot.ops.rotated_attention import AttentionForm, ensure_rotated_attention, rotated_attention_node
from graphrot.rotation.orthogonal import choose_matrix

OUTPUTS = ("output", "present_key", "present_value")

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A node, and the sizes of a call. ``lengths``: slots in use after it, per row of the batch."""

    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    bits: Literal[4, 8] = 4
    lengths: tuple[int, ...] = (7,)
    tokens: int = 3
    past: int = 4
    total: int = 7
    softcap: float = 0.0
    window: int = -1
    causal: bool = True
    rotate: bool = True
    mask: tuple[int, ...] | None = None
    dtype: ir.DataType = ir.DataType.FLOAT
    seed: int = 0

    @property
    def form(self) -> AttentionForm:
        return AttentionForm(
            self.heads,
            self.kv_heads,
            self.head_size,
            self.bits,
            self.head_size**-0.5,
            self.softcap,
            self.window,
            self.causal,
        )

    @property
    def starts(self) -> list[int]:
        return [max(0, length - self.tokens) for length in self.lengths]

    def node(self) -> ir.Node:
        """With inputs of their types and ranks, all sizes but the last unknown."""
        batch, heads, row = "batch", self.kv_heads, self.form.row_bytes
        shapes: dict[str, tuple[ir.DataType, list[int | str]]] = {
            "query": (self.dtype, [batch, "tokens", self.heads * self.head_size]),
            "key": (self.dtype, [batch, "tokens", heads * self.head_size]),
            "value": (self.dtype, [batch, "tokens", heads * self.head_size]),
            "past_key": (ir.DataType.UINT8, [batch, heads, "past", row]),
            "past_value": (ir.DataType.UINT8, [batch, heads, "past", row]),
            "seqlens_k": (ir.DataType.INT32, [batch]),
            "total": (ir.DataType.INT32, []),
            "mask": (ir.DataType.FLOAT, ["mask_batch", "mask_heads", "mask_tokens", "mask_slots"]),
        }
        made = {
            name: ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
            for name, (dtype, shape) in shapes.items()
        }
        mask = made.pop("mask")
        matrix = choose_matrix(self.head_size, rotations="hadamard", seed=None)
        return rotated_attention_node(
            *made.values(),
            OUTPUTS,
            self.form,
            mask=None if self.mask is None else mask,
            rotation=transform_attributes(matrix) if self.rotate else None,
        )

    def model(self, opset: int = 21) -> ir.Model:
        node = self.node()
        graph = ir.Graph(node.inputs, node.outputs, nodes=[node], opset_imports={"": opset}, name="g")
        made = ir.Model(graph, ir_version=10)
        ensure_rotated_attention(made)
        return made

    def inputs(self) -> Arrays:
        """Random; the cache holds rows of other numbers in all slots, those that are not in use among them."""
        rng = np.random.default_rng(self.seed)
        batch, dtype = len(self.lengths), self.dtype.numpy()
        found = {
            name: rng.standard_normal((batch, self.tokens, heads * self.head_size)).astype(dtype)
            for name, heads in (("query", self.heads), ("key", self.kv_heads), ("value", self.kv_heads))
        }
        for name in ("past_key", "past_value"):
            stored = rng.standard_normal((batch, self.kv_heads, self.past, self.head_size))
            found[name] = store_rows(stored, self.bits)
        found["seqlens_k"] = np.array(self.lengths, np.int32) - 1
        found["total"] = np.array(self.total, np.int32)
        if self.mask is not None:
            mask = rng.standard_normal(self.mask).astype(np.float32)
            mask[rng.random(self.mask) < 0.2] = -np.inf
            found["mask"] = mask
        return found

    def but(self, **changes: object) -> Case:
        return replace(self, **changes)


def run(session: ort.InferenceSession, given: Arrays) -> list[np.ndarray]:
    """All outputs; bfloat16 goes through bindings as raw bits."""
    if given["query"].dtype != ml_dtypes.bfloat16:
        return [np.asarray(part) for part in session.run(None, given)]
    binding = session.io_binding()
    for name, array in given.items():
        value = ort.OrtValue.ortvalue_from_numpy(array) if array.dtype != ml_dtypes.bfloat16 else raw(array)
        binding.bind_ortvalue_input(name, value)
    output = np.empty(given["query"].shape, ml_dtypes.bfloat16)
    binding.bind_ortvalue_output("output", raw(output))
    for name in OUTPUTS[1:]:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    return [output, *(part.numpy() for part in binding.get_outputs()[1:])]


def raw(array: np.ndarray) -> ort.OrtValue:
    """A bfloat16 array as the runtime takes it; the memory is shared."""
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), int(ir.DataType.BFLOAT16))


TOLERANCE = {ir.DataType.FLOAT: 1e-5, ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}
"""Largest error as a part of the largest result: sums in float32, or the rounding of the output's type."""


def check(case: Case, given: Arrays, got: list[np.ndarray], tolerance: float | None = None) -> None:
    """Outputs agree with the reference: values and keys that are not rotated to the bit.

    A rotation in float32 moves a number across the border between two codes now and then. So rotated keys may differ by
    a step, in few places, and attention is compared over the rows that were stored.
    """
    output, *presents = got
    want, *rows = expected(case, given)
    assert output.dtype == case.dtype.numpy() and output.shape == want.shape
    for present, row in zip(presents, rows, strict=True):
        assert present.dtype == np.uint8 and present.shape == row.shape
    np.testing.assert_array_equal(presents[1], rows[1])
    if case.rotate:
        keys, exact = (load_rows(part, case.bits) for part in (presents[0], rows[0]))
        step = (np.nanmax(exact) - np.nanmin(exact)) / ((1 << case.bits) - 1)
        np.testing.assert_array_equal(np.isnan(keys), np.isnan(exact))
        assert np.nanmax(np.abs(keys - exact)) <= 1.01 * step
        assert (presents[0] != rows[0]).mean() < 0.01
    else:
        np.testing.assert_array_equal(presents[0], rows[0])
    want = attend_stored(case.node(), given["query"], presents[0], presents[1], case.starts, given.get("mask"))
    lost = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(output), lost)
    error = np.abs(output.astype(np.float64) - want)[~lost].max(initial=0.0)
    assert error <= (tolerance or TOLERANCE[case.dtype]) * max(1.0, np.abs(want[~lost]).max(initial=0.0))


def expected(case: Case, given: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the reference says."""
    values = [given[name] for name in ("query", "key", "value", "past_key", "past_value", "seqlens_k")]
    return evaluate_rotated_attention(case.node(), *values, int(given["total"]), given.get("mask"))
