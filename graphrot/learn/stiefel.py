"""Descent over orthogonal matrices: Riemannian SGD with momentum, by the Cayley transform.

The method of Li, Fuxin and Todorovic, "Efficient Riemannian optimization on the Stiefel manifold via the Cayley
transform" (ICLR 2020), which SpinQuant (Liu et al., arXiv 2405.16406, section 3) learns rotations with. A step is
``R <- (I + t/2 A)^-1 (I - t/2 A) R`` with ``A`` skew-symmetric: an orthogonal matrix stays one whatever ``t`` is. Two
choices differ from the paper's first algorithm. The transform is solved exactly and not by fixed-point iterations,
since the matrices are small and live in float64. And a step's length is in units of the gradient's running norm, one
number for each matrix (their second algorithm): losses of different scales then need no rates of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graphrot.errors import CheckFailed

TOLERANCE = 1e-6
"""How far ``R.T R`` may be from the identity, in its largest element. Steps are exact to about 1e-13."""

MOMENTUM = 0.9
"""What remains of the last direction in the next one."""

NORM_MEMORY = 0.99
"""What remains of the running squared norm of a gradient."""


@dataclass
class State:
    """One matrix on its way; all float64.

    Args:
        matrix: ``R [n, n]``.
        momentum: ``[n, n]``, tangent at ``R``.
        norm: running mean of the gradient's squared norm, 0 in the beginning.
        steps: that were made.
    """

    matrix: torch.Tensor
    momentum: torch.Tensor
    norm: float = 0.0
    steps: int = 0


class CayleySgd:
    """Moves orthogonal matrices against their gradients.

    Args:
        matrices: the start by key, ``[n, n]`` float64 orthogonal; they are copied.
        momentum: see :data:`MOMENTUM`.

    Raises:
        CheckFailed: a matrix is not orthogonal.
    """

    def __init__(self, matrices: Mapping[str, torch.Tensor], *, momentum: float = MOMENTUM) -> None:
        self._momentum = momentum
        self.states = {
            key: State(matrix.detach().to(torch.float64).clone(), torch.zeros_like(matrix, dtype=torch.float64))
            for key, matrix in matrices.items()
        }
        self.check()

    @property
    def matrices(self) -> dict[str, torch.Tensor]:
        """The matrices as they are now; not copies."""
        return {key: state.matrix for key, state in self.states.items()}

    def step(self, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        """One step of every matrix that has a gradient.

        Args:
            gradients: of the loss by key, ``[n, n]`` in the ambient space, any float dtype.
            rate: length of the step, as a fraction of ``sqrt(n)``, the norm of the matrix, where all gradients agree
                and have the norm that they usually have; less where they differ, and never more.

        Raises:
            CheckFailed: a gradient is not finite, or a matrix is not orthogonal any more.
        """
        with torch.no_grad():
            for key, gradient in gradients.items():
                self._move(key, self.states[key], gradient.to(torch.float64), rate)
        self.check()

    def _move(self, key: str, state: State, gradient: torch.Tensor, rate: float) -> None:
        matrix = state.matrix
        if not torch.isfinite(gradient).all():
            raise CheckFailed(
                "The gradient of the loss is not finite",
                where=f"rotation {key}, step {state.steps + 1}",
                do="lower the rate, or check the calibration text",
            )
        tangent = _skew(gradient @ matrix.T)
        state.steps += 1
        state.norm = NORM_MEMORY * state.norm + (1 - NORM_MEMORY) * float(tangent.square().sum())
        usual = (state.norm / (1 - NORM_MEMORY**state.steps)) ** 0.5
        if usual == 0.0:
            return
        # The old direction, transported to here by projection onto the tangent space.
        direction = self._momentum * _skew(state.momentum @ matrix.T) + (1 - self._momentum) * tangent
        state.momentum = direction @ matrix
        direction = direction / (1 - self._momentum**state.steps)
        half = direction * (rate * len(matrix) ** 0.5 / max(usual, float(direction.norm())) / 2)
        identity = torch.eye(len(matrix), dtype=torch.float64)
        # Contiguous: a state that was read from a file is, and products round by how their operands lie.
        state.matrix = torch.linalg.solve(identity + half, (identity - half) @ matrix).contiguous()

    @property
    def error(self) -> float:
        """The largest element of ``|R.T R - I|`` over all matrices."""
        return max((orthogonality(state.matrix) for state in self.states.values()), default=0.0)

    def check(self) -> None:
        """Refuse to go on from a matrix that is not orthogonal.

        Raises:
            CheckFailed: one is off by more than :data:`TOLERANCE`.
        """
        for key, state in self.states.items():
            error = orthogonality(state.matrix)
            if not error <= TOLERANCE:
                raise CheckFailed(
                    "A learned matrix is not orthogonal",
                    where=f"rotation {key}, after {state.steps} steps: off by {error:.1e}, allowed {TOLERANCE:.0e}",
                )


def orthogonality(matrix: torch.Tensor) -> float:
    """The largest element of ``|R.T R - I|``."""
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    return float((matrix.T @ matrix - identity).abs().max())


def _skew(product: torch.Tensor) -> torch.Tensor:
    """The skew-symmetric part: with ``product = G R.T``, ``skew R`` is the gradient in the canonical metric's plane."""
    return (product - product.T) / 2
