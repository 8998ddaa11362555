"""Small decoders with LayerNorms, and what the passes make of them, in float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import SpaceKind
from graphrot.evaluate.double import to_double
from graphrot.folded import materialize
from graphrot.passes import ROTATION_PASSES
from graphrot.plan.build import PlanRequest
from graphrot.plan.types import RotationPlan
from tests.analysis.graphs import FFN, HIDDEN, INT64, VOCAB, Builder, Hook, feeds_for, layer_op
from tests.analysis.rotated import run

KINDS: tuple[SpaceKind, ...] = ("R1", "R2", "R4")
"""Without R3: heads of 6 channels have no Hadamard matrix, and the function of other transforms works in float32."""


def request(*, bits: tuple[int | None, int | None] = (None, None), kinds: tuple[SpaceKind, ...] = KINDS) -> PlanRequest:
    """Hadamard matrices; ``bits`` of embedding and head."""
    return PlanRequest(kinds, "hadamard", embedding_bits=bits[0], head_bits=bits[1])


def applied(model: ir.Model, plan: RotationPlan) -> ir.Model:
    """A copy after all rotation passes, its weights written."""
    result = model.clone()
    for kind in ROTATION_PASSES:
        kind(plan)(result)
    materialize(result, None)
    result.graph.sort()
    return result


def error(model: ir.Model, plan: RotationPlan, *, double: bool = True) -> float:
    """Largest relative error of the outputs after the passes (caches start empty)."""
    source = to_double(model) if double else model
    result = applied(source, plan)
    floats = np.float64 if double else np.float32
    feeds = {
        name: array.astype(floats) if np.issubdtype(array.dtype, np.floating) else array
        for name, array in feeds_for(model, past=0).items()
    }
    expected, found = run(source, feeds), run(to_double(result) if double else result, feeds)
    logits = expected["logits"]
    return float(np.abs(found["logits"] - logits).max() / np.abs(logits).max())


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def activated(b: Builder, x: str) -> str:
    return b.op("Mul", x, b.op("Sigmoid", x))


def transform(b: Builder, h: str) -> str:
    """The head of a masked language model: dense, activation, LayerNorm."""
    return layer_op(b, activated(b, b.linear(h, HIDDEN, HIDDEN, bias=True)))


def raw_transform(b: Builder, h: str) -> str:
    """The same and one more linear, and a branch that reads the activation as it is."""
    act = activated(b, b.linear(h, HIDDEN, HIDDEN, bias=True))
    return b.op("Add", b.linear(layer_op(b, act), HIDDEN, HIDDEN), b.linear(act, HIDDEN, HIDDEN))


def raw_branch(b: Builder, x: str) -> str:
    """A branch of the stream without a norm in front."""
    return b.op("Add", x, b.linear(activated(b, b.linear(x, HIDDEN, FFN)), FFN, HIDDEN))


def tied_decoder(final: Hook | None = None) -> ir.Model:
    """Embedding, positions, one branch, LayerNorms; the head reads the embedding's table, transposed."""
    b = Builder(seed=5, opset=21)
    ids = b.input("ids", ["batch", "sequence"], INT64)
    table = b.constant(b.rng.standard_normal((VOCAB, HIDDEN)))
    x = b.op("Add", b.op("Gather", table, ids), b.vector(HIDDEN))
    h = activated(b, b.linear(layer_op(b, x), HIDDEN, FFN, bias=True))
    x = b.op("Add", x, b.linear(h, FFN, HIDDEN, bias=True))
    h = layer_op(b, x)
    h = final(b, h) if final else h
    b.result(b.op("MatMul", h, b.op("Transpose", table, perm=[1, 0])), "logits")
    b.output("logits", ["batch", "sequence", VOCAB])
    return b.model()
