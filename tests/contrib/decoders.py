"""Decoders of com.microsoft's attention operators, as scripts for GPT-2 write them; built by hand."""

from __future__ import annotations

import onnx_ir as ir
from onnx import TensorProto

from tests.analysis.graphs import INT64, VOCAB, Builder

HIDDEN, HEADS, WIDTH, FFN, POSITIONS = 36, 3, 12, 40, 64


def decoder(attention: str = "Attention", *, layers: int = 2, opset: int = 17, fused: bool = False) -> ir.Model:
    """Learned positions, LayerNorms, an FFN with FastGelu; keys and values in one cache ``[2, B, H, T, D]``.

    Args:
        attention: ``Attention``; ``packed``: MultiHeadAttention of one tensor, without a cache; or the name of an
            operator that takes the inputs of Attention.
        layers: how many.
        opset: of the standard domain.
        fused: the matmuls of the FFN and the head are FusedMatMul, with a factor or transposed.
    """
    b = Builder(0, opset)
    ids = b.input("input_ids", ["batch", "sequence"], INT64)
    positions = b.input("position_ids", ["batch", "sequence"], INT64)
    mask = b.input("attention_mask", ["batch", "total" if attention != "packed" else "sequence"], INT64)
    x = b.op("Add", _lookup(b, VOCAB, ids), _lookup(b, POSITIONS, positions))
    mask = b.op("Cast", mask, to=TensorProto.INT32)
    presents = []
    for layer in range(layers):
        h = _norm(b, x)
        if attention == "packed":
            y = _packed(b, h, mask)
        else:
            past = b.input(f"past_{layer}", [2, "batch", HEADS, "past", WIDTH])
            weights = b.matrix(HIDDEN, 3 * HIDDEN), b.vector(3 * HIDDEN)
            rules = {"num_heads": HEADS, **({"unidirectional": 1} if attention == "Attention" else {})}
            y = b.op(attention, h, *weights, mask, past, outputs=2, domain="com.microsoft", **rules)
            presents.append(f"t{int(y[1:]) + 1}")
        x = b.op("Add", x, b.linear(y, HIDDEN, HIDDEN, bias=True))
        h = _norm(b, x)
        up = _fused(b, h, HIDDEN, FFN, alpha=0.7) if fused else b.linear(h, HIDDEN, FFN)
        inner = b.op("FastGelu", up, b.vector(FFN), domain="com.microsoft")
        down = _fused(b, inner, FFN, HIDDEN, transB=1) if fused else b.linear(inner, FFN, HIDDEN)
        x = b.op("Add", x, b.op("Add", down, b.vector(HIDDEN)))
    h = _norm(b, x)
    b.result(_fused(b, h, HIDDEN, VOCAB, alpha=1.5, transB=1) if fused else b.linear(h, HIDDEN, VOCAB), "logits")
    b.output("logits", ["batch", "sequence", VOCAB])
    for layer, present in enumerate(presents):
        b.result(present, f"present_{layer}")
        b.output(f"present_{layer}", [2, "batch", HEADS, "total", WIDTH])
    return b.model()


def _lookup(b: Builder, rows: int, indices: str) -> str:
    return b.op("Gather", b.constant(b.rng.standard_normal((rows, HIDDEN))), indices)


def _norm(b: Builder, x: str) -> str:
    return b.op("LayerNormalization", x, b.vector(HIDDEN, around=1), b.vector(HIDDEN), axis=-1, epsilon=1e-5)


def _packed(b: Builder, h: str, mask: str) -> str:
    rows = b.op("Reshape", b.linear(h, HIDDEN, 3 * HIDDEN), b.ints(0, 0, HEADS, 3, WIDTH))
    rules = {"num_heads": HEADS, "unidirectional": 1}
    return b.op("MultiHeadAttention", rows, "", "", b.vector(3 * HIDDEN), mask, domain="com.microsoft", **rules)


def _fused(b: Builder, x: str, rows: int, columns: int, **rules: float) -> str:
    weight = b.matrix(columns, rows) if rules.get("transB") else b.matrix(rows, columns)
    return b.op("FusedMatMul", x, weight, domain="com.microsoft", **rules)
