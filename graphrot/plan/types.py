"""The plan: which matrices act where. JSON round-trip, replayable, holds no numbers of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from graphrot.analysis.types import GainFold, Placement, Refusal, RotationSpace, TiedHead

Construction = Literal["hadamard", "random", "block-hadamard", "hartley", "file"]


@dataclass(frozen=True)
class MatrixRef:
    """How to rebuild one orthogonal matrix ``Q [dim, dim]`` (row convention: ``x' = x @ Q``)."""

    construction: Construction
    dim: int
    block: int | None = None
    """Block size of a block-diagonal matrix."""
    seed: int | None = None
    """Seed of the random signs (hadamard) or of the matrix (random); None: no signs."""
    mean_preserving: bool = False
    """Q maps the all-ones vector to itself."""
    file: str | None = None
    key: str | None = None
    note: str = ""
    """Set when a fallback was taken, for the report."""


@dataclass(frozen=True)
class Rotation:
    space: RotationSpace
    matrix: MatrixRef
    placement: Placement


@dataclass(frozen=True)
class RotationPlan:
    source_hash: str
    recipe: dict[str, Any]
    gain_folds: tuple[GainFold, ...]
    rotations: tuple[Rotation, ...]
    refusals: tuple[Refusal, ...]
    tie: TiedHead | None = None
    """Keep the table shared between embedding and head; the head may get a small matrix in front."""
    tie_matrix: str | None = None
    """First output of the MatMul by the small matrix, where one is needed."""
    untie: bool = False
    """The source shares the table and the model written does not."""
