"""Single operators of com.microsoft, as the analysis follows them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.analysis.analyze import analyze
from tests.analysis.graphs import FFN, HIDDEN, INT64, VOCAB, Builder
from tests.analysis.rotated import relative_error


def _head(b: Builder, x: str) -> ir.Model:
    b.result(b.op("MatMul", x, b.matrix(HIDDEN, VOCAB)), "logits")
    b.output("logits", ["B", "S", VOCAB])
    return b.model()


def _embedded(b: Builder) -> str:
    ids = b.input("input_ids", ["B", "S"], INT64)
    return b.op("Gather", b.matrix(VOCAB, HIDDEN), ids)


def _check(model: ir.Model, expected: dict[tuple[str, str, int], int]) -> None:
    facts = analyze(model)
    assert Counter((space.kind, space.placement, space.dim) for space in facts.spaces) == expected
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 5))
    assert relative_error(model, facts, {"input_ids": ids}, double=False) <= 2e-5


@pytest.mark.parametrize("activation", ["BiasGelu", "FastGelu", "QuickGelu"])
def test_feed_forward(activation: str) -> None:
    """FusedMatMul by constants as they are or transposed; an activation that takes the bias in."""
    b = Builder()
    x = _embedded(b)
    norm = b.op("SimplifiedLayerNormalization", x, b.vector(HIDDEN, around=1), axis=-1, epsilon=1e-3)
    weight = b.constant(b.rng.standard_normal((FFN, HIDDEN)) / np.sqrt(HIDDEN))
    up = b.op("FusedMatMul", norm, weight, domain="com.microsoft", transB=1, alpha=0.7)
    bias = [] if activation == "QuickGelu" else [b.vector(FFN)]
    inner = b.op(activation, up, *bias, domain="com.microsoft")
    down = b.op("FusedMatMul", inner, b.matrix(FFN, HIDDEN), domain="com.microsoft", alpha=1.3)
    _check(_head(b, b.op("Add", x, down)), {("R1", "merged", HIDDEN): 1, ("R4", "online", FFN): 1})


def test_attention_with_one_bias_for_all() -> None:
    b = Builder()
    x = _embedded(b)
    norm = b.op("SimplifiedLayerNormalization", x, b.vector(HIDDEN, around=1), axis=-1, epsilon=1e-3)
    parts = [b.linear(norm, HIDDEN, HIDDEN) for _ in range(3)]
    mixed = b.op("MultiHeadAttention", *parts, b.vector(3 * HIDDEN), domain="com.microsoft", num_heads=4)
    result = b.op("Add", x, b.linear(mixed, HIDDEN, HIDDEN))
    _check(
        _head(b, result),
        {("R1", "merged", HIDDEN): 1, ("R2", "merged", 6): 1, ("R3", "merged", 6): 1, ("O", "online", HIDDEN): 1},
    )


def test_scores_by_a_fused_product() -> None:
    b = Builder()
    x = _embedded(b)
    q, k, v = (b.linear(x, HIDDEN, HIDDEN, bias=True) for _ in range(3))
    scores = b.op("FusedMatMul", q, k, domain="com.microsoft", transB=1, alpha=0.2)
    mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), v)
    result = b.op("Add", x, b.linear(mixed, HIDDEN, HIDDEN))
    _check(
        _head(b, result),
        {("R1", "merged", HIDDEN): 1, ("R2", "merged", HIDDEN): 1, ("R3", "merged", HIDDEN): 1},
    )
