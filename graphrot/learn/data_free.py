"""The data-free loss: the fourth moment of what weights read and write, over the squared second.

It is 3 for normal numbers, less where no channel sticks out, and large where a few carry the weight. The vectors are
the rows of weights along the rotated channels: a consumer's are what it listens to, a producer's and the embedding's
are what the channels are made of. No text is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from graphrot.learn.parts import Turned, changes

VECTORS = 64
"""Vectors of every operand in a batch."""

MOST = 1024
"""Vectors of an operand that are looked at, at most."""

_LEAST = 1e-12


@dataclass(frozen=True)
class Vectors:
    """Vectors of one operand along the channels of one matrix, in the start's basis.

    Args:
        part: what acts on them.
        learned: ``[n, width]`` float32 to learn on.
        heldout: ``[m, width]`` float32.
    """

    part: Turned
    learned: torch.Tensor
    heldout: torch.Tensor


@dataclass(frozen=True)
class VectorBatch:
    """Positions of vectors for each operand; None: the held-out ones, all of them."""

    chosen: tuple[torch.Tensor, ...] | None


class DataFreeTask:
    """See the module.

    Args:
        start: the matrices in whose basis the vectors are, ``[dim, dim]`` float64 by space id.
        vectors: of all operands.
    """

    def __init__(self, start: Mapping[str, torch.Tensor], vectors: Sequence[Vectors]) -> None:
        self._start = dict(start)
        self._vectors = list(vectors)

    @property
    def heldout(self) -> Sequence[VectorBatch]:
        """One batch: all held-out vectors."""
        return [VectorBatch(None)]

    def batch(self, generator: np.random.Generator) -> VectorBatch:
        """Some vectors of every operand."""
        picked = [
            torch.from_numpy(generator.integers(0, len(entry.learned), min(VECTORS, len(entry.learned))))
            for entry in self._vectors
        ]
        return VectorBatch(tuple(picked))

    def __call__(self, matrices: Mapping[str, torch.Tensor], batch: VectorBatch) -> torch.Tensor:
        """The mean over operands."""
        turns = changes(self._start, matrices)
        losses = []
        for number, entry in enumerate(self._vectors):
            x = entry.heldout if batch.chosen is None else entry.learned[batch.chosen[number]]
            losses.append(fourth_moment(x[:, entry.part.index] @ turns[entry.part.key]))
        return torch.stack(losses).mean()


def fourth_moment(x: torch.Tensor) -> torch.Tensor:
    """Mean fourth power over the squared mean square along the last axis, in the mean over all vectors: a scalar."""
    square = x.square()
    return (square.square().mean(-1) / square.mean(-1).square().clamp_min(_LEAST)).mean()


def split_vectors(part: Turned, numbers: np.ndarray, axis: int, generator: np.random.Generator) -> Vectors:
    """Some vectors of an operand, an eighth of them held out.

    Args:
        part: what acts on them.
        numbers: the operand, float.
        axis: along which the channels lie.
        generator: picks the vectors.
    """
    rows = np.moveaxis(numbers, axis, -1).reshape(-1, numbers.shape[axis])
    picked = np.sort(generator.permutation(len(rows))[:MOST])
    chosen = np.ascontiguousarray(rows[picked], dtype=np.float32)
    chosen = chosen[np.any(chosen != 0, axis=1)]
    generator.shuffle(chosen, axis=0)
    held = max(1, len(chosen) // 8)
    return Vectors(part, torch.from_numpy(chosen[held:]), torch.from_numpy(chosen[:held]))
