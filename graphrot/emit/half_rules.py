"""What a half type means for each operator.

Four kinds. *Moving* operators take any type. *Products* (matmuls, attention, norms that sum in float32
inside) run in half. *Wide* ones (powers, sums, exponentials) run in float32, because their numbers leave
float16's range or need its missing digits. All others work by *elements* and follow their inputs. An
operator that is not known is wide.
"""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from graphrot.model.floats import is_standard

Kind = Literal["move", "product", "wide", "elements"]
Provider = Literal["cpu", "cuda"]
"""Where a model is to run."""

_MOVE = frozenset(
    "Cast Compress Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad Reshape "
    "ReverseSequence ScatterElements ScatterND Slice SpaceToDepth Split Squeeze TensorScatter Tile TopK Transpose "
    "Trilu Unsqueeze".split()
)
LOOKUPS = frozenset({"Gather", "GatherElements", "GatherND"})

_ELEMENTS = frozenset(
    "Abs Add And BitShift Ceil Celu CastLike Clip Div Dropout Elu Equal Erf Floor Gelu Greater GreaterOrEqual "
    "HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Max Min Mish Mod Mul Neg Not Or PRelu Relu Round "
    "Selu Sigmoid Sign Softplus Softsign Sub Sum Swish Tanh ThresholdedRelu Where Xor".split()
)
_PRODUCTS = frozenset(
    "Attention Conv ConvTranspose Einsum Gemm LayerNormalization MatMul RMSNormalization RotaryEmbedding "
    "SimplifiedLayerNormalization".split()
)
"""The norms sum in float32 by the standard (``stash_type``), and do so in ONNX Runtime 1.20 and 1.32."""

_CONTRIBUTED: dict[str, Kind] = {
    **dict.fromkeys(("BiasGelu", "FastGelu", "Gelu", "QuickGelu"), "elements"),
    **dict.fromkeys(
        (
            *("FusedMatMul", "GatherBlockQuantized", "GroupQueryAttention", "MatMulNBits", "MultiHeadAttention"),
            *("RotaryEmbedding", "SimplifiedLayerNormalization", "SkipLayerNormalization"),
            *("SkipSimplifiedLayerNormalization",),
        ),
        "product",
    ),
}
_OURS = frozenset({"HadamardTransform", "RotatedAttention", "RotatedMatMul"})
_ANY_TYPE = frozenset({"Shape", "Size", "IsNaN", "IsInf"})

BFLOAT16_CPU = frozenset(
    "Cast CastLike Concat Flatten Gather GatherElements GatherND Identity Reshape ScatterND Slice Split Squeeze "
    "Transpose Unsqueeze HadamardTransform RotatedAttention RotatedMatMul".split()
)
"""Operators with a bfloat16 kernel, in ONNX Runtime on the CPU, 1.20 and 1.32, or in graphrot's library."""

_FLOAT16_KERNELS = frozenset(
    "GroupQueryAttention HadamardTransform LayerNormalization MatMulNBits RMSNormalization RotatedAttention "
    "RotatedMatMul RotaryEmbedding SimplifiedLayerNormalization SkipLayerNormalization "
    "SkipSimplifiedLayerNormalization".split()
)


def kind_of(node: ir.Node) -> Kind:
    """The kind of a node without subgraphs."""
    name = node.op_type
    if is_standard(node):
        if name in _MOVE:
            return "move"
        if name in _PRODUCTS:
            return "product"
        return "elements" if name in _ELEMENTS else "wide"
    if node.domain == "com.microsoft":
        return _CONTRIBUTED.get(name, "wide")
    return "product" if node.domain == "graphrot" and name in _OURS else "wide"


def reads_any_type(node: ir.Node) -> bool:
    """Whether a node's result does not depend on its input's float type: no cast is needed."""
    return is_standard(node) and node.op_type in _ANY_TYPE


def stays_float32(node: ir.Node, index: int) -> bool:
    """Inputs that are float32 whatever the operator's other types are: by its definition, or for their digits.

    Scales of RotatedMatMul may have a type of their own: those of channels are few, and stay. RotatedAttention adds
    its mask in float32.
    """
    if is_rotated_matmul(node):
        return index == 4 or (index == 2 and node.attributes["block_size"].as_int() == 0)
    if (node.domain, node.op_type) == ("graphrot", "RotatedAttention"):
        return index == 7
    return node.domain == "com.microsoft" and node.op_type == "GroupQueryAttention" and index in (12, 13)


def is_rotated_matmul(node: ir.Node) -> bool:
    """Whether a node is graphrot's own matmul, which takes its scales as float32 or float16, whatever it multiplies."""
    return (node.domain, node.op_type) == ("graphrot", "RotatedMatMul")


def has_kernel(node: ir.Node, half: ir.DataType) -> bool:
    """Whether a node in a half type runs on the CPU by itself.

    ONNX Runtime puts casts around float16 operators without a kernel; for bfloat16 it does not.
    """
    return half == ir.DataType.FLOAT16 or node.op_type in BFLOAT16_CPU


def needs_constant_scales(node: ir.Node) -> bool:
    """Whether a packed matmul returns wrong numbers where its scales are not a constant.

    ONNX Runtime 1.32, MatMulNBits with ``accuracy_level`` 4, of 4 and 8 bits: weights are packed when they are
    loaded, without scales that a node makes, and multiplied as if those were in. Level 0 is right.
    """
    level = node.attributes.get("accuracy_level")
    return node.op_type == "MatMulNBits" and level is not None and level.as_int() == 4


def runs_alone(node: ir.Node) -> bool:
    """Whether ONNX Runtime would put casts around a float16 node that has a kernel, to run it in float32.

    It does so on the CPU where what makes its input and what reads its output has none: then the scales of a
    MatMulNBits get a cast, too, which is not folded below the highest optimization level, nor where they are
    shared. Only the input counts here, and what is moved on the way to it does not.
    """
    data = node.inputs[0]
    maker = data.producer() if data is not None else None
    while maker is not None and kind_of(maker) == "move" and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    return maker is not None and maker.op_type not in _FLOAT16_KERNELS
