"""The grid of every weight, by what rounding it does to the model's answers, within a budget of stored bits.

Each weight is rounded alone, on the recipe's own grid and by its own solver, and the divergence that follows is
measured. That of finer grids is inferred: divergence grows with the square of a weight's error, and how the squared
error shrinks from grid to grid is measured on the weight. Divergences of weights that are rounded independently add
up, so that the best choice within the budget is a knapsack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from graphrot.analysis.types import Facts, LinearRef
from graphrot.auto.budget import Candidate, spend
from graphrot.auto.effect import WeightEffects
from graphrot.auto.storage import Storage, candidates, grid_name
from graphrot.auto.text import measured
from graphrot.errors import UsageError
from graphrot.graph import value_map
from graphrot.passes.quantize_weights import plain_name
from graphrot.passes.refs import current_linears
from graphrot.plan.types import GridChoice, RotationPlan
from graphrot.progress import Progress, silent
from graphrot.quant.clip import clip_scales
from graphrot.quant.grid import WeightGrid
from graphrot.quant.linears import quantize_linears
from graphrot.quant.rtn import round_to
from graphrot.quant.weights import load_weight
from graphrot.quantize import CALIBRATION_TOKENS, CALIBRATION_WINDOW, calibration_feeds
from graphrot.recipe import Recipe
from graphrot.report.parts import ChoicePart
from graphrot.texts import Texts

TOKENS = 128
"""Tokens that every weight is measured on."""

MEASURE = "divergence KL(float || this weight rounded) of the next token on held-out text, nats"

_SAMPLE = 96
"""Output channels of a weight that its candidates' errors are measured on."""


@dataclass(frozen=True)
class Grids:
    """The plan with a grid for every linear, and why these."""

    plan: RotationPlan
    choices: tuple[ChoicePart, ...]


def choose_grids(
    model: ir.Model,
    facts: Facts,
    plan: RotationPlan,
    recipe: Recipe,
    *,
    texts: Texts,
    folder: Path,
    longest: int | None = None,
    progress: Progress = silent,
) -> Grids:
    """Give every linear but heads the grid that serves the model best within ``recipe.bits``.

    Args:
        model: rotated, float; only read.
        facts: of the source.
        plan: that ``model`` was rotated by.
        recipe: its own grid is the smallest that a weight gets.
        texts: for gptq, and to measure on.
        folder: scratch, owned by the caller.
        longest: tokens that the model takes at once, or None.
        progress: told of each measurement.

    Raises:
        UsageError: the budget does not even hold the recipe's own grid.
        InputRefused: the model does not run with its weights as inputs.
    """
    assert recipe.bits is not None
    pairs = list(zip(facts.linears, current_linears(model, facts.linears), strict=True))
    body = [now for _, now in pairs if not now.is_head]
    names = [was.node for was, now in pairs if not now.is_head]
    grids = candidates(recipe)
    storage = Storage.of(recipe)
    count = sum(linear.in_features * linear.out_features for linear in body)
    shared = storage.shared_bits(body, grids)
    budget = int(recipe.bits * count) - shared
    smallest = sum(min(storage.bits(linear, grid) for grid in grids) for linear in body)
    if smallest > budget:
        raise UsageError(
            f"{recipe.bits:g} bits per weight are too few",
            where="recipe field 'bits'",
            why=f"4-bit codes and one scale per {recipe.group} take {smallest / count:.2f} here",
            do="raise the budget",
        )
    effects = _effects(model, body, facts, recipe, texts, folder, longest, progress)
    tables = [_candidates(model, linear, grids, storage, effects[linear.node]) for linear in body]
    picked = spend(tables, budget)
    assert picked is not None
    chosen = [grids[index] for index in picked]
    choices = [_weight(linear, grids, table, index) for linear, table, index in zip(body, tables, picked, strict=True)]
    total = _total(grids, tables, picked, budget, shared, count)
    taken = tuple(GridChoice(name, g.bits, g.group, g.symmetric) for name, g in zip(names, chosen, strict=True))
    return Grids(replace(plan, grids=taken), (total, *choices))


