"""The transform across heads (kind O): alone and behind R2, in every form of attention, and what refuses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import graphrot
from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import Facts
from graphrot.cli.convert import summary
from graphrot.converted import Converted
from graphrot.errors import InputRefused
from graphrot.evaluate.double import to_double
from graphrot.folded import materialize
from graphrot.passes import ROTATION_PASSES
from graphrot.plan.build import PlanRequest, build_plan
from graphrot.plan.serialize import load_plan, plan_from_json, plan_to_json
from graphrot.plan.types import RotationPlan
from tests.analysis.fused import fused_decoder
from tests.analysis.graphs import GROUPS, HEADS, HIDDEN, WIDTH, Builder, Hook, decoder, feeds_for
from tests.analysis.rotated import relative_error, run
from tests.contrib.built import built
from tests.coverage.graphs import graph
from tests.exported import tiny_onnx

DOUBLE, SINGLE, WRONG = 1e-12, 2e-5, 1e-3
HARTLEY = 1e-6
"""An online R2 of 6 channels is Hartley's matrix, which the file holds in float32."""
SIDE = HEADS * WIDTH
KINDS: list[tuple[Any, ...]] = [("O",), ("R1", "R2", "R4", "O")]


def _plan(facts: Facts, kinds: tuple[Any, ...]) -> RotationPlan:
    return build_plan(facts, PlanRequest(kinds, "hadamard"), source_hash="0")


def _error(model: ir.Model, plan: RotationPlan, feeds: dict[str, np.ndarray], *, double: bool = True) -> float:
    """Relative error of the passes; caches are fed in their own basis, so they must be empty where they rotate."""
    source = to_double(model) if double else model
    result = source.clone()
    for kind in ROTATION_PASSES:
        kind(plan)(result)
    materialize(result, None)
    result = to_double(result) if double else result  # the transform's function works in float32
    floats = np.float64 if double else np.float32
    feeds = {n: x.astype(floats) if np.issubdtype(x.dtype, np.floating) else x for n, x in feeds.items()}
    expected, found = run(source, feeds), run(result, feeds)
    return float(np.abs(found["logits"] - expected["logits"]).max() / np.abs(expected["logits"]).max())


def _across(facts: Facts) -> list[tuple[int, str, int]]:
    return [(s.dim, s.online[0].op, len(s.consumers)) for s in facts.spaces if s.kind == "O"]


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@pytest.mark.parametrize(("name", "width"), [("llama", 48), ("gpt2", 80)])
def test_exact_in_exports(name: str, width: int, kinds: tuple[Any, ...]) -> None:
    """Grouped heads; Gemm with biases; heads that are wider together than the stream."""
    model = ir.load(tiny_onnx(name))
    facts = analyze(model)
    plan = _plan(facts, kinds)
    layers = sum(r.space.kind == "O" for r in plan.rotations)
    assert layers == len(_across(facts)) >= 2
    assert all(r.matrix.dim == width and r.placement == "online" for r in plan.rotations if r.space.kind == "O")
    assert _error(model, plan, feeds_for(model, past=0)) <= DOUBLE


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_exact_with_cross_attention(kinds: tuple[Any, ...]) -> None:
    source = graph("whisper_decoder", "torchscript", 17)
    model = source.model.clone()
    model.graph.outputs[0].name = "logits"
    facts = analyze(model)
    assert _across(facts) == [(60, "Reshape", 1)] * 4
    feeds = {v.name or "": x for v, x in zip(model.graph.inputs, source.inputs, strict=True)}
    assert _error(model, _plan(facts, kinds), feeds, double=False) <= SINGLE


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_exact_with_interleaved_heads(kinds: tuple[Any, ...]) -> None:
    source = graph("interleaved heads", "by hand", 19)
    facts = analyze(source.model)
    assert _across(facts) == [(48, "Reshape", 1)]
    assert _error(source.model, _plan(facts, kinds), {"ids": source.inputs[0]}) <= DOUBLE


