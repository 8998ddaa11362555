"""``graphrot::RotatedMatMul``: a linear that rotates and rounds its input, and multiplies integers.

Domain ``graphrot``, version 1. Inputs:

* ``X`` ``[..., K]``: float, float16 or bfloat16;
* ``B``: 4- or 8-bit weights as MatMulNBits stores them, uint8 ``[N, blocks, block * bits / 8]`` of biased codes,
  low half of a byte first;
* ``scales``: float or float16, whatever X is; ``[N, blocks]``, or ``[N]`` where ``block_size`` is 0;
* ``zero_points`` (optional): uint8 ``[N, ceil(blocks * bits / 8)]``, packed like the codes; all of a row are equal
  where ``block_size`` is 0. Without them 8 (or 128) stands for zero;
* ``bias`` (optional): float ``[N]``.

Output ``Y`` ``[..., N]`` of X's type::

    z = HadamardTransform(X) if rotate, else X                  in float32
    s = max(max|z|, EPSILON) / levels                           for every row
    q = z / s, rounded half to even                             whole numbers from -levels to levels
    Y = s * sum_g scales[n, g] * (sum_k q * (code - zero)) + bias

Sums of a group are exact. A row with a NaN or an infinity gives a row of NaN.

The node carries everything as attributes, all written on every node, for kernels and for the model-local function
that stands in for them:

* 4-bit weights: MatMulNBits of ONNX Runtime at accuracy level 0, on the whole numbers q;
* 8-bit weights with a scale per channel: MatMulInteger. MatMulNBits takes 8 bits from ONNX Runtime 1.22 on only, and
  a hundred times longer at level 0;
* 8-bit weights with a scale per group: DequantizeLinear and Gemm, which decodes the weight at each run (20 times
  slower than MatMulInteger for one token) but keeps a byte per weight in memory.

A constant If chooses; ONNX Runtime takes the other branches out when it loads the model, unless its optimizations are
off. The branches that are not taken must be sound all the same: their shapes fit together for any attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.errors import UsageError
from graphrot.ops.body import FunctionBody
from graphrot.ops.hadamard import ATTRIBUTES as TRANSFORM_ATTRIBUTES
from graphrot.ops.hadamard import DOMAIN, add_function, declared_function, transform_attributes, transform_nodes
from graphrot.plan.types import MatrixRef

OP_TYPE = "RotatedMatMul"

EPSILON = 1e-5
"""Least largest magnitude of a row: keeps the scale of a row of zeros above zero, also in float16."""

ATTRIBUTES = {
    "K": ir.AttributeType.INT,
    "N": ir.AttributeType.INT,
    "bits": ir.AttributeType.INT,
    "block_size": ir.AttributeType.INT,
    "block": ir.AttributeType.INT,
    "activation_bits": ir.AttributeType.INT,
    "rotate": ir.AttributeType.INT,
    **TRANSFORM_ATTRIBUTES,
    "levels": ir.AttributeType.FLOAT,
    "scales_shape": ir.AttributeType.INTS,
}
"""All attributes of the node.

