"""``RotatedMatMul``: the function body against the float64 reference, without the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphrot.emit.nbits import BlockLayout, pack_blocks, pack_zeros
from graphrot.errors import InputRefused
from graphrot.ops.hadamard import DOMAIN, transform_attributes
from graphrot.ops.reference import evaluate_rotated_matmul, integer_product, round_rows, unpack_codes, weight_codes
from graphrot.ops.rotated_matmul import (
    ATTRIBUTES,
    OP_TYPE,
    PackedWeight,
    ensure_rotated_matmul,
    rotated_matmul_node,
)
from graphrot.quant.activations import quantize_tokens
from graphrot.rotation.orthogonal import build_matrix, choose_matrix
from tests.ops.test_hadamard_op import run, session

LEVELS = (0, 1, 2, 99)
"""Optimizations of ONNX Runtime: none, basic, extended, all."""

TOLERANCE = {ir.DataType.FLOAT: 2e-6, ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}
"""Largest error as a part of the largest result: the rounding of the output's type."""


@dataclass(frozen=True)
class Case:
    """A node and its weight; ``group`` 0: per channel, its codes in blocks of ``block``."""

    k: int = 96
    n: int = 24
    bits: Literal[4, 8] = 4
    group: int = 0
    block: int = 32
    zeros: bool = False
    bias: bool = False
    rotate: bool = False
    activation_bits: Literal[4, 8] = 8
    dtype: ir.DataType = ir.DataType.FLOAT
    half_scales: bool = False

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.block, -(-self.k // self.block))

    def inputs(self) -> dict[str, np.ndarray]:
        """``B``, ``scales`` and what is given of ``zero_points`` and ``bias``, random."""
        rng = np.random.default_rng(self.k + self.n + self.bits)
        low, high = (0, 1 << self.bits) if self.zeros else (-(1 << (self.bits - 1)), 1 << (self.bits - 1))
        codes = rng.integers(low, high, (self.k, self.n)).astype(np.uint8 if self.zeros else np.int8)
        shape = (self.n, self.layout.blocks) if self.group else (self.n,)
        scales = rng.uniform(0.5, 2.0, shape) / high
        found = {
            "B": pack_blocks(codes, self.bits, self.layout),
            "scales": scales.astype(np.float16 if self.half_scales else np.float32),
        }
        if self.zeros:
            points = rng.integers(low, high, (self.layout.blocks if self.group else 1, self.n))
            found["zero_points"] = pack_zeros(points, self.bits, self.layout)
        if self.bias:
            found["bias"] = rng.standard_normal(self.n).astype(np.float32)
        return found

    def model(self, *, anywhere: bool = False) -> ir.Model:
        """One node; ``anywhere``: the input's shape is not known."""
        known = {name: constant(name, array) for name, array in self.inputs().items()}
        weight = PackedWeight(
            codes=known["B"],
            scales=known["scales"],
            zeros=known.get("zero_points"),
            in_features=self.k,
            out_features=self.n,
            bits=self.bits,
            block_size=self.group,
            block=self.block,
        )
        shape = None if anywhere else ir.Shape(["batch", "tokens", self.k])
        x = ir.Value(name="x", shape=shape, type=ir.TensorType(self.dtype))
        matrix = choose_matrix(self.k, rotations="hadamard", seed=None)
        node = rotated_matmul_node(
            x,
            weight,
            "y",
            activation_bits=self.activation_bits,
            bias=known.get("bias"),
            rotation=transform_attributes(matrix) if self.rotate else None,
        )
        graph = ir.Graph([x], node.outputs, nodes=[node], initializers=known.values(), opset_imports={"": 21}, name="g")
        made = ir.Model(graph, ir_version=10)
        ensure_rotated_matmul(made)
        return made

    def rows(self, *shape: int) -> np.ndarray:
        """Random inputs, a row of zeros and a row with one number far above the others among them."""
        x = np.random.default_rng(len(shape) + self.k).standard_normal((*shape, self.k))
        flat = x.reshape(-1, self.k)
        flat[1] = 0
        flat[2, self.k // 2] = 300
        return x.astype(self.dtype.numpy())

    def expected(self, x: np.ndarray) -> np.ndarray:
        given = self.inputs()
        return evaluate_rotated_matmul(
            self.model().graph[0], x, given["B"], given["scales"], given.get("zero_points"), given.get("bias")
        )

    def slack(self, x: np.ndarray) -> np.ndarray:
        """What a code that float32 rounds to the other side of a tie changes in each output, at most.

        Half a millionth of the largest code is more than float32's transform and division are off by.
        """
        rotated = x.astype(np.float64)
        if self.rotate:
            rotated = build_matrix(choose_matrix(self.k, rotations="hadamard", seed=None)).rotate(rotated, -1)
        levels = (1 << (self.activation_bits - 1)) - 1
        _, scales = round_rows(rotated, levels)
        near = np.abs(np.abs(rotated / scales) % 1 - 0.5) < 5e-7 * levels
        given = self.inputs()
        weights = weight_codes(given["B"], given.get("zero_points"), in_features=self.k, bits=self.bits)
        return integer_product(near, scales, np.abs(weights), given["scales"], group=self.group)


def constant(name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    return ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))


def check(case: Case, y: np.ndarray, x: np.ndarray) -> None:
    want = case.expected(x)
    assert y.shape == want.shape and y.dtype == case.dtype.numpy()
    allowed = TOLERANCE[case.dtype] * np.abs(want).max() + case.slack(x)
    assert (np.abs(y.astype(np.float64) - want) <= allowed).all()


SMALL = [
    Case(bits=bits, group=group, block=group or 32, zeros=zeros, bias=bias, rotate=rotate, activation_bits=rounding)
    for bits in (4, 8)
    for group in (0, 32)
    for zeros, bias, rotate, rounding in (
        (False, False, False, 8), (False, True, True, 8), (True, False, True, 4), (True, True, False, 8),
    )
]  # fmt: skip

OTHERS = [
    Case(k=100, n=33, block=16, bias=True),
    Case(k=100, n=33, block=16, bits=8, zeros=True),
    Case(k=100, n=33, group=64, block=64, zeros=True, rotate=True),
    Case(k=100, n=33, bits=8, group=64, block=64, rotate=True),
    Case(k=576, n=40, group=128, block=128, rotate=True),
    Case(k=1536, n=8, block=256, rotate=True, bias=True),
    Case(k=1, n=1, block=16),
    Case(k=64, n=24, half_scales=True, group=32, zeros=True),
    Case(k=64, n=24, bits=8, half_scales=True),
]


@pytest.mark.parametrize("case", [*SMALL, *OTHERS], ids=str)
def test_every_form_at_every_level(case: Case) -> None:
    proto, x = ir.to_proto(case.model()), case.rows(2, 3)
    onnx.checker.check_model(proto)
    for level in LEVELS:
        check(case, run(session(proto, library=False, level=level), x), x)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_half_types(dtype: ir.DataType, bits: Literal[4, 8]) -> None:
    case = Case(bits=bits, dtype=dtype, bias=True, rotate=True, half_scales=True)
    x = case.rows(2, 3)
    for level in (0, 99):
        check(case, run(session(case.model(), library=False, level=level), x, case.n), x)


@pytest.mark.parametrize("case", [Case(rotate=True, bias=True), Case(bits=8), Case(bits=8, group=32)], ids=str)
def test_any_shape(case: Case) -> None:
    ready = session(case.model(anywhere=True), library=False)
    for shape in [(3,), (1, 5), (4, 1, 3), (2, 3, 1, 2)]:
        x = case.rows(*shape)
        check(case, run(ready, x), x)


@pytest.mark.parametrize("case", SMALL[::4] + SMALL[1::4], ids=str)
def test_rows_that_are_not_finite_and_rows_of_zeros(case: Case) -> None:
    x = case.rows(1, 6)
    x[0, 3, 5], x[0, 4, 0] = np.nan, -np.inf
    assert np.isnan(case.expected(x)[0, 3:5]).all()
    for level in (0, 99):
        y = run(session(case.model(), library=False, level=level), x)
        assert np.isnan(y[0, 3:5]).all()
        check(case, y[:, [0, 1, 2, 5]], x[:, [0, 1, 2, 5]])
        np.testing.assert_array_equal(y[0, 1], case.inputs().get("bias", np.zeros(case.n)))


def test_sums_of_whole_numbers_are_exact() -> None:
    """The function answers to the bit what integers do: the scales stand behind the sums."""
    for case in (Case(k=1536, n=16, block=256), Case(k=1536, n=16, bits=8, block=256)):
        x, given = case.rows(2, 3), case.inputs()
        q, scales = quantize_tokens(x, 8)
        sums = q.astype(np.int64) @ weight_codes(given["B"], None, in_features=case.k, bits=case.bits).T
        want = sums.astype(np.float32) * given["scales"] * scales
        np.testing.assert_array_equal(run(session(case.model(), library=False), x), want)


def test_nothing_is_left_of_branches_and_of_no_rotation(tmp_path: str) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.optimized_model_filepath = f"{tmp_path}/seen.onnx"
    ort.InferenceSession(ir.to_proto(Case().model()).SerializeToString(), options, providers=["CPUExecutionProvider"])
    ops = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    assert "MatMulNBits" in ops
    assert {"If", "MatMul", "Identity", "Expand", "Reshape"}.isdisjoint(ops)


def test_every_attribute_stands_on_every_node() -> None:
    for case in (Case(), Case(rotate=True)):
        node = case.model().graph[0]
        assert {name: attribute.type for name, attribute in node.attributes.items()} == ATTRIBUTES
        assert [None if value is None else value.name for value in node.inputs] == ["x", "B", "scales"]
    both = Case(bias=True).model().graph[0]
    assert [None if value is None else value.name for value in both.inputs] == ["x", "B", "scales", None, "bias"]
    assert Case().model().graph[0].attributes["size"].as_int() == 1
    assert both.outputs[0].shape == ["batch", "tokens", 24]


def test_the_function_is_added_once_and_old_opsets_are_refused() -> None:
    made = Case().model()
    function = made.functions[DOMAIN, OP_TYPE, ""]
    ensure_rotated_matmul(made)
    assert made.functions[DOMAIN, OP_TYPE, ""] is function
    assert made.opset_imports[DOMAIN] == made.opset_imports["com.microsoft"] == 1
    del made.functions[DOMAIN, OP_TYPE, ""]
    made.graph.opset_imports[""] = 20
    with pytest.raises(InputRefused, match="opset 20, and RotatedMatMul needs 21"):
        ensure_rotated_matmul(made)


def test_reference_by_hand() -> None:
    q, s = round_rows([[63.5, -0.25, 0.75, 1.25], [0, 0, 0, 0], [1, np.inf, 0, 0]], 127)
    np.testing.assert_array_equal(q, [[127, 0, 2, 2], [0, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(s[:, 0], [0.5, 1e-5 / 127, np.nan])
    np.testing.assert_array_equal(unpack_codes([[0x21, 0xF8]], 4), [[1, 2, 8, 15]])
    codes, zeros = np.array([[[0x21], [0xF8]]], np.uint8), np.array([[0x93]], np.uint8)
    np.testing.assert_array_equal(weight_codes(codes, zeros, in_features=3, bits=4), [[-2, -1, -1]])
    np.testing.assert_array_equal(weight_codes(codes, None, in_features=4, bits=4), [[-7, -6, 0, 7]])
    product = integer_product([[1, 2, 3]], [[0.5]], [[1, 1, 1]], [[10, 100]], [7], group=2)
    np.testing.assert_array_equal(product, [[0.5 * (3 * 10 + 3 * 100) + 7]])
