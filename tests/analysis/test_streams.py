"""Streams that begin or end in the basis of something else: transforms at their ends, found, exact and needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import Facts, RotationSpace
from graphrot.evaluate.double import to_double
from graphrot.folded import materialize
from graphrot.passes import ROTATION_PASSES
from graphrot.plan.build import PlanRequest, build_plan
from graphrot.plan.serialize import plan_from_json, plan_to_json
from graphrot.plan.types import RotationPlan
from tests.analysis.graphs import (
    FFN,
    HIDDEN,
    VOCAB,
    Builder,
    decoder,
    feeds_for,
    layer_op,
    rms_norm,
    rms_op,
    simplified,
)
from tests.analysis.rotated import relative_error, run

EXACT = 1e-12
STATES = ["batch", "sequence", HIDDEN]


def _also_output(b: Builder, x: str) -> str:
    b.output(b.result(b.op("Identity", x), "extra"), STATES)
    return x


def _blocks(b: Builder, x: str, norm: Callable[..., str]) -> str:
    for _ in range(2):
        act = b.op("Sigmoid", b.linear(norm(b, x), HIDDEN, FFN))
        x = b.op("Add", x, b.linear(act, FFN, HIDDEN))
    return x


def _from_embeddings() -> ir.Model:
    """Embeddings come from outside, as in the text half of a model that sees pictures."""
    b = Builder()
    x = _blocks(b, b.input("embeddings", STATES), rms_norm)
    b.result(b.linear(rms_norm(b, x), HIDDEN, VOCAB), "logits")
    b.output("logits", ["batch", "sequence", VOCAB])
    return b.model()


def _to_states(norm: Callable[..., str]) -> ir.Model:
    """What comes out is the last norm with its gain, as in models that embed sentences."""
    b = Builder()
    ids = b.input("ids", ["batch", "sequence"], 7)
    x = _blocks(b, b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), ids), norm)
    b.result(norm(b, x), "states")
    b.output("states", STATES)
    return b.model()


def _to_sum(norm: str) -> ir.Model:
    """The last sum and its norm are one operator, whose sum comes out too."""
    b = Builder()
    ids = b.input("ids", ["batch", "sequence"], 7)
    x = _blocks(b, b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), ids), rms_op)
    branch = b.linear(b.op("Sigmoid", b.linear(rms_op(b, x), HIDDEN, FFN)), FFN, HIDDEN)
    extra = [b.vector(HIDDEN)] if norm == "SkipLayerNormalization" else []
    gain = b.vector(HIDDEN, around=1)
    states, total = b.name(), b.name()
    inputs = [x, branch, gain, *extra]
    b.nodes.append(helper.make_node(norm, inputs, [states, "", "", total], domain="com.microsoft", epsilon=1e-5))
    b.result(states, "states")
    b.output("states", STATES)
    b.output(b.result(total, "sum"), STATES)
    return b.model()


def _between(norm: Callable[..., str], *, seen: bool = False) -> ir.Model:
    """Norms stand in the stream itself (the first encoders); ``seen``: what they make comes out as well."""
    b = Builder()
    ids = b.input("ids", ["batch", "sequence"], 7)
    x = norm(b, b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), ids))
    for layer in range(2):
        act = b.op("Sigmoid", b.linear(x, HIDDEN, FFN))
        x = norm(b, b.op("Add", x, b.linear(act, FFN, HIDDEN)))
        if seen and layer == 0:
            x = b.result(x, "middle")
            b.output("middle", STATES)
    b.result(x, "states")
    b.output("states", STATES)
    return b.model()


CASES: dict[str, tuple[Callable[[], ir.Model], int, int]] = {
    "embeddings are an input": (_from_embeddings, 1, 0),
    "states are an output, RMS norm in parts": (lambda: _to_states(rms_norm), 0, 1),
    "states are an output, RMSNormalization": (lambda: _to_states(rms_op), 0, 1),
    "hidden states are an output": (lambda: decoder(residual=_also_output)[0], 0, 1),
    "embedding is an output": (lambda: decoder(embedded=_also_output)[0], 0, 1),
    "normed states are an output": (lambda: decoder(final=_also_output)[0], 0, 1),
}


def _r1(facts: Facts) -> RotationSpace:
    (space,) = [s for s in facts.spaces if s.kind == "R1"]
    return space


def _plan(facts: Facts, **options: bool) -> RotationPlan:
    return build_plan(facts, PlanRequest(("R1",), "hadamard", seed=3, **options), source_hash="0")


def _error_of_passes(model: ir.Model, plan: RotationPlan, *, twice: bool = False, double: bool = True) -> float:
    source = to_double(model) if double else model
    result = source.clone()
    for kind in ROTATION_PASSES * (1 + twice):
        kind(plan)(result)
    materialize(result, None)
    result.graph.sort()
    result = to_double(result) if double else result
    assert [v.name for v in result.graph.outputs] == [v.name for v in model.graph.outputs]
    floats = np.float64 if double else np.float32
    feeds = {n: x.astype(floats) if x.dtype.kind == "f" else x for n, x in feeds_for(model).items()}
    turned = {n for r in plan.rotations for n in r.space.cache_inputs}
    feeds = {n: np.zeros_like(x) if n in turned else x for n, x in feeds.items()}
    expected, found = run(source, feeds), run(result, feeds)
    kept = [n for n in expected if not any(n in r.space.cache_outputs for r in plan.rotations)]
    return max(float(np.abs(found[n] - expected[n]).max() / np.abs(expected[n]).max()) for n in kept)


@pytest.mark.parametrize("case", CASES)
def test_transforms_at_the_ends(case: str) -> None:
    make, entries, exits = CASES[case]
    model = make()
    facts = analyze(model)
    space = _r1(facts)
    assert (len(space.online), len(space.exits), space.optional) == (entries, exits, False)
    assert not [r for r in facts.refused if r.kind == "R1"]
    assert relative_error(model, facts, feeds_for(model)) <= EXACT
    plan = _plan(facts)
    assert plan_from_json(plan_to_json(plan)) == plan
    (rotation,) = [r for r in plan.rotations if r.space.kind == "R1"]
    assert rotation.matrix.seed is not None and rotation.placement == "online"
    assert _error_of_passes(model, plan) <= EXACT
    assert _error_of_passes(model, plan, twice=True) <= EXACT


@pytest.mark.parametrize("case", CASES)
def test_each_transform_is_needed(case: str) -> None:
    make, _, _ = CASES[case]
    model = make()
    plan = _plan(analyze(model))
    rotations = tuple(
        replace(r, space=replace(r.space, online=(), exits=())) if r.space.kind == "R1" else r for r in plan.rotations
    )
    assert _error_of_passes(model, replace(plan, rotations=rotations)) > 1e-4


@pytest.mark.parametrize("norm", [rms_norm, rms_op])
def test_norms_in_the_stream_are_an_option(norm: Callable[..., str]) -> None:
    model = _between(norm)
    facts = analyze(model)
    spaces = [s for s in facts.spaces if s.kind == "R1"]
    assert [(len(s.online), len(s.exits), s.optional) for s in spaces] == [(1, 1, True), (1, 1, True)]
    refused = [r for r in facts.refused if r.kind == "R1"]
    assert len(refused) == 2 and all("--online-r1 puts 2 transforms" in r.change for r in refused)
    assert relative_error(model, facts, feeds_for(model)) <= EXACT
    assert [r.space.kind for r in _plan(facts).rotations if r.space.kind == "R1"] == []
    assert len([r for r in _plan(facts).refusals if r.kind == "R1"]) == 2
    taken = _plan(facts, online_r1=True)
    assert len([r for r in taken.rotations if r.space.kind == "R1"]) == 2 and not taken.refusals
    assert _error_of_passes(model, taken) <= EXACT


@pytest.mark.parametrize(("norm", "exits"), [(rms_norm, 1), (rms_op, 2)])
def test_norms_in_the_stream_may_come_out(norm: Callable[..., str], exits: int) -> None:
    """One operator ends a stream, begins the next, and is an output (of what stands in front of the transform, where
    the gain is a node of its own)."""
    model = _between(norm, seen=True)
    facts = analyze(model)
    assert [len(s.exits) for s in facts.spaces if s.kind == "R1"] == [1, exits]
    assert relative_error(model, facts, feeds_for(model)) <= EXACT
    taken = _plan(facts, online_r1=True)
    assert len([r for r in taken.rotations if r.space.kind == "R1"]) == 2
    assert _error_of_passes(model, taken) <= EXACT


def _double(b: Builder, x: str) -> str:
    """The states come out in double, and go on in float."""
    b.output(b.result(b.op("Cast", x, to=11), "extra"), STATES)
    b.outputs[-1].type.tensor_type.elem_type = 11
    return x


def test_no_transform_stands_in_double() -> None:
    """Behind a Cast of an input it may; a stream that comes out in double is refused by that output."""
    b = Builder()
    x = b.op("Cast", b.input("embeddings", STATES, 11), to=1)
    b.result(b.linear(rms_norm(b, _blocks(b, x, rms_norm)), HIDDEN, VOCAB), "logits")
    b.output("logits", ["batch", "sequence", VOCAB])
    space = _r1(analyze(b.model()))
    assert [use.op for use in space.online] == ["Cast"]
    model, _ = decoder(residual=_double)
    facts = analyze(model)
    assert "R1" not in {s.kind for s in facts.spaces}
    assert [r.reason for r in facts.refused if r.kind == "R1"] == ["it is the graph output 'extra'"]


def test_simplified_norms_end_a_stream() -> None:
    model = _to_states(simplified)
    facts = analyze(model)
    assert len(_r1(facts).exits) == 1
    assert relative_error(model, facts, feeds_for(model), double=False) <= 2e-5
    assert _error_of_passes(model, _plan(facts), double=False) <= 2e-5


@pytest.mark.parametrize("norm", ["SkipSimplifiedLayerNormalization", "SkipLayerNormalization"])
def test_a_skip_norm_ends_a_stream_and_hands_its_sum_on(norm: str) -> None:
    model = _to_sum(norm)
    facts = analyze(model)
    assert len(_r1(facts).exits) == 2
    assert relative_error(model, facts, feeds_for(model), double=False) <= 2e-5


def test_layer_norms_end_a_stream() -> None:
    model = _to_states(layer_op)
    facts = analyze(model)
    assert len(_r1(facts).exits) == 1
    assert relative_error(model, facts, feeds_for(model)) <= EXACT
