"""The certificate passes what is right and fails each single thing that is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import graphrot
from graphrot.analysis.types import RotationSpace, WeightUse
from graphrot.errors import CheckFailed
from graphrot.evaluate import certificate
from graphrot.evaluate.compare import TOLERANCE
from graphrot.evaluate.double import to_double
from graphrot.plan.serialize import load_plan, plan_to_json
from graphrot.plan.types import RotationPlan
from tests.exported import tiny_onnx

Mutant = Callable[[RotationPlan], RotationPlan]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RotationPlan]:
    """The plan of a rotate-only conversion, by model."""
    folder = tmp_path_factory.mktemp("plans")

    def plan(name: str) -> RotationPlan:
        path = folder / f"{name}.plan.json"
        if not path.exists():
            result = graphrot.convert(tiny_onnx(name), output=folder / f"{name}.onnx", recipe="rotate-only")
            assert result.certificate is not None
            assert result.certificate.dtype == "float64"
            assert result.certificate.relative <= 1e-12
        return load_plan(path)

    return plan


def _edit(plan: RotationPlan, kind: str, change: Callable[[RotationSpace], RotationSpace]) -> RotationPlan:
    """Change the first space of a kind that the change applies to."""
    rotations = list(plan.rotations)
    for index, rotation in enumerate(rotations):
        if rotation.space.kind == kind and (space := change(rotation.space)) != rotation.space:
            rotations[index] = replace(rotation, space=space)
            return replace(plan, rotations=tuple(rotations))
    raise AssertionError(f"no {kind} to change")


def _without_bias(uses: tuple[WeightUse, ...]) -> tuple[WeightUse, ...]:
    index = next((i for i, use in enumerate(uses) if use.role == "bias"), None)
    return uses if index is None else uses[:index] + uses[index + 1 :]


def _weights(uses: tuple[WeightUse, ...]) -> tuple[WeightUse, ...]:
    """All but the first weight."""
    index = next(i for i, use in enumerate(uses) if use.role == "weight")
    return uses[:index] + uses[index + 1 :]


def consumer(kind: str) -> Mutant:
    return lambda plan: _edit(plan, kind, lambda space: replace(space, consumers=_weights(space.consumers)))


def producer(kind: str) -> Mutant:
    return lambda plan: _edit(plan, kind, lambda space: replace(space, producers=_weights(space.producers)))


def bias(kind: str) -> Mutant:
    return lambda plan: _edit(plan, kind, lambda space: replace(space, producers=_without_bias(space.producers)))


def online(kind: str) -> Mutant:
    return lambda plan: _edit(plan, kind, lambda space: replace(space, online=space.online[1:]))


def gain(plan: RotationPlan) -> RotationPlan:
    return replace(plan, gain_folds=plan.gain_folds[1:])


def gain_consumer(plan: RotationPlan) -> RotationPlan:
    first = plan.gain_folds[0]
    return replace(plan, gain_folds=(replace(first, consumers=first.consumers[1:]), *plan.gain_folds[1:]))


def shift(plan: RotationPlan) -> RotationPlan:
    first = next(fold for fold in plan.gain_folds if fold.shift is not None)
    bare = replace(first, shift=None, shift_node=None, shift_input=None)
    return replace(plan, gain_folds=tuple(bare if fold is first else fold for fold in plan.gain_folds))


MUTANTS: list[tuple[str, str, Mutant]] = [
    ("llama", "one consumer of R1", consumer("R1")),
    ("llama", "one producer of R1", producer("R1")),
    ("llama", "one consumer of R2", consumer("R2")),
    ("llama", "one producer of R2", producer("R2")),
    ("llama", "one consumer of R4", consumer("R4")),
    ("llama", "one transform of R4", online("R4")),
    ("llama", "one transform of R3", online("R3")),
    ("llama", "one gain", gain),
    ("llama", "one consumer of a gain", gain_consumer),
    ("llama_tied", "one consumer of R1", consumer("R1")),
    ("llama_tied", "one gain", gain),
    ("qwen2", "one bias of R2", bias("R2")),
    ("gpt2", "one bias of R1", bias("R1")),
    ("gpt2", "one shift", shift),
    ("gpt2", "one transform of R4", online("R4")),
]


@pytest.mark.parametrize(("name", "what", "mutant"), MUTANTS, ids=[f"{n}: {w}" for n, w, _ in MUTANTS])
def test_each_thing_left_out_is_found(
    name: str, what: str, mutant: Mutant, plans: Callable[[str], RotationPlan], tmp_path: Path
) -> None:
    plan = plans(name)
    path = tmp_path / "mutant.json"
    path.write_text(plan_to_json(mutant(plan)), encoding="utf-8")
    output = tmp_path / "out.onnx"
    with pytest.raises(CheckFailed, match="does not answer like the source") as caught:
        graphrot.convert(tiny_onnx(name), output=output, recipe="rotate-only", plan=path, allow_partial=True)
    assert caught.value.exit_code == 1
    assert not output.exists()


def test_a_control_that_changes_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "leave_one_out", lambda model, plan, number: None)
    with pytest.raises(CheckFailed, match="cannot see a mistake"):
        graphrot.convert(tiny_onnx("llama"), recipe="rotate-only")


def test_float64_finds_what_float32_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is wrong in its seventh digit passes in float32."""

    def slightly_off(model: ir.Model) -> ir.Model:
        wide = to_double(model)
        for value in wide.graph.initializers.values():
            if value.const_value is not None and value.const_value.size > 2000:
                numbers = value.const_value.numpy() * (1 + 1e-6 * (value.const_value.dtype == ir.DataType.DOUBLE))
                value.const_value = ir.tensor(np.asarray(numbers), name=value.name)
                break
        return wide

    calls: list[ir.Model] = []

    def once(model: ir.Model) -> ir.Model:
        calls.append(model)
        return to_double(model) if len(calls) == 1 else slightly_off(model)

    monkeypatch.setattr(certificate, "to_double", once)
    with pytest.raises(CheckFailed, match="float64"):
        graphrot.convert(tiny_onnx("llama"), recipe="rotate-only")
    assert len(calls) == 2


def test_large_models_are_measured_in_float32_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "SMALL", 1000)
    result = graphrot.convert(tiny_onnx("llama"), recipe="rotate-only").certificate
    assert result is not None
    assert result.dtype == "float32"
    assert 1e-8 < result.relative <= TOLERANCE["float32"]
    assert result.control_relative is not None and result.control_relative > 0.01


def test_hartley_transforms_are_measured_in_float32() -> None:
    """Their factors are not whole numbers, so the float64 twin would not be exact."""
    model = ir.load(tiny_onnx("llama"))
    node = ir.node("Anything", [model.graph.inputs[0]], {"factor": ir.tensor(np.ones((3, 3), np.float32))})
    node.domain = "graphrot"
    model.graph.append(node)
    assert not certificate.exact_in_double(model)


@pytest.mark.parametrize("only", ["R1", "R2", "R3", "R4"])
def test_each_kind_alone_has_a_control(only: str) -> None:
    """R3 has no folded inverse: there the control takes a transform out."""
    result = graphrot.convert(tiny_onnx("llama"), recipe="rotate-only", only=only).certificate
    assert result is not None
    assert result.relative <= 1e-12
    assert result.control_relative is not None and result.control_relative > 1e-3


def test_without_rotation_there_is_no_control() -> None:
    result = graphrot.convert(tiny_onnx("llama"), recipe="w4a8", rotations=None, solver="rtn").certificate
    assert result is not None
    assert (result.control_relative, result.max_abs) == (None, 0.0)