@pytest.mark.parametrize(
    ("attention", "op"),
    [("standard", "Attention"), ("grouped", "GroupQueryAttention"), ("packed", "GroupQueryAttention"),
     ("multi", "MultiHeadAttention")],
)  # fmt: skip
def test_exact_behind_fused_attention(attention: Any, op: str) -> None:
    model = fused_decoder(attention, rotary="none")
    facts = analyze(model)
    assert _across(facts) == [(64, op, 1)]
    only = tuple(s for s in facts.spaces if s.kind == "O")
    for spaces in (only, facts.spaces):
        assert relative_error(model, facts, feeds_for(model, batch=1), spaces=spaces, double=False) <= 1e-5


def _sub_norm(b: Builder, x: str) -> str:
    """A norm over all heads, with gain and shift, in front of the projection."""
    centred = b.op("Sub", x, b.op("ReduceMean", x, b.ints(-1), keepdims=1))
    root = b.op("Sqrt", b.op("Add", b.op("ReduceMean", b.op("Mul", centred, centred), b.ints(-1)), b.constant(1e-3)))
    return b.op("Add", b.op("Mul", b.op("Div", centred, root), b.vector(SIDE, around=1)), b.vector(SIDE))


def _gain(b: Builder, x: str) -> str:
    return b.op("Mul", x, b.vector(SIDE, around=1))


def _moved(b: Builder, x: str) -> str:
    """Through shapes, a type and a half, back to what it was."""
    flat = b.op("Reshape", b.op("Identity", x), b.ints(-1, SIDE))
    again = b.op("Reshape", flat, b.op("Shape", x))
    return b.op("Mul", b.op("Cast", b.op("Cast", again, to=TensorProto.DOUBLE), to=TensorProto.FLOAT), b.constant(0.5))


def _two_gains(b: Builder, x: str) -> str:
    """Another linear reads the heads by a gain of its own."""
    other = b.linear(b.op("Mul", x, b.vector(SIDE, around=1)), SIDE, SIDE)
    return b.op("Add", b.op("Mul", x, b.vector(SIDE, around=1)), b.op("Mul", b.op("Tanh", other), b.constant(0.0)))


def _masked(b: Builder, x: str) -> str:
    return b.op("Mul", x, b.constant(b.rng.uniform(0.5, 2, (GROUPS, 1, WIDTH))))


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True}, {"merged": _gain}, {"merged": _sub_norm}, {"merged": _moved}, {"values": _masked}],
    ids=["plain", "bias", "gain", "norm", "moved", "R2 online"],
)
def test_exact_with_something_in_front(options: dict[str, Any], kinds: tuple[Any, ...]) -> None:
    """A gain that folds into the projection is folded there before R2 and O, also where O alone is taken."""
    model, _ = decoder(cache=False, **options)
    facts = analyze(model)
    plan = _plan(facts, kinds)
    assert [r.space.dim for r in plan.rotations if r.space.kind == "O"] == [SIDE]
    assert not [r for r in facts.refused if r.kind == "O"]
    assert relative_error(model, facts, feeds_for(model)) <= DOUBLE
    online = any(r.space.kind == "R2" and r.placement == "online" for r in plan.rotations)
    assert _error(model, plan, feeds_for(model)) <= (HARTLEY if online else DOUBLE)


def test_the_order_of_a_plan_does_not_matter() -> None:
    """R2 that must stand in the graph, too: its inverse goes into the projection first, wherever a plan names it."""
    model, _ = decoder(cache=False, values=_masked)
    facts = analyze(model)
    plan = _plan(facts, ("R2", "O"))
    assert [(r.space.kind, r.placement) for r in plan.rotations] == [("R2", "online"), ("O", "online")]
    turned = plan_from_json(plan_to_json(replace(plan, rotations=plan.rotations[::-1])))
    assert _error(model, turned, feeds_for(model)) <= HARTLEY


