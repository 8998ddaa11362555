"""Every rotation pass keeps the answers, in float64, on tiny decoders of five architectures."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import Facts
from graphrot.evaluate.double import to_double
from graphrot.folded import materialize
from graphrot.passes import ROTATION_PASSES, FoldGains, FoldRotations, InsertOnline, ShareTable, TieTable
from graphrot.passes.base import PROVENANCE, GraphPass
from graphrot.plan.build import PlanRequest, build_plan
from graphrot.plan.serialize import plan_from_json, plan_to_json
from graphrot.plan.types import RotationPlan
from tests.exported import tiny_onnx
from tests.tiny import TINY_NAMES, VOCAB

KINDS = ("R1", "R2", "R3", "R4")
TOLERANCE = 1e-10
"""Relative to the largest logit; float64 rounding through two layers stays far below."""


@cache
def _source(name: str) -> tuple[ir.Model, Facts]:
    model = to_double(ir.load(tiny_onnx(name)))
    return model, analyze(model)


def _plan(
    facts: Facts,
    *,
    bits: int | None = None,
    rotations: Literal["hadamard", "random", "block-hadamard"] = "hadamard",
    kinds: tuple[str, ...] = KINDS,
) -> RotationPlan:
    request = PlanRequest(kinds=kinds, rotations=rotations, embedding_bits=bits, head_bits=None)
    return build_plan(facts, request, source_hash="0")


def _feeds(model: ir.Model, *, batch: int = 2, length: int = 7) -> dict[str, np.ndarray]:
    """Token ids, an all-ones mask, positions and empty caches, told apart by their declared shapes."""
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        assert value.shape is not None and value.dtype is not None and value.name is not None
        if len(value.shape) == 4:
            feeds[value.name] = np.zeros((batch, int(value.shape[1]), 0, int(value.shape[3])), value.dtype.numpy())
        elif value.name == "input_ids":
            feeds[value.name] = rng.integers(0, VOCAB, (batch, length))
        elif value.name == "position_ids":
            feeds[value.name] = np.tile(np.arange(length), (batch, 1))
        else:
            feeds[value.name] = np.ones((batch, length), np.int64)
    return feeds


def _logits(model: ir.Model) -> np.ndarray:
    model = to_double(model)  # the function body of the online transform works in float32 otherwise
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["logits"], _feeds(model))[0])


def _relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def _apply(model: ir.Model, plan: RotationPlan, passes: tuple[type[GraphPass], ...] = ROTATION_PASSES) -> ir.Model:
    rotated = model.clone()
    for kind in passes:
        kind(plan)(rotated)
    materialize(rotated, None)
    return rotated


@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_pass_keeps_the_logits(name: str) -> None:
    model, facts = _source(name)
    plan = _plan(facts)
    expected = _logits(model)
    rotated = model.clone()
    for kind in ROTATION_PASSES:
        step = kind(plan)
        step(rotated)
        written = rotated.clone()
        materialize(written, None)
        assert _relative(_logits(written), expected) <= TOLERANCE, kind.__name__
    assert {r.space.kind for r in plan.rotations} == set(KINDS)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_rotated_weight_changes(name: str) -> None:
    model, facts = _source(name)
    plan = _plan(facts)
    rotated = _apply(model, plan)
    before = {v.name: v for node in model.graph for v in node.outputs}
    after = {v.name: v for node in rotated.graph for v in node.outputs}
    seen = 0
    for rotation in plan.rotations:
        for use in (*rotation.space.producers, *rotation.space.consumers):
            if use.node not in before or use.role == "bias" or (plan.tie and use.node == plan.tie.head.node):
                continue
            old, new = (_operand(values, use.node, use.input) for values in (before, after))
            assert np.linalg.norm(new - old) / np.linalg.norm(old) > 0.5, use
            seen += 1
    assert seen >= 4


def _operand(values: dict[str | None, ir.Value], node: str, index: int) -> np.ndarray:
    producer = values[node].producer()
    assert producer is not None
    value = producer.inputs[index]
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()


@pytest.mark.parametrize("name", TINY_NAMES)
@pytest.mark.parametrize("rotations", ["random", "block-hadamard"])
def test_other_matrices(name: str, rotations: Literal["random", "block-hadamard"]) -> None:
    model, facts = _source(name)
    plan = _plan(facts, rotations=rotations)
    assert _relative(_logits(_apply(model, plan)), _logits(model)) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "qwen3"])
def test_an_untied_table(name: str) -> None:
    model, facts = _source(name)
    assert facts.tied is not None
    plan = _plan(facts, bits=8)
    assert plan.untie and plan.tie is None
    assert _relative(_logits(_apply(model, plan)), _logits(model)) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "qwen3"])
def test_a_tied_table_stays_one(name: str) -> None:
    model, facts = _source(name)
    plan = _plan(facts)
    assert plan.tie is not None and plan.tie_matrix is not None
    rotated = _apply(model, plan)
    assert facts.tied is not None
    size = (facts.tied.embedding.rows, facts.tied.embedding.dim)
    tables = [v for v in rotated.graph.initializers.values() if sorted(v.shape.numpy()) == sorted(size)]
    assert len(tables) == 1


@pytest.mark.parametrize("name", TINY_NAMES)
def test_passes_are_idempotent_and_keep_the_signature(name: str) -> None:
    model, facts = _source(name)
    plan = _plan(facts)
    once = _apply(model, plan)
    text = _shape_of(once)
    for kind in ROTATION_PASSES:
        result = kind(plan)(once)
        assert not result.modified, kind.__name__
    assert _shape_of(once) == text
    assert [v.name for v in once.graph.inputs] == [v.name for v in model.graph.inputs]
    assert [v.name for v in once.graph.outputs] == [v.name for v in model.graph.outputs]
    onnx.checker.check_model(ir.to_proto(once), full_check=True)


def _shape_of(model: ir.Model) -> list[str]:
    return [
        f"{n.op_type}({','.join(i.name or '' for i in n.inputs if i is not None)})->{n.outputs[0].name}"
        for n in model.graph
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone(kind: str) -> None:
    for name in ("llama", "gpt2"):
        model, facts = _source(name)
        plan = _plan(facts, kinds=(kind,))
        assert plan.rotations
        assert (kind == "R1") == bool(plan.gain_folds) or name == "gpt2", (
            "gains are folded only where a rotation needs it"
        )
        assert _relative(_logits(_apply(model, plan)), _logits(model)) <= TOLERANCE


def test_online_transform_and_its_inverse_come_together() -> None:
    model, facts = _source("llama")
    plan = _plan(facts, kinds=("R4",))
    untouched = _apply(model, plan, (TieTable, FoldGains, FoldRotations, ShareTable))
    assert not any(n.op_type == "HadamardTransform" for n in untouched.graph)
    assert _relative(_logits(untouched), _logits(model)) == 0
    rotated = _apply(model, plan, (InsertOnline,))
    nodes = [n for n in rotated.graph if n.op_type == "HadamardTransform"]
    assert len(nodes) == len(plan.rotations)
    assert all(n.metadata_props[PROVENANCE].startswith("R4") for n in nodes)


MUTANTS = ("producer", "consumer", "bias", "online", "gain")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_plan_that_forgets_one_thing_changes_the_answers(mutant: str) -> None:
    model, facts = _source("qwen2")
    broken = _mutate(_plan(facts), mutant)
    assert _relative(_logits(_apply(model, broken)), _logits(model)) > 1e-4


def _mutate(plan: RotationPlan, mutant: str) -> RotationPlan:
    if mutant == "gain":
        fold = plan.gain_folds[0]
        return replace(plan, gain_folds=(replace(fold, consumers=fold.consumers[1:]), *plan.gain_folds[1:]))
    rotations = list(plan.rotations)
    for index, rotation in enumerate(rotations):
        space = rotation.space
        if mutant == "bias":
            kept = tuple(u for u in space.producers if u.role != "bias")
            if len(kept) == len(space.producers):
                continue
            space = replace(space, producers=kept)
        elif mutant == "online":
            if not space.online:
                continue
            space = replace(space, online=space.online[1:])
        elif not getattr(space, f"{mutant}s"):
            continue
        else:
            space = replace(space, **{f"{mutant}s": getattr(space, f"{mutant}s")[1:]})
        rotations[index] = replace(rotation, space=space)
        return replace(plan, rotations=tuple(rotations))
    raise AssertionError(f"nothing to forget: {mutant}")


def test_plans_survive_json() -> None:
    for name in ("gpt2", "phi3"):
        _, facts = _source(name)
        plan = _plan(facts)
        assert plan_from_json(plan_to_json(plan)) == plan
