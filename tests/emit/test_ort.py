"""Target ort: MatMulNBits says what the canonical form says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.quant.grid import WeightGrid
from tests.emit.lowered import Setting, expected, lower
from tests.passes_quant.graphs import Example, check, describe, difference, ids, run_ort

FLOAT_INPUTS = [
    Setting(WeightGrid(4)),
    Setting(WeightGrid(4, symmetric=False)),
    Setting(WeightGrid(4, 32)),
    Setting(WeightGrid(4, 32, symmetric=False)),
    Setting(WeightGrid(4, 128)),
    Setting(WeightGrid(4), table=WeightGrid(4)),
    Setting(WeightGrid(4), table=WeightGrid(4, symmetric=False)),
    Setting(WeightGrid(4), table=WeightGrid(4, 32)),
    Setting(WeightGrid(4), table=WeightGrid(4, 32, symmetric=False)),
    Setting(WeightGrid(4), table=WeightGrid(8), tied=False),
    Setting(WeightGrid(4), 4),
    Setting(WeightGrid(4, 32, symmetric=False), 4, WeightGrid(4)),
    Setting(activations=8),
    Setting(activations=4),
]
"""Settings in which every sum is one of floats."""

ROUNDED_INPUTS = [
    Setting(WeightGrid(4), 8),
    Setting(WeightGrid(4, symmetric=False), 8),
    Setting(WeightGrid(4, 32), 8),
    Setting(WeightGrid(4, 16, symmetric=False), 8),
    Setting(WeightGrid(4), 8, WeightGrid(8)),
    Setting(WeightGrid(4), None, WeightGrid(8)),
    Setting(WeightGrid(4), None, WeightGrid(8, symmetric=False)),
    Setting(WeightGrid(4), None, WeightGrid(8, 32)),
    Setting(WeightGrid(8), 8, WeightGrid(8)),
    Setting(WeightGrid(8, symmetric=False), 8),
    Setting(WeightGrid(8, 64, symmetric=False)),
    Setting(WeightGrid(8), 4),
]
"""Settings with 8-bit activations, or 8-bit weights, in some linear."""


@pytest.mark.parametrize("dim", [48, 49])
@pytest.mark.parametrize("setting", FLOAT_INPUTS, ids=str)
def test_float_inputs_are_exact(setting: Setting, dim: int, tmp_path: Path) -> None:
    example = Example(dim=dim)
    proto = check(lower(example, setting, "ort", tmp_path).model)
    tokens = ids(example)
    want = expected(example, setting, tokens, "ort")
    for level in (0, 1, 2, 99):
        assert difference(run_ort(proto, tokens, level=level), want) < 1e-5, level


@pytest.mark.parametrize("dim", [48, 49, 96])
@pytest.mark.parametrize("setting", ROUNDED_INPUTS, ids=str)
def test_rounded_inputs_are_those_of_the_blocks(setting: Setting, dim: int, tmp_path: Path) -> None:
    """Against numpy's picture of the rounding per block.

    A value that lies almost between two codes may fall to either side, which moves a whole token; so most
    tokens must agree closely, and all within what one code is worth. Values that have 4 bits already lie
    between two codes often (3 of 6 parts is 63.5 of 127), so there the bound for most is one code, too.
    """
    four = setting.activations == 4
    example = Example(dim=dim)
    proto = check(lower(example, setting, "ort", tmp_path).model)
    tokens = ids(example, 3, 7)
    want = expected(example, setting, tokens, "ort")
    float_inputs = expected(example, Setting(setting.weights, None, setting.table, setting.tied), tokens, "portable")
    for level in (0, 1, 2, 99):
        result = run_ort(proto, tokens, level=level)
        errors = token_errors(result, want)
        assert np.median(errors) < (1e-2 if four else 1e-5), level
        assert errors.max() < (0.3 if four else 0.02), level
        assert np.median(token_errors(result, float_inputs)) > 1e-3, level


@pytest.mark.parametrize("setting", [Setting(WeightGrid(4)), Setting(WeightGrid(4, 32), 8, WeightGrid(8))], ids=str)
def test_float16(setting: Setting, tmp_path: Path) -> None:
    """Sums of codes without scales would leave the range: inputs here are up to three thousand."""
    example = Example(dtype=np.float16)
    example.weights["table"] *= np.float16(1000)
    for name, factor in (("w_a", 0.003), ("w_g", 0.003), ("w_d", 1e-4), ("bias", 0.1)):
        example.weights[name] *= np.float16(factor)
    proto = check(lower(example, setting, "ort", tmp_path).model)
    tokens = ids(example)
    result = run_ort(proto, tokens)
    assert result.dtype == np.float16 and np.isfinite(result).all()
    assert difference(result, expected(example, setting, tokens, "ort")) < 2e-2


def token_errors(result: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Per token: largest difference over the largest reference."""
    found: np.ndarray = np.abs(result - reference).max(axis=-1) / np.abs(reference).max(axis=-1)
    return found