def _forget_fold(plan: RotationPlan) -> RotationPlan:
    last = plan.rotations[-1]
    return replace(plan, rotations=(*plan.rotations[:-1], replace(last, space=replace(last.space, consumers=()))))


def _forget_transform(plan: RotationPlan) -> RotationPlan:
    last = plan.rotations[-1]
    return replace(plan, rotations=(*plan.rotations[:-1], replace(last, space=replace(last.space, online=()))))


def _o_first(plan: RotationPlan) -> RotationPlan:
    """Fold as if O met the heads before R2 does."""
    named = [replace(r, space=replace(r.space, kind="other" if r.space.kind == "O" else "O")) for r in plan.rotations]
    return replace(plan, rotations=tuple(named))


@pytest.mark.parametrize("mutant", [_forget_fold, _forget_transform, _o_first])
def test_half_a_transform_or_the_wrong_order_is_wrong(mutant: Callable[[RotationPlan], RotationPlan]) -> None:
    model, _ = decoder(cache=False, values=_masked)
    plan = _plan(analyze(model), ("R2", "O"))
    assert plan.rotations[-1].space.kind == "O"
    assert _error(model, mutant(plan), feeds_for(model)) > WRONG


def _is_output(b: Builder, x: str) -> str:
    b.output(b.result(x, "side"), ["batch", "sequence", SIDE])
    return "side"


def _looked_at(b: Builder, x: str) -> str:
    return b.op("Mul", x, b.op("Sigmoid", b.op("ReduceMax", x, b.ints(-1), keepdims=1)))


def _read_twice(b: Builder, x: str) -> str:
    b.output(b.result(b.op("Softsign", x), "extra"), ["batch", "sequence", SIDE])
    return x


def _beside(b: Builder, x: str) -> str:
    states = b.op("Slice", "t2", b.ints(0), b.ints(WIDTH), b.ints(2))  # of the embedding
    return b.op("Slice", b.op("Concat", x, states, axis=2), b.ints(WIDTH), b.ints(SIDE + WIDTH), b.ints(2))


def _captured(b: Builder, x: str) -> str:
    names = [b.name(), b.name()]
    branches = [
        helper.make_graph(
            [helper.make_node(op, [x], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        )
        for op, name in zip(("Neg", "Identity"), names, strict=True)
    ]
    flag = b.op("Greater", b.op("Size", x), b.constant(1 << 40, np.int64))
    b.output(b.result(b.op("If", flag, then_branch=branches[0], else_branch=branches[1]), "extra"), [None, None, None])
    return x


@pytest.mark.parametrize(
    ("hook", "op", "words"),
    [
        (_is_output, "Reshape", "an output of the graph"),
        (_read_twice, "Softsign", "in another way"),
        (_beside, "Concat", "other channels beside"),
        (_captured, "If", "a subgraph"),
        (_two_gains, "Mul", "in another way"),
    ],
)
def test_what_stands_in_the_way_is_named(hook: Hook, op: str, words: str) -> None:
    model, _ = decoder(cache=False, merged=hook)
    facts = analyze(model)
    assert not _across(facts)
    found = [r for r in facts.refused if r.kind == "O"]
    assert len(found) == 1 and found[0].op == op and words in found[0].reason
    assert found[0].node in {node.outputs[0].name for node in model.graph}
    assert found[0] not in _plan(facts, ("R1", "R2")).refusals
    assert found[0] in _plan(facts, ("O",)).refusals


def _attention(heads: int, width: int, project: Hook, values: Hook | None = None) -> ir.Model:
    """One attention whose heads ``[B, H, S, D]`` are read by ``project``."""
    b = Builder()
    x = b.op("Gather", b.matrix(37, HIDDEN), b.input("ids", ["batch", "sequence"], TensorProto.INT64))
    shape = (0, 0, heads, width)
    parts = [b.op("Reshape", b.linear(x, HIDDEN, heads * width), b.ints(*shape)) for _ in range(3)]
    q, k, v = (b.op("Transpose", part, perm=[0, 2, 1, 3]) for part in parts)
    v = values(b, v) if values else v
    scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2]))
    made = project(b, b.op("MatMul", b.op("Softmax", scores, axis=-1), v))
    b.result(b.linear(b.op("Add", x, made), HIDDEN, 37), "logits")
    b.output("logits", ["batch", "sequence", 37])
    return b.model()


