"""Integer tables: lookups and shared heads equal decoded rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from graphrot.analysis.types import LinearRef
from graphrot.errors import InputRefused
from graphrot.graph import WeightStore, add_initializer
from graphrot.passes.quantize_nodes import NodeWriter
from graphrot.passes.quantize_tables import QuantizeTables, TableItem
from graphrot.passes.quantize_weights import QuantizeWeights
from graphrot.quant.grid import WeightGrid
from graphrot.quant.rtn import quantize_rtn
from tests.passes_quant.graphs import PLAN, Example, check, describe, difference, ids, run_ort

GRIDS = [
    WeightGrid(8),
    WeightGrid(8, symmetric=False),
    WeightGrid(8, 32),
    WeightGrid(4),
    WeightGrid(4, symmetric=False),
    WeightGrid(4, 32),
    WeightGrid(4, 16, symmetric=False),
]
IDS = [f"int{g.bits}-{g.group or 'row'}-{'sym' if g.symmetric else 'asym'}" for g in GRIDS]


def quantized(example: Example, grid: WeightGrid, folder: Path, *, tied: bool) -> tuple[ir.Model, QuantizeTables]:
    model = example.model()
    item = TableItem(example.embedding, quantize_rtn(example.weights["table"], grid), example.head if tied else None)
    step = QuantizeTables(PLAN, [item], store=WeightStore(folder))
    assert step(model).modified
    return model, step


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "alone"])
@pytest.mark.parametrize("dim", [48, 49])
@pytest.mark.parametrize("grid", GRIDS, ids=IDS)
def test_equals_decoded_rows(grid: WeightGrid, dim: int, tied: bool, tmp_path: Path) -> None:
    example = Example(dim=dim)
    model, _ = quantized(example, grid, tmp_path, tied=tied)
    proto = check(model)
    table = quantize_rtn(example.weights["table"], grid)
    tokens = ids(example)
    tokens[0, :2] = 0, example.vocab - 1
    want = example.reference(tokens, table=table, head=table if tied else None)
    assert difference(ReferenceEvaluator(proto).run(None, {"ids": tokens})[0], want) < 2e-6
    for level in (0, 1, 2, 99):
        assert difference(run_ort(proto, tokens, level=level), want) < 2e-6, level
    assert difference(example.reference(tokens), want) > 1e-3


def lookup_only(table: np.ndarray, rank: int) -> ir.Model:
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["x"])],
        "lookup",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [f"d{k}" for k in range(rank)])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*(f"d{k}" for k in range(rank)), table.shape[1]])],
        [numpy_helper.from_array(table, "table")],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


@pytest.mark.parametrize("grid", [WeightGrid(8), WeightGrid(4, 32)], ids=["int8", "int4"])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 1, 3)], ids=str)
def test_ids_of_any_shape(shape: tuple[int, ...], grid: WeightGrid, tmp_path: Path) -> None:
    example = Example()
    table = example.weights["table"]
    tensor = quantize_rtn(table, grid)
    model = lookup_only(table, len(shape))
    QuantizeTables(PLAN, [TableItem(example.embedding, tensor)], store=WeightStore(tmp_path))(model)
    tokens = np.random.default_rng(0).integers(0, example.vocab, shape)
    proto = check(model)
    want = tensor.dequantize()[tokens]
    for result in (run_ort(proto, tokens), ReferenceEvaluator(proto).run(None, {"ids": tokens})[0]):
        assert result.shape == (*shape, example.dim)
        np.testing.assert_array_equal(result, want)


def test_one_initializer_serves_both(tmp_path: Path) -> None:
    example = Example()
    model, step = quantized(example, WeightGrid(8), tmp_path, tied=True)
    record, head = step.records[0], step.heads[0]
    assert record.grid == head.grid and record.head == head.node == "logits"
    codes = model.graph.initializers[record.grid.codes]
    assert {use.node.op_type for use in codes.uses()} == {"Gather", "DequantizeLinear"}
    assert codes.const_value is not None and tuple(codes.const_value.shape) == (48, 50)
    assert "table" not in model.graph.initializers
    assert not any(node.outputs[0].name == "head" for node in model.graph)


def test_four_bits_take_half_a_byte(tmp_path: Path) -> None:
    for tied, shape in ((True, (24, 50)), (False, (50, 24))):
        model, step = quantized(Example(), WeightGrid(4), tmp_path, tied=tied)
        codes = model.graph.initializers[step.records[0].grid.codes].const_value
        assert codes is not None and (codes.dtype, tuple(codes.shape)) == (ir.DataType.UINT8, shape)


def test_gemm_head(tmp_path: Path) -> None:
    """A head that is a Gemm with transB and a bias shares the table, too."""
    example = Example()
    model = example.model()
    table, last = model.graph.initializers["table"], next(n for n in model.graph if n.outputs[0].name == "logits")
    bias = add_initializer(model, "head_bias", np.random.default_rng(5).standard_normal(50).astype(np.float32))
    hidden = last.inputs[0]
    assert hidden is not None
    writer = NodeWriter(model)
    flat = writer.op(last, "Reshape", [hidden, writer.integers([-1, 48], "flat_hidden")], "hidden_rows")
    writer.take_over(last.outputs[0], writer.op(last, "Gemm", [flat, table, bias], "out", {"transB": 1}))
    logits = model.graph.outputs[0]
    logits.shape = ir.Shape(["rows", 50])
    tensor = quantize_rtn(example.weights["table"], WeightGrid(8))
    head = LinearRef("logits", "Gemm", "table", 1, "hidden_rows", 48, 50, "NK", "head_bias", is_head=True)
    step = QuantizeTables(PLAN, [TableItem(example.embedding, tensor, head)], store=WeightStore(tmp_path))
    step(model)
    assert step.heads[0].node == step.records[0].head == "logits.matmul"
    tokens = ids(example)
    want = example.reference(tokens, table=tensor, head=tensor).reshape(-1, 50) + bias.const_value.numpy()
    assert difference(run_ort(check(model), tokens), want) < 2e-6


def test_golden(tmp_path: Path) -> None:
    model, _ = quantized(Example(), WeightGrid(8), tmp_path, tied=True)
    names = ("flat_ids", "token_codes", "token_scales", "token_rows", "token_rows_1", "ids_shape", "rows_shape")
    assert describe(model, *(f"table.{name}" for name in names), "x", "table.head.dequantized", "logits") == [
        "table.flat_ids = Reshape(ids, flat_1)",
        "table.token_codes = Gather<axis=1>(table.codes, table.flat_ids)",
        "table.token_scales = Gather<axis=1>(table.scales, table.flat_ids)",
        "table.token_rows = DequantizeLinear<axis=0, block_size=48>(table.token_codes, table.token_scales)",
        "table.token_rows_1 = Transpose<perm=(1, 0)>(table.token_rows)",
        "table.ids_shape = Shape(ids)",
        "table.rows_shape = Concat<axis=0>(table.ids_shape, width)",
        "x = Reshape<allowzero=1>(table.token_rows_1, table.rows_shape)",
        "table.head.dequantized = DequantizeLinear<axis=0, block_size=48>(table.codes, table.scales)",
        "logits = MatMul(hidden, table.head.dequantized)",
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_twice_changes_nothing(tied: bool, tmp_path: Path) -> None:
    example = Example()
    model, _ = quantized(example, WeightGrid(4), tmp_path, tied=tied)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    item = TableItem(example.embedding, quantize_rtn(example.weights["table"], WeightGrid(4)))
    again = QuantizeTables(PLAN, [item], store=WeightStore(tmp_path, "again.bin"))
    assert not again(model).modified and again.records == []
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_swapped_halves_are_seen(tmp_path: Path) -> None:
    example = Example()
    model, step = quantized(example, WeightGrid(4), tmp_path, tied=True)
    codes = model.graph.initializers[step.records[0].grid.codes]
    assert codes.const_value is not None
    packed = codes.const_value.numpy()
    codes.const_value = ir.tensor(((packed >> 4) | (packed << 4)).astype(np.uint8), name=codes.name)
    tokens = ids(example)
    table = quantize_rtn(example.weights["table"], WeightGrid(4))
    want = example.reference(tokens, table=table, head=table)
    assert difference(run_ort(check(model), tokens), want) > 1e-2


def test_with_quantized_linears(tmp_path: Path) -> None:
    """A head of its own is a linear like the others."""
    example = Example()
    store = WeightStore(tmp_path)
    model = example.model()
    table = quantize_rtn(example.weights["table"], WeightGrid(8))
    own = quantize_rtn(example.weights["table"], WeightGrid(4))
    QuantizeTables(PLAN, [TableItem(example.embedding, table)], store=store)(model)
    QuantizeWeights(PLAN, [(example.head, own)], store=store)(model)
    tokens = ids(example)
    assert difference(run_ort(check(model), tokens), example.reference(tokens, table=table, head=own)) < 2e-6


def test_refuses_another_axis(tmp_path: Path) -> None:
    example = Example()
    model = example.model()
    next(node for node in model.graph if node.op_type == "Gather").attributes["axis"] = ir.AttrInt64("axis", 1)
    item = TableItem(example.embedding, quantize_rtn(example.weights["table"], WeightGrid(8)))
    with pytest.raises(InputRefused, match="Only a Gather of rows"):
        QuantizeTables(PLAN, [item], store=WeightStore(tmp_path)).apply(model, set())


def test_refuses_a_scaled_head(tmp_path: Path) -> None:
    example = Example()
    item = TableItem(example.embedding, quantize_rtn(example.weights["table"], WeightGrid(8)), example.linears[2])
    with pytest.raises(InputRefused, match="cannot share"):
        QuantizeTables(PLAN, [item], store=WeightStore(tmp_path)).apply(example.model(), set())
