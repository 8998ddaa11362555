"""``graphrot::HadamardTransform``: the node, and the function that stands in for the kernel.

Domain ``graphrot``, version 1. One input X ``[..., blocks * size]`` (float, float16 or bfloat16), one
output of the same shape and type: every block x of ``size`` channels becomes ``x @ (factor (x) S) * scale``
with Sylvester's S of order ``size / K``, in float32 arithmetic.

The node carries its matrix in small Kronecker factors as attributes, and one model-local function
refers to them; runtimes that lack the kernel inline the function. Every attribute stands on every
node: defaults of a function do not reach a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphrot.errors import InputRefused, UsageError
from graphrot.ops.body import FunctionBody
from graphrot.plan.types import MatrixRef
from graphrot.rotation.hadamard import factor_matrix, sylvester
from graphrot.rotation.orthogonal import reference_split

DOMAIN = "graphrot"
VERSION = 1
OP_TYPE = "HadamardTransform"

ATTRIBUTES = {
    "size": ir.AttributeType.INT,
    "construction": ir.AttributeType.STRING,
    "scale": ir.AttributeType.FLOAT,
    "factor": ir.AttributeType.TENSOR,
    "left": ir.AttributeType.TENSOR,
    "right": ir.AttributeType.TENSOR,
    "shape": ir.AttributeType.INTS,
    "shape3": ir.AttributeType.INTS,
}
"""All attributes of the node.

``size``: channels per block. ``construction``: name of the factor, for people. ``scale``: 1/sqrt(size).
``factor``: ``[K, K]``, int8 of +-1, or float32 (Hartley), with ``factor @ factor.T == K * I``.
``left`` ``[2^a, 2^a]`` and ``right`` ``[2^b, 2^b]``, int8: S = left (x) right.
``shape``: ``[-1, K, 2^a, 2^b]``. ``shape3``: ``[-1, K, 2^(a+b)]``.
"""

OLDEST_OPSET = 15
"""The first with CastLike, which the function uses."""
_FUNCTIONS_IR = 8
"""The first IR version with functions."""


def hadamard_node(x: ir.Value, matrix: MatrixRef, output_name: str, *, transpose: bool = False) -> ir.Node:
    """The node that transforms ``x`` by a structured matrix without signs.

    Args:
        x: ``[..., blocks * size]``; shape and type pass on to the output.
        matrix: hadamard, hartley or block-hadamard. Signs belong into folds and are refused here.
        output_name: name of the output; a free name.
        transpose: transform by the transposed matrix, which is the inverse.

    Returns:
        A node that is in no graph yet, named like its output.

    Raises:
        UsageError: the matrix has signs, keeps the mean, or is not structured.
    """
    if matrix.seed is not None or matrix.mean_preserving:
        raise UsageError(
            f"{OP_TYPE} takes no signs",
            where=f"output {output_name!r}",
            why="random signs and mean-preserving matrices exist in folded rotations only",
        )
    output = ir.Value(name=output_name, shape=x.shape, type=x.type)
    attributes = transform_attributes(matrix, transpose=transpose)
    return ir.Node(DOMAIN, OP_TYPE, [x], attributes, outputs=[output], name=output_name)


def transform_attributes(matrix: MatrixRef, *, transpose: bool = False) -> list[ir.Attr]:
    """The attributes (:data:`ATTRIBUTES`) that say by which matrix is transformed.

    Args:
        matrix: hadamard, hartley or block-hadamard; its signs do not count.
        transpose: transform by the transposed matrix.

    Raises:
        UsageError: the matrix is not structured.
    """
    split = reference_split(matrix)
    factor = np.ascontiguousarray(factor_matrix(split).T if transpose else factor_matrix(split))
    left, right = split.levels // 2, split.levels - split.levels // 2
    return [
        ir.AttrInt64("size", split.size),
        ir.AttrString("construction", f"{split.construction} transposed" if transpose else split.construction),
        ir.AttrFloat32("scale", split.size**-0.5),
        ir.AttrTensor("factor", ir.tensor(factor if split.is_hadamard else factor.astype(np.float32))),
        ir.AttrTensor("left", ir.tensor(sylvester(left))),
        ir.AttrTensor("right", ir.tensor(sylvester(right))),
        ir.AttrInt64s("shape", [-1, split.order, 1 << left, 1 << right]),
        ir.AttrInt64s("shape3", [-1, split.order, 1 << split.levels]),
    ]


def transform_nodes(body: FunctionBody, x: ir.Value, like: ir.Value) -> ir.Value:
    """The transform of float32 ``x``, shaped as ``like``, by the matrix in the attributes.

    The scale comes first, so that no sum leaves the range that the result has.
    """

    def matrix(name: str) -> ir.Value:
        return body.cast(body.attribute(name), ir.DataType.FLOAT, f"{name}_float")

    scaled = body.add("Mul", "X_scaled", [x, body.attribute("scale")])
    blocks = body.add("Reshape", "X_blocks", [scaled, body.attribute("shape")])
    by_right = body.add("MatMul", "Y_right", [blocks, matrix("right")])
    by_left = body.add("MatMul", "Y_left", [matrix("left"), by_right])
    rows = body.add("Reshape", "Y_rows", [by_left, body.attribute("shape3")])
    transposed = body.add("Transpose", "factor_transposed", [matrix("factor")], [ir.AttrInt64s("perm", [1, 0])])
    by_factor = body.add("MatMul", "Y_factor", [transposed, rows])
    shape = body.add("Shape", "X_shape", [like])
    return body.add("Reshape", "Y_float", [by_factor, shape], [ir.AttrInt64("allowzero", 1)])


def hadamard_function(opset: int = 21) -> ir.Function:
    """The model-local function ``graphrot::HadamardTransform`` in standard operators.

    Args:
        opset: version of the standard operators, that of the model (15 or later).
    """
    body = FunctionBody(ATTRIBUTES)
    x = ir.Value(name="X")
    y = body.add("CastLike", "Y", [transform_nodes(body, body.cast(x, ir.DataType.FLOAT, "X_float"), x), x])
    return declared_function(OP_TYPE, [x], [y], body, ATTRIBUTES, {"": opset})


def declared_function(
    op_type: str,
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    body: FunctionBody,
    attributes: Mapping[str, ir.AttributeType],
    imports: dict[str, int],
) -> ir.Function:
    """A function of the domain with these attributes, all without defaults."""
    graph = ir.Graph(inputs, outputs, nodes=body.nodes, opset_imports=imports, name=op_type)
    declared = [ir.Attr(name, kind, None) for name, kind in attributes.items()]
    return ir.Function(DOMAIN, op_type, graph=graph, attributes=declared)


def ensure_function(model: ir.Model) -> None:
    """Give the model the function and the import of the domain, unless it has them, and an IR version with functions.

    Raises:
        InputRefused: the model's standard opset is too old for the function.
    """
    add_function(model, OP_TYPE, hadamard_function, OLDEST_OPSET)


def add_function(model: ir.Model, op_type: str, make: Callable[[int], ir.Function], oldest_opset: int) -> None:
    """As :func:`ensure_function`, for any function of the domain that ``make`` makes for an opset."""
    opset = model.opset_imports.get("", 0)
    if opset < oldest_opset:
        raise InputRefused(
            f"The model uses opset {opset}, and {op_type} needs {oldest_opset} or later",
            do="export it with a later opset",
        )
    model.opset_imports.setdefault(DOMAIN, VERSION)
    model.ir_version = max(model.ir_version, _FUNCTIONS_IR)
    key = (DOMAIN, op_type, "")
    if key not in model.functions:
        model.functions[key] = make(opset)
