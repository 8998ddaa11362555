"""The rows of a quantized cache in standard operators: numbers to bytes and back.

Float16 numbers are taken apart and put together by arithmetic that is exact in float32, since standard operators have
no view of a number's bits. Zero is stored without a sign where it comes from a zero.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.ops.body import FunctionBody

LARGEST = 65504.0
"""The largest finite float16."""

_NAN_BITS = 0x7E00
_EXPONENTS = np.arange(1, 31)
"""Of normal float16 numbers: ``2^(e - 15)`` and more; below the first are the subnormal ones, spaced as those of 1."""


def levels(body: FunctionBody) -> ir.Value:
    """The largest code as a float: 15 or 255."""
    four = body.add("Equal", "is_four", [body.attribute("bits"), body.constant(np.array(4), "four")])
    largest = [body.constant(np.array(number, np.float32), f"levels_{number:.0f}") for number in (15.0, 255.0)]
    return body.add("Where", "levels", [four, *largest])


def encode(body: FunctionBody, z: ir.Value, highest: ir.Value, name: str) -> ir.Value:
    """Rows ``[..., R]`` uint8 of ``z`` ``[..., D]`` float32; ``highest`` from :func:`levels`."""
    last, zero = body.constant(np.array([-1]), f"{name}_last"), body.constant(np.zeros((), np.float32), f"{name}_zero")
    lost = body.add("ReduceSum", f"{name}_lost", [body.add("Sub", f"{name}_differences", [z, z]), last])
    finite = body.add("Equal", f"{name}_finite", [lost, zero])
    known = body.add("Where", f"{name}_known", [finite, z, zero])
    low = body.add("ReduceMin", f"{name}_low", [known, last])
    high = body.add("ReduceMax", f"{name}_high", [known, last])
    step = body.add("Div", f"{name}_step", [body.add("Sub", f"{name}_range", [high, low]), highest])
    both = body.add("Concat", f"{name}_both", [step, low], [ir.AttrInt64("axis", -1)])
    bits, rounded = _to_half(body, both, name)
    not_finite = body.constant(np.array([0, _NAN_BITS], np.float32), f"{name}_not_finite")
    stored_bits = body.add("Where", f"{name}_stored_bits", [finite, bits, not_finite])
    codes = _codes(body, known, rounded, highest, name)
    return body.add(
        "Concat",
        f"{name}_rows",
        [_packed(body, codes, name), _bytes(body, stored_bits, name)],
        [ir.AttrInt64("axis", -1)],
    )


def decode(body: FunctionBody, rows: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
    """The numbers of ``rows`` ``[..., R]`` uint8.

    Returns:
        Float32 ``[..., D]``, and bool ``[..., 1]``: the row is not finite; then its numbers are zeros.
    """
    ends = body.constant(np.array([-4]), f"{name}_ends")
    stored = _sliced(body, rows, body.constant(np.array([0]), f"{name}_first"), ends, f"{name}_stored")
    tail = _sliced(body, rows, ends, body.constant(np.array([1 << 40]), f"{name}_beyond"), f"{name}_tail")
    numbers = _from_half(body, tail, name)
    total = body.add(
        "ReduceSum",
        f"{name}_total",
        [numbers, body.constant(np.array([-1]), f"{name}_axis")],
        [ir.AttrInt64("keepdims", 1)],
    )
    lost = body.add("IsNaN", f"{name}_lost", [total])
    known = body.add("Where", f"{name}_known", [lost, body.constant(np.zeros((), np.float32), f"{name}_zero"), numbers])
    step, base = _pair(body, known, name)
    codes = body.cast(_unpacked(body, stored, name), ir.DataType.FLOAT, f"{name}_codes_single")
    scaled = body.add("Mul", f"{name}_scaled", [codes, step])
    return body.add("Add", f"{name}_numbers", [scaled, base]), lost


def _sliced(body: FunctionBody, x: ir.Value, start: ir.Value, end: ir.Value, name: str) -> ir.Value:
    """Along the last axis."""
    return body.add("Slice", name, [x, start, end, body.constant(np.array([-1]), f"{name}_axis")])


def _pair(body: FunctionBody, both: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
    """``[..., 1]`` twice, of ``[..., 2]``."""
    first, second = (
        body.add("Gather", f"{name}_{part}_of_two", [both, body.constant(np.array([at]), f"{name}_{part}_at")],
                 [ir.AttrInt64("axis", -1)])
        for at, part in enumerate(("step", "base"))
    )  # fmt: skip
    return first, second


def _to_half(body: FunctionBody, numbers: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
    """Float16 of finite numbers: its 16 bits as a whole number, and its value; both in float32."""
    ends = [body.constant(np.array(end, np.float32), f"{name}_end_{at}") for at, end in enumerate((-LARGEST, LARGEST))]
    within = body.add("Clip", f"{name}_within", [numbers, *ends])
    size = body.add("Abs", f"{name}_size", [within])
    one = body.constant(np.array([-1]), f"{name}_new_axis")
    normal = body.constant(np.exp2(_EXPONENTS[1:] - 15.0).astype(np.float32), f"{name}_powers")
    reached = body.add(
        "GreaterOrEqual", f"{name}_reached", [body.add("Unsqueeze", f"{name}_sizes", [size, one]), normal]
    )
    counted = body.cast(reached, ir.DataType.FLOAT, f"{name}_reached_single")
    exponent = body.add("ReduceSum", f"{name}_exponent", [counted, one], [ir.AttrInt64("keepdims", 0)])  # e - 1
    at = body.cast(exponent, ir.DataType.INT64, f"{name}_exponent_at")
    spacings = np.exp2(_EXPONENTS - 25.0)
    spacing = body.add(
        "Gather", f"{name}_spacing", [body.constant(spacings.astype(np.float32), f"{name}_spacings"), at]
    )
    fraction = body.add("Round", f"{name}_fraction", [body.add("Div", f"{name}_scaled", [size, spacing])])
    kilo = body.constant(np.array(1024, np.float32), f"{name}_kilo")
    unsigned = body.add("Add", f"{name}_unsigned", [body.add("Mul", f"{name}_shifted", [exponent, kilo]), fraction])
    negative = body.add("Less", f"{name}_negative", [within, body.constant(np.zeros((), np.float32), f"{name}_null")])
    sign = body.cast(negative, ir.DataType.FLOAT, f"{name}_sign")
    top = body.constant(np.array(32768, np.float32), f"{name}_top")
    bits = body.add("Add", f"{name}_bits", [unsigned, body.add("Mul", f"{name}_sign_bit", [sign, top])])
    rounded = body.add("Mul", f"{name}_rounded_size", [fraction, spacing])
    minus = body.add("Neg", f"{name}_minus", [rounded])
    return bits, body.add("Where", f"{name}_rounded", [negative, minus, rounded])


def _bytes(body: FunctionBody, bits: ir.Value, name: str) -> ir.Value:
    """Whole numbers ``[..., 2]`` as bytes ``[..., 4]``, the low one first."""
    scale = body.constant(np.array(256, np.float32), f"{name}_scale")
    upper = body.add("Floor", f"{name}_upper", [body.add("Div", f"{name}_split", [bits, scale])])
    lower = body.add("Sub", f"{name}_lower", [bits, body.add("Mul", f"{name}_joined", [upper, scale])])
    new = body.constant(np.array([-1]), f"{name}_byte_axis")
    parts = [body.add("Unsqueeze", f"{name}_byte_{at}", [part, new]) for at, part in enumerate((lower, upper))]
    pairs = body.add("Concat", f"{name}_pairs", parts, [ir.AttrInt64("axis", -1)])
    flat = body.add("Reshape", f"{name}_four", [pairs, body.constant(np.array([0, 0, 0, 4]), f"{name}_four_shape")])
    return body.cast(flat, ir.DataType.UINT8, f"{name}_bytes")


def _from_half(body: FunctionBody, tail: ir.Value, name: str) -> ir.Value:
    """Two numbers ``[..., 2]`` of four bytes; NaN for what is not finite."""
    upper = np.arange(256)
    exponents = upper >> 2 & 31
    fractions = np.where(exponents > 0, 1024, 0) + 256 * (upper & 3)
    spacings = np.where(upper < 128, 1.0, -1.0) * np.exp2(np.maximum(exponents, 1) - 25.0)
    spacings[exponents == 31] = np.nan
    axis = [ir.AttrInt64("axis", -1)]
    lows = body.add("Gather", f"{name}_lows", [tail, body.constant(np.array([0, 2]), f"{name}_low_at")], axis)
    highs = body.add("Gather", f"{name}_highs", [tail, body.constant(np.array([1, 3]), f"{name}_high_at")], axis)
    at = body.cast(highs, ir.DataType.INT32, f"{name}_highs_at")
    tables = {"fraction": fractions.astype(np.float32), "spacing": spacings.astype(np.float32)}
    fraction, spacing = (
        body.add("Gather", f"{name}_{part}", [body.constant(table, f"{name}_{part}s"), at])
        for part, table in tables.items()
    )
    whole = body.add("Add", f"{name}_whole", [fraction, body.cast(lows, ir.DataType.FLOAT, f"{name}_lows_single")])
    return body.add("Mul", f"{name}_halves", [whole, spacing])


def _codes(body: FunctionBody, known: ir.Value, rounded: ir.Value, highest: ir.Value, name: str) -> ir.Value:
    """Whole numbers ``[..., D]`` in float32."""
    step, base = _pair(body, rounded, f"{name}_rounded")
    zero = body.constant(np.zeros((), np.float32), f"{name}_none")
    flat = body.add("Equal", f"{name}_flat", [step, zero])
    divisor = body.add("Where", f"{name}_divisor", [flat, body.constant(np.ones((), np.float32), f"{name}_unit"), step])
    above = body.add("Sub", f"{name}_above", [known, base])
    whole = body.add("Round", f"{name}_nearest", [body.add("Div", f"{name}_steps", [above, divisor])])
    clipped = body.add("Clip", f"{name}_clipped", [whole, zero, highest])
    return body.add("Where", f"{name}_codes", [flat, zero, clipped])


def _packed(body: FunctionBody, codes: ir.Value, name: str) -> ir.Value:
    """Codes ``[..., D]`` as bytes."""

    def halves(branch: FunctionBody) -> ir.Value:
        parts = _halves(branch, codes)
        scale = branch.constant(np.array(16, np.float32), "scale")
        joined = branch.add("Add", "joined", [parts[0], branch.add("Mul", "upper", [parts[1], scale])])
        return branch.cast(joined, ir.DataType.UINT8, "bytes")

    def whole(branch: FunctionBody) -> ir.Value:
        return branch.cast(codes, ir.DataType.UINT8, "bytes")

    return body.choose(f"{name}_packed", _is_four(body, f"{name}_pack_four"), halves, whole)


def _halves(body: FunctionBody, codes: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The first and the second half of the channels."""
    size = body.add("Div", "half_size", [body.attribute("head_size"), body.constant(np.array(2), "two")])
    middle = body.add("Reshape", "middle", [size, body.constant(np.array([1]), "vector")])
    zero, beyond = body.constant(np.array([0]), "start"), body.constant(np.array([1 << 40]), "beyond")
    return _sliced(body, codes, zero, middle, "first"), _sliced(body, codes, middle, beyond, "second")


def _unpacked(body: FunctionBody, stored: ir.Value, name: str) -> ir.Value:
    """Bytes as codes ``[..., D]`` uint8."""

    def halves(branch: FunctionBody) -> ir.Value:
        lower = branch.add("BitwiseAnd", "lower", [stored, branch.constant(np.array(15, np.uint8), "fifteen")])
        four = branch.constant(np.array(4, np.uint8), "four")
        upper = branch.add("BitShift", "upper", [stored, four], [ir.AttrString("direction", "RIGHT")])
        return branch.add("Concat", "codes", [lower, upper], [ir.AttrInt64("axis", -1)])

    def whole(branch: FunctionBody) -> ir.Value:
        return branch.add("Identity", "codes", [stored])

    return body.choose(f"{name}_codes", _is_four(body, f"{name}_unpack_four"), halves, whole)


def _is_four(body: FunctionBody, name: str) -> ir.Value:
    bits = body.add("Constant", f"{name}_bits", [], [body.reference("bits", "value_int")])
    return body.add("Equal", name, [bits, body.constant(np.array(4), f"{name}_number")])
