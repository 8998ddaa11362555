"""Target ort with graphrot's kernels: RotatedMatMul says what the canonical form says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.emit.rotated import absorb_transforms, bias_behind
from graphrot.ops.hadamard import ensure_function, hadamard_node
from graphrot.ops.reference import evaluate_rotated_matmul
from graphrot.ops.rotated_matmul import ATTRIBUTES
from graphrot.quant.grid import WeightGrid
from graphrot.rotation.orthogonal import choose_matrix
from tests.emit.lowered import Setting, Target, expected, lower
from tests.emit.test_ort import token_errors
from tests.half.graphs import graph
from tests.ops.test_hadamard_op import session
from tests.ops.test_rotated_matmul_function import Case, constant
from tests.passes_quant.graphs import Example, check, describe, difference, ids, run_ort

SETTINGS = [
    Setting(WeightGrid(4), 8),
    Setting(WeightGrid(4, symmetric=False), 8),
    Setting(WeightGrid(4, 32), 8),
    Setting(WeightGrid(4, 32, symmetric=False), 8),
    Setting(WeightGrid(4), 8, WeightGrid(8)),
    Setting(WeightGrid(4), 8, WeightGrid(8, symmetric=False)),
    Setting(WeightGrid(4, 32), 4, WeightGrid(8)),
    Setting(WeightGrid(4), 4, WeightGrid(4)),
    Setting(WeightGrid(8), 8, WeightGrid(8)),
    Setting(WeightGrid(8, symmetric=False), 4),
    Setting(WeightGrid(8, 32, symmetric=False), 8),
    Setting(WeightGrid(8, 64), 8),
]


@pytest.mark.parametrize("dim", [48, 49])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_rounded_inputs_are_those_of_the_tokens(setting: Setting, dim: int, tmp_path: Path) -> None:
    """A value that lies almost between two codes may fall to either side, which moves a whole token."""
    example = Example(dim=dim)
    proto = check(lower(example, setting, "graphrot", tmp_path).model)
    tokens = ids(example, 3, 7)
    want = expected(example, setting, tokens, "graphrot")
    for level in (0, 1, 2, 99):
        errors = token_errors(run_ort(proto, tokens, level=level), want)
        assert np.median(errors) < 1e-5, level
        assert errors.max() < (0.3 if setting.activations == 4 else 0.02), level


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_rounded_linear_is_ours(setting: Setting, tmp_path: Path) -> None:
    model = lower(Example(), setting, "graphrot", tmp_path).model
    ops = [node.op_type for node in model.graph]
    ours = [node for node in model.graph if node.op_type == "RotatedMatMul"]
    assert len(ours) == 3 + (setting.table is not None and setting.table.bits == 8)
    assert ops.count("MatMulNBits") == (setting.table is not None and setting.table.bits == 4)
    assert ops.count("MatMul") == (setting.table is None), "a float head"
    assert not {"Gemm", "QuantizeLinear", "ReduceMax", "Round"} & set(ops)
    assert [node.attributes["activation_bits"].as_int() for node in ours[:3]] == [setting.activations] * 3
    assert list(model.functions) == [("graphrot", "RotatedMatMul", "")]
    assert model.opset_imports["graphrot"] == 1
    assert not ir.to_proto(model).graph.value_info


@pytest.mark.parametrize("setting", [Setting(WeightGrid(4)), Setting(WeightGrid(8), None, WeightGrid(8))], ids=str)
def test_without_rounded_inputs_kernels_change_nothing(setting: Setting, tmp_path: Path) -> None:
    targets: list[Target] = ["ort", "graphrot"]
    models = [lower(Example(), setting, target, tmp_path / target).model for target in targets]
    first, second = (check(model).SerializeToString(deterministic=True) for model in models)
    assert first == second


def test_golden_linears(tmp_path: Path) -> None:
    model = lower(Example(), Setting(WeightGrid(4), 8, WeightGrid(8)), "graphrot", tmp_path).model
    ours = [node for node in model.graph if node.op_type == "RotatedMatMul"]
    shown = []
    for node in ours:
        names = ("K", "N", "bits", "block_size", "block", "activation_bits", "rotate", "size")
        numbers = [node.attributes[name].as_int() for name in names]
        inputs = [value.name if value is not None else "" for value in node.inputs]
        shown.append((node.outputs[0].name, *numbers, *inputs))
    assert shown == [
        ("a", 48, 100, 4, 0, 16, 8, 0, 1, "x", "w_a.blocks", "w_a.row_scales"),
        ("g", 48, 100, 4, 0, 16, 8, 0, 1, "x", "w_g.blocks", "w_g.row_scales"),
        ("d", 100, 48, 4, 0, 16, 8, 0, 1, "flat", "w_d.blocks", "w_d.row_scales", "middle_zeros", "w_d.bias"),
        ("logits", 48, 50, 8, 0, 16, 8, 0, 1, "hidden", "table.blocks", "table.row_scales"),
    ]
    assert model.graph.initializers["w_a.row_scales"].const_value.shape == [100]


def test_shared_table_has_one_scale_for_each_row(tmp_path: Path) -> None:
    for grid in (WeightGrid(8), WeightGrid(8, symmetric=False)):
        example = Example()
        setting = Setting(WeightGrid(4), 8, grid)
        model = lower(example, setting, "graphrot", tmp_path).model
        assert {use.node.op_type for use in model.graph.initializers["table.blocks"].uses()} == {
            "Gather",
            "RotatedMatMul",
        }
        scales = model.graph.initializers["table.row_scales"].const_value
        assert scales is not None and list(scales.shape) == [50]
        assert "block_size=48" in describe(model, "table.packed.token_rows")[0]


def test_report(tmp_path: Path) -> None:
    report = lower(Example(), Setting(WeightGrid(4), 8, WeightGrid(8)), "graphrot", tmp_path).report
    assert [(e.tensor, e.node, e.bits, e.group) for e in report.quantized] == [
        ("table", "x", 8, "channel"),
        ("w_a", "a", 4, "channel"),
        ("w_g", "g", 4, "channel"),
        ("w_d", "d", 4, "channel"),
    ]
    padded = 2 * 100 * 48 + 48 * 112
    assert report.linear_bits_per_weight == pytest.approx((4 * padded + 32 * (100 + 100 + 48)) / (3 * 4800))


@pytest.mark.parametrize(
    ("setting", "words", "others"),
    [
        (Setting(WeightGrid(4), 8), ["integers by graphrot's library"], ["head", "MatMulNBits", "1.22"]),
        (Setting(WeightGrid(4), 4, WeightGrid(8)), ["8-bit head is rounded"], ["4-bit activations", "1.22"]),
        (Setting(activations=8), ["in front of float weights"], ["graphrot's library"]),
        (Setting(WeightGrid(8)), ["3 of these have float activations", "1.22"], ["graphrot's library"]),
    ],
    ids=str,
)
def test_notes(setting: Setting, words: list[str], others: list[str], tmp_path: Path) -> None:
    text = "\n".join(lower(Example(), setting, "graphrot", tmp_path).report.notes)
    assert all(word in text for word in words) and not any(word in text for word in others)


def behind_transform(*, size: int = 16, reshape: bool = False, also: str = "") -> ir.Model:
    """``x -> transform -> RotatedMatMul``, through a Reshape or not; ``also``: another reader of the transform."""
    made = Case(k=48, block=16, bias=True, zeros=True).model()
    (node,), (x,) = made.graph, made.graph.inputs
    transform = hadamard_node(x, choose_matrix(size, rotations="hadamard", seed=None), "h")
    between = [transform]
    if reshape:
        shape = constant("shape", np.array([-1, 48]))
        made.graph.initializers["shape"] = shape
        between.append(ir.node("Reshape", [transform.outputs[0], shape], name="r"))
        between[-1].outputs[0].name = "r"
    made.graph.insert_before(node, between)
    node.replace_input_with(0, between[-1].outputs[0])
    node.outputs[0].shape = None
    if also:
        other = ir.node(also, [transform.outputs[0]])
        other.outputs[0].name = "other"
        other.outputs[0].type = ir.TensorType(ir.DataType.INT64 if also == "Shape" else ir.DataType.FLOAT)
        made.graph.append(other)
        made.graph.outputs.append(other.outputs[0])
    ensure_function(made)
    return made


@pytest.mark.parametrize("form", [{}, {"size": 48}, {"reshape": True}, {"also": "Shape"}], ids=str)
def test_transforms_go_into_what_multiplies(form: dict[str, Any]) -> None:
    x = np.random.default_rng(5).standard_normal((2, 3, 48)).astype(np.float32)
    want = session(behind_transform(**form), library=False).run(None, {"x": x})
    model = behind_transform(**form)
    absorb_transforms(model)
    assert "HadamardTransform" not in {node.op_type for node in model.graph}
    assert list(model.functions) == [("graphrot", "RotatedMatMul", "")]
    node = next(node for node in model.graph if node.op_type == "RotatedMatMul")
    assert [node.attributes[name].as_int() for name in ("rotate", "size")] == [1, form.get("size", 16)]
    assert {name: attribute.type for name, attribute in node.attributes.items()} == ATTRIBUTES
    for found, value in zip(session(model, library=False).run(None, {"x": x}), want, strict=True):
        np.testing.assert_array_equal(found, value)
    given = Case(k=48, block=16, bias=True, zeros=True).inputs()
    exact = evaluate_rotated_matmul(node, x, given["B"], given["scales"], given["zero_points"], given["bias"])
    assert difference(want[0].reshape(exact.shape), exact) < 2e-2


@pytest.mark.parametrize("form", [{"also": "Neg"}, {"reshape": True, "also": "Neg"}], ids=str)
def test_transforms_that_something_else_reads_stay(form: dict[str, Any]) -> None:
    model = behind_transform(**form)
    absorb_transforms(model)
    assert [node.op_type for node in model.graph].count("HadamardTransform") == 1
    assert ("graphrot", "HadamardTransform", "") in model.functions
    node = next(node for node in model.graph if node.op_type == "RotatedMatMul")
    assert node.attributes["rotate"].as_int() == 0


def test_a_second_transform_stays_in_front_of_the_first() -> None:
    model = behind_transform()
    first = next(node for node in model.graph if node.op_type == "HadamardTransform")
    again = hadamard_node(model.graph.inputs[0], choose_matrix(12, rotations="hadamard", seed=None), "g")
    model.graph.insert_before(first, again)
    first.replace_input_with(0, again.outputs[0])
    absorb_transforms(model)
    left = [node for node in model.graph if node.op_type == "HadamardTransform"]
    assert left == [again]
    assert next(node for node in model.graph if node.op_type == "RotatedMatMul").attributes["size"].as_int() == 16


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("y = Add(p, b)", "y"),
        ("y = Add(b, p)", "y"),
        ("y = Sub(p, b)", None),
        ("y = Add(p, one)", None),
        ("y = Add(p, row)", None),
        ("y = Add(p, p)", None),
        ("y = Add(p, x)", None),
        ("s = Add(p, b) y = Mul(s, p)", None),
        ("y = Identity(p)", None),
    ],
)
def test_which_sums_are_a_bias(text: str, found: str | None) -> None:
    shapes = {"w": (4, 4), "b": (4,), "one": (1,), "row": (1, 4)}
    used = {name: shape for name, shape in shapes.items() if name == "w" or re.search(rf"\b{name}\b", text)}
    numbers = {name: np.random.default_rng(0).random(shape).astype(np.float32) for name, shape in used.items()}
    model = graph(f"(float[n, 4] x) => (float[n, 4] y) {{ p = MatMul(x, w) {text} }}", **numbers)
    product = next(node for node in model.graph if node.op_type == "MatMul").outputs[0]
    result = bias_behind(product, 4)
    assert (None if result is None else result[0].outputs[0].name) == found
    if result is not None:
        np.testing.assert_array_equal(result[1], numbers["b"])


def test_a_product_that_is_an_output_has_no_bias() -> None:
    text = "(float[n, 4] x) => (float[n, 4] p, float[n, 4] y) { p = MatMul(x, w) y = Add(p, b) }"
    model = graph(text, w=np.ones((4, 4), np.float32), b=np.ones(4, np.float32))
    assert bias_behind(model.graph.outputs[0], 4) is None
