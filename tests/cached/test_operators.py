"""Fused attention operators in every form they take: they answer like the float model afterwards, or they are refused.

One layer without positions, so that every form can be written in a few lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto

from graphrot.analysis.types import AttentionSites
from graphrot.passes.quantize_cache import QuantizeCache
from tests.analysis.graphs import INT64, VOCAB, Builder
from tests.passes_quant.attended import answers, session, sites_of, text
from tests.passes_quant.graphs import PLAN

HEADS, WIDTH, HIDDEN = 4, 8, 24
CLOSE = 0.02
"""Of the largest logit: rows of 8 bits are off by 1/510 of their range, some 1 % of a number."""

IDS = text(3, 9)
WHOLE = np.ones_like(IDS)
LEFT = (np.arange(9) >= np.array([[0], [2], [3]])).astype(np.int64)

FLOAT, INT32, BOOL = TensorProto.FLOAT, TensorProto.INT32, TensorProto.BOOL
MICROSOFT = "com.microsoft"


class Layer(Builder):
    """A decoder whose attention is put in by a function: it gets this, and makes the output and both presents."""

    def __init__(self, *, groups: int, value_width: int = WIDTH, past: list[Any] | None = None) -> None:
        super().__init__(3)
        self.groups, self.value_width = groups, value_width
        self.ids = self.input("input_ids", ["b", "s"], INT64)
        self.padding = self.input("attention_mask", ["b", "t"], INT64)
        x = self.op("Gather", self.constant(self.rng.standard_normal((VOCAB, HIDDEN))), self.ids)
        sizes = (HEADS * WIDTH, groups * WIDTH, groups * value_width)
        self.query, self.key, self.value = (self.linear(x, HIDDEN, size) for size in sizes)
        shapes = [past or ["b", groups, "p", width] for width in (WIDTH, value_width)]
        self.pasts = [self.input(f"past.{kind}", shape) for kind, shape in zip(("key", "value"), shapes, strict=True)]
        self._shapes = shapes

    def three(self, y: str) -> tuple[str, str, str]:
        """The three outputs of a node, by the first."""
        return y, f"t{int(y[1:]) + 1}", f"t{int(y[1:]) + 2}"

    def close(self, y: str, *presents: str) -> ir.Model:
        self.result(self.linear(y, HEADS * self.value_width, VOCAB), "logits")
        self.output("logits", ["b", "s", VOCAB])
        for name, present, shape in zip(("key", "value"), presents, self._shapes, strict=False):
            self.result(present, f"present.{name}")
            self.output(f"present.{name}", [size if size != "p" else "t" for size in shape])
        return self.model()

    def added(self) -> str:
        """``[B, 1, S, T]``: what is added to the scores of padding and of tokens to come."""
        slots = self.op("Range", self.number(0), self.op("Squeeze", self.total()), self.number(1))
        before = self.op("Sub", self.total(), self.op("Shape", self.ids, start=1))
        queries = self.op("Range", self.op("Squeeze", before), self.op("Squeeze", self.total()), self.number(1))
        seen = self.op("LessOrEqual", slots, self.op("Unsqueeze", queries, self.ints(1)))
        seen = self.op("And", seen, self.op("Unsqueeze", self.op("Cast", self.padding, to=BOOL), self.ints(1, 2)))
        return self.op("Where", seen, self.constant(0.0), self.constant(-3.4028235e38))

    def number(self, number: int) -> str:
        return self.constant(number, np.int64)

    def total(self) -> str:
        return self.op("Shape", self.padding, start=1)

    def lengths(self) -> tuple[str, str]:
        """``seqlens_k`` and ``total_sequence_length``."""
        ones = self.op("Sub", self.op("ReduceSum", self.padding, self.ints(1), keepdims=0), self.number(1))
        return self.op("Cast", ones, to=INT32), self.op("Cast", self.op("Squeeze", self.total()), to=INT32)

    def turned(self, x: str, heads: int, width: int = WIDTH) -> str:
        return self.op("Transpose", self.op("Reshape", x, self.ints(0, 0, heads, width)), perm=[0, 2, 1, 3])

    def flat(self, x: str) -> str:
        return self.op("Reshape", self.op("Transpose", x, perm=[0, 2, 1, 3]), self.ints(0, 0, -1))


def _rows(b: Layer, *rest: str, **rules: Any) -> tuple[str, ...]:
    """Attention of the standard domain over ``[B, S, H * D]``."""
    rules = {"q_num_heads": HEADS, "kv_num_heads": b.groups, "scale": 0.3, **rules}
    return b.three(b.op("Attention", b.query, b.key, b.value, b.added(), *b.pasts, *rest, outputs=3, **rules))


def _multi(b: Layer, *, bias: str = "", mask: str = "", added: str = "", **rules: Any) -> tuple[str, ...]:
    rules = {"num_heads": HEADS, "scale": 0.3, "domain": MICROSOFT, **rules}
    rest = (bias, mask, added, *b.pasts)
    return b.three(b.op("MultiHeadAttention", b.query, b.key, b.value, *rest, outputs=3, **rules))


def _padded(b: Layer) -> tuple[str, ...]:
    return _multi(b, mask=b.op("Cast", b.padding, to=INT32), unidirectional=1)


def _grouped(b: Layer, *, bias: str = "", sink: str = "", packed: bool = False, **rules: Any) -> tuple[str, ...]:
    rules = {"num_heads": HEADS, "kv_num_heads": b.groups, "scale": 0.3, "domain": MICROSOFT, **rules}
    given = (b.op("Concat", b.query, b.key, b.value, axis=-1), "", "") if packed else (b.query, b.key, b.value)
    rest = ("", "", "", bias, sink) if bias or sink else ()
    return b.three(b.op("GroupQueryAttention", *given, *b.pasts, *b.lengths(), *rest, outputs=3, **rules))


def _sloped(b: Layer) -> tuple[str, ...]:
    """A bias that falls with distance, ``[1, H, S, T]``."""
    slots = b.op("Cast", b.op("Range", b.number(0), b.op("Squeeze", b.total()), b.number(1)), to=FLOAT)
    row = b.op("Mul", slots, b.constant(np.geomspace(0.05, 0.8, HEADS).reshape(1, HEADS, 1, 1)))
    shape = b.op("Concat", b.ints(1, HEADS), b.op("Shape", b.ids, start=1), b.total(), axis=0)
    return _grouped(b, bias=b.op("Expand", row, shape))


def _products(b: Layer) -> tuple[str, ...]:
    """Spelled out, with FusedMatMul for the scores."""
    new = [b.turned(x, b.groups, width) for x, width in ((b.key, WIDTH), (b.value, b.value_width))]
    made = [b.op("Concat", past, x, axis=2) for past, x in zip(b.pasts, new, strict=True)]
    scores = b.op("FusedMatMul", b.turned(b.query, HEADS), made[0], alpha=0.3, transB=1, domain=MICROSOFT)
    weights = b.op("Softmax", b.op("Add", scores, b.added()), axis=-1)
    return b.flat(b.op("MatMul", weights, made[1])), *made


def _model(attend: Callable[[Layer], tuple[str, ...]], groups: int = 2, **sizes: Any) -> ir.Model:
    b = Layer(groups=groups, **sizes)
    return b.close(*attend(b))


def _stored(model: ir.Model, found: AttentionSites) -> ir.Model:
    QuantizeCache(PLAN, found, bits=8)(model)
    model.graph.sort()
    return model


@pytest.mark.parametrize(
    ("attend", "groups", "paddings", "causal", "terms"),
    [
        (_rows, 2, (WHOLE, LEFT), True, 0),
        (lambda b: _rows(b, is_causal=1, softcap=0.7), 2, (WHOLE,), True, 0),
        (_padded, 4, (WHOLE, LEFT), True, 0),
        (lambda b: _multi(b, unidirectional=1), 4, (WHOLE,), True, 0),
        (_products, 4, (WHOLE, LEFT), True, 0),
        (_sloped, 2, (WHOLE,), True, 1),
    ],
    ids=[
        "Attention of rows",
        "causal and bounded",
        "padding as numbers",
        "padding that is not read",
        "FusedMatMul",
        "GroupQueryAttention's bias",
    ],
)
def test_it_answers_like_the_float_model(
    attend: Callable[[Layer], tuple[str, ...]], groups: int, paddings: tuple[np.ndarray, ...], causal: bool, terms: int
) -> None:
    stored = _model(attend, groups)
    found = sites_of(stored)
    assert not found.refused
    assert [(site.causal, len(site.mask)) for site in found.sites] == [(causal, terms)]
    runs, floats = session(_stored(stored, found)), session(_model(attend, groups))
    for padding in paddings:
        first = [4, 1, 4] if len(found.sites[0].seqlens) == 0 else [9]
        wanted, got = (answers(one, IDS, padding, first)[padding.astype(bool)] for one in (floats, runs))
        assert np.abs(got - wanted).max() < CLOSE * np.abs(wanted).max()


def _one_cache(b: Layer) -> tuple[str, ...]:
    """Two attentions over one cache."""
    first, *presents = _products(b)
    scores = b.op("FusedMatMul", b.turned(b.query, HEADS), presents[0], alpha=0.9, transB=1, domain=MICROSOFT)
    weights = b.op("Softmax", b.op("Add", scores, b.added()), axis=-1)
    return b.op("Add", first, b.flat(b.op("MatMul", weights, presents[1]))), *presents


def _forgetful(b: Layer) -> tuple[str, ...]:
    """Keys and values are new in each call."""
    y, *_ = _rows(b)
    node = b.nodes[-1]
    del node.input[4:], node.output[1:]
    for _ in b.pasts:
        b.inputs.pop()
    return (y,)


def _together(b: Layer) -> tuple[str, ...]:
    """Keys and values in one cache ``[2, B, H, T, D]``."""
    new = b.op("Concat", *(b.op("Unsqueeze", b.turned(x, 4), b.ints(0)) for x in (b.key, b.value)), axis=0)
    b.inputs.pop()
    made = b.op("Concat", b.pasts[0], new, axis=3)
    keys, values = (b.op("Gather", made, b.constant(place, np.int64), axis=0) for place in (0, 1))
    scores = b.op("MatMul", b.turned(b.query, HEADS), b.op("Transpose", keys, perm=[0, 1, 3, 2]))
    weights = b.op("Softmax", b.op("Add", scores, b.added()), axis=-1)
    return b.flat(b.op("MatMul", weights, values)), made


def _lengths(b: Layer) -> tuple[str, ...]:
    """Caches that are kept elsewhere, with the lengths of their rows."""
    joined = [b.op("Concat", p, b.turned(x, 2), axis=2) for p, x in zip(b.pasts, (b.key, b.value), strict=True)]
    counts = b.op("ReduceSum", b.padding, b.ints(1), keepdims=0)
    query = b.turned(b.query, HEADS)
    y = b.op("Attention", query, *joined, "", "", "", counts, scale=0.3, is_causal=1)
    b.opset = 24
    return b.flat(y), *joined


@pytest.mark.parametrize(
    ("attend", "sizes", "words"),
    [
        (_products, {"groups": 4, "value_width": 6}, "its keys and values differ in heads or width"),
        (_forgetful, {}, "it has no cache"),
        (_one_cache, {"groups": 4}, "other attention reads the same cache"),
        (_together, {"groups": 4, "past": [2, "b", 4, "p", WIDTH]}, "its cache is not of the form"),
        (lambda b: _grouped(b, packed=True), {}, "its keys and values are not given one by one"),
        (lambda b: _grouped(b, sink=b.vector(HEADS)), {}, "it adds a sink to the softmax"),
        (lambda b: _grouped(b, smooth_softmax=1), {}, "it adds a sink to the softmax"),
        (lambda b: _multi(b, bias=b.vector(3 * HEADS * WIDTH)), {"groups": 4}, "it adds a bias"),
        (_lengths, {}, "nonpad_kv_seqlen"),
    ],
    ids=["widths", "no cache", "one cache", "both in one", "packed", "sink", "smooth", "bias", "lengths of rows"],
)
def test_what_cannot_be_replaced_is_refused(
    attend: Callable[[Layer], tuple[str, ...]], sizes: dict[str, Any], words: str
) -> None:
    found = sites_of(_model(attend, **sizes))
    assert not found.sites
    assert found.refused and all(words in refusal.reason and refusal.kind == "KV" for refusal in found.refused)
