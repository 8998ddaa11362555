"""The plan: which matrices act where. JSON round-trip, replayable, holds no numbers of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from graphrot.analysis.types import GainFold, MeanNorm, Placement, Refusal, RotationSpace, Runs, TiedHead, WeightUse

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
    sha256: str | None = None
    """Of the file; another one is refused."""
    note: str = ""
    """Set when a fallback was taken, for the report."""


@dataclass(frozen=True)
class Rotation:
    space: RotationSpace
    matrix: MatrixRef
    placement: Placement


@dataclass(frozen=True)
class CentredTensor:
    """A run-time tensor whose rows lose their mean by two nodes behind it; what read it reads ``centred``."""

    tensor: str
    centred: str
    """Name of the result: the first output of a Sub."""


@dataclass(frozen=True)
class CentredLookup:
    """Rows of a table that a head shares: they lose their mean after the lookup, in the rotated basis.

    ``x - (x a) b`` with vectors ``a [D, 1]`` and ``b [1, D]`` (one pair for each group), which rotate like a consumer
    and a producer of the space.
    """

    tensor: str
    """What the lookup makes."""
    groups: tuple[Runs, ...]
    width: int
    number: str
    """First output of the MatMul by ``a``."""
    part: str
    """First output of the MatMul by ``b``."""
    centred: str
    """First output of the Sub."""


@dataclass(frozen=True)
class MeanFold:
    """The mean of a space is taken out of what makes its channels, so that its LayerNorms become RMS norms."""

    space: str
    producers: tuple[WeightUse, ...]
    """Weights, biases and tables that are centred along their channels."""
    norms: tuple[MeanNorm, ...]
    online: tuple[CentredTensor, ...] = ()
    lookup: CentredLookup | None = None


@dataclass(frozen=True)
class GridChoice:
    """The grid of one linear's weight."""

    node: str
    """The linear, by its first output in the source."""
    bits: Literal[4, 8]
    group: int | None
    symmetric: bool


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
    mean_folds: tuple[MeanFold, ...] = ()
    grids: tuple[GridChoice, ...] = ()
    """The grids of all linears but heads, where each has its own; empty: the recipe's."""
