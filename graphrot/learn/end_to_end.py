"""The losses ce and kl: the whole rounded model runs in every step, differentiable in its rotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from graphrot.learn.settings import BATCH
from graphrot.learn.subject import Subject
from graphrot.quant.grid import WeightGrid
from graphrot.recipe import Recipe
from graphrot.torch_graph.loss import EndToEnd
from graphrot.torch_graph.rounding import Rounding

MOST_HELDOUT = 8
"""Sequences that the held-out loss runs, at most: a measurement should take no longer than a few steps."""


class EndToEndTask:
    """A loss of the model on sequences of tokens.

    Args:
        loss: the objective.
        learned: ``[count, length] int64``.
        heldout: ``[count, length] int64``.
        batch: sequences of a step.
    """

    def __init__(self, loss: EndToEnd, learned: np.ndarray, heldout: np.ndarray, *, batch: int = BATCH) -> None:
        self._loss = loss
        self._learned = learned
        self._heldout = heldout
        self._size = min(batch, len(learned))

    @property
    def heldout(self) -> Sequence[np.ndarray]:
        """The held-out sequences, as many at once as in a step."""
        return [self._heldout[start : start + self._size] for start in range(0, len(self._heldout), self._size)]

    def batch(self, generator: np.random.Generator) -> np.ndarray:
        """Some sequences, each once."""
        chosen = generator.choice(len(self._learned), self._size, replace=False)
        return np.ascontiguousarray(self._learned[chosen])

    def __call__(self, matrices: Mapping[str, torch.Tensor], batch: np.ndarray) -> torch.Tensor:
        """Nats a token."""
        return self._loss(matrices, batch)


def end_to_end_task(
    subject: Subject,
    recipe: Recipe,
    sequences: np.ndarray,
    *,
    heldout: int,
    loss: Literal["ce", "kl"],
    top_k: int | None,
) -> EndToEndTask:
    """The model with its rotations still open, rounded as the recipe says.

    GPTQ makes up for most of what rounding does to weights, and cannot be run in every step: where it solves the
    weights and something else is rounded, too, the loss rounds that alone, as SpinQuant does.

    Args:
        subject: the model; its weights must still be open.
        recipe: what is rounded.
        sequences: ``[count, length] int64``.
        heldout: how many of them, the last ones, are not learned on.
        loss: ce or kl.
        top_k: tokens that kl looks at; None: all.

    Raises:
        InputRefused: an operator of the model is not differentiated.
    """
    grid = None
    elsewhere = recipe.activation_bits is not None or recipe.kv_bits is not None
    if recipe.weight_bits is not None and not (recipe.solver == "gptq" and elsewhere):
        grid = WeightGrid(recipe.weight_bits, recipe.group_size, symmetric=recipe.symmetric is not False)
    rounding = Rounding(
        [linear for linear in subject.linears if not linear.is_head],
        activation_bits=recipe.activation_bits,
        weight_grid=grid,
        sites=subject.sites,
        kv_bits=recipe.kv_bits,
        scale_gradient=True,
    )
    objective = EndToEnd(subject.model, rounding, loss, top_k, caches=subject.facts.caches, checkpointed=True)
    learned = len(sequences) - heldout
    return EndToEndTask(objective, sequences[:learned], sequences[learned:][:MOST_HELDOUT])
