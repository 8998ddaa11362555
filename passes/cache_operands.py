"""Operands of attention in the form that the fused operators take: rows ``[B, S, H * D]``, masks ``[B, H, S, T]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import AttentionSite, MaskTerm, OperandRef
from graphrot.errors import InputRefused
from graphrot.graph import node_of
from graphrot.model.floats import is_standard
from graphrot.passes.cache_lengths import CacheLengths
from graphrot.passes.quantize_nodes import NodeWriter

_HEADS_LAST = (0, 2, 1, 3)
Attributes = Mapping[str, int | Sequence[int]]


class Operands:
    """Brings tensors of one site into form, in front of its node.

    Args:
        writer: adds the nodes.
        values: of the model, by name.
        site: the site.
    """

    def __init__(self, writer: NodeWriter, values: dict[str, ir.Value], site: AttentionSite) -> None:
        self._writer = writer
        self._values = values
        self._site = site
        self._anchor = node_of(values, site.node)

    def read(self, use: OperandRef) -> ir.Value:
        """What an input of a node reads now.

        Raises:
            InputRefused: the sites were found in another model.
        """
        node = node_of(self._values, use.node)
        value = node.inputs[use.input] if use.input < len(node.inputs) else None
        if value is None:
            raise InputRefused("An attention node has lost an input", where=f"input {use.input} of {use.node!r}")
        return value

    def rows(self, value: ir.Value, form: str, heads: int) -> ir.Value:
        """``[B, S, H * D]`` of a value in another form."""
        if form == "rows":
            return value
        width = self._site.head_size
        if form == "stacked":
            value = self._unstacked(value, heads)
        maker = value.producer()
        data = maker.inputs[0] if maker is not None and _turns(maker) else None
        turned = data if data is not None else self._op("Transpose", [value], "rows", {"perm": _HEADS_LAST})
        flat = self._writer.integers([0, 0, heads * width], "rows_shape")
        return self._op("Reshape", [turned, flat], "rows")

    def output(self, rows: ir.Value) -> ir.Value:
        """Rows in the form of what the site's node made."""
        site = self._site
        if site.output == "rows":
            return rows
        split = self._writer.integers([0, 0, site.heads, site.head_size], "heads_shape")
        heads = self._op("Reshape", [rows, split], "heads")
        turned = self._op("Transpose", [heads], "heads", {"perm": _HEADS_LAST})
        if site.output == "heads":
            return turned
        length = self._op("Shape", [turned], "length", {"start": 2, "end": 3})
        parts = [self._writer.integers([-1], "free"), length, self._writer.integers([site.head_size], "width")]
        return self._op("Reshape", [turned, self._op("Concat", parts, "stacked_shape", {"axis": 0})], "stacked")

    def mask(self) -> ir.Value | None:
        """All terms of the mask as one float32 tensor that is added; None without any."""
        found: ir.Value | None = None
        for term in self._site.mask:
            part = self._term(term)
            found = part if found is None else self._op("Add", [found, part], "mask")
        return found

    def spread(self, mask: ir.Value, lengths: CacheLengths) -> ir.Value:
        """``[B, 1, S, T]`` of a mask that is the same for all new tokens."""
        one = self._writer.integers([1], "size")
        sizes = [lengths.size("B"), one, lengths.size("S"), lengths.size("T")]
        return self._op("Expand", [mask, self._op("Concat", sizes, "mask_shape", {"axis": 0})], "mask")

    def _term(self, term: MaskTerm) -> ir.Value:
        value = self.read(term.place)
        if term.place.form == "stacked":
            value = self._unstacked(value, self._site.heads)
        if term.kind == "bias":
            if term.factor == 1.0:
                return value
            return self._op("Mul", [value, self._number(term.factor)], "scaled_mask")
        shown, hidden = self._number(0.0), self._number(max(term.number, float(np.finfo(np.float32).min)))
        return self._op("Where", [value, *((shown, hidden) if term.kind == "keep" else (hidden, shown))], "mask")

    def _unstacked(self, value: ir.Value, heads: int) -> ir.Value:
        """``[B * H, ...]`` as ``[B, H, ...]``."""
        rest = self._op("Shape", [value], "sizes", {"start": 1})
        shape = self._op("Concat", [self._writer.integers([-1, heads], "heads"), rest], "shape", {"axis": 0})
        return self._op("Reshape", [value, shape], "by_head")

    def _number(self, number: float) -> ir.Value:
        return self._writer.constant(np.asarray(number, np.float32), "number")

    def _op(self, op_type: str, operands: list[ir.Value], name: str, attributes: Attributes | None = None) -> ir.Value:
        return self._writer.op(self._anchor, op_type, operands, f"{self._site.node}.{name}", attributes)


def _turns(node: ir.Node) -> bool:
    """Whether a Transpose takes ``[B, S, H, D]`` to ``[B, H, S, D]``."""
    perm = node.attributes.get("perm")
    if node.op_type != "Transpose" or not is_standard(node) or perm is None:
        return False
    return tuple(perm.as_ints()) == _HEADS_LAST
