"""From a source to a plan, and from a plan to a rotated graph whose weights are still lists of edits."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphrot.analysis.types import Facts
from graphrot.model.apart import take_apart
from graphrot.model.load import Source
from graphrot.passes import ROTATION_PASSES
from graphrot.passes.raise_opset import needed_opset
from graphrot.plan.build import PlanRequest, build_plan
from graphrot.plan.learned import with_file
from graphrot.plan.types import RotationPlan
from graphrot.recipe import Recipe
from graphrot.rotation.file import read_rotations
from graphrot.rotation.orthogonal import RotationKind


def opened_up(source: Source, *, rotary: bool) -> Source:
    """The source with fused operators taken apart; ``rotary``: rotary positions inside of attention, too.

    Only the graph in memory changes: what the result is compared with is the file as it was.
    """
    model = source.model.clone()
    return replace(source, model=model) if take_apart(model, rotary=rotary) else source


def plan_for(facts: Facts, recipe: Recipe, *, source_hash: str) -> RotationPlan:
    """The plan that a recipe asks for.

    Raises:
        InputRefused: the recipe's file of learned rotations cannot be read, or lacks a matrix that the model needs.
    """
    file = None if recipe.rotations_file is None else read_rotations(recipe.rotations_file)
    request = PlanRequest(
        kinds=recipe.sites,
        rotations=_constructed(recipe),
        seed=recipe.seed,
        embedding_bits=recipe.embedding_bits,
        head_bits=recipe.head_bits,
        recipe=recipe.model_dump(),
        online_r1=recipe.online_r1,
    )
    plan = build_plan(facts, request, source_hash=source_hash)
    return plan if file is None else with_file(plan, file)


def _constructed(recipe: Recipe) -> RotationKind | None:
    """The matrices of what is not learned; those that auto tries are Hadamard matrices."""
    if recipe.rotations_file is not None or recipe.rotations == "auto":
        return "hadamard"
    return next((kind for kind in get_args(RotationKind) if kind == recipe.rotations), None)


def rotated_graph(model: ir.Model, plan: RotationPlan, *, quantizes: bool) -> ir.Model:
    """A rotated copy of a model; its weights are :class:`graphrot.folded.FoldedTensor`: the old ones, and edits.

    Args:
        model: opened up; only read.
        plan: made from it.
        quantizes: raise the opset to what quantization needs.
    """
    result = model.clone()
    for step in [*needed_opset(plan, quantizes=quantizes), *(kind(plan) for kind in ROTATION_PASSES)]:
        step(result)
    RemoveUnusedNodesPass()(result)
    result.graph.sort()
    return result
