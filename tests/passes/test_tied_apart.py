"""One table for embedding and head, where only one of the two lies in a space that rotates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.analysis.analyze import analyze
from graphrot.evaluate.double import to_double
from graphrot.folded import materialize
from graphrot.passes import ROTATION_PASSES
from graphrot.plan.build import PlanRequest, build_plan
from graphrot.plan.types import RotationPlan
from tests.analysis.graphs import FFN, HIDDEN, INT64, VOCAB, Builder, rms_norm
from tests.analysis.rotated import run

NARROW = 12


def _stream(b: Builder, x: str) -> str:
    """A residual branch, and the norm behind it."""
    x = b.op("Add", x, b.linear(b.op("Sigmoid", b.linear(rms_norm(b, x), HIDDEN, FFN)), FFN, HIDDEN))
    return rms_norm(b, x)


def _table_alone(b: Builder) -> tuple[str, str]:
    """Narrow embeddings, a factor in front of the stream; the head reads behind an activation."""
    table = b.matrix(VOCAB, NARROW)
    x = _stream(b, b.linear(b.op("Gather", table, "ids"), NARROW, HIDDEN))
    return table, rms_norm(b, b.op("Sigmoid", b.linear(x, HIDDEN, NARROW)), NARROW)


def _head_alone(b: Builder) -> tuple[str, str]:
    """The embedding goes through an activation; the stream begins with positions and ends in the head."""
    table = b.matrix(VOCAB, HIDDEN)
    looked_up = b.linear(b.op("Tanh", b.op("Gather", table, "ids")), HIDDEN, HIDDEN)
    places = b.op("Gather", b.matrix(VOCAB - 1, HIDDEN), "ids")
    return table, _stream(b, b.op("Add", looked_up, places))


def _two_spaces(b: Builder) -> tuple[str, str]:
    """Both rotate, each by a matrix of its own."""
    table = b.matrix(VOCAB, NARROW)
    x = _stream(b, b.linear(b.op("Gather", table, "ids"), NARROW, HIDDEN))
    return table, rms_norm(b, b.linear(x, HIDDEN, NARROW), NARROW)


def _planned(build: Callable[[Builder], tuple[str, str]], rotations: str) -> tuple[ir.Model, RotationPlan]:
    b = Builder()
    b.input("ids", ["batch", "tokens"], INT64)
    table, x = build(b)
    b.result(b.op("MatMul", x, b.op("Transpose", table, perm=[1, 0])), "logits")
    b.output("logits", ["batch", "tokens", VOCAB])
    model = b.model()
    request = PlanRequest(("R1", "R2", "R3", "R4"), rotations)
    return model, build_plan(analyze(model), request, source_hash="0")


@pytest.mark.parametrize("rotations", ["hadamard", "random"])
@pytest.mark.parametrize("build", [_table_alone, _head_alone, _two_spaces], ids=["table", "head", "both"])
def test_the_table_stays_shared_and_the_answers_equal(
    build: Callable[[Builder], tuple[str, str]], rotations: str
) -> None:
    model, plan = _planned(build, rotations)
    assert plan.tie is not None and plan.tie_matrix is not None
    table = any(u.node == plan.tie.embedding.node for r in plan.rotations for u in r.space.producers)
    assert table is (build is not _head_alone)
    model = to_double(model)  # folds are cast to the weights' type
    result = model.clone()
    for kind in ROTATION_PASSES:
        kind(plan)(result)
    materialize(result, None)
    result.graph.sort()
    wide = [v for v in result.graph.initializers.values() if v.shape is not None and VOCAB in tuple(v.shape)]
    assert len(wide) == 1  # still one table
    feeds = {"ids": np.random.default_rng(0).integers(0, VOCAB - 1, (2, 5))}
    expected, found = (run(m, feeds)["logits"] for m in (model, to_double(result)))
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    assert error <= 1e-12
