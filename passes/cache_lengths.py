"""Lengths of past and new tokens as tensors, made once for all attention of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import AttentionSites, ShapeRead
from graphrot.errors import InputRefused
from graphrot.passes.quantize_nodes import NodeWriter

PADDING = "attention_mask"
_LOWEST = np.float32(np.finfo(np.float32).min)
"""What the mask adds to the scores of padding."""


class CacheLengths:
    """Sizes of the batch and of past and new tokens, taken from attention_mask where that counts both.

    Args:
        writer: adds the nodes in front of all others.
        found: the attention of the graph.
    """

    def __init__(self, writer: NodeWriter, found: AttentionSites) -> None:
        self._writer = writer
        self._inputs = {value.name: value for value in writer.model.graph.inputs}
        self._found = found
        self._anchor = writer.model.graph[0]
        self._made: dict[str, ir.Value] = {}

    def size(self, symbol: str) -> ir.Value:
        """``[1] int64``: the batch ``B``, new tokens ``S``, those before ``P``, both together ``T``."""
        if symbol not in self._made:
            if symbol == "S":
                found = self._axis(self._tokens(), 1)
            elif symbol == "B":
                found = self._axis(self._tokens(), 0)
            elif self._found.counts:
                total = self._axis(self._inputs[PADDING], 1)
                found = total if symbol == "T" else self._op("Sub", [total, self.size("S")], "past_length")
            else:
                past = self._axis(self._inputs[self._found.sites[0].past_key], 2)
                found = past if symbol == "P" else self._op("Add", [past, self.size("S")], "total_length")
            self._made[symbol] = found
        return self._made[symbol]

    def total(self) -> ir.Value:
        """``[1] int32``: past and new tokens."""
        return self._once("total", lambda: self._cast(self.size("T"), ir.DataType.INT32, "total_sequence_length"))

    def seqlens(self) -> ir.Value:
        """``[B] int32``: the slots in use, minus one; all rows have the same."""

        def make() -> ir.Value:
            last = self._op("Sub", [self.total(), self._writer.constant(np.array([1], np.int32), "one")], "last_slot")
            return self._op("Expand", [last, self.size("B")], "seqlens_k")

        return self._once("seqlens", make)

    def counted(self) -> ir.Value:
        """``[B] int32``: the ones in a row of attention_mask, minus one: the slots in use where padding is on the
        right."""

        def make() -> ir.Value:
            axes, attributes = self._writer.integers([1], "axes"), {"keepdims": 0}
            mask = self._inputs[PADDING]
            ones = self._writer.op(self._anchor, "ReduceSum", [mask, axes], "attended_tokens", attributes)
            one = self._writer.constant(np.array(1, mask.dtype.numpy() if mask.dtype else np.int64), "one")
            return self._cast(self._op("Sub", [ones, one], "last_attended"), ir.DataType.INT32, "seqlens_k")

        return self._once("counted", make)

    def padding(self) -> ir.Value:
        """``[B, 1, 1, T] float32``: 0, and the least number for padding."""

        def make() -> ir.Value:
            kept = self._cast(self._inputs[PADDING], ir.DataType.BOOL, "attended")
            zero = self._writer.constant(np.zeros((), np.float32), "zero")
            lowest = self._writer.constant(np.asarray(_LOWEST), "lowest")
            rows = self._op("Where", [kept, zero, lowest], "padding_rows")
            return self._op("Unsqueeze", [rows, self._writer.integers([1, 2], "axes")], "padding_mask")

        return self._once("padding", make)

    def shape(self, read: ShapeRead) -> ir.Value:
        """``[rank] int64``: what a node finds that reads a shape."""
        key = f"shape {read.sizes}"
        return self._once(key, lambda: self._concat([self._part(*size) for size in read.sizes], "cache_shape"))

    def _part(self, symbol: str, factor: int) -> ir.Value:
        if symbol == "1":
            return self._writer.integers([factor], "size")
        if factor == 1:
            return self.size(symbol)
        return self._op("Mul", [self.size(symbol), self._writer.integers([factor], "size")], "multiple")

    def _tokens(self) -> ir.Value:
        """An input ``[B, S]`` or ``[B, S, width]``."""
        named = self._inputs.get("input_ids")
        if named is not None:
            return named
        caches = {name for site in self._found.sites for name in (site.past_key, site.past_value)}
        for name, value in self._inputs.items():
            if name not in caches and name != PADDING and value.shape is not None and len(value.shape) in (2, 3):
                return value
        raise InputRefused(
            "The number of new tokens is in no input of the model",
            where=f"inputs {', '.join(str(name) for name in self._inputs)}",
            do="give a model with input_ids or inputs_embeds, or use --kv none",
        )

    def _axis(self, value: ir.Value, axis: int) -> ir.Value:
        attributes = {"start": axis, "end": axis + 1}
        return self._writer.op(self._anchor, "Shape", [value], f"{value.name}.size_{axis}", attributes)

    def _cast(self, value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
        return self._writer.op(self._anchor, "Cast", [value], name, {"to": int(dtype)})

    def _concat(self, parts: Sequence[ir.Value], name: str) -> ir.Value:
        return self._writer.op(self._anchor, "Concat", parts, name, {"axis": 0})

    def _op(self, op_type: str, operands: Sequence[ir.Value], name: str) -> ir.Value:
        return self._writer.op(self._anchor, op_type, operands, name)

    def _once(self, key: str, make: Callable[[], ir.Value]) -> ir.Value:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
