"""Which matrices of a plan can be learned, and where learned ones go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from graphrot.errors import InputRefused
from graphrot.plan.types import MatrixRef, Rotation, RotationPlan
from graphrot.rotation.file import RotationFile

KINDS = frozenset({"R1", "R2"})
"""The kinds whose matrices are learned. The others run while the model does, and have to be fast."""


def learnable(plan: RotationPlan) -> tuple[Rotation, ...]:
    """The rotations whose matrix may be any orthogonal one: R1 and R2, folded, that need not keep a mean."""
    return tuple(rotation for rotation in plan.rotations if _free(rotation))


def _free(rotation: Rotation) -> bool:
    merged = rotation.placement == "merged" and rotation.space.kind in KINDS
    return merged and not rotation.matrix.mean_preserving


def with_keys(plan: RotationPlan, start: Path) -> RotationPlan:
    """The plan with a reference by its space's id for every matrix that can be learned.

    Args:
        plan: the plan.
        start: a safetensors file with the matrices that learning starts from, for passes that look at numbers.
    """
    return _replaced(
        plan, lambda rotation: MatrixRef("file", rotation.space.dim, file=str(start), key=rotation.space.id)
    )


def with_file(plan: RotationPlan, file: RotationFile) -> RotationPlan:
    """The plan with learned matrices in place of those that can be learned.

    Raises:
        InputRefused: the file lacks one of them, or has it in another size.
    """
    wanted = {rotation.space.id: rotation.space.dim for rotation in learnable(plan)}
    if not wanted:
        raise InputRefused(
            "Nothing that is rotated in this model can take a learned matrix",
            where=", ".join(dict.fromkeys(rotation.space.kind for rotation in plan.rotations)) or "no rotation",
            why="R1 and R2 can, where they are folded into weights and no LayerNorm needs their mean",
            do="use --rotations hadamard",
        )
    missing = [key for key in wanted if key not in file.sizes]
    if missing:
        raise InputRefused(
            "The file with the rotations lacks matrices that the model needs",
            where=f"{file.path}: {', '.join(missing)}",
            why=f"it has {', '.join(file.sizes)}",
            do="learn rotations for this model and these sites, or name the sites that it has (--only)",
        )
    odd = [
        f"{key} is {file.sizes[key]}, and the model has {dim}" for key, dim in wanted.items() if file.sizes[key] != dim
    ]
    if odd:
        raise InputRefused(
            "Matrices in the file with the rotations have another size than the model's spaces",
            where=f"{file.path}: {'; '.join(odd)}",
            do="learn rotations for this model",
        )
    return _replaced(
        plan,
        lambda rotation: MatrixRef(
            "file", rotation.space.dim, file=file.path, key=rotation.space.id, sha256=file.sha256
        ),
    )


def _replaced(plan: RotationPlan, matrix: Callable[[Rotation], MatrixRef]) -> RotationPlan:
    rotations = tuple(
        replace(rotation, matrix=matrix(rotation)) if _free(rotation) else rotation for rotation in plan.rotations
    )
    return replace(plan, rotations=rotations)
