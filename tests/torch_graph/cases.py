"""One call of every operator: operands, attributes, opset."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

MICROSOFT = "com.microsoft"


Operands = tuple[np.ndarray | None, ...]


@dataclass(frozen=True)
class Case:
    """One node. ``outputs``: how many are compared; those that ``skipped`` names are not made."""

    op: str
    inputs: Operands
    attributes: dict[str, Any] = field(default_factory=dict)
    domain: str = ""
    opset: int = 21
    outputs: int = 1
    skipped: tuple[int, ...] = ()
    double: bool = True
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.op}{'-' if self.note else ''}{self.note}"


_RANDOM = np.random.default_rng(7)


def real(*shape: int, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return _RANDOM.uniform(low, high, shape)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def whole(number: int) -> np.ndarray:
    return np.array(number, np.int64)


def flags(*shape: int) -> np.ndarray:
    return _RANDOM.integers(0, 2, shape).astype(bool)


def _elementwise() -> list[Case]:
    unary = "Abs Cos Exp Floor Ceil Identity Neg Relu Round Sigmoid Sign Sin Tanh"
    single = "Erf HardSwish Softplus Elu HardSigmoid LeakyRelu"
    found = [Case(op, (real(3, 4),)) for op in unary.split()]
    found += [Case(op, (real(3, 4),), double=False) for op in single.split()]
    found += [Case(op, (real(3, 4, low=0.1),)) for op in ("Log", "Sqrt", "Reciprocal")]
    found += [Case(op, (real(3, 1), real(4))) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum")]
    compare = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
    found += [Case(op, (np.round(real(3, 4)), np.round(real(3, 4)))) for op in compare]
    found += [Case(op, (flags(3, 4), flags(4))) for op in ("And", "Or", "Xor")]
    found += [
        Case("Not", (flags(3),)),
        Case("Div", (ints(7, -7, 8), ints(2, 2, -3)), note="whole"),
        Case("Mod", (ints(7, -7, 8), ints(3, 3, -3))),
        Case("Mod", (real(4), real(4)), {"fmod": 1}, note="fmod"),
        Case("Pow", (real(3, 4, low=0.1), np.array(3.0))),
        Case("Pow", (real(3, 4), np.array(2.0)), note="square"),
        Case("Pow", (real(3, 4, low=0.1), real(4)), note="many"),
        Case("Clip", (real(3, 4), np.array(-1.0), np.array(0.5))),
        Case("Clip", (real(3, 4), None, np.array(0.5)), note="above"),
        Case("Clip", (real(3, 4),), {"min": -1.0, "max": 0.5}, opset=10, double=False, note="attributes"),
        Case("Where", (flags(3, 4), real(3, 1), real(4))),
        Case("Cast", (real(3, 4),), {"to": int(ir.DataType.INT64)}),
        Case("Cast", (ints(0, 3),), {"to": int(ir.DataType.BOOL)}, note="flags"),
        Case("CastLike", (real(3, 4), ints(1))),
        Case("IsNaN", (np.array([0.0, np.nan, np.inf]),)),
        Case("IsInf", (np.array([0.0, np.nan, np.inf, -np.inf]),), {"detect_negative": 0}),
        Case("Dropout", (real(3, 4),)),
        Case("Gelu", (real(3, 4),), double=False),
        Case("Gelu", (real(3, 4),), {"approximate": "tanh"}, double=False, note="tanh"),
        Case("Swish", (real(3, 4),), {"alpha": 1.5}, opset=24, double=False),
        Case("Gelu", (real(3, 4),), domain=MICROSOFT, double=False, note="microsoft"),
        Case("FastGelu", (real(3, 4), real(4)), domain=MICROSOFT, double=False),
        Case("BiasGelu", (real(3, 4), real(4)), domain=MICROSOFT, double=False),
        Case("QuickGelu", (real(3, 4),), {"alpha": 1.7}, domain=MICROSOFT, double=False),
    ]
    return found


def _movement() -> list[Case]:
    x = real(2, 3, 4)
    return [
        Case("Reshape", (x, ints(0, -1))),
        Case("Reshape", (real(0, 3), ints(0, 6)), {"allowzero": 1}, note="zero"),
        Case("Flatten", (x,), {"axis": 2}),
        Case("Transpose", (x,), {"perm": [2, 0, 1]}),
        Case("Transpose", (x,), note="reversed"),
        Case("Squeeze", (real(2, 1, 3, 1), ints(1, -1))),
        Case("Squeeze", (real(2, 1, 3, 1),), note="all"),
        Case("Unsqueeze", (x, ints(0, -1))),
        Case("Unsqueeze", (x,), {"axes": [1]}, opset=11, note="attributes"),
        Case("Concat", (x, real(2, 1, 4)), {"axis": 1}),
        Case("Concat", (real(2, 0, 4), x), {"axis": -2}, note="empty"),
        Case("Split", (x, ints(1, 3)), {"axis": -1}, outputs=2),
        Case("Split", (real(2, 5),), {"axis": 1, "num_outputs": 2}, outputs=2, note="count"),
        Case("Slice", (x, ints(1, -3), ints(3, 99), ints(1, 2), ints(1, 2))),
        Case("Slice", (x, ints(-1), ints(-99), ints(2), ints(-2)), note="backwards"),
        Case("Slice", (x, ints(2), ints(1), ints(1)), note="nothing"),
        Case("Gather", (x, np.array([[0, -1], [2, 1]])), {"axis": 1}),
        Case("Gather", (x, whole(-1)), {"axis": 1}, note="one"),
        Case("GatherElements", (x, _RANDOM.integers(-3, 3, (2, 2, 4))), {"axis": 1}),
        Case("GatherND", (x, np.array([[0, 2], [1, -1]]))),
        Case("GatherND", (x, np.array([[2], [0]])), {"batch_dims": 1}, note="batch"),
        Case("ScatterElements", (x, np.array([[[0, 1, 2, -1]], [[2, 2, 1, 0]]]), real(2, 1, 4)), {"axis": 2}),
        Case(
            "ScatterElements",
            (x, np.array([[[0, 0, 2, 1]]]), real(1, 1, 4)),
            {"axis": 2, "reduction": "add"},
            note="add",
        ),
        Case("ScatterND", (x, np.array([[0, 2], [1, -1]]), real(2, 4))),
        Case("ScatterND", (x, np.array([[0, 2], [0, 2]]), real(2, 4)), {"reduction": "add"}, note="add"),
        Case("Expand", (real(3, 1), ints(2, 1, 4))),
        Case("Tile", (x, ints(2, 1, 3))),
        Case("Pad", (x, ints(0, 1, 0, 2, 0, 1), np.array(0.5))),
        Case("Pad", (x, ints(1, 2), None, ints(-1)), note="axes"),
        Case("Trilu", (real(3, 4), whole(1)), {"upper": 0}),
        Case("Trilu", (real(3, 4),), note="upper"),
        Case("Shape", (x,), {"start": 1, "end": -1}),
        Case("Size", (x,)),
        Case("ConstantOfShape", (ints(2, 3),)),
        Case("ConstantOfShape", (ints(2),), {"value": ir.tensor(np.array([3], np.int64))}, note="whole"),
        Case("Range", (whole(2), whole(11), whole(3))),
        Case("CumSum", (x, whole(1)), {"reverse": 1}),
        Case("CumSum", (x, whole(1)), {"exclusive": 1}, note="exclusive"),
        Case("OneHot", (ints(0, -1, 2), whole(4), np.array([0.5, 2.0])), {"axis": 0}, double=False),
        Case("NonZero", (ints(0, 2, 0, 3),)),
        Case("TopK", (x, ints(2)), {"largest": 0}, outputs=2),
        Case("ArgMax", (x,), {"axis": 1, "keepdims": 0}),
    ]


def _norms() -> list[Case]:
    x, gain, bias = real(2, 3, 8), real(8), real(8)
    names = ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd", "ReduceL2", "ReduceSumSquare")
    found = [Case(op, (x, ints(1, -1)), {"keepdims": 0}, double=op != "ReduceL2") for op in names]
    return [
        *found,
        Case("ReduceMean", (x,), {"axes": [-1]}, opset=17, note="attributes"),
        Case("ReduceSum", (x,), {"noop_with_empty_axes": 1}, note="nothing"),
        Case("Softmax", (x,), {"axis": 1}),
        Case("Softmax", (x,), {"axis": 1}, opset=11, note="flat"),
        Case("LogSoftmax", (x,)),
        Case("LayerNormalization", (x, gain, bias), {"epsilon": 2**-10}),
        Case("RMSNormalization", (x, gain), {"epsilon": 2**-10}, opset=23),
        Case("SimplifiedLayerNormalization", (x, gain), {"epsilon": 2**-10}),
        Case(
            "SkipLayerNormalization",
            (x, real(2, 3, 8), gain, bias, real(8)),
            domain=MICROSOFT,
            outputs=4,
            skipped=(1, 2),
            double=False,
        ),
        Case(
            "SkipSimplifiedLayerNormalization",
            (x, real(2, 3, 8), gain, real(8)),
            domain=MICROSOFT,
            outputs=4,
            skipped=(1, 2),
            double=False,
        ),
    ]


def _products() -> list[Case]:
    packed = _RANDOM.integers(0, 256, (6, 3, 16)).astype(np.uint8)
    bytes_ = _RANDOM.integers(0, 256, (6, 3, 32)).astype(np.uint8)
    scales, zeros = real(6, 3, low=0.01, high=0.1), _RANDOM.integers(0, 256, (6, 2)).astype(np.uint8)
    sizes = {"N": 6, "K": 80, "block_size": 32}
    return [
        Case("MatMul", (real(2, 3, 4), real(4, 5))),
        Case("Gemm", (real(4, 3), real(5, 4), real(5)), {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
        Case("Gemm", (real(3, 4), real(4, 5)), note="plain"),
        Case("Einsum", (real(2, 3, 4), real(2, 5, 4)), {"equation": "bik,bjk->bij"}),
        Case(
            "FusedMatMul",
            (real(2, 4, 3), real(2, 5, 4)),
            {"transA": 1, "transB": 1, "alpha": 0.5},
            domain=MICROSOFT,
            double=False,
        ),
        Case("MatMulNBits", (real(2, 80), packed, scales), {"bits": 4, **sizes}, domain=MICROSOFT, double=False),
        Case(
            "MatMulNBits",
            (real(2, 80), packed, scales, zeros),
            {"bits": 4, **sizes},
            domain=MICROSOFT,
            double=False,
            note="zeros",
        ),
        Case(
            "MatMulNBits",
            (real(2, 80), bytes_, scales),
            {"bits": 8, **sizes},
            domain=MICROSOFT,
            double=False,
            note="bytes",
        ),
    ]


def _attention() -> list[Case]:
    q, k, v = real(2, 3, 96), real(2, 3, 32), real(2, 3, 32)
    past = real(2, 2, 5, 16), real(2, 2, 5, 16)
    none = np.zeros((2, 2, 0, 16)), np.zeros((2, 2, 0, 16))
    prompt = (q, k, v, *none)
    token = (real(1, 1, 96), real(1, 1, 32), real(1, 1, 32), real(1, 2, 5, 16), real(1, 2, 5, 16))
    cos, sin = real(16, 8), real(16, 8)
    lengths, total = np.array([2, 2], np.int32), np.array(3, np.int32)
    packed = real(2, 3, 8), real(8, 48), real(48)
    with_past = np.array([5], np.int32), np.array(6, np.int32)
    standard = {"q_num_heads": 6, "kv_num_heads": 2}
    wide = real(2, 3, 16), real(2, 3, 16), real(2, 3, 16)
    wide_past = real(2, 4, 5, 4), real(2, 4, 5, 4)
    mask = np.array([[1, 1, 0], [1, 1, 1]], np.int32)
    positions = np.array([[3, 4, 5], [0, 1, 2]])
    heads = real(2, 6, 3, 8)
    pairs = real(2, 2, 3, 8), real(2, 2, 3, 8)
    seen = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    return [
        _grouped("", (*prompt, lengths, total)),
        _grouped("past", (*token, *with_past), scale=0.3, softcap=2.0),
        _grouped("rotary", (*prompt, lengths, total, cos, sin), do_rotary=1, local_window_size=2),
        _grouped("interleaved", (*token, *with_past, cos, sin), do_rotary=1, rotary_interleaved=1),
        _grouped("packed", (np.concatenate([q, k, v], -1), None, None, *none, lengths, total)),
        _grouped("bias", (*prompt, lengths, total, None, None, None, real(1, 6, 3, 3))),
        _grouped("sink", (*prompt, lengths, total, None, None, None, None, real(6))),
        _grouped("smooth", (*prompt, lengths, total), smooth_softmax=1),
        _contrib("MultiHeadAttention", "", wide, num_heads=4),
        _contrib("MultiHeadAttention", "masked", (*wide, real(48), mask), num_heads=4, unidirectional=1, scale=0.4),
        _contrib(
            "MultiHeadAttention", "past", (*wide, None, None, real(1, 4, 3, 8), *wide_past), outputs=3, num_heads=4
        ),
        _contrib("Attention", "microsoft", (*packed, mask), num_heads=4, unidirectional=1),
        _contrib(
            "Attention",
            "microsoft-past",
            (*packed, None, real(2, 2, 4, 5, 4)),
            outputs=2,
            num_heads=4,
            unidirectional=1,
        ),
        _single("Attention", "", (q, k, v), standard),
        _single(
            "Attention", "past", (q, k, v, real(3, 8), *past), {**standard, "is_causal": 1, "scale": 0.4}, outputs=3
        ),
        _single("Attention", "flags", (q, k, v, seen), standard),
        _single("Attention", "heads", (heads, *pairs), {"softcap": 1.5}),
        _single("RotaryEmbedding", "", (q, cos, sin, positions), {"num_heads": 6}),
        _single("RotaryEmbedding", "heads", (heads, real(2, 3, 4), real(2, 3, 4)), {"interleaved": 1}),
        _contrib("RotaryEmbedding", "microsoft", (q, positions, cos, sin)),
        _contrib(
            "RotaryEmbedding",
            "partial",
            (real(2, 6, 3, 16), ints(4), cos[:, :4], sin[:, :4]),
            rotary_embedding_dim=8,
            num_heads=6,
        ),
    ]


def _contrib(op: str, note: str, inputs: Operands, *, outputs: int = 1, **attributes: Any) -> Case:
    return Case(op, inputs, attributes, domain=MICROSOFT, outputs=outputs, double=False, note=note)


def _grouped(note: str, inputs: Operands, **attributes: Any) -> Case:
    return _contrib("GroupQueryAttention", note, inputs, outputs=3, num_heads=6, kv_num_heads=2, **attributes)


def _single(op: str, note: str, inputs: Operands, attributes: dict[str, Any], outputs: int = 1) -> Case:
    return Case(op, inputs, attributes, opset=23, outputs=outputs, double=False, note=note)


CASES = [*_elementwise(), *_movement(), *_norms(), *_products(), *_attention()]
