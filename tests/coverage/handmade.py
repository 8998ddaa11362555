"""Graphs that no exporter at hand writes, node by node. Gains, shifts and biases are random."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx import TensorProto

from tests.analysis.graphs import FLOAT, INT64, VOCAB, Builder

HIDDEN, HEADS, GROUPS, WIDTH, FFN = 36, 4, 2, 12, 40
"""Heads are wider than their share of the hidden size: 4 * 12 = 48."""
HALF = TensorProto.FLOAT16
TEXT: list[int | str] = ["batch", "sequence"]
_BATCH, _LENGTH = 2, 7


def build(name: str, opset: int) -> tuple[ir.Model, tuple[np.ndarray, ...]]:
    """One of the functions below, by name: the model and its inputs (token ids)."""
    b = Builder(seed=len(name), opset=opset)
    ids = b.input("ids", TEXT, INT64)
    b.result(_GRAPHS[name](b, ids), "logits")
    b.output("logits", [*TEXT, VOCAB])
    return b.model(), (np.random.default_rng(0).integers(0, VOCAB, (_BATCH, _LENGTH)),)


def _table(b: Builder, rows: int = VOCAB, width: int = HIDDEN) -> str:
    return b.constant(b.rng.standard_normal((rows, width)))


def _rms(b: Builder, x: str, gain: str | None = None) -> str:
    """Decomposed; the gain may be shared with another norm."""
    squares = b.op("Pow", x, b.constant(2.0))
    mean = b.op("ReduceMean", squares, b.ints(-1)) if b.opset >= 18 else b.op("ReduceMean", squares, axes=[-1])
    root = b.op("Sqrt", b.op("Add", mean, b.constant(1e-3)))
    return b.op("Mul", b.op("Div", x, root), gain or b.vector(HIDDEN, around=1))


def _layer(b: Builder, x: str) -> str:
    return b.op("LayerNormalization", x, b.vector(HIDDEN, around=1), b.vector(HIDDEN), axis=-1, epsilon=1e-3)


def _split_heads(b: Builder, x: str, heads: int) -> str:
    return b.op("Transpose", b.op("Reshape", x, b.ints(0, 0, heads, WIDTH)), perm=[0, 2, 1, 3])


def _attend(b: Builder, q: str, k: str, v: str) -> str:
    """Heads ``[B, H, S, D]``, as many of k and v as of q."""
    scores = b.op("Mul", b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2])), b.constant(0.3))
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), v)
    return b.op("Reshape", b.op("Transpose", mixed, perm=[0, 2, 1, 3]), b.ints(0, 0, HEADS * WIDTH))


def _gated(b: Builder, h: str, linear: Callable[[Builder, str, int, int], str]) -> str:
    gate = linear(b, h, HIDDEN, FFN)
    act = b.op("Mul", b.op("Mul", gate, b.op("Sigmoid", gate)), linear(b, h, HIDDEN, FFN))
    return linear(b, act, FFN, HIDDEN)


def _linear(b: Builder, x: str, rows: int, columns: int) -> str:
    return b.linear(x, rows, columns)


def _decoder(
    b: Builder,
    x: str,
    *,
    linear: Callable[[Builder, str, int, int], str] = _linear,
    norm: Callable[[Builder, str], str] = _rms,
    scale: float | None = None,
) -> str:
    """One layer without positions; ``scale`` multiplies each branch."""
    h = norm(b, x)
    q, k, v = (_split_heads(b, linear(b, h, HIDDEN, HEADS * WIDTH), HEADS) for _ in range(3))
    y = linear(b, _attend(b, q, k, v), HEADS * WIDTH, HIDDEN)
    x = b.op("Add", x, y if scale is None else b.op("Mul", y, b.constant(scale)))
    y = _gated(b, norm(b, x), linear)
    return b.op("Add", x, y if scale is None else b.op("Mul", b.constant(scale), y))


def operators(b: Builder, ids: str) -> str:
    """RMSNormalization, RotaryEmbedding and Attention as operators; q, k, v in one weight, gate and up in one."""
    gain = [b.vector(HIDDEN, around=1) for _ in range(3)]
    x = b.op("Gather", _table(b), ids)
    h = b.op("RMSNormalization", x, gain[0], axis=-1, epsilon=1e-3)
    qkv = b.linear(h, HIDDEN, (HEADS + 2 * GROUPS) * WIDTH, bias=True)
    sizes = [HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH]
    q, k, v = _parts(b, qkv, sizes)
    q, k = _rotary(b, q, HEADS), _rotary(b, k, GROUPS)
    y = b.op("Attention", q, k, v, q_num_heads=HEADS, kv_num_heads=GROUPS, is_causal=1)
    x = b.op("Add", x, b.linear(y, HEADS * WIDTH, HIDDEN))
    h = b.op("RMSNormalization", x, gain[1], axis=-1, epsilon=1e-3)
    gate, up = _parts(b, b.linear(h, HIDDEN, 2 * FFN), [FFN, FFN])
    act = b.op("Mul", b.op("Mul", gate, b.op("Sigmoid", gate)), up)
    x = b.op("Add", x, b.linear(act, FFN, HIDDEN))
    return b.linear(b.op("RMSNormalization", x, gain[2], axis=-1, epsilon=1e-3), HIDDEN, VOCAB)


def _parts(b: Builder, x: str, sizes: list[int]) -> list[str]:
    first = b.op("Split", x, b.ints(*sizes), outputs=len(sizes), axis=-1)
    number = int(first[1:])
    return [f"t{number + k}" for k in range(len(sizes))]


def _rotary(b: Builder, x: str, heads: int) -> str:
    """The operator, with tables of cosines and sines for positions that follow from the shape."""
    length = b.op("Gather", b.op("Shape", x), b.constant(1, np.int64))
    positions = b.op("Range", b.constant(0, np.int64), length, b.constant(1, np.int64))
    positions = b.op("Expand", b.op("Unsqueeze", positions, b.ints(0)), b.op("Shape", b.op("Squeeze", _some(b, x))))
    angles = np.arange(32)[:, None] * b.rng.uniform(0.1, 1, WIDTH // 2)
    tables = [b.constant(f(angles)) for f in (np.cos, np.sin)]
    return b.op("RotaryEmbedding", x, *tables, positions, num_heads=heads)


def _some(b: Builder, x: str) -> str:
    return b.op("Slice", x, b.ints(0), b.ints(1), b.ints(2))


def wrapped(b: Builder, ids: str) -> str:
    """Weights behind Transpose, Cast, Identity, Constant, Concat, Slice, Reshape and a scalar Mul."""
    turn = 0

    def linear(b: Builder, x: str, rows: int, columns: int) -> str:
        nonlocal turn
        turn += 1
        shape = {0: (columns, rows), 4: (rows, columns + 3)}.get(turn % 8, (rows, columns))
        numbers = (b.rng.standard_normal(shape) / np.sqrt(rows)).astype(np.float32)
        match turn % 8:
            case 0:
                weight = b.op("Transpose", b.constant(numbers), perm=[1, 0])
            case 1:
                weight = b.op("Cast", b.constant(numbers, np.float16), to=FLOAT)
            case 2:
                weight = b.op("Identity", b.constant(numbers))
            case 3:
                weight = b.op("Constant", value=_tensor(numbers))
            case 4:
                weight = b.op("Slice", b.constant(numbers), b.ints(0), b.ints(columns), b.ints(1))
            case 5:
                weight = b.op("Concat", b.constant(numbers[:, :7]), b.constant(numbers[:, 7:]), axis=1)
            case 6:
                weight = b.op("Reshape", b.constant(numbers.reshape(-1)), b.ints(rows, columns))
            case _:
                weight = b.op("Mul", b.constant(numbers), b.constant(0.5))
        return b.op("MatMul", x, weight)

    x = b.op("Gather", b.op("Identity", _table(b)), ids)
    x = _decoder(b, _decoder(b, x, linear=linear), linear=linear)
    return linear(b, _rms(b, x), HIDDEN, VOCAB)


def _tensor(array: np.ndarray) -> TensorProto:
    from onnx import numpy_helper

    return numpy_helper.from_array(array)


def shared(b: Builder, ids: str) -> str:
    """Two layers of one set of weights and gains, a third gain in every norm, a head that is the table, transposed."""
    table, gain = _table(b), b.vector(HIDDEN, around=1)
    made: dict[tuple[int, int, int], str] = {}
    turn = 0

    def linear(b: Builder, x: str, rows: int, columns: int) -> str:
        nonlocal turn
        turn += 1
        key = (rows, columns, turn % 7)
        if key not in made:
            made[key] = b.matrix(rows, columns)
        return b.op("MatMul", x, made[key])

    x = b.op("Gather", table, ids)
    for _ in range(2):
        x = _decoder(b, x, linear=linear, norm=lambda b, x: _rms(b, x, gain))
    return b.op("MatMul", _rms(b, x, gain), b.op("Transpose", table, perm=[1, 0]))


def half(b: Builder, ids: str) -> str:
    """float16 but for islands of float32: norms, softmax, and the logits."""

    def linear(b: Builder, x: str, rows: int, columns: int) -> str:
        weight = b.rng.standard_normal((rows, columns)) / np.sqrt(rows)
        y = b.op("MatMul", x, b.constant(weight, np.float16))
        return b.op("Add", y, b.constant(0.3 * b.rng.standard_normal(columns), np.float16))

    def norm(b: Builder, x: str) -> str:
        wide = b.op("Cast", x, to=FLOAT)
        squares = b.op("ReduceMean", b.op("Mul", wide, wide), b.ints(-1))
        root = b.op("Sqrt", b.op("Add", squares, b.constant(1e-3)))
        return b.op("Mul", b.op("Cast", b.op("Div", wide, root), to=HALF), half_vector())

    def half_vector() -> str:
        return b.constant(1 + 0.3 * b.rng.standard_normal(HIDDEN), np.float16)

    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN)), np.float16), ids)
    h = norm(b, x)
    q, k, v = (_split_heads(b, linear(b, h, HIDDEN, HEADS * WIDTH), HEADS) for _ in range(3))
    scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = b.op("Mul", b.op("Cast", scores, to=FLOAT), b.constant(0.3))
    mixed = b.op("MatMul", b.op("Cast", b.op("Softmax", scores, axis=-1), to=HALF), v)
    mixed = b.op("Reshape", b.op("Transpose", mixed, perm=[0, 2, 1, 3]), b.ints(0, 0, HEADS * WIDTH))
    x = b.op("Add", x, linear(b, mixed, HEADS * WIDTH, HIDDEN))
    x = b.op("Add", x, _gated(b, norm(b, x), linear))
    return b.op("Cast", linear(b, norm(b, x), HIDDEN, VOCAB), to=FLOAT)


def interleaved(b: Builder, ids: str) -> str:
    """One weight holds, per head, the rows of q, k and v; no positions; LayerNorm."""
    x = b.op("Gather", _table(b), ids)
    h = _layer(b, x)
    qkv = b.linear(h, HIDDEN, 3 * HEADS * WIDTH, bias=True)
    qkv = b.op("Transpose", b.op("Reshape", qkv, b.ints(0, 0, HEADS, 3, WIDTH)), perm=[3, 0, 2, 1, 4])
    q, k, v = (b.op("Gather", qkv, b.constant(n, np.int64), axis=0) for n in range(3))
    x = b.op("Add", x, b.linear(_attend(b, q, k, v), HEADS * WIDTH, HIDDEN, bias=True))
    h = _layer(b, x)
    act = b.op("Relu", b.linear(h, HIDDEN, FFN, bias=True))
    x = b.op("Add", x, b.linear(act, FFN, HIDDEN, bias=True))
    return b.linear(_layer(b, x), HIDDEN, VOCAB)


def experts(b: Builder, ids: str) -> str:
    """Two of five experts per token, their weights picked by Gather, weighed by the router."""
    count, chosen = 5, 2
    x = b.op("Gather", _table(b), ids)
    h = _rms(b, x)
    q, k, v = (_split_heads(b, b.linear(h, HIDDEN, HEADS * WIDTH), HEADS) for _ in range(3))
    x = b.op("Add", x, b.linear(_attend(b, q, k, v), HEADS * WIDTH, HIDDEN))
    h = _rms(b, x)
    top = b.op("TopK", b.op("Softmax", b.linear(h, HIDDEN, count), axis=-1), b.ints(chosen), outputs=2, axis=-1)
    index = f"t{int(top[1:]) + 1}"
    rows = b.op("Unsqueeze", h, b.ints(2, 3))  # [B, S, 1, 1, hidden]

    def weights(rows: int, columns: int) -> str:
        return b.op("Gather", b.constant(b.rng.standard_normal((count, rows, columns)) / np.sqrt(rows)), index)

    gate, up = (b.op("MatMul", rows, weights(HIDDEN, FFN)) for _ in range(2))
    act = b.op("Mul", b.op("Mul", gate, b.op("Sigmoid", gate)), up)
    made = b.op("Squeeze", b.op("MatMul", act, weights(FFN, HIDDEN)), b.ints(3))
    x = b.op("Add", x, b.op("ReduceSum", b.op("Mul", made, b.op("Unsqueeze", top, b.ints(-1))), b.ints(2), keepdims=0))
    return b.linear(_rms(b, x), HIDDEN, VOCAB)


def scaled_branches(b: Builder, ids: str) -> str:
    """A gain per channel behind every branch, before it is added; LayerNorm in front, with and without biases."""

    def linear(b: Builder, x: str, rows: int, columns: int) -> str:
        y = b.linear(x, rows, columns, bias=rows == FFN)
        return b.op("Mul", y, b.vector(columns, around=1)) if columns == HIDDEN else y

    x = _decoder(b, b.op("Gather", _table(b), ids), linear=linear, norm=_layer)
    return b.linear(_layer(b, x), HIDDEN, VOCAB)


def positions(b: Builder, ids: str) -> str:
    """Learned positions that follow from the shape alone, a constant kind of token, and scalar multipliers."""
    length = b.op("Gather", b.op("Shape", ids), b.constant(1, np.int64))
    known = b.op("Range", b.constant(0, np.int64), length, b.constant(1, np.int64))
    x = b.op("Mul", b.op("Gather", _table(b), ids), b.constant(1.7))
    x = b.op("Add", x, b.op("Unsqueeze", b.op("Gather", _table(b, 32), known), b.ints(0)))
    x = b.op("Add", x, b.op("Gather", _table(b, 2), b.constant([1], np.int64)))
    x = _decoder(b, x, norm=_layer, scale=0.4)
    return b.op("Div", b.linear(_layer(b, x), HIDDEN, VOCAB), b.constant(3.0))


_GRAPHS: dict[str, Callable[[Builder, str], str]] = {
    "operators": operators,
    "wrapped weights": wrapped,
    "shared weights": shared,
    "half with float islands": half,
    "interleaved heads": interleaved,
    "experts": experts,
    "gains behind branches": scaled_branches,
    "known positions": positions,
}
