"""The model that rotations are learned for: loaded, analysed, planned, and rotated by the start's matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import AttentionSites, Facts, LinearRef
from graphrot.cache import find_sites
from graphrot.errors import InputRefused
from graphrot.folded import materialize
from graphrot.graph import WeightStore, value_map
from graphrot.model.finite import refuse_not_finite
from graphrot.model.load import Source, load_source, widened
from graphrot.passes.refs import current_linears
from graphrot.plan.learned import learnable, with_keys
from graphrot.plan.replay import refuse_less
from graphrot.plan.types import Rotation, RotationPlan
from graphrot.prepare import opened_up, plan_for, rotated_graph
from graphrot.progress import Progress
from graphrot.recipe import Recipe
from graphrot.rotation.file import write_rotations
from graphrot.rotation.orthogonal import build_matrix

if TYPE_CHECKING:
    from graphrot.model.interop import ModelObject


@dataclass(frozen=True)
class Subject:
    """What is learned on.

    Args:
        source: opened up.
        facts: of it.
        plan: with the start's matrices.
        rotations: those of the plan that can be learned.
        start: their matrices, ``[dim, dim]`` float64 by space id.
        sites: the attention whose cache the recipe quantizes.
        model: rotated, nodes in topological order. Its weights are written out, in the start's basis; or they are still
            lists of edits, in which a matrix that can be learned stands by its space's id.
        linears: of ``model``.
    """

    source: Source
    facts: Facts
    plan: RotationPlan
    rotations: tuple[Rotation, ...]
    start: Mapping[str, np.ndarray]
    sites: AttentionSites
    model: ir.Model
    linears: tuple[LinearRef, ...]

    @property
    def shapes(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """Shapes of the operands that can be learned on, by node (first output) and input."""
        values = value_map(self.model)
        found: dict[tuple[str, int], tuple[int, ...]] = {}
        for rotation in self.rotations:
            for use in (*rotation.space.producers, *rotation.space.consumers):
                operand = self.operand(use.node, use.input, values)
                if operand is not None and operand.const_value is not None:
                    found[use.node, use.input] = tuple(int(size) for size in operand.const_value.shape.numpy())
        return found

    def operand(self, node: str, position: int, values: Mapping[str, ir.Value]) -> ir.Value | None:
        """The constant operand of a node; None where there is none."""
        made = values.get(node)
        producer = None if made is None else made.producer()
        if producer is None or position >= len(producer.inputs):
            return None
        value = producer.inputs[position]
        return value if value is not None and value.const_value is not None else None


def load_subject(
    spec: str | ModelObject,
    recipe: Recipe,
    *,
    export: Path,
    scratch: Path,
    written: bool,
    allow_partial: bool,
    progress: Progress,
) -> Subject:
    """Load a model and rotate it; the recipe's matrices are the start.

    Args:
        spec: as :func:`graphrot.model.load.load_source` takes it.
        recipe: what will be rotated and rounded.
        export: a folder for the source as an .onnx file.
        scratch: a folder for rotated weights; both must stay while the subject is used.
        written: write the rotated weights out.
        allow_partial: go on where some rotations or caches are refused.
        progress: told of each step.

    Raises:
        InputRefused: the source cannot be used, or nothing in it can be learned.
    """
    source = widened(load_source(spec, workdir=export, progress=progress), scratch / "widened")
    refuse_not_finite(source.model)
    source = opened_up(source, rotary="R3" in recipe.sites or recipe.kv is not None)
    facts = analyze(source.model, progress=progress)
    sites = find_sites(source.model, facts, recipe, allow_partial=allow_partial, progress=progress)
    plan = plan_for(facts, recipe, source_hash=source.sha256)
    refuse_less(plan, recipe, allow_partial=allow_partial)
    rotations = learnable(plan)
    if not rotations:
        raise InputRefused(
            "No rotation of this model can be learned",
            where=", ".join(dict.fromkeys(rotation.space.kind for rotation in plan.rotations)),
            why="R1 and R2 can, where they are folded into weights and no LayerNorm needs their mean",
            do="see graphrot inspect; convert with --rotations hadamard",
        )
    start = {rotation.space.id: build_matrix(rotation.matrix).dense() for rotation in rotations}
    if written:
        model = rotated_graph(source.model, plan, quantizes=True)
        progress("rotating the weights", 0, 1)
        materialize(model, WeightStore(scratch / "rotated"), progress=progress)
    else:
        file = scratch / "start.safetensors"
        write_rotations(file, start, {})
        model = rotated_graph(source.model, with_keys(plan, file), quantizes=True)
    return Subject(source, facts, plan, rotations, start, sites, model, current_linears(model, facts.linears))


def named_in(rotations: Sequence[Rotation], outputs: str) -> Rotation | None:
    """The rotation that turns what a cache output holds."""
    return next((rotation for rotation in rotations if outputs in rotation.space.cache_outputs), None)
