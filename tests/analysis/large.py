"""Graphs of many nodes and tiny widths."""

from __future__ import annotations

import onnx_ir as ir

from tests.analysis.graphs import INT64, VOCAB, Builder, layer_norm, rms_norm

WIDTH = 4


def chain(nodes: int) -> ir.Model:
    """One node after another, ``nodes`` of them or a few more: what rotates, what does not, and gains that fold."""
    b = Builder()
    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, WIDTH))), b.input("ids", ["batch", "sequence"], INT64))
    matrix, vector = b.matrix(WIDTH, WIDTH), b.vector(WIDTH, around=1)
    turn = 0
    while len(b.nodes) < nodes:
        match turn % 7:
            case 0 | 3:
                x = b.op("MatMul", x, matrix)
            case 1:
                x = b.op("Add", b.op("Mul", x, vector), b.vector(WIDTH))
            case 2:
                x = b.op("Tanh", x)
                if turn % 2:  # the linear in this branch reads what may not rotate
                    x = b.op("Add", b.op("MatMul", x, matrix), b.op("Softmax", x, axis=-1))
            case 4:
                x = b.op("Add", x, b.op("MatMul", (rms_norm if turn % 2 else layer_norm)(b, x, WIDTH), matrix))
            case 5:
                x = b.op("Transpose", b.op("Transpose", x, perm=[0, 2, 1]), perm=[0, 2, 1])
            case _:
                x = b.op("Mul", b.op("Mul", x, vector), b.constant(0.5))
        turn += 1
    b.result(x, "y")
    b.output("y", ["batch", "sequence", WIDTH])
    return b.model()


def deep(layers: int) -> ir.Model:
    """A decoder of many layers: two heads of 2, LayerNorm and RMSNorm in turn, a gated feed-forward of 6."""
    b = Builder()
    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, WIDTH))), b.input("ids", ["batch", "sequence"], INT64))
    for number in range(layers):
        norm = layer_norm if number % 2 else rms_norm
        h = norm(b, x, WIDTH)
        q, k, v = (_heads(b, b.linear(h, WIDTH, WIDTH, bias=True)) for _ in range(3))
        scores = b.op("Softmax", b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
        mixed = b.op("Transpose", b.op("MatMul", scores, v), perm=[0, 2, 1, 3])
        x = b.op("Add", x, b.linear(b.op("Reshape", mixed, b.ints(0, 0, WIDTH)), WIDTH, WIDTH))
        h = norm(b, x, WIDTH)
        gate = b.linear(h, WIDTH, 6)
        act = b.op("Mul", b.op("Mul", gate, b.op("Sigmoid", gate)), b.linear(h, WIDTH, 6))
        x = b.op("Add", x, b.linear(act, 6, WIDTH))
    b.result(b.linear(rms_norm(b, x, WIDTH), WIDTH, VOCAB), "logits")
    b.output("logits", ["batch", "sequence", VOCAB])
    return b.model()


def _heads(b: Builder, x: str) -> str:
    return b.op("Transpose", b.op("Reshape", x, b.ints(0, 0, 2, 2)), perm=[0, 2, 1, 3])