def _effects(
    model: ir.Model,
    body: Sequence[LinearRef],
    facts: Facts,
    recipe: Recipe,
    texts: Texts,
    folder: Path,
    longest: int | None,
    progress: Progress,
) -> Mapping[str, float]:
    """Node -> what rounding its weight alone does to the model's answers."""
    assert recipe.solver is not None
    feeds = []
    if recipe.solver == "gptq":
        read = texts.tokens(CALIBRATION_TOKENS)
        feeds = calibration_feeds(model, read, facts.caches, window=longest or CALIBRATION_WINDOW)
    rounded = quantize_linears(
        model,
        body,
        grid=candidates(recipe)[0],
        solver=recipe.solver,
        activation_bits=recipe.activation_bits,
        feeds=feeds,
        scratch=folder / "probe",
        progress=progress,
    )
    found = measured(texts, count=TOKENS, window=min(TOKENS, longest or TOKENS))
    rows = calibration_feeds(model, found.tokens.reshape(-1), facts.caches, window=found.tokens.shape[1])
    session = WeightEffects(model, body, rows, folder / "effects")
    result = {}
    for position, linear in enumerate(body):
        result[linear.node] = max(0.0, session.divergence(linear.node, rounded[linear.node].dequantize()))
        progress("measuring weights", position + 1, len(body))
    return result


def _candidates(
    model: ir.Model, linear: LinearRef, grids: Sequence[WeightGrid], storage: Storage, effect: float
) -> list[Candidate]:
    """Every grid with its bits and its effect: that of the first one, times the ratio of the squared errors."""
    weight = load_weight(value_map(model), linear)
    sample = weight[:: max(1, len(weight) // _SAMPLE)]
    errors = [round_to(sample, *clip_scales(sample, grid), grid).error ** 2 for grid in grids]
    first = errors[0] or 1.0
    return [
        Candidate(storage.bits(linear, grid), effect * error / first) for grid, error in zip(grids, errors, strict=True)
    ]


def _weight(linear: LinearRef, grids: Sequence[WeightGrid], table: Sequence[Candidate], index: int) -> ChoicePart:
    base, taken = table[0], table[index]
    size = linear.in_features * linear.out_features
    return ChoicePart(
        kind="weight",
        name=plain_name(linear.weight),
        chosen=grid_name(grids[index]),
        candidates={grid_name(grid): candidate.effect for grid, candidate in zip(grids, table, strict=True)},
        measure=f"{MEASURE}; of all but {grid_name(grids[0])} inferred from their squared errors",
        gain=1 - taken.effect / base.effect if base.effect > 0 else 0.0,
        why=f"{taken.bits / size:.2f} bits per weight" + ("" if index else ": the bits gain more in other weights"),
    )


def _total(
    grids: Sequence[WeightGrid],
    tables: Sequence[Sequence[Candidate]],
    picked: Sequence[int],
    budget: int,
    shared: int,
    count: int,
) -> ChoicePart:
    """The choice against one grid for all weights, where that is within the budget."""
    sums: dict[str, float] = {}
    for position, grid in enumerate(grids):
        if sum(table[position].bits for table in tables) <= budget:
            sums[f"all {grid_name(grid)}"] = sum(table[position].effect for table in tables)
    mixed = sum(table[index].effect for table, index in zip(tables, picked, strict=True))
    bits = (shared + sum(table[index].bits for table, index in zip(tables, picked, strict=True))) / count
    best = min(sums.values(), default=0.0)
    return ChoicePart(
        kind="recipe",
        name="weights",
        chosen="a grid for each",
        candidates={**sums, "a grid for each": mixed},
        measure=f"sum over weights of: {MEASURE}",
        gain=1 - mixed / best if best > 0 else 0.0,
        why=f"least within the budget; {bits:.3f} bits per weight",
    )
