"""Which learnable matrix acts on which channels of a tensor, and a tensor under a change of these matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from graphrot.analysis.types import Runs, decode_runs
from graphrot.plan.types import Rotation


@dataclass(frozen=True)
class Turned:
    """Blocks of channels along one axis on which one matrix acts: ``v <- v @ Q`` for each of them.

    Args:
        key: space id of the matrix.
        index: ``[blocks, dim]`` int64 positions along the axis.
        width: length of the axis.
    """

    key: str
    index: torch.Tensor
    width: int

    @classmethod
    def of(cls, key: str, groups: Sequence[Runs], width: int) -> Turned:
        """From the groups of a use."""
        return cls(key, torch.from_numpy(np.asarray([decode_runs(group) for group in groups], np.int64)), width)

    @property
    def whole(self) -> bool:
        """The blocks tile the axis in order."""
        flat = self.index.reshape(-1)
        return len(flat) == self.width and bool((flat == torch.arange(self.width)).all())

    def apply(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """``x [..., width]`` with its blocks multiplied by ``turn [dim, dim]``."""
        if self.whole:
            return (x.reshape(*x.shape[:-1], *self.index.shape) @ turn).reshape(x.shape)
        result = x.clone()
        result[..., self.index] = x[..., self.index] @ turn
        return result


def turned(x: torch.Tensor, parts: Sequence[Turned], turns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """``x [..., width]`` under a change of matrices along its last axis."""
    for part in parts:
        x = part.apply(x, turns[part.key])
    return x


@dataclass(frozen=True)
class Operand:
    """A constant operand that learnable matrices act on: node (first output), input, and the parts by axis."""

    node: str
    input: int
    axes: Mapping[int, tuple[Turned, ...]]
    table: bool = False


def operands(rotations: Sequence[Rotation], shapes: Mapping[tuple[str, int], tuple[int, ...]]) -> list[Operand]:
    """The weights and tables of some rotations; those that several act on come once.

    Args:
        rotations: the learnable ones.
        shapes: of operands by node and input; one that is not there is left out.
    """
    found: dict[tuple[str, int], dict[int, list[Turned]]] = {}
    tables: set[tuple[str, int]] = set()
    for rotation in rotations:
        for use in (*rotation.space.producers, *rotation.space.consumers):
            place = (use.node, use.input)
            if use.role == "bias" or place not in shapes:
                continue
            if use.role == "table":
                tables.add(place)
            part = Turned.of(rotation.space.id, use.groups, shapes[place][use.axis])
            found.setdefault(place, {}).setdefault(use.axis, []).append(part)
    return [
        Operand(node, position, {axis: tuple(parts) for axis, parts in axes.items()}, (node, position) in tables)
        for (node, position), axes in found.items()
    ]


def changes(start: Mapping[str, torch.Tensor], matrices: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What takes tensors that were rotated by ``start`` on to ``matrices``: ``start.T @ matrix``, float32.

    Args:
        start: ``[dim, dim]`` float64 by space id.
        matrices: likewise; gradients flow to them.
    """
    return {key: (start[key].T @ matrix).to(torch.float32) for key, matrix in matrices.items()}
