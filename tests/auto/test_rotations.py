"""Rotations by measurement: taken where the rounded model gains, and nowhere else."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import graphrot
from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import Facts, LinearRef
from graphrot.auto.rotations import MARGIN, choose_rotations, worth
from graphrot.auto.session import model_session
from graphrot.auto.sites import _with_outputs, site_errors
from graphrot.auto.text import measured
from graphrot.auto.trial import Effect, part_of
from graphrot.cli.main import run
from graphrot.graph import value_map
from graphrot.model.load import load_source
from graphrot.plan.types import RotationPlan
from graphrot.prepare import plan_for, rotated_graph
from graphrot.quant.activations import fake_quantize_tokens
from graphrot.quant.grid import WeightGrid
from graphrot.quant.rtn import quantize_rtn
from graphrot.quant.weights import load_weight
from graphrot.quantize import CALIBRATION_TOKENS, calibration_feeds
from graphrot.recipe import resolve_recipe
from graphrot.rotation.orthogonal import build_matrix
from graphrot.texts import Texts

NONE = resolve_recipe("w4a8", rotations=None)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "auto.md"


@dataclass
class Scripted:
    """Stands in for measurements: what kinds cost, with a minus behind them where sites are missing."""

    costs: dict[str, float]
    again: dict[str, float] = field(default_factory=dict)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def measure(self, plan: RotationPlan, *, draw: Literal[0, 1] = 0) -> Effect:
        counts = Counter(rotation.space.kind for rotation in plan.rotations)
        kinds = "".join(sorted(counts)) or "none"
        if any(counts[kind] == 1 for kind in ("R2", "R4")):
            kinds += "-"
        self.asked.append(kinds)
        cost = self.again.get(kinds, self.costs[kinds]) if draw else self.costs[kinds]
        return Effect(np.full(100, cost))

    def site_errors(self, plan: RotationPlan) -> dict[str, tuple[float, float]]:
        return self.errors


@pytest.fixture(scope="module")
def facts(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return analyze(load_source(str(plain), workdir=tmp_path_factory.mktemp("load")).model)


def kinds_of(plan: RotationPlan) -> set[str]:
    return {rotation.space.kind for rotation in plan.rotations}


def choose(facts: Facts, trials: Scripted) -> tuple[set[str], dict[str, str]]:
    recipe = resolve_recipe("auto")
    chosen = choose_rotations(facts, recipe, source_hash="0", trials=trials)
    assert chosen.plan.recipe["rotations"] == "auto"
    assert chosen.plan.recipe["seed"] == 0
    return kinds_of(chosen.plan), {choice.name: choice.chosen for choice in chosen.choices}


def test_what_gains_is_taken(facts: Facts) -> None:
    trials = Scripted({"none": 1.0, "R1R2R4": 0.5, "R1R2": 0.6, "R1R4": 0.55, "R2R4": 0.8})
    taken, said = choose(facts, trials)
    assert taken == {"R1", "R2", "R4"}
    assert said == {"rotations": "R1, R2, R4", "R1": "rotated", "R2": "rotated", "R4": "rotated"}
    assert trials.asked == ["none", "R1R2R4", "R1R2", "R1R4", "R2R4", "none", "R1R2R4"]


def test_a_transform_must_be_worth_it_and_a_merged_rotation_must_not_hurt(facts: Facts) -> None:
    costs = {"none": 1.0, "R1R2R4": 0.5, "R1R2": 0.51, "R1": 0.505, "R2": 0.7}
    taken, said = choose(facts, Scripted(costs))
    assert taken == {"R1"}, "without R4 it costs 2 % more, without R2 1 % less"
    assert (said["R4"], said["R2"], said["R1"]) == ("not rotated", "not rotated", "rotated")


@pytest.mark.parametrize(("fewer", "dropped"), [(0.49, True), (0.51, False)])
def test_sites_whose_linears_lose_go_if_the_model_agrees(facts: Facts, fewer: float, dropped: bool) -> None:
    """R2.1 loses; R4.0 gains too little for a transform; the others gain."""
    costs = {"none": 1.0, "R1R2R4": 0.5, "R1R2": 0.6, "R1R4": 0.55, "R2R4": 0.8, "R1R2R4-": fewer}
    errors = {"R2.0": (0.2, 0.1), "R2.1": (0.1, 0.2), "R4.0": (0.1, 0.098), "R4.1": (0.1, 0.05)}
    recipe = resolve_recipe("auto")
    ids = {rotation.space.id for rotation in plan_for(facts, recipe, source_hash="0").rotations}
    assert set(errors) < ids
    chosen = choose_rotations(facts, recipe, source_hash="0", trials=Scripted(costs, errors=errors))
    left = {rotation.space.id for rotation in chosen.plan.rotations}
    assert left == ids - ({"R2.1", "R4.0"} if dropped else set())
    said = {choice.name: choice for choice in chosen.choices}
    assert (said["R2.0"].chosen, said["R2.0"].gain) == ("rotated", pytest.approx(0.5))
    assert said["R2.1"].chosen == ("not rotated" if dropped else "rotated")


@pytest.mark.parametrize(
    ("first", "second"),
    [(0.9, 0.5), (0.5, 0.9), (1.1, 1.1)],
    ids=["too little", "by chance", "worse"],
)
def test_without_a_wide_gain_twice_nothing_is_rotated(facts: Facts, first: float, second: float) -> None:
    costs = dict.fromkeys(["R1R2", "R1R4", "R2R4"], 2.0) | {"none": 1.0, "R1R2R4": first}
    taken, said = choose(facts, Scripted(costs, again={"R1R2R4": second}))
    assert taken == set()
    assert said["rotations"] == "none"


def test_a_gain_within_the_noise_of_the_text_is_none() -> None:
    rng = np.random.default_rng(0)
    without = Effect(rng.exponential(1.0, 400))
    steady = Effect(without.positions * 0.7)
    lucky = Effect(without.positions - np.where(np.arange(400) == 7, 0.3 * without.positions.sum(), 0))
    assert worth(steady, without, MARGIN)
    assert not worth(lucky, without, MARGIN), "all of the gain is in one position"


def test_random_weights_are_not_rotated_and_that_is_said(
    plain: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the commands of the page, which replay the choice, too."""
    first, again = (
        shlex.split(line) for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:8] == "graphrot"
    )
    output = tmp_path / "OUT"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TEXT").write_bytes(text.read_bytes())
    for file in plain.parent.iterdir():
        target = "MODEL.onnx" if file == plain else file.name
        (tmp_path / target).write_bytes(file.read_bytes())
    assert run([*first[1:], "--certificate", "off"]) == 0
    printed = capsys.readouterr().out
    assert "rotated    nothing" in printed
    assert "chosen     rotations: none" in printed
    assert "nothing is rotated" in printed
    assert "chosen     grids: " in printed
    manifest = json.loads((output / "graphrot.json").read_text(encoding="utf-8"))
    assert manifest["plan"]["rotations"] == []
    assert {choice["kind"] for choice in manifest["choices"]} == {"recipe", "rotation", "weight"}
    assert manifest["recipe"]["rotations"] == "auto"

    assert run([*again[1:], "--certificate", "off"]) == 0
    assert (output / "model.onnx.data").read_bytes() == (tmp_path / "AGAIN" / "model.onnx.data").read_bytes()


