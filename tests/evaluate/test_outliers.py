"""Outliers are those of the source's own activations and of the rotated model's, run apart from each other."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphrot
from graphrot.analysis.analyze import analyze
from graphrot.evaluate.outliers import crest, measure_outliers, tensors_in_both
from graphrot.evaluate.watch import Watched
from graphrot.folded import materialize
from graphrot.model.save import save_model
from graphrot.plan.build import PlanRequest, build_plan
from graphrot.prepare import rotated_graph
from tests.exported import tiny_onnx

TOKENS = np.random.default_rng(7).integers(3, 60, 40)


def _rotated(path: Path, folder: Path, kinds: tuple[str, ...] = ("R1", "R2", "R3", "R4")):
    source = ir.load(path)
    facts = analyze(source)
    plan = build_plan(facts, PlanRequest(kinds, "hadamard"), source_hash="")
    rotated = rotated_graph(source, plan, quantizes=False)
    materialize(rotated, None)
    save_model(rotated, folder / "rotated.onnx")
    return source, facts, plan, rotated


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("llama", ("R1", "R2", "R3", "R4")), ("gpt2", ("R1", "R2", "R4")), ("llama", ("R1", "R2", "R4", "O"))],
)
def test_before_is_what_the_source_makes(name: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Gains, shifts (GPT-2), head-wise and full rotations of one tensor (R2 and O): all are undone."""
    path = tiny_onnx(name)
    source, facts, plan, rotated = _rotated(path, tmp_path, kinds)
    seen = list(tensors_in_both(tmp_path / "rotated.onnx", rotated, source, facts, plan, TOKENS, folder=tmp_path))
    assert {tensor.kind for tensor in seen} == set(kinds) - {"O"}
    widths = {tensor.tensor: tensor.before.shape[-1] for tensor in seen}
    (tmp_path / "own").mkdir()
    truth = dict(Watched(path, widths, tmp_path / "own").run(TOKENS))
    for tensor in seen:
        expected = truth[tensor.tensor]
        np.testing.assert_allclose(tensor.before, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
        assert np.abs(tensor.after - tensor.before).max() > 0.01 * np.abs(expected).max(), "nothing was rotated"


def test_a_planted_outlier_is_seen_and_spread(tmp_path: Path) -> None:
    """One channel of the down projection's input is made fifty times as large, and its row of the weight as small."""
    model = onnx.load(tiny_onnx("llama"))
    facts = analyze(ir.load(tiny_onnx("llama")))
    space = next(space for space in facts.spaces if space.kind == "R4")
    up = next(linear for linear in facts.linears if linear.out_features == space.dim)
    for initializer in model.graph.initializer:
        if initializer.name == up.weight:
            numbers = onnx.numpy_helper.to_array(initializer).copy()
            numbers[:, 3] *= 50
            initializer.CopyFrom(onnx.numpy_helper.from_array(numbers, initializer.name))
    onnx.save(model, tmp_path / "planted.onnx")
    plain = _first_r4(tiny_onnx("llama"), tmp_path)
    planted = _first_r4(tmp_path / "planted.onnx", tmp_path)
    assert planted.before > 10 * plain.before
    assert planted.after < planted.before / 5


def _first_r4(path: Path, folder: Path):
    source, facts, plan, rotated = _rotated(path, folder)
    found = measure_outliers(folder / "rotated.onnx", rotated, source, facts, plan, TOKENS)
    return next(outlier for outlier in found if outlier.kind == "R4")


def test_crest_leaves_zeros_out() -> None:
    assert crest(np.array([0.0, 0.0, 0.0, -8.0, 2.0, 1.0])) == 4.0
    assert crest(np.zeros(3)) == 1.0


def test_more_tensors_than_fit_are_read_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, facts, plan, rotated = _rotated(tiny_onnx("llama"), tmp_path)
    path = tmp_path / "rotated.onnx"
    whole = measure_outliers(path, rotated, source, facts, plan, TOKENS)
    monkeypatch.setattr(import_module("graphrot.evaluate.watch"), "BUDGET", 1)
    assert measure_outliers(path, rotated, source, facts, plan, TOKENS) == whole


def test_convert_writes_them() -> None:
    report = graphrot.convert(tiny_onnx("llama"), recipe="rotate-only").report
    assert {outlier.kind for outlier in report.outliers} == {"R1", "R2", "R3", "R4"}
    spaces = {rotation.space for rotation in report.plan.rotations}
    assert {outlier.space for outlier in report.outliers} == spaces
