"""Store embedding tables as integers, alone or shared with the head that reads the same table.

A lookup gathers codes and scales of its rows and decodes only those: a DequantizeLinear whose scale is
the gathered one.

* Alone: codes ``[V, D]``, so that a row is contiguous.
* Shared: one ``[D, V]`` array of codes serves both. The head needs that layout (from ``[V, D]`` with a
  Transpose it took 64 ms a token instead of 27 on a 49152 x 576 table, ONNX Runtime 1.32, CPU), while
  the lookup of 256 tokens by columns costs 6 ms.
* 4 bits: Gather has no 4-bit types, so two codes share a byte, the even channel in the low half, and are
  taken apart with BitwiseAnd and BitShift. A shared table is taken apart from constants, which
  runtimes fold to one byte per code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import EmbeddingRef, LinearRef
from graphrot.errors import InputRefused
from graphrot.graph import WeightStore, node_of, value_map
from graphrot.passes.base import GraphPass, record_provenance
from graphrot.passes.quantize_nodes import NodeWriter, float_type, require_opset
from graphrot.passes.quantize_weights import dequantize_columns, plain_name, replace_weight
from graphrot.passes.records import QuantizedLinear, QuantizedTable, StoredGrid
from graphrot.plan.types import RotationPlan
from graphrot.quant.grid import QuantizedTensor


@dataclass(frozen=True)
class TableItem:
    """One table to store as integers.

    Args:
        embedding: the lookup.
        tensor: the table ``[V, D]`` on a grid.
        head: the linear that reads the same table, when it is shared.
    """

    embedding: EmbeddingRef
    tensor: QuantizedTensor
    head: LinearRef | None = None


class QuantizeTables(GraphPass):
    """Replace lookups in float tables, and the heads that share them, by integer ones.

    Args:
        plan: the plan (kept for the record).
        items: the tables; taken one by one.
        store: where codes and scales go.
    """

    def __init__(self, plan: RotationPlan, items: Iterable[TableItem], *, store: WeightStore) -> None:
        super().__init__(plan)
        self._items = items
        self._store = store
        self.records: list[QuantizedTable] = []
        self.heads: list[QuantizedLinear] = []
        """Records of the heads that share a table of :attr:`records`."""

    def apply(self, model: ir.Model, done: set[str]) -> None:
        require_opset(model)
        values = value_map(model)
        writer = NodeWriter(model, self._store)
        for item in self._items:
            name = item.embedding.node
            if name in done:
                self.report.skipped.append((name, "quantized already"))
                continue
            _quantize(writer, values, item, self.records, self.heads)
            done.add(name)
            self.report.changed.append(name)
            if item.head is not None:
                self.report.changed.append(item.head.node)


def _quantize(
    writer: NodeWriter,
    values: dict[str, ir.Value],
    item: TableItem,
    records: list[QuantizedTable],
    heads: list[QuantizedLinear],
) -> None:
    lookup = node_of(values, item.embedding.node)
    head = None if item.head is None else node_of(values, item.head.node)
    _require_table(lookup, head, item)
    table, ids = lookup.inputs[0], lookup.inputs[1]
    assert table is not None and ids is not None
    base = plain_name(item.embedding.table)
    grid = _store(writer, item, float_type(table, "An embedding table"), base)
    rows = look_up(writer, lookup, ids, grid, dim=item.tensor.in_features, by_columns=head is not None, base=base)
    writer.take_over(lookup.outputs[0], rows)
    last = rows.producer()
    assert last is not None
    record_provenance(last, f"int{grid.bits} table")
    product = None if head is None else _decode_head(writer, head, grid, item.tensor.in_features, base)
    record = QuantizedTable(
        node=item.embedding.node,
        ids=ids.name or "",
        tensor=base,
        grid=grid,
        layout="rows" if head is None else "columns",
        rows=item.tensor.out_features,
        dim=item.tensor.in_features,
        error=item.tensor.error,
        head=product,
        error_without_rotation=item.tensor.error_without_rotation,
    )
    records.append(record)
    if product is not None:
        heads.append(
            QuantizedLinear(
                node=product,
                tensor=base,
                grid=grid,
                in_features=record.dim,
                out_features=record.rows,
                error=record.error,
                is_head=True,
                error_without_rotation=record.error_without_rotation,
            )
        )


def _decode_head(writer: NodeWriter, node: ir.Node, grid: StoredGrid, dim: int, base: str) -> str:
    """Let the head read the shared codes; returns the output of its MatMul."""
    codes = writer.model.graph.initializers[grid.codes]
    if grid.bits == 4:
        codes = _unpack_columns(writer, node, codes, dim, f"{base}.head")
    return replace_weight(writer, node, dequantize_columns(writer, node, grid, dim, f"{base}.head", codes), grid.bits)


def _store(writer: NodeWriter, item: TableItem, dtype: ir.DataType, base: str) -> StoredGrid:
    tensor, shared = item.tensor, item.head is not None
    bits = tensor.grid.bits
    codes, zeros = tensor.codes, tensor.zeros
    if bits == 4:
        if zeros is None:
            zeros = np.full(tensor.scales.shape, 8, dtype=np.uint8)
        codes = pack_rows(tensor)
    code_dtype = ir.DataType.INT8 if codes.dtype == np.int8 else ir.DataType.UINT8

    def put(array: np.ndarray, part_dtype: ir.DataType, part: str) -> str:
        return writer.weight(array.T if shared else array, part_dtype, f"{base}.{part}").name or ""

    return StoredGrid(
        codes=put(codes, code_dtype, "codes"),
        scales=put(tensor.scales, dtype, "scales"),
        zeros=None if zeros is None else put(zeros, ir.DataType.UINT8, "zeros"),
        bits=bits,
        group=tensor.grid.group,
        symmetric=tensor.grid.symmetric,
    )


def pack_rows(tensor: QuantizedTensor) -> np.ndarray:
    """4-bit codes two to a byte along the channels, even channel low: ``[V, ceil(D/2)]`` uint8, 8 means 0."""
    rows, dim = tensor.codes.shape
    packed = np.zeros((rows, -(-dim // 2)), dtype=np.uint8)
    for start in range(0, rows, 4096):
        part = tensor.codes[start : start + 4096]
        codes = (part + 8).astype(np.uint8) if tensor.grid.symmetric else part
        packed[start : start + 4096] = codes[:, 0::2]
        packed[start : start + 4096, : dim // 2] |= codes[:, 1::2] << 4
    return packed


def look_up(
    writer: NodeWriter, anchor: ir.Node, ids: ir.Value, grid: StoredGrid, *, dim: int, by_columns: bool, base: str
) -> ir.Value:
    """Gather the rows ``ids`` of a table in canonical form and decode them.

    Args:
        writer: adds the nodes.
        anchor: the node to add them before.
        ids: token ids, any shape.
        grid: names of the parts.
        dim: D.
        by_columns: the layout is ``[D, V]``, else ``[V, D]``.
        base: what to name things after.

    Returns:
        ``[*ids.shape, D]``.
    """
    flat = writer.op(anchor, "Reshape", [ids, writer.integers([-1], "flat")], f"{base}.flat_ids")
    axis = 1 if by_columns else 0

    def gather(name: str, part: str) -> ir.Value:
        table = writer.model.graph.initializers[name]
        return writer.op(anchor, "Gather", [table, flat], f"{base}.token_{part}", {"axis": axis})

    codes = gather(grid.codes, "codes")
    if grid.bits == 4 and by_columns:
        codes = _unpack_columns(writer, anchor, codes, dim, f"{base}.token")
    elif grid.bits == 4:
        codes = unpack_rows(writer, anchor, codes, dim, f"{base}.token")
    operands = [codes, gather(grid.scales, "scales")]
    if grid.zeros is not None:
        operands.append(gather(grid.zeros, "zeros"))
    block = {"axis": 1 - axis, "block_size": grid.group or dim}
    decoded = writer.op(anchor, "DequantizeLinear", operands, f"{base}.token_rows", block)
    if by_columns:
        decoded = writer.op(anchor, "Transpose", [decoded], f"{base}.token_rows", {"perm": [1, 0]})
    return shape_like_ids(writer, anchor, decoded, ids, dim, base)


def shape_like_ids(writer: NodeWriter, anchor: ir.Node, rows: ir.Value, ids: ir.Value, dim: int, base: str) -> ir.Value:
    """``[T, D]`` rows to ``[*ids.shape, D]``."""
    shape = writer.op(anchor, "Shape", [ids], f"{base}.ids_shape")
    full = writer.op(anchor, "Concat", [shape, writer.integers([dim], "width")], f"{base}.rows_shape", {"axis": 0})
    return writer.op(anchor, "Reshape", [rows, full], f"{base}.embedded", {"allowzero": 1})


def _halves(writer: NodeWriter, anchor: ir.Node, packed: ir.Value, axis: int, base: str) -> ir.Value:
    """The two codes of each byte along a new axis ``axis``."""
    low = writer.op(anchor, "BitwiseAnd", [packed, writer.constant(np.array(15, np.uint8), "low_half")], f"{base}_low")
    four = writer.constant(np.array(4, np.uint8), "half_a_byte")
    high = writer.op(anchor, "BitShift", [packed, four], f"{base}_high", {"direction": "RIGHT"})
    axes = writer.integers([axis], "new_axis")
    pair = [writer.op(anchor, "Unsqueeze", [half, axes], f"{base}_half") for half in (low, high)]
    return writer.op(anchor, "Concat", pair, f"{base}_pairs", {"axis": axis})


def unpack_rows(writer: NodeWriter, anchor: ir.Node, packed: ir.Value, dim: int, base: str) -> ir.Value:
    """``[T, ceil(D/2)]`` bytes (or any shape of T times as many) to ``[T, D]`` codes."""
    pairs = _halves(writer, anchor, packed, -1, base)
    even = dim + dim % 2
    codes = writer.op(anchor, "Reshape", [pairs, writer.integers([-1, even], "unpacked")], f"{base}_codes")
    return codes if even == dim else cut(writer, anchor, codes, dim, 1, base)


def _unpack_columns(writer: NodeWriter, anchor: ir.Node, packed: ir.Value, dim: int, base: str) -> ir.Value:
    """``[ceil(D/2), T]`` bytes to ``[D, T]`` codes."""
    pairs = _halves(writer, anchor, packed, 1, base)
    even = dim + dim % 2
    codes = writer.op(anchor, "Reshape", [pairs, writer.integers([even, -1], "unpacked")], f"{base}_codes")
    return codes if even == dim else cut(writer, anchor, codes, dim, 0, base)


def cut(writer: NodeWriter, anchor: ir.Node, value: ir.Value, size: int, axis: int, base: str) -> ir.Value:
    """The first ``size`` positions along ``axis``."""
    bounds = [writer.integers([n], "bound") for n in (0, size, axis)]
    return writer.op(anchor, "Slice", [value, *bounds], f"{base}_cut")


def _require_table(lookup: ir.Node, head: ir.Node | None, item: TableItem) -> None:
    where = f"the {lookup.op_type} that makes {item.embedding.node!r}"
    axis = lookup.attributes.get("axis")
    if lookup.op_type != "Gather" or item.embedding.table_input != 0 or (axis is not None and axis.as_int() != 0):
        raise InputRefused(
            "Only a Gather of rows can be quantized as an embedding",
            where=where,
            do="use --embedding none, or write the lookup as Gather(table, ids) on axis 0",
        )
    shape = (item.tensor.out_features, item.tensor.in_features)
    if shape != (item.embedding.rows, item.embedding.dim):
        raise InputRefused(
            f"The quantized table is {shape}, the embedding ({item.embedding.rows}, {item.embedding.dim})",
            where=where,
            do="quantize the table of this model",
        )
    if head is None or item.head is None:
        return
    plain = head.op_type == "MatMul" or (
        head.op_type == "Gemm"
        and not ("alpha" in head.attributes and head.attributes["alpha"].as_float() != 1.0)
        and not ("transA" in head.attributes and head.attributes["transA"].as_int())
    )
    if not plain or item.head.weight_input != 1 or (item.head.out_features, item.head.in_features) != shape:
        raise InputRefused(
            "The head cannot share the embedding's integer table",
            where=f"the {head.op_type} that makes {item.head.node!r}",
            why="it is not a plain MatMul or Gemm of the same shape",
            do="untie them, or use --embedding none --head none",
        )
