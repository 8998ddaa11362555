"""Canonical weights: equal to decoded float64 weights, everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from graphrot.errors import InputRefused
from graphrot.graph import WeightStore
from graphrot.passes.base import PROVENANCE
from graphrot.passes.quantize_nodes import channel_block, unfused_block
from graphrot.passes.quantize_weights import QuantizeWeights
from graphrot.passes.records import QuantizedLinear
from graphrot.quant.grid import WeightGrid
from tests.passes_quant.graphs import PLAN, Example, check, describe, difference, ids, run_ort

GRIDS = [
    WeightGrid(4),
    WeightGrid(4, symmetric=False),
    WeightGrid(4, 32),
    WeightGrid(4, 64, symmetric=False),
    WeightGrid(4, 128),
    WeightGrid(8),
    WeightGrid(8, symmetric=False),
    WeightGrid(8, 32),
    WeightGrid(8, 32, symmetric=False),
]
IDS = [f"int{g.bits}-{g.group or 'channel'}-{'sym' if g.symmetric else 'asym'}" for g in GRIDS]

FLOAT32 = 2e-6
"""Sums of at most 100 float32 products, three matmuls deep."""


def quantized(example: Example, grid: WeightGrid, folder: Path) -> tuple[ir.Model, list[QuantizedLinear]]:
    model = example.model()
    tensors = example.quantized(grid)
    items = ((linear, tensors[linear.node]) for linear in example.linears)
    step = QuantizeWeights(PLAN, items, store=WeightStore(folder))
    assert step(model).modified
    return model, step.records


@pytest.mark.parametrize("grid", GRIDS, ids=IDS)
def test_equals_decoded_weights(grid: WeightGrid, tmp_path: Path) -> None:
    example = Example()
    proto = check(quantized(example, grid, tmp_path)[0])
    tokens = ids(example)
    want = example.reference(tokens, example.quantized(grid))
    assert difference(ReferenceEvaluator(proto).run(None, {"ids": tokens})[0], want) < FLOAT32
    for level in (0, 1, 2, 99):
        assert difference(run_ort(proto, tokens, level=level), want) < FLOAT32, level
    assert difference(want, example.reference(tokens)) > 1e-3, "the grid is not visible in this comparison"


@pytest.mark.parametrize("grid", [WeightGrid(4), WeightGrid(4, 32, symmetric=False), WeightGrid(8)])
def test_float16(grid: WeightGrid, tmp_path: Path) -> None:
    example = Example(dtype=np.float16)
    proto = check(quantized(example, grid, tmp_path)[0])
    tokens = ids(example)
    result = run_ort(proto, tokens)
    assert result.dtype == np.float16
    assert difference(result, example.reference(tokens, example.quantized(grid))) < 1e-2


@pytest.mark.parametrize(("dim", "ffn"), [(80, 36), (101, 17), (16, 7), (3, 5)])
@pytest.mark.parametrize("grid", [WeightGrid(4), WeightGrid(4, 32), WeightGrid(4, 32, symmetric=False), WeightGrid(8)])
def test_any_width(dim: int, ffn: int, grid: WeightGrid, tmp_path: Path) -> None:
    example = Example(dim=dim, ffn=ffn, vocab=23)
    proto = check(quantized(example, grid, tmp_path)[0])
    tokens = ids(example)
    want = example.reference(tokens, example.quantized(grid))
    assert difference(ReferenceEvaluator(proto).run(None, {"ids": tokens})[0], want) < FLOAT32
    assert difference(run_ort(proto, tokens), want) < FLOAT32


def test_stored_form(tmp_path: Path) -> None:
    model, records = quantized(Example(), WeightGrid(4), tmp_path)
    initializers = model.graph.initializers
    first = records[0]
    codes = initializers[first.grid.codes].const_value
    assert isinstance(codes, ir.ExternalTensor)
    assert (codes.dtype, tuple(codes.shape)) == (ir.DataType.INT4, (48, 100))
    assert codes.nbytes == 48 * 100 // 2
    assert tuple(initializers[first.grid.scales].const_value.shape) == (1, 100)
    assert not {"w_a", "w_g", "w_d"} & set(initializers)
    multiplied = {
        str(n.outputs[0].name): n.metadata_props.get(PROVENANCE) for n in model.graph if n.op_type == "MatMul"
    }
    assert [multiplied[r.node] for r in records] == ["int4 weight"] * 3
    assert [r.tensor for r in records] == ["w_a", "w_g", "w_d"]
    assert [(r.in_features, r.out_features) for r in records] == [(48, 100), (48, 100), (100, 48)]


def test_twice_changes_nothing(tmp_path: Path) -> None:
    example = Example()
    model = example.model()
    tensors = example.quantized(WeightGrid(4))
    items = [(linear, tensors[linear.node]) for linear in example.linears]
    QuantizeWeights(PLAN, items, store=WeightStore(tmp_path))(model)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    again = QuantizeWeights(PLAN, items, store=WeightStore(tmp_path, "again.bin"))
    assert not again(model).modified
    assert again.records == []
    assert [name for name, _ in again.report.skipped] == ["a", "g", "d"]
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_golden(tmp_path: Path) -> None:
    example = Example()
    model, _ = quantized(example, WeightGrid(4), tmp_path)
    assert describe(model, "w_d.block_scales", "w_d.dequantized", "d.matmul", "d") == [
        "w_d.block_scales = Expand(w_d.scales, blocks_by_channels_1)",
        "w_d.dequantized = DequantizeLinear<axis=0, block_size=16>(w_d.codes, w_d.block_scales)",
        "d.matmul = MatMul(flat, w_d.dequantized)",
        "d = Add(d.matmul, d.bias)",
    ]


def _shift_zero(model: ir.Model, records: list[QuantizedLinear]) -> None:
    zeros = model.graph.initializers[records[0].grid.zeros or ""]
    assert zeros.const_value is not None
    zeros.const_value = ir.tensor((zeros.const_value.numpy().astype(np.uint8) + 1).astype(np.uint8), name=zeros.name)


def _other_axis(model: ir.Model, records: list[QuantizedLinear]) -> None:
    """Blocks along the output channels, with as many scales: the shapes fit, the numbers do not."""
    scales = model.graph.initializers[records[0].grid.scales]
    assert scales.const_value is not None
    numbers = np.resize(scales.const_value.numpy(), (64, 1))
    scales.const_value, scales.shape = ir.tensor(numbers, name=scales.name), ir.Shape(numbers.shape)
    node = next(n for n in model.graph if n.op_type == "DequantizeLinear")
    node.attributes["axis"] = ir.AttrInt64("axis", 1)
    node.attributes["block_size"] = ir.AttrInt64("block_size", 64)
    zeros = node.inputs[2]
    assert zeros is not None and zeros.const_value is not None
    moved = np.resize(zeros.const_value.numpy(), (64, 1))
    zeros.const_value, zeros.shape = ir.tensor(moved, name=zeros.name), ir.Shape(moved.shape)


def _drop_bias(model: ir.Model, _records: list[QuantizedLinear]) -> None:
    node = next(n for n in model.graph if n.op_type == "Add")
    node.outputs[0].replace_all_uses_with(node.inputs[0])
    model.graph.remove(node, safe=True)


@pytest.mark.parametrize("mutate", [_shift_zero, _other_axis, _drop_bias])
def test_mutants_are_seen(mutate: object, tmp_path: Path) -> None:
    example = Example(dim=64, ffn=64)
    grid = WeightGrid(8, symmetric=False)
    model, records = quantized(example, grid, tmp_path)
    assert callable(mutate)
    mutate(model, records)
    tokens = ids(example)
    result = run_ort(check(model), tokens)
    assert difference(result, example.reference(tokens, example.quantized(grid))) > 100 * FLOAT32


@pytest.mark.parametrize("width", [1, 16, 48, 80, 100, 101, 576, 1536, 4864, 8192])
def test_blocks(width: int) -> None:
    block = channel_block(width)
    assert block in (16, 32, 64, 128, 256)
    assert all(-width % block <= -width % other for other in (16, 32, 64, 128, 256))
    whole = unfused_block(width)
    assert whole >= width and (width < 16 or bin(whole).count("1") > 1)


def test_refuses_old_opset(tmp_path: Path) -> None:
    example = Example()
    step = QuantizeWeights(PLAN, [], store=WeightStore(tmp_path))
    with pytest.raises(InputRefused, match="needs opset 21 and the model has 20"):
        step.apply(example.model(opset=20), set())


def test_refuses_double(tmp_path: Path) -> None:
    example = Example(dtype=np.float64)
    linear = example.linears[0]
    step = QuantizeWeights(PLAN, [(linear, example.quantized(WeightGrid(4))["a"])], store=WeightStore(tmp_path))
    with pytest.raises(InputRefused, match="A weight has type DOUBLE"):
        step.apply(example.model(), set())


def test_refuses_another_models_weight(tmp_path: Path) -> None:
    example = Example()
    tensor = Example(dim=32).quantized(WeightGrid(4))["a"]
    step = QuantizeWeights(PLAN, [(example.linears[0], tensor)], store=WeightStore(tmp_path))
    with pytest.raises(InputRefused, match="takes 32 inputs to 100, the linear 48 to 100"):
        step.apply(example.model(), set())


def test_refuses_transposed_input(tmp_path: Path) -> None:
    example = Example()
    model = example.model()
    gemm = next(node for node in model.graph if node.op_type == "Gemm")
    gemm.attributes["transA"] = ir.AttrInt64("transA", 1)
    step = QuantizeWeights(
        PLAN, [(example.linears[2], example.quantized(WeightGrid(4))["d"])], store=WeightStore(tmp_path)
    )
    with pytest.raises(InputRefused, match="transposes its first operand"):
        step.apply(model, set())
