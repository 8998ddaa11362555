"""A decoder layer of fused operators, as runtimes like it: skip norms and one attention node."""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from tests.analysis.graphs import FFN, INT64, VOCAB, Builder

HIDDEN = 40
HEADS = 4
GROUPS = 2
WIDTH = 16

Attention = Literal["standard", "grouped", "packed", "multi"]
Rotary = Literal["none", "node", "inside"]


def fused_decoder(attention: Attention, *, rotary: Rotary = "none", layer: bool = False) -> ir.Model:
    """One layer.

    Args:
        attention: Attention of opset 23; GroupQueryAttention with three inputs or a packed one;
            MultiHeadAttention (all heads have their own key and value).
        rotary: positions applied by a node in front, inside GroupQueryAttention, or not at all.
        layer: SkipLayerNormalization with shifts instead of SkipSimplifiedLayerNormalization.
    """
    b = Builder(opset=23)
    groups = HEADS if attention == "multi" else GROUPS
    ids = b.input("ids", ["batch", "sequence"], INT64)
    mask = b.input("mask", ["batch", "total"], INT64)
    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), ids)
    h = _first_norm(b, x, layer)
    if attention == "packed":
        qkv = [b.linear(h, HIDDEN, (HEADS + 2 * groups) * WIDTH, bias=True), "", ""]
    else:
        qkv = [b.linear(h, HIDDEN, n * WIDTH, bias=n == groups) for n in (HEADS, groups, groups)]
    if rotary == "node":
        qkv[0] = _turn(b, qkv[0], HEADS)
        qkv[1] = _turn(b, qkv[1], groups)
    y = _attend(b, qkv, attention, mask, inside=rotary == "inside")
    y = b.linear(y, HEADS * WIDTH, HIDDEN)
    h, x = _skip_norm(b, x, y, layer)
    up = b.linear(h, HIDDEN, FFN, bias=True)
    y = b.linear(b.op("Mul", up, b.op("Sigmoid", up)), FFN, HIDDEN)
    h, _ = _skip_norm(b, x, y, layer)
    b.result(b.linear(h, HIDDEN, VOCAB), "logits")
    b.output("logits", ["batch", "sequence", VOCAB])
    for name in ("present_k", "present_v"):
        b.output(name, ["batch", groups, "total", WIDTH])
    return b.model()


def _first_norm(b: Builder, x: str, layer: bool) -> str:
    gain = b.vector(HIDDEN, around=1)
    if layer:
        return b.op("LayerNormalization", x, gain, b.vector(HIDDEN), axis=-1, epsilon=1e-3)
    return b.op("SimplifiedLayerNormalization", x, gain, axis=-1, epsilon=1e-3)


def _skip_norm(b: Builder, x: str, y: str, layer: bool) -> tuple[str, str]:
    """Norm of ``x + y + bias``, and the sum."""
    op = "SkipLayerNormalization" if layer else "SkipSimplifiedLayerNormalization"
    parts = [b.vector(HIDDEN, around=1), *([b.vector(HIDDEN)] if layer else []), b.vector(HIDDEN)]
    h = b.op(op, x, y, *parts, outputs=4, domain="com.microsoft", epsilon=1e-3)
    node = b.nodes[-1]
    total = node.output[3]
    node.output[1], node.output[2] = "", ""
    return h, total


def _turn(b: Builder, x: str, heads: int) -> str:
    return b.op("RotaryEmbedding", x, b.ints(2), *_tables(b), domain="com.microsoft", num_heads=heads)


def _tables(b: Builder) -> tuple[str, str]:
    """Cosines and sines of 64 positions."""
    angles = np.arange(64)[:, None] * np.geomspace(1.0, 0.01, WIDTH // 2)
    return b.constant(np.cos(angles)), b.constant(np.sin(angles))


def _attend(b: Builder, qkv: list[str], attention: Attention, mask: str, *, inside: bool) -> str:
    groups = HEADS if attention == "multi" else GROUPS
    shape = ["batch", groups, "past", WIDTH]
    pasts = b.input("past_k", shape), b.input("past_v", shape)
    if attention == "standard":
        y = b.op("Attention", *qkv, "", *pasts, outputs=3, q_num_heads=HEADS, kv_num_heads=GROUPS, scale=0.4)
    elif attention == "multi":
        inputs = (*qkv, "", "", "", *pasts)
        y = b.op("MultiHeadAttention", *inputs, outputs=3, domain="com.microsoft", num_heads=HEADS)
    else:
        ends = b.op("Sub", b.op("ReduceSum", mask, b.ints(1), keepdims=0), b.ints(1))
        lengths = (
            b.op("Cast", ends, to=6),
            b.op("Cast", b.op("Gather", b.op("Shape", mask), b.constant(1, np.int64)), to=6),
        )
        tables = _tables(b) if inside else ()
        y = b.op(
            "GroupQueryAttention", *qkv, *pasts, *lengths, *tables,
            outputs=3, domain="com.microsoft", num_heads=HEADS, kv_num_heads=GROUPS, do_rotary=int(inside),
        )  # fmt: skip
    b.nodes[-1].output[1], b.nodes[-1].output[2] = "present_k", "present_v"
    return y