``bits``: 4 or 8, of the weights. ``block_size``: channels that share a scale (32, 64 or 128); 0: all of them.
``block``: length of the blocks that ``B`` is stored in. ``activation_bits``: 8 or 4. ``rotate``: 0 or 1; then the
attributes of HadamardTransform follow, for 0 those of size 1. ``levels``: the largest code, 127 or 7, and
``scales_shape``: ``[N, blocks]``, say what the others say, for the function.
"""

GROUPS = (32, 64, 128)
"""Numbers of channels that may share a scale, if not all of a row do."""

OLDEST_OPSET = 21
"""The first with blocks in DequantizeLinear."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight ``[N, K]`` as the node takes it.

    Args:
        codes: ``B``.
        scales: ``[N, blocks]``, or ``[N]`` where ``block_size`` is 0.
        zeros: ``zero_points`` or None.
        in_features: K.
        out_features: N.
        bits: of a code.
        block_size: channels that share a scale; 0: all of them.
        block: length of the blocks of ``codes``.
    """

    codes: ir.Value
    scales: ir.Value
    zeros: ir.Value | None
    in_features: int
    out_features: int
    bits: Literal[4, 8]
    block_size: int
    block: int

    @property
    def blocks(self) -> int:
        """Blocks in a row of ``codes``."""
        return -(-self.in_features // self.block)


def rotated_matmul_node(
    x: ir.Value,
    weight: PackedWeight,
    output_name: str,
    *,
    activation_bits: Literal[4, 8] = 8,
    bias: ir.Value | None = None,
    rotation: Iterable[ir.Attr] | None = None,
) -> ir.Node:
    """The node that multiplies ``x`` by a weight.

    Args:
        x: ``[..., K]``; the type passes on to the output.
        weight: the weight.
        output_name: name of the output; a free name.
        activation_bits: what ``x`` is rounded to, per row.
        bias: float32 ``[N]``.
        rotation: the attributes of the HadamardTransform in front, from ``transform_attributes`` or from a node that
            this one takes in; None: no rotation.

    Returns:
        A node that is in no graph yet, named like its output.

    Raises:
        UsageError: the operator does not have groups of this size.
    """
    if weight.block_size not in (0, *GROUPS):
        raise UsageError(f"{OP_TYPE} has no groups of {weight.block_size}", where=f"output {output_name!r}")
    transform = list(transform_attributes(MatrixRef("hadamard", 1)) if rotation is None else rotation)
    numbers = {
        "K": weight.in_features,
        "N": weight.out_features,
        "bits": weight.bits,
        "block_size": weight.block_size,
        "block": weight.block,
        "activation_bits": activation_bits,
        "rotate": int(rotation is not None),
    }
    attributes = [
        *(ir.AttrInt64(name, number) for name, number in numbers.items()),
        *transform,
        ir.AttrFloat32("levels", (1 << (activation_bits - 1)) - 1),
        ir.AttrInt64s("scales_shape", [weight.out_features, weight.blocks]),
    ]
    inputs = [x, weight.codes, weight.scales, weight.zeros, bias]
    while inputs[-1] is None:  # ONNX Runtime 1.20 crashes on an empty name at the end
        inputs.pop()
    shape = None if x.shape is None else ir.Shape([*x.shape[:-1], weight.out_features])
    output = ir.Value(name=output_name, shape=shape, type=x.type)
    return ir.Node(DOMAIN, OP_TYPE, inputs, attributes, outputs=[output], name=output_name)


def ensure_rotated_matmul(model: ir.Model) -> None:
    """Give the model the function, unless it has it, and the imports of the domains that it takes.

    Raises:
        InputRefused: the model's standard opset is too old for the function.
    """
    add_function(model, OP_TYPE, rotated_matmul_function, OLDEST_OPSET)
    model.opset_imports.setdefault("com.microsoft", 1)


def rotated_matmul_function(opset: int = 21) -> ir.Function:
    """The model-local function ``graphrot::RotatedMatMul``.

    Args:
        opset: version of the standard operators, that of the model (21 or later).
    """
    names = ("X", "B", "scales", "zero_points", "bias")
    inputs = x, codes, scales, zeros, bias = [ir.Value(name=name) for name in names]
    body = FunctionBody(ATTRIBUTES)
    rows, row_scales = _rounded(body, body.cast(x, ir.DataType.FLOAT, "X_single"))
    block_scales, channel_scales = _split(body, scales)
    four = body.add("Equal", "is_four", [body.attribute("bits"), body.constant(np.array(4), "four")])
    product = body.choose(
        "product",
        four,
        lambda branch: _four_bits(branch, rows, codes, block_scales, zeros),
        lambda branch: _eight_bits(branch, rows, codes, block_scales, zeros),
    )
    scaled = body.add("Mul", "Y_scaled", [body.add("Mul", "Y_columns", [product, channel_scales]), row_scales])
    summed = body.add("Add", "Y_single", [scaled, _offsets(body, channel_scales, bias)])
    y = body.add("CastLike", "Y", [summed, x])
    return declared_function(OP_TYPE, inputs, [y], body, ATTRIBUTES, {"": opset, "com.microsoft": 1})


def _rounded(body: FunctionBody, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """``q`` in float, and ``s`` ``[..., 1]``. No Clip: it would make numbers of NaN, and is not needed."""
    rotate = body.cast(body.attribute("rotate"), ir.DataType.BOOL, "rotates")
    z = body.choose(
        "Z", rotate, lambda branch: transform_nodes(branch, x, x), lambda branch: branch.add("Identity", "same", [x])
    )
    magnitude = body.add("Abs", "Z_magnitude", [z])
    largest = body.add("ReduceMax", "Z_largest", [magnitude, body.constant(np.array([-1]), "last")])
    bounded = body.add("Max", "Z_range", [largest, body.constant(np.array(EPSILON, np.float32), "least")])
    scales = body.add("Div", "row_scales", [bounded, body.attribute("levels")])
    return body.add("Round", "rows", [body.add("Div", "Z_scaled", [z, scales])]), scales


def _split(body: FunctionBody, scales: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Scales as products: ``[N, blocks]`` for the blocks and ``[N]`` for the channels.

    Where a channel has one scale its blocks get ones, and their product is a sum of whole numbers, which is exact.
    """
    given = body.add("Flatten", "scales_given", [body.cast(scales, ir.DataType.FLOAT, "scales_single")])
    zero, one = body.constant(np.array([0]), "zero"), body.constant(np.array([1]), "one")
    first = body.add("Slice", "scales_first", [given, zero, one, one])
    unit = body.constant(np.array(1, np.float32), "unit")
    is_zero = body.add("Equal", "scales_zero", [first, body.constant(np.array(0, np.float32), "nothing")])
    column = body.add("Where", "scales_column", [is_zero, unit, first])
    ratios = body.add("Div", "scales_ratios", [given, column])
    blocks = body.add("Expand", "block_scales", [ratios, body.attribute("scales_shape")])
    return blocks, body.add("Reshape", "channel_scales", [column, body.constant(np.array([-1]), "flat")])


