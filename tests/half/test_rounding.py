"""One rounding from float64 to a half type, of numbers and of rotated weights."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrot.analysis.types import encode_runs
from graphrot.folded import FoldedTensor, Rotate, Scale, materialize, round_once, rounded_numbers
from graphrot.graph import WeightStore, add_initializer
from graphrot.plan.types import MatrixRef
from tests.half.graphs import BF16, F16, HALVES

DIGITS = {F16: 10, BF16: 7}
LEAST = {F16: -14, BF16: -126}
TIE = 1 + 2.0**-11 + 2.0**-40
"""Just over a tie of float16; float32 rounds it onto the tie, which then goes to even: down."""


def nearest(number: float, half: ir.DataType) -> Fraction:
    """The closest number of a half type, ties to even, in whole-number arithmetic."""
    exact = abs(Fraction(number))
    if exact == 0:
        return Fraction(0)
    exponent = LEAST[half]
    while Fraction(2) ** (exponent + 1) <= exact:
        exponent += 1
    step = Fraction(2) ** (exponent - DIGITS[half])
    return round(exact / step) * step * (-1 if number < 0 else 1)


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.name)
@given(number=st.floats(-60000, 60000), digit=st.sampled_from([0.0, 2.0**-40, -(2.0**-40)]))
def test_round_once_is_the_nearest_number(half: ir.DataType, number: float, digit: float) -> None:
    # Ties of the type, moved a little, are where two roundings go wrong.
    tie = float(np.float32(number).astype(half.numpy()))
    for value in (number, tie * (1 + 2.0 ** -(DIGITS[half] + 1)) * (1 + digit)):
        found = round_once(np.array([value]), half)
        assert Fraction(float(found[0])) == nearest(value, half)


@pytest.mark.parametrize(("half", "tie"), [(F16, TIE), (BF16, 1 + 2.0**-8 + 2.0**-40)], ids=["FLOAT16", "BFLOAT16"])
def test_two_roundings_would_differ(half: ir.DataType, tie: float) -> None:
    once = round_once(np.array([tie]), half)
    twice = np.array([tie]).astype(np.float32).astype(half.numpy())
    assert float(once[0]) > 1.0 == float(twice[0])


def test_what_no_half_number_stands_for() -> None:
    numbers = np.array([1e39, -1e39, np.inf, np.nan, 3.4e38, 1e-60])
    found = round_once(numbers, BF16).astype(np.float64)
    assert found[:3].tolist() == [np.inf, -np.inf, np.inf] and np.isnan(found[3])
    assert found[4] == np.inf and found[5] == 0
    assert np.isinf(round_once(np.array([65520.0]), F16)[0]) and round_once(np.array([65519.0]), F16)[0] == 65504


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.name)
def test_a_rotated_weight_is_rounded_once(half: ir.DataType, tmp_path: Path) -> None:
    """Written as float32 for the certificate, then narrowed: the half numbers come from float64."""
    rng = np.random.default_rng(3)
    numbers = rng.standard_normal((300, 48)).astype(np.float32)
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)
    matrix = MatrixRef("hadamard", 48, seed=5)
    edits = (Scale(0, tuple(rng.standard_normal(300))), Rotate(1, (encode_runs(range(48)),), matrix))
    folded = FoldedTensor(ir.tensor(numbers), edits, "w")
    value = add_initializer(model, "w", folded)
    exact = folded.exact()
    materialize(model, WeightStore(tmp_path))
    assert value.const_value is not None and value.const_value.dtype == ir.DataType.FLOAT
    found = rounded_numbers(value.const_value, half)
    assert found.dtype == half.numpy()
    assert np.array_equal(found, round_once(exact, half))


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.name)
def test_a_folded_gain_is_not_rounded_to_float32_in_between(half: ir.DataType, tmp_path: Path) -> None:
    """The numbers stand on ties of the half type, and the gain moves them off by less than float32 can tell."""
    ties = (1 + 2.0 ** -(DIGITS[half] + 1)) * 2.0 ** np.arange(-3, 5)
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)
    folded = FoldedTensor(ir.tensor(ties.astype(np.float32)[None]), (Scale(0, (1 + 2.0**-40,)),), "w")
    value = add_initializer(model, "w", folded)
    materialize(model, WeightStore(tmp_path))
    assert value.const_value is not None
    up = ties * (1 + 2.0 ** -(DIGITS[half] + 1))
    assert np.array_equal(rounded_numbers(value.const_value, half)[0], up.astype(np.float32).astype(half.numpy()))
    assert (value.const_value.numpy().astype(half.numpy()) < up.astype(half.numpy())).all(), "two roundings do as well"


def test_float16_of_numpy_is_one_rounding() -> None:
    assert np.array([TIE]).astype(np.float16)[0] > 1
    assert np.array([1 + 2.0**-8 + 2.0**-40]).astype(ml_dtypes.bfloat16)[0] == 1, "round_once has become needless"