def test_a_width_without_a_hadamard_matrix_is_refused() -> None:
    def project(b: Builder, x: str) -> str:
        side = b.op("Reshape", b.op("Transpose", x, perm=[0, 2, 1, 3]), b.ints(0, 0, 6))
        return b.linear(side, 6, HIDDEN)

    facts = analyze(_attention(2, 3, project))
    (refusal,) = [r for r in facts.refused if r.kind == "O"]
    assert not _across(facts) and refusal.op == "MatMul"
    assert "no Hadamard matrix of size 6 = 3 * 2" in refusal.reason and refusal.change


def _each(b: Builder, x: str) -> str:
    each = b.op("MatMul", x, b.constant(b.rng.standard_normal((HEADS, WIDTH, HIDDEN))))
    return b.op("ReduceSum", each, b.ints(1), keepdims=0)


def _extremes(b: Builder, x: str) -> str:
    b.output(b.result(b.op("ReduceMax", x, b.ints(3), keepdims=1), "extremes"), ["batch", HEADS, "sequence", 1])
    return x


def test_heads_that_are_multiplied_one_by_one() -> None:
    """R2 is all that can be done; where it is refused, so is O."""
    facts = analyze(_attention(HEADS, WIDTH, _each))
    assert "R2" in {s.kind for s in facts.spaces} and not _across(facts)
    facts = analyze(_attention(HEADS, WIDTH, _each, _extremes))
    assert "R2" not in {s.kind for s in facts.spaces} and not _across(facts)
    (refusal,) = [r for r in facts.refused if r.kind == "O"]
    assert refusal.op == "MatMul" and "a matrix of its own" in refusal.reason


def test_heads_beside_activations_are_one_place_for_r4() -> None:
    def hook(b: Builder, x: str) -> str:
        return b.op("Concat", x, b.op("Tanh", b.linear(x, SIDE, SIDE)), axis=2)

    model = _attention(HEADS, WIDTH, lambda b, x: b.linear(hook(b, _side(b, x)), 2 * SIDE, HIDDEN))
    facts = analyze(model)
    assert ("R4", 2 * SIDE) in {(s.kind, s.dim) for s in facts.spaces}
    assert not _across(facts) and {r.op for r in facts.refused if r.kind == "O"} <= {"Concat"}
    assert relative_error(model, facts, feeds_for(model)) <= DOUBLE


def _side(b: Builder, x: str) -> str:
    return b.op("Reshape", b.op("Transpose", x, perm=[0, 2, 1, 3]), b.ints(0, 0, SIDE))


def test_one_head_alone_has_no_transform_across_heads() -> None:
    def project(b: Builder, x: str) -> str:
        return b.linear(b.op("Squeeze", x, b.ints(1)), 24, HIDDEN)

    facts = analyze(_attention(1, 24, project))
    assert {s.kind for s in facts.spaces} >= {"R1", "R2"} and not _across(facts)
    assert not [r for r in facts.refused if r.kind == "O"]


def test_what_reads_the_residual_stream_is_no_output_projection() -> None:
    """Also where routers weigh the outputs of experts by a product, as attention weighs values."""
    model, _ = decoder(cache=False, merged=_looked_at)
    facts = analyze(model)
    assert _across(facts) == [(SIDE, "Mul", 1)]  # one number a row is no obstacle
    assert relative_error(model, facts, feeds_for(model)) <= DOUBLE