def _offsets(body: FunctionBody, channel_scales: ir.Value, bias: ir.Value) -> ir.Value:
    """``[N]``: the bias, or zeros where there is none. Gemm may miss its last input, which Add must not."""
    row = body.add("Unsqueeze", "scales_row", [channel_scales, body.constant(np.array([0]), "front")])
    added = body.add("Gemm", "bias_row", [body.constant(np.zeros((1, 1), np.float32), "no_scale"), row, bias])
    return body.add("Reshape", "offsets", [added, body.constant(np.array([-1]), "flat_bias")])


def _four_bits(
    body: FunctionBody, rows: ir.Value, codes: ir.Value, block_scales: ir.Value, zeros: ir.Value
) -> ir.Value:
    attributes = [body.reference("K"), body.reference("N"), body.reference("block", "block_size")]
    attributes += [ir.AttrInt64("bits", 4), ir.AttrInt64("accuracy_level", 0)]
    # Codes of 8 bits do not fit here, and a constant's shape is checked where the branch is not taken, too.
    operands = [rows, body.add("Identity", "codes", [codes]), block_scales, zeros]
    product = body.add("MatMulNBits", "product", operands, attributes, domain="com.microsoft")
    # Says the type to checkers that do not know the operator; ONNX Runtime drops it.
    return body.cast(product, ir.DataType.FLOAT, "single")


def _eight_bits(
    body: FunctionBody, rows: ir.Value, codes: ir.Value, block_scales: ir.Value, zeros: ir.Value
) -> ir.Value:
    """The rows get as long as those of the codes, which also are the shape of this branch where it is not taken."""
    flat = body.add("Reshape", "codes", [codes, body.constant(np.array([0, -1]), "by_rows")])
    stored = body.add("Shape", "stored", [flat], [ir.AttrInt64("start", 1)])
    padding = body.add("Sub", "padding", [stored, body.add("Shape", "width", [rows], [ir.AttrInt64("start", -1)])])
    zero, last = body.constant(np.array([0]), "zero"), body.constant(np.array([-1]), "last")
    amounts = body.add("Concat", "amounts", [zero, padding], [ir.AttrInt64("axis", 0)])
    padded = body.add("Pad", "rows", [rows, amounts, None, last])
    points = _zero_points(body, block_scales, zeros)
    channel = body.add("Equal", "by_channel", [body.attribute("block_size"), body.constant(np.array(0), "none")])
    return body.choose(
        "product",
        channel,
        lambda branch: _whole_numbers(branch, padded, flat, points),
        lambda branch: _decoded(branch, padded, flat, block_scales, points),
    )