def test_outliers_are_rotated_away_and_the_plan_replays(outliers: Path, text: Path, tmp_path: Path) -> None:
    options = {"activations": "int4", "solver": "clip", "calibration": text, "certificate": None}
    first = graphrot.convert(outliers, output=tmp_path / "a", recipe="w4a8", rotations="auto", **options)
    assert "R1" in kinds_of(first.plan)
    (total,) = [choice for choice in first.report.choices if choice.name == "rotations"]
    assert total.gain > MARGIN
    again = graphrot.convert(outliers, output=tmp_path / "b", recipe="w4a8", plan=tmp_path / "a/plan.json", **options)
    assert "choose rotations" not in again.report.seconds
    assert (tmp_path / "a/model.onnx.data").read_bytes() == (tmp_path / "b/model.onnx.data").read_bytes()


def test_what_is_measured_lies_behind_what_gptq_reads(plain: Path, text: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text(text.read_text(encoding="utf-8") * 4, encoding="utf-8")
    texts = Texts(plain.parent, long)
    everything = texts.tokens(10**9)
    assert len(everything) > CALIBRATION_TOKENS + 300
    found = measured(texts, count=256, window=100)
    np.testing.assert_array_equal(found.tokens.reshape(-1), everything[CALIBRATION_TOKENS : CALIBRATION_TOKENS + 200])
    assert found.tokens.shape == (2, 100)
    assert not found.seen
    short = Texts(plain.parent, text)
    everything = short.tokens(10**9)
    assert len(everything) < CALIBRATION_TOKENS
    found = measured(short, count=256, window=100)
    np.testing.assert_array_equal(found.tokens.reshape(-1), everything[-256:][:200])
    assert found.seen


def test_a_trial_rounds_runs_of_linears_from_both_ends() -> None:
    linears = [LinearRef(str(k), "MatMul", "w", 1, "x", 8, 8, "KN", is_head=k == 210) for k in range(211)]
    part = [int(linear.node) for linear in part_of(linears)]
    assert part == [*range(14), *range(98, 112), *range(196, 210)]
    assert part_of(linears[:60]) == tuple(linears[:60])


def test_errors_of_sites_are_those_of_the_turned_tensors(facts: Facts, plain: Path, tmp_path: Path) -> None:
    """Against the source itself: R4 alone leaves every other tensor as it was."""
    source = load_source(str(plain), workdir=tmp_path / "load")
    recipe = resolve_recipe("w4a8", only="R4", solver="rtn")
    plan = plan_for(facts, recipe, source_hash="0")
    tokens = np.random.default_rng(0).integers(3, 90, 40)
    feeds = calibration_feeds(source.model, tokens, facts.caches, window=40)
    rotated, still = (
        rotated_graph(source.model, p, quantizes=True) for p in (plan, plan_for(facts, NONE, source_hash="0"))
    )
    found = site_errors(rotated, facts.linears, plan, recipe, feeds, tmp_path / "rotated")
    assert set(found) == {rotation.space.id for rotation in plan.rotations}
    for rotation in plan.rotations:
        (use,) = rotation.space.consumers
        (linear,) = [linear for linear in facts.linears if linear.node == use.node]
        session = model_session(_with_outputs(still, [linear.input]), tmp_path / rotation.space.id)
        x = session.run(None, feeds[0])[0].reshape(-1, linear.in_features)
        weight = load_weight(value_map(still), linear)
        turned = (lambda numbers: numbers, partial(build_matrix(rotation.matrix).rotate, axis=-1))
        for figure, turn in zip(found[rotation.space.id], turned, strict=True):
            inputs = fake_quantize_tokens(turn(x.astype(np.float64)).astype(np.float32), 8)
            stored = quantize_rtn(turn(weight.astype(np.float64)).astype(np.float32), WeightGrid(4)).dequantize()
            exact = x @ weight.T
            expected = np.square(inputs @ stored.T - exact).sum() / np.square(exact).sum()
            assert figure == pytest.approx(expected, rel=1e-3)
