"""Grids by measurement: what is stored is what was counted, what is measured is what happens, and plans replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import graphrot
from graphrot.analysis.types import LinearRef
from graphrot.auto.effect import LOGITS, WeightEffects, divergence, log_softmax
from graphrot.auto.storage import Storage, candidates, grid_name
from graphrot.errors import InputRefused, UsageError
from graphrot.evaluate.session import DecoderSession
from graphrot.quant.gptq import gptq_many
from graphrot.quant.grid import WeightGrid
from graphrot.recipe import resolve_recipe

CLIP: dict[str, Any] = {"recipe": "w4a8", "solver": "clip", "certificate": None, "embedding": None, "head": None}


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"bits": 5.5}, True),
        ({"bits": 6.5, "kernels": "ort"}, False),
        ({"bits": 6, "target": "portable"}, True),
        ({"bits": 5.2, "activations": None, "dtype": "float16"}, False),
    ],
    ids=["graphrot", "ort", "portable", "float16"],
)
def test_what_is_written_is_within_the_budget(plain: Path, text: Path, options: dict[str, Any], exact: bool) -> None:
    result = graphrot.convert(plain, calibration=text, **{**CLIP, **options})
    stored = result.report.sizes.bits_per_weight
    assert stored <= options["bits"]
    assert stored > options["bits"] - 0.35
    (total,) = [choice for choice in result.report.choices if choice.name == "weights"]
    counted = float(total.why.split("; ")[1].split()[0])
    assert counted == pytest.approx(stored, abs=6e-4) if exact else counted >= stored - 6e-4
    used = {(entry.bits, entry.group) for entry in result.report.quantized}
    assert len(used) > 1
    assert used == {(grid.bits, grid.group or "channel") for grid in result.plan.grids}


def test_a_plan_replays_the_grids(plain: Path, text: Path, tmp_path: Path) -> None:
    first = graphrot.convert(plain, output=tmp_path / "a", calibration=text, bits=5.5, **CLIP)
    again = graphrot.convert(plain, output=tmp_path / "b", plan=tmp_path / "a" / "plan.json", **CLIP)
    assert "choose grids" in first.report.seconds
    assert "choose grids" not in again.report.seconds
    assert (tmp_path / "a/model.onnx.data").read_bytes() == (tmp_path / "b/model.onnx.data").read_bytes()
    with pytest.raises(UsageError, match="--bits and --plan contradict each other"):
        graphrot.convert(plain, plan=tmp_path / "a" / "plan.json", bits=5, **CLIP)


def test_a_budget_that_holds_nothing(plain: Path, text: Path) -> None:
    with pytest.raises(UsageError, match="4 bits per weight are too few"):
        graphrot.convert(plain, calibration=text, bits=4, **CLIP)


def test_the_choice_says_what_it_gained(plain: Path, text: Path) -> None:
    choices = graphrot.convert(plain, calibration=text, bits=5.5, **CLIP).report.choices
    (total,) = [choice for choice in choices if choice.kind == "recipe"]
    weights = [choice for choice in choices if choice.kind == "weight"]
    assert total.candidates["a grid for each"] < min(f for n, f in total.candidates.items() if n.startswith("all "))
    chosen = sum(choice.candidates[choice.chosen] for choice in weights)
    assert chosen == pytest.approx(total.candidates["a grid for each"])
    for choice in weights:
        names = list(choice.candidates)
        assert choice.gain == pytest.approx(1 - choice.candidates[choice.chosen] / choice.candidates[names[0]])
        assert choice.candidates["int8/channel"] < choice.candidates["int4/32"] < choice.candidates["int4/channel"]


def test_candidates_are_never_coarser_than_the_recipe() -> None:
    names = [grid_name(grid) for grid in candidates(resolve_recipe("w4a8", group=64, symmetric=False))]
    assert names == ["int4/64/asymmetric", "int4/64", "int4/32", "int4/32/asymmetric", "int8/channel"]


def test_float16_halves_the_scales_that_it_narrows() -> None:
    linear = LinearRef("y", "MatMul", "w", 1, "x", 128, 10, "KN")
    wide, half = (
        Storage.of(resolve_recipe("w4a8", dtype=dtype)).bits(linear, WeightGrid(4, 32)) for dtype in (None, "float16")
    )
    assert (wide, half) == (10 * (512 + 4 * 32), 10 * (512 + 4 * 16))


@pytest.fixture(scope="module")
def decoder(plain: Path) -> tuple[Path, list[LinearRef]]:
    """The model, and two of its linears."""
    model = ir.load(plain)
    found = []
    for node in model.graph:
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is not None and weight.const_value is not None:
            k, n = (int(size) for size in weight.const_value.shape.numpy())
            name, data = node.outputs[0].name or "", node.inputs[0]
            assert data is not None
            found.append(LinearRef(name, "MatMul", weight.name or "", 1, data.name or "", k, n, "KN"))
    return plain, found[:2]


def feeds_of(path: Path, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """What the model's inputs need for tokens behind nothing."""
    feeds: dict[str, np.ndarray] = {}
    for value in ir.load(path).graph.inputs:
        name, shape = value.name or "", [] if value.shape is None else list(value.shape)
        if name == "input_ids":
            feeds[name] = tokens
        elif name == "attention_mask":
            feeds[name] = np.ones_like(tokens)
        elif name == "position_ids":
            feeds[name] = np.arange(tokens.shape[1])[None]
        else:
            feeds[name] = np.zeros((1, int(shape[1]), 0, int(shape[3])), np.float32)
    return feeds


