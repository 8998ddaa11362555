"""The one place that decides: facts and the user's wishes become a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from graphrot.analysis.types import Facts, GainFold, Refusal, RotationSpace, SpaceKind, TiedHead, places
from graphrot.plan.means import fold_means, mean_note, mean_refusal
from graphrot.plan.tie import matrix_name, redirect, touches_head
from graphrot.plan.types import MatrixRef, Rotation, RotationPlan
from graphrot.rotation.orthogonal import choose_matrix

_KIND_NUMBER: dict[SpaceKind, int] = {"R1": 1, "R2": 2, "R3": 3, "R4": 4, "O": 5, "other": 6}


@dataclass(frozen=True)
class PlanRequest:
    """What the plan needs to know of the recipe.

    Args:
        kinds: the kinds of spaces to rotate.
        rotations: the matrices of merged spaces; online ones are always Hadamard transforms, because they
            must be fast (QuaRot, section 4), and but for R1 without signs.
        seed: seed of signs and random matrices.
        embedding_bits: 8 or 4, or None for float.
        head_bits: likewise.
        recipe: the whole recipe, kept in the plan as a record.
        online_r1: take R1 also where its transforms stand within the layers.
    """

    kinds: tuple[SpaceKind, ...]
    rotations: Literal["hadamard", "random", "block-hadamard"] | None
    seed: int = 0
    embedding_bits: int | None = None
    head_bits: int | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    online_r1: bool = False


def build_plan(facts: Facts, request: PlanRequest, *, source_hash: str) -> RotationPlan:
    """Choose rotations, gain folds, mean folds and the fate of a tied table.

    Args:
        facts: what the analysis found.
        request: what is asked for.
        source_hash: sha256 of the source, kept in the plan.

    Returns:
        A plan that takes every space of the wanted kinds; the analysis' refusals of those kinds are
        carried along.
    """
    rotations: list[Rotation] = []
    refusals = [refusal for refusal in facts.refused if refusal.kind in request.kinds]
    lifted: set[tuple[SpaceKind, str]] = set()
    # What an option frees, or is refused for its mean instead.
    means: list[Refusal] = []
    if request.rotations is not None:
        for space in facts.spaces:
            if space.kind not in request.kinds:
                continue
            refusal = mean_refusal(space)
            if space.optional and refusal is None and not request.online_r1:
                continue
            if space.optional:
                lifted.update((space.kind, place) for place in places(space))
            if refusal is not None:
                means.append(refusal)
            else:
                rotations.append(Rotation(space=space, matrix=_matrix(space, request), placement=space.placement))
    refusals = [r for r in refusals if (r.kind, r.node) not in lifted] + means
    gains = _needed_gains(facts.gains, rotations)
    tie = _keep_tied(facts.tied, request, rotations, gains)
    taken, mean_folds = fold_means(rotations, tie)
    matrix = None
    if tie is not None and touches_head(tie, gains, taken):
        matrix = matrix_name(tie)
        gains, taken = redirect(tie, gains, taken)
    return RotationPlan(
        source_hash=source_hash,
        recipe=request.recipe,
        gain_folds=gains,
        rotations=taken,
        refusals=tuple(refusals),
        tie=tie,
        tie_matrix=matrix,
        untie=facts.tied is not None and tie is None,
        mean_folds=mean_folds,
    )


def _matrix(space: RotationSpace, request: PlanRequest) -> MatrixRef:
    assert request.rotations is not None
    kind = request.rotations
    if space.placement == "online":
        if space.kind != "R1":
            return choose_matrix(space.dim, rotations="hadamard", seed=None)
        kind = "hadamard" if kind == "random" else kind
    number = int(space.id.rpartition(".")[2]) if "." in space.id else 0
    entropy = (request.seed, _KIND_NUMBER[space.kind], number)
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    kept = space.mean_preserving and not space.mean_folds
    matrix = choose_matrix(space.dim, rotations=kind, seed=seed, mean_preserving=kept)
    return replace(matrix, note="; ".join(note for note in (matrix.note, mean_note(space)) if note))


def _needed_gains(gains: Sequence[GainFold], rotations: Sequence[Rotation]) -> tuple[GainFold, ...]:
    """The folds in the way of a chosen rotation: those that share an axis of an operand with it.

    Folding a gain without need makes 4-bit grids worse, so the others stay where they are.
    """
    uses = [use for r in rotations for use in (*r.space.producers, *r.space.consumers)]
    rotated = {(use.node, use.input, use.axis) for use in uses}
    return tuple(g for g in gains if any((c.use.node, c.use.input, c.use.axis) in rotated for c in g.consumers))


def _keep_tied(
    tied: TiedHead | None, request: PlanRequest, rotations: Sequence[Rotation], gains: Sequence[GainFold]
) -> TiedHead | None:
    """Keep one table for embedding and head where that gives the smaller file.

    A shared table needs equal bits on both sides and, once the head's side has its own gain or basis,
    a float ``[D, D]`` matrix in front of the head.
    """
    if tied is None or request.embedding_bits != request.head_bits:
        return None
    if not touches_head(tied, gains, rotations):
        return tied
    bits = request.head_bits or 32
    table_bytes = tied.embedding.rows * tied.embedding.dim * bits / 8
    matrix_bytes = tied.embedding.dim**2 * 4
    return tied if matrix_bytes < table_bytes else None
