"""Small decoders whose attention is written in different ways, and how they are run with either kind of cache.

4 query heads, 2 heads of keys and values of 8 channels; positions turn a part of a head. Nothing says
in its name what it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto

from graphrot.analysis.analyze import analyze
from graphrot.analysis.cached.find import find_attention
from graphrot.analysis.types import AttentionSites
from graphrot.model.apart import take_apart
from tests.analysis.graphs import INT64, VOCAB, Builder

HEADS, GROUPS, WIDTH, TURNED, HIDDEN = 4, 2, 8, 4, 24
FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL


@dataclass(frozen=True)
class Written:
    """How attention is written.

    ``form``: plain, stacked (batch and heads in one axis), attention (the standard operator), multi_head.
    ``mask``: added, chosen (Where), table (a causal table that is cut to size), square
    (the same, made of all tokens by all), slopes (a bias that falls with
    distance), tokens (padding told from the ids), whole (nothing is hidden) or sunk (a sink takes part); and what
    is causal for a few tokens only: prefix (the first 16 see each other), blocks (of 32), ahead (12 tokens to come
    are seen) and one_wide (all heads but one have a window of 12).
    """

    form: str = "plain"
    mask: str = "added"
    window: int = 0
    softcap: float = 0.0
    late_scale: bool = False
    layers: int = 1
    groups: int = GROUPS


def decoder(written: Written) -> ir.Model:
    """``input_ids, attention_mask, position_ids``, caches ``[B, H, T, D]``; opset 23."""
    b = Builder(3)
    ids = b.input("input_ids", ["b", "s"], INT64)
    padding = b.input("attention_mask", ["b", "t"], INT64)
    positions = b.input("position_ids", ["b", "s"], INT64)
    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), ids)
    presents = []
    mask = ""
    for layer in range(written.layers):
        past = [b.input(f"past.{layer}.{kind}", ["b", written.groups, "p", WIDTH]) for kind in ("key", "value")]
        if not mask and written.mask != "whole":
            mask = _mask(b, written, ids, padding, past[0])
        y, made = _attention(b, written, x, positions, past, mask)
        presents += made
        x = b.op("Add", x, b.linear(y, HEADS * WIDTH, HIDDEN))
    b.result(b.linear(x, HIDDEN, VOCAB), "logits")
    b.output("logits", ["b", "s", VOCAB])
    for number, present in enumerate(presents):
        name = f"present.{number // 2}.{('key', 'value')[number % 2]}"
        b.result(present, name)
        b.output(name, ["b", written.groups, "t", WIDTH])
    return b.model()


def _length(b: Builder, value: str, axis: int) -> str:
    return b.op("Shape", value, start=axis, end=axis + 1)


def _mask(b: Builder, written: Written, ids: str, padding: str, past: str) -> str:
    """True where a query sees a slot (``chosen``), or numbers to add; ``[B, 1, S, T]``."""
    before, new = _length(b, past, 2), _length(b, ids, 1)
    total = b.op("Add", before, new)
    scalar = [b.op("Squeeze", value) for value in (before, total)]
    zero, one = b.constant(0, np.int64), b.constant(1, np.int64)
    slots = b.op("Range", zero, scalar[1], one)
    queries = b.op("Unsqueeze", b.op("Range", scalar[0], scalar[1], one), b.ints(1))
    if written.mask == "square":
        ones = b.op("Expand", b.constant(1.0), b.op("Concat", total, total, axis=0))
        seen = b.op("Cast", b.op("Slice", b.op("Trilu", ones, upper=0), before, total, b.ints(0)), to=BOOL)
    elif written.mask == "table":
        table = b.constant(np.tril(np.ones((1, 1, 64, 64))), np.bool_)
        rows = b.op("Slice", table, before, total, b.ints(2))
        seen = b.op("Slice", rows, b.ints(0), total, b.ints(3))
    else:
        seen = b.op("LessOrEqual", slots, queries)
    if written.mask == "prefix":
        first = b.constant(16, np.int64)
        seen = b.op("Or", seen, b.op("And", b.op("Less", slots, first), b.op("Less", queries, first)))
    if written.mask == "blocks":
        size = b.constant(32, np.int64)
        seen = b.op("LessOrEqual", b.op("Div", slots, size), b.op("Div", queries, size))
    if written.mask == "ahead":
        seen = b.op("LessOrEqual", slots, b.op("Add", queries, b.constant(12, np.int64)))
    if written.mask == "one_wide":
        near = b.op("Greater", slots, b.op("Sub", queries, b.constant(12, np.int64)))
        wide = b.constant(np.arange(HEADS).reshape(HEADS, 1, 1) == 0, np.bool_)
        seen = b.op("And", seen, b.op("Or", near, wide))
    if written.window:
        near = b.op("Greater", slots, b.op("Sub", queries, b.constant(written.window, np.int64)))
        seen = b.op("And", seen, near)
    if written.mask == "tokens":
        known = b.op("Cast", padding, to=BOOL)
        odd = b.op("Greater", b.op("ReduceMax", ids, b.ints(1), keepdims=1), b.constant(VOCAB - 3, np.int64))
        known = b.op("And", known, b.op("Not", odd))
    else:
        known = b.op("Cast", padding, to=BOOL)
    seen = b.op("And", seen, b.op("Unsqueeze", known, b.ints(1, 2)))
    if written.mask in ("chosen", "tokens"):
        return seen
    numbers = b.op("Where", seen, b.constant(0.0), b.constant(-3.4028235e38))
    if written.mask != "slopes":
        return numbers
    distance = b.op("Cast", b.op("Sub", slots, queries), to=FLOAT)
    slopes = b.constant(-np.geomspace(0.05, 0.8, HEADS).reshape(HEADS, 1, 1) * -1)
    return b.op("Add", numbers, b.op("Mul", slopes, distance))


def _turned(b: Builder, x: str, positions: str) -> str:
    """Positions turn the first channels of each head of ``[B, H, S, D]``."""
    half = TURNED // 2
    angles = b.op("Mul", b.op("Unsqueeze", b.op("Cast", positions, to=FLOAT), b.ints(-1)), b.vector(half, spread=1))
    angles = b.op("Unsqueeze", b.op("Concat", angles, angles, axis=-1), b.ints(1))
    head, rest = (b.op("Slice", x, b.ints(a), b.ints(e), b.ints(3)) for a, e in ((0, TURNED), (TURNED, WIDTH)))
    first, second = (b.op("Slice", head, b.ints(a), b.ints(e), b.ints(3)) for a, e in ((0, half), (half, TURNED)))
    swapped = b.op("Concat", b.op("Neg", second), first, axis=3)
    moved = b.op("Add", b.op("Mul", head, b.op("Cos", angles)), b.op("Mul", swapped, b.op("Sin", angles)))
    return b.op("Concat", moved, rest, axis=3)


def _heads(b: Builder, x: str, heads: int) -> str:
    shaped = b.op("Reshape", b.linear(x, HIDDEN, heads * WIDTH), b.ints(0, 0, heads, WIDTH))
    return b.op("Transpose", shaped, perm=[0, 2, 1, 3])


def _attention(
    b: Builder, written: Written, x: str, positions: str, past: list[str], mask: str
) -> tuple[str, list[str]]:
    query, key = _turned(b, _heads(b, x, HEADS), positions), _turned(b, _heads(b, x, written.groups), positions)
    value = _heads(b, x, written.groups)
    if written.form == "attention":
        operands = [query, key, value, mask, *past]
        y = b.op("Attention", *operands, outputs=3, softcap=written.softcap, scale=0.3)
        number = int(y[1:])
        return _flat(b, y), [f"t{number + 1}", f"t{number + 2}"]
    if written.form == "multi_head":
        query, key, value = (_flat(b, part) for part in (query, key, value))
        rules = {"num_heads": HEADS, "scale": 0.3}
        y = b.op(
            "MultiHeadAttention", query, key, value, "", "", mask, *past, outputs=3, domain="com.microsoft", **rules
        )
        number = int(y[1:])
        return y, [f"t{number + 1}", f"t{number + 2}"]
    made = [b.op("Concat", old, new, axis=2) for old, new in zip(past, (key, value), strict=True)]
    keys, values = (_repeated(b, part, HEADS // written.groups) for part in made)
    keys = b.op("Transpose", keys, perm=[0, 1, 3, 2])
    if not written.late_scale:
        query = b.op("Mul", query, b.constant(0.3))
    batch = _length(b, query, 0)
    if written.form == "stacked":
        query, keys, values = (b.op("Reshape", p, _stack(b, p)) for p in (query, keys, values))
    scores = b.op("MatMul", query, keys)
    if written.form == "stacked":
        shape = b.op("Concat", batch, b.ints(HEADS), _length(b, scores, 1), _length(b, scores, 2), axis=0)
        scores = b.op("Reshape", scores, shape)
    if written.late_scale:
        scores = b.op("Div", scores, b.constant(1 / 0.3))
    if written.softcap:
        scores = b.op("Div", scores, b.constant(written.softcap))
        scores = b.op("Mul", b.op("Tanh", scores), b.constant(written.softcap))
    if written.mask in ("chosen", "tokens"):
        scores = b.op("Where", mask, scores, b.constant(-1e9))
    elif mask:
        scores = b.op("Add", scores, mask)
    if written.mask == "sunk":
        sink = b.vector(HEADS)
        column = b.op("Reshape", sink, b.ints(1, HEADS, 1, 1))
        like = b.op("Slice", scores, b.ints(0), b.ints(1), b.ints(3))
        scores = b.op("Concat", scores, b.op("Add", b.op("Mul", like, b.constant(0.0)), column), axis=3)
    weights = b.op("Softmax", scores, axis=-1)
    if written.mask == "sunk":
        weights = b.op("Slice", weights, b.ints(0), b.ints(-1), b.ints(3))
    if written.form == "stacked":
        weights = b.op("Reshape", weights, _stack(b, weights))
    y = b.op("MatMul", weights, values)
    if written.form == "stacked":
        y = b.op("Reshape", y, b.op("Concat", batch, b.ints(HEADS, -1, WIDTH), axis=0))
    return _flat(b, y), made


def _stack(b: Builder, value: str) -> str:
    """The shape ``[B * H, ...]`` of ``[B, H, ...]``."""
    return b.op("Concat", b.ints(-1), _length(b, value, 2), _length(b, value, 3), axis=0)


def _repeated(b: Builder, x: str, times: int) -> str:
    """Each head as many times, one copy behind the other, as exporters write it."""
    if times == 1:
        return x
    batch, length = _length(b, x, 0), _length(b, x, 2)
    shape = b.op("Concat", batch, b.ints(HEADS // times, times), length, b.ints(WIDTH), axis=0)
    spread = b.op("Expand", b.op("Unsqueeze", x, b.ints(2)), shape)
    return b.op("Reshape", spread, b.op("Concat", batch, b.ints(HEADS), length, b.ints(WIDTH), axis=0))


def _flat(b: Builder, x: str) -> str:
    return b.op("Reshape", b.op("Transpose", x, perm=[0, 2, 1, 3]), b.ints(0, 0, -1))


def sites_of(model: ir.Model) -> AttentionSites:
    """What the analysis finds."""
    take_apart(model, rotary=True)
    return find_attention(model, analyze(model).caches)


def session(model: ir.Model | Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    source = str(model) if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


_TYPES = {
    "tensor(float)": np.float32,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
    "tensor(float16)": np.float16,
}


def answers(runs: ort.InferenceSession, ids: np.ndarray, padding: np.ndarray, steps: list[int]) -> np.ndarray:
    """Logits ``[B, S, V]`` of tokens that come in steps; each step takes the cache of the one before."""
    taken = {value.name for value in runs.get_inputs()}
    cache = {
        value.name: np.zeros((len(ids), value.shape[1], 0, value.shape[3]), _TYPES[value.type])
        for value in runs.get_inputs()
        if value.name.startswith("past")
    }
    found, start = [], 0
    positions = np.maximum(padding.cumsum(axis=1) - 1, 0)
    for end in np.cumsum(steps):
        feeds = {
            "input_ids": ids[:, start:end],
            "attention_mask": padding[:, :end],
            "position_ids": positions[:, start:end],
        }
        outputs = runs.run(None, {**{name: array for name, array in feeds.items() if name in taken}, **cache})
        given = {value.name: array for value, array in zip(runs.get_outputs(), outputs, strict=True)}
        cache = {name: given[re.sub("past(_key_values)?", "present", name)] for name in cache}
        found.append(outputs[0])
        start = end
    return np.concatenate(found, axis=1)


def text(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(1, VOCAB - 5, (batch, length))