def test_the_effect_is_that_of_the_edited_file(decoder: tuple[Path, list[LinearRef]], tmp_path: Path) -> None:
    path, linears = decoder
    tokens = np.random.default_rng(1).integers(3, 90, (1, 20))
    effects = WeightEffects(ir.load(path), linears, [feeds_of(path, tokens)], tmp_path / "effects")
    model = onnx.load(path)
    (stored,) = [t for t in model.graph.initializer if t.name == linears[1].weight]
    old = numpy_helper.to_array(stored)
    new = old + 0.02 * np.random.default_rng(2).standard_normal(old.shape).astype(np.float32)
    stored.CopyFrom(numpy_helper.from_array(new, stored.name))
    onnx.save(model, tmp_path / "edited.onnx")
    before, after = (
        log_softmax(np.array(DecoderSession(file).run(tokens)[0][0])) for file in (path, tmp_path / "edited.onnx")
    )
    expected = divergence(before, after)
    found = effects.divergences({linears[1].node: np.ascontiguousarray(new.T)})
    assert expected.mean() > 1e-4
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-6)
    # Nothing of it stays for the next, and the model itself does not diverge from itself.
    assert abs(effects.divergence(linears[0].node, old_weight(path, linears[0]))) < 1e-6


def old_weight(path: Path, linear: LinearRef) -> np.ndarray:
    (stored,) = [t for t in onnx.load(path).graph.initializer if t.name == linear.weight]
    return np.ascontiguousarray(numpy_helper.to_array(stored).T)


def test_a_model_without_logits_is_refused(decoder: tuple[Path, list[LinearRef]], tmp_path: Path) -> None:
    path, linears = decoder
    model = ir.load(path)
    for value in model.graph.outputs:
        if value.name == LOGITS:
            value.name = "scores"
    with pytest.raises(InputRefused, match="The model has no logits"):
        WeightEffects(model, linears, [], tmp_path)


def test_the_divergence_is_that_of_float64() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((70, 50)).astype(np.float32) * 5
    other = logits + rng.standard_normal((70, 50)).astype(np.float32)

    def exact(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))

    p, q = exact(logits), exact(other)
    expected = (np.exp(p) * (p - q)).sum(axis=1)
    found = divergence(log_softmax(logits.copy()), log_softmax(other.copy()))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_gptq_with_a_grid_for_each_weight() -> None:
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((300, 64))
    weights = [rng.standard_normal((n, 64)).astype(np.float32) for n in (5, 7, 6)]
    grids = [WeightGrid(4), WeightGrid(8), WeightGrid(4)]
    together = gptq_many(weights, inputs.T @ inputs, grids)
    for weight, grid, tensor in zip(weights, grids, together, strict=True):
        (alone,) = gptq_many([weight], inputs.T @ inputs, grid)
        assert tensor.grid == grid
        np.testing.assert_array_equal(tensor.codes, alone.codes)
        assert tensor.error == pytest.approx(alone.error, rel=1e-6)