def _zero_points(body: FunctionBody, like: ir.Value, zeros: ir.Value) -> ir.Value:
    """``[N, blocks]`` uint8: the zero points, or 128. DequantizeLinear may miss its last input, and makes 0 - zero."""
    shape = body.add("Shape", "points", [like])

    def filled(branch: FunctionBody, code: int, name: str) -> ir.Value:
        return branch.add(
            "ConstantOfShape", name, [shape], [ir.AttrTensor("value", ir.tensor(np.array([code], np.uint8)))]
        )

    def given(branch: FunctionBody) -> ir.Value:
        ones = branch.add(
            "ConstantOfShape", "ones", [shape], [ir.AttrTensor("value", ir.tensor(np.ones(1, np.float32)))]
        )
        block = [ir.AttrInt64("axis", 1), ir.AttrInt64("block_size", 1)]
        negative = branch.add("DequantizeLinear", "negative", [filled(branch, 0, "nothing"), ones, zeros], block)
        return branch.cast(branch.add("Neg", "positive", [negative]), ir.DataType.UINT8, "given")

    present = body.add("OptionalHasElement", "has_zeros", [zeros])
    return body.choose("zeros", present, given, lambda branch: filled(branch, 128, "middle"))


def _whole_numbers(body: FunctionBody, rows: ir.Value, codes: ir.Value, points: ir.Value) -> ir.Value:
    """MatMulInteger, its first input unsigned: of two signed ones ONNX Runtime is many times slower."""
    middle = body.constant(np.array(128, np.float32), "middle")
    unsigned = body.cast(body.add("Add", "shifted", [rows, middle]), ir.DataType.UINT8, "unsigned")
    columns = body.add("Transpose", "columns", [codes], [ir.AttrInt64s("perm", [1, 0])])
    at = [body.constant(np.array([n]), f"at_{n}") for n in (0, 1)]
    first = body.add("Slice", "points_first", [points, at[0], at[1], at[1]])
    column_points = body.add("Reshape", "points", [first, body.constant(np.array([-1]), "flat")])
    point = body.constant(np.array(128, np.uint8), "point")
    whole = body.add("MatMulInteger", "whole", [unsigned, columns, point, column_points])
    # Codes know no NaN: x - x is 0, or NaN where x is not finite.
    lost = body.add(
        "ReduceSum", "lost", [body.add("Sub", "differences", [rows, rows]), body.constant(np.array([-1]), "last")]
    )
    return body.add("Add", "sums", [body.cast(whole, ir.DataType.FLOAT, "single"), lost])


def _decoded(body: FunctionBody, rows: ir.Value, codes: ir.Value, block_scales: ir.Value, points: ir.Value) -> ir.Value:
    """Gemm, since MatMul takes no transposed weight."""
    blocks = [ir.AttrInt64("axis", 1), body.reference("block", "block_size")]
    weight = body.add("DequantizeLinear", "weight", [codes, block_scales, points], blocks)
    ends = [body.add("Shape", "rows_shape", [rows], [ir.AttrInt64("end", -1)])]
    ends.append(body.add("Shape", "channels", [codes], [ir.AttrInt64("end", 1)]))
    width = body.add("Shape", "width", [rows], [ir.AttrInt64("start", -1)])
    flat = body.add("Concat", "flat_shape", [body.constant(np.array([-1]), "any"), width], [ir.AttrInt64("axis", 0)])
    two = body.add("Reshape", "flat", [rows, flat])
    product = body.add("Gemm", "flat_product", [two, weight], [ir.AttrInt64("transB", 1)])
    shape = body.add("Concat", "shape", ends, [ir.AttrInt64("axis", 0)])
    return body.add("Reshape", "product", [product, shape], [ir.AttrInt64("allowzero", 1)])
