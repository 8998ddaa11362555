"""What the descent asks of a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch


class Objective(Protocol):
    """A loss of rotations on one batch; less is better."""

    def __call__(self, matrices: Mapping[str, torch.Tensor], batch: Any) -> torch.Tensor:
        """The loss.

        Args:
            matrices: by space id, ``[dim, dim]`` float64, orthogonal; gradients flow to them.
            batch: one of the kind that the objective is for.

        Returns:
            A scalar.
        """
        ...


class Task(Objective, Protocol):
    """An objective with its data: batches to learn on, and others that only measure."""

    @property
    def heldout(self) -> Sequence[Any]:
        """The batches that say how good matrices are; none of their data is learned on."""
        ...

    def batch(self, generator: np.random.Generator) -> Any:
        """A batch to learn on: the same one for generators in the same state."""
        ...