def test_levels_and_what_is_left(tmp_path: Path) -> None:
    setting = Setting(WeightGrid(4), 8, WeightGrid(8))
    lowered = lower(Example(), setting, "ort", tmp_path)
    model = lowered.model
    nodes = [node for node in model.graph if node.op_type == "MatMulNBits"]
    attributes = [{name: node.attributes[name].as_int() for name in ("K", "N", "bits", "block_size")} for node in nodes]
    assert attributes == [
        {"K": 48, "N": 100, "bits": 4, "block_size": 16},
        {"K": 48, "N": 100, "bits": 4, "block_size": 16},
        {"K": 100, "N": 48, "bits": 4, "block_size": 16},
        {"K": 48, "N": 50, "bits": 8, "block_size": 16},
    ]
    assert [node.attributes["accuracy_level"].as_int() for node in nodes] == [4] * 4
    assert {node.domain for node in nodes} == {"com.microsoft"} and model.opset_imports["com.microsoft"] == 1
    assert [node.inputs[0].name for node in nodes if node.inputs[0] is not None] == ["x", "x", "flat", "hidden"]
    ops = {node.op_type for node in model.graph}
    assert not ops & {"QuantizeLinear", "MatMul", "Gemm", "Expand"}
    stored = {value.const_value.dtype for value in model.graph.initializers.values() if value.const_value is not None}
    assert not stored & {ir.DataType.INT4, ir.DataType.INT8}
    assert not ir.to_proto(model).graph.value_info


def test_level_zero_keeps_the_chain_of_4_bit_activations(tmp_path: Path) -> None:
    model = lower(Example(), Setting(WeightGrid(4), 4), "ort", tmp_path).model
    nodes = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert [node.attributes["accuracy_level"].as_int() for node in nodes] == [0] * 3
    assert [node.inputs[0].name for node in nodes if node.inputs[0] is not None] == ["x.rounded"] * 2 + ["flat.rounded"]


def test_shared_table_is_one_initializer(tmp_path: Path) -> None:
    for bits, width in ((8, 16), (4, 8)):
        grid = WeightGrid(8) if bits == 8 else WeightGrid(4)
        model = lower(Example(), Setting(table=grid), "ort", tmp_path).model
        tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
        sizes = {name: t.size for name, t in tensors.items() if t is not None and t.dtype == ir.DataType.UINT8}
        assert [name for name, size in sizes.items() if size > 1000] == ["table.blocks"]
        table = model.graph.initializers["table.blocks"]
        assert table.const_value is not None and tuple(table.const_value.shape) == (50, 3, width)
        assert {use.node.op_type for use in table.uses()} == {"Gather", "MatMulNBits"}


def test_golden_linear(tmp_path: Path) -> None:
    model = lower(Example(), Setting(WeightGrid(4), 8), "ort", tmp_path).model
    assert describe(model, "d.matmul.nbits", "d.matmul", "d") == [
        "d.matmul.nbits = MatMulNBits<K=100, N=48, accuracy_level=4, bits=4, block_size=16>(flat, w_d.blocks, ones_1)",
        "d.matmul = Mul(d.matmul.nbits, w_d.row_scales)",
        "d = Add(d.matmul, d.bias)",
    ]
    model = lower(Example(), Setting(WeightGrid(4, 32, symmetric=False)), "ort", tmp_path).model
    (line,) = describe(model, "a")
    assert line == (
        "a = MatMulNBits<K=48, N=100, accuracy_level=0, bits=4, block_size=32>"
        "(x, w_a.blocks, w_a.row_scales, w_a.row_zeros)"
    )