def test_convert_and_replay(tmp_path: Path) -> None:
    """A file of the model builder; and the plan once more, in another order, with quantized weights."""
    source = built("llama") / "model.onnx"
    only = ("R1", "R2", "R3", "R4", "O")
    done = graphrot.convert(source, output=tmp_path / "a.onnx", recipe="rotate-only", only=only)
    assert done.certificate is not None and done.certificate.relative <= SINGLE
    assert done.certificate.control_relative is not None and done.certificate.control_relative > WRONG
    assert _cost(done) == [
        "online     Hadamard transforms for every token: O 2 of size 48, R3 4 of size 16, R4 2 of size 112"
    ]
    plan = load_plan(tmp_path / "a.plan.json")
    turned = tmp_path / "turned.json"
    turned.write_text(plan_to_json(replace(plan, rotations=plan.rotations[::-1])), encoding="utf-8")
    again = graphrot.convert(source, recipe="w4a8", solver="rtn", weights="int8", plan=turned, certificate=None)
    assert again.report.recipe["only"] == only and len(again.report.quantized) > 8
    assert _transforms(again.model) == _transforms(done.model) == 8


def _cost(done: Converted) -> list[str]:
    return [line for line in summary(done, Path("x")) if line.startswith("online")]


def _transforms(model: ir.Model) -> int:
    """Transforms of their own, and those inside of what multiplies."""
    rotating = [node for node in model.graph if node.op_type == "RotatedMatMul" and node.attributes["rotate"].as_int()]
    return len(rotating) + sum(node.op_type == "HadamardTransform" for node in model.graph)


def test_it_is_taken_where_it_is_named_and_nowhere_else() -> None:
    alone, usual = (
        graphrot.convert(tiny_onnx("gpt2"), recipe="rotate-only", certificate=None, **options)
        for options in ({"only": "O"}, {})
    )
    assert {r.space.kind for r in alone.plan.rotations} == {"O"} and _transforms(alone.model) == 2
    assert _cost(alone) == ["online     Hadamard transforms for every token: O 2 of size 80"]
    assert {r.space.kind for r in usual.plan.rotations} == {"R1", "R2", "R3", "R4"}
    assert _cost(usual) == ["online     Hadamard transforms for every token: R4 2 of size 320"]


def test_a_refused_place_stops_the_conversion() -> None:
    model, _ = decoder(cache=False, rope=False, merged=_beside)
    options: dict[str, Any] = {"recipe": "rotate-only", "certificate": None}
    with pytest.raises(InputRefused, match="Not everything") as caught:
        graphrot.convert(model, only="R1,O", **options)
    assert "O at" in str(caught.value) and "Concat" in str(caught.value)
    assert graphrot.convert(model, only="R1,O", allow_partial=True, **options).report.plan.refused[0].kind == "O"
    assert graphrot.convert(model, **options).report.plan.refused == []


def test_one_transform_for_a_row_that_is_read_in_two_shapes() -> None:
    """The first linear reads the row behind a Reshape, the second as it is: two transforms would not commute."""

    def project(b: Builder, x: str) -> str:
        row = _side_of(b, x)
        flat = b.op("Gemm", b.op("Reshape", row, b.ints(-1, SIDE)), b.matrix(SIDE, HIDDEN))
        plain = b.linear(row, SIDE, HIDDEN)
        return b.op("Add", b.op("Reshape", flat, b.op("Shape", plain)), plain)

    model = _attention(HEADS, WIDTH, project)
    facts = analyze(model)
    assert [(len(s.online), len(s.consumers)) for s in facts.spaces if s.kind == "O"] == [(1, 2)]
    assert relative_error(model, facts, feeds_for(model)) <= 1e-12


def _side_of(b: Builder, x: str) -> str:
    return b.op("Reshape", b.op("Transpose", x, perm=[0, 2, 1, 3]), b.ints(0, 0, SIDE))