def test_golden_shared_table(tmp_path: Path) -> None:
    model = lower(Example(), Setting(table=WeightGrid(8)), "ort", tmp_path).model
    zeros = "ConstantOfShape<value=Tensor<UINT8,[1]>(array([128], dtype=uint8), name=None)>"
    decoded = "table.packed.token_codes, table.packed.token_scales, table.packed.token_zeros"
    names = "flat_ids token_blocks token_codes token_scales token_scales_shape token_zeros token_rows".split()
    assert describe(model, *(f"table.packed.{name}" for name in names), "x") == [
        "table.packed.flat_ids = Reshape(ids, flat_2)",
        "table.packed.token_blocks = Gather<axis=0>(table.blocks, table.packed.flat_ids)",
        "table.packed.token_codes = Reshape(table.packed.token_blocks, row)",
        "table.packed.token_scales = Gather<axis=0>(table.row_scales, table.packed.flat_ids)",
        "table.packed.token_scales_shape = Shape(table.packed.token_scales)",
        f"table.packed.token_zeros = {zeros}(table.packed.token_scales_shape)",
        f"table.packed.token_rows = DequantizeLinear<axis=1, block_size=16>({decoded})",
        "x = Reshape<allowzero=1>(table.packed.token_rows, table.packed.rows_shape)",
    ]


def test_report(tmp_path: Path) -> None:
    lowered = lower(Example(), Setting(WeightGrid(4), 8, WeightGrid(8)), "ort", tmp_path)
    report = lowered.report
    assert report.target == "ort"
    assert [(e.tensor, e.node, e.bits, e.group) for e in report.quantized] == [
        ("table", "x", 8, "channel"),
        ("w_a", "a", 4, "channel"),
        ("w_g", "g", 4, "channel"),
        ("w_d", "d.matmul", 4, "channel"),
    ]
    assert all(0 < e.error < 0.2 for e in report.quantized)
    scales, ones = 100 + 100 + 48, 100 * 3 + 48 * 7
    padded = 2 * 100 * 48 + 48 * 112
    assert report.linear_bits_per_weight == pytest.approx((4 * padded + 32 * (scales + ones)) / (3 * 4800))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (Setting(WeightGrid(4)), []),
        (Setting(WeightGrid(4), 8), ["rounded inside MatMulNBits"]),
        (Setting(WeightGrid(4), 4), ["4-bit activations", "float speed"]),
        (Setting(activations=8), ["in front of float weights", "float speed"]),
        (Setting(activations=4), ["4-bit activations", "float speed"]),
        (Setting(WeightGrid(8)), ["3 of these have float activations", "ONNX Runtime 1.22"]),
        (Setting(WeightGrid(4), None, WeightGrid(8)), ["1 of these have float activations", "ONNX Runtime 1.22"]),
        (Setting(WeightGrid(8), 8), ["rounded inside MatMulNBits", "ONNX Runtime 1.22"]),
    ],
    ids=str,
)
def test_notes(setting: Setting, words: list[str], tmp_path: Path) -> None:
    text = "\n".join(lower(Example(), setting, "ort", tmp_path).report.notes)
    assert all(word in text for word in words)
    assert bool(text) == bool(words)
    assert ("have float activations" in text) == any("have float activations" in word for word in words)


def test_nothing_quantized(tmp_path: Path) -> None:
    lowered = lower(Example(), Setting(), "ort", tmp_path)
    assert lowered.report.notes == () and lowered.report.linear_bits_per_weight is None
    assert "com.microsoft" not in lowered.model.opset_imports


def _wrong_zero(model: ir.Model) -> None:
    _change(model, "w_d.row_zeros", lambda packed: packed ^ 0x11)


def _wrong_halves(model: ir.Model) -> None:
    _change(model, "w_d.blocks", lambda packed: (packed >> 4) | (packed << 4))


def _wrong_block_order(model: ir.Model) -> None:
    _change(model, "w_d.row_scales", lambda scales: scales[:, ::-1])


def _dropped_bias(model: ir.Model) -> None:
    node = next(n for n in model.graph if n.outputs[0].name == "d")
    node.outputs[0].replace_all_uses_with(node.inputs[0])
    model.graph.remove(node, safe=True)


def _change(model: ir.Model, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    value = model.graph.initializers[name]
    assert value.const_value is not None
    array = value.const_value.numpy()
    value.const_value = ir.tensor(np.ascontiguousarray(change(array)).astype(array.dtype), name=name)


@pytest.mark.parametrize("mutate", [_wrong_zero, _wrong_halves, _wrong_block_order, _dropped_bias])
def test_mutants_are_seen(mutate: Callable[[ir.Model], None], tmp_path: Path) -> None:
    example, setting = Example(), Setting(WeightGrid(4, 16, symmetric=False))
    model = lower(example, setting, "ort", tmp_path).model
    mutate(model)
    tokens = ids(example)
    assert difference(run_ort(check(model), tokens), expected(example, setting, tokens, "ort")) > 1e-3
