"""The descent itself: batches, rates, the held-out loss, the best matrices, and where an interrupted run goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from graphrot.errors import CheckFailed, UsageError
from graphrot.learn.checkpoint import Checkpoint, Progressed
from graphrot.learn.stiefel import CayleySgd
from graphrot.learn.task import Task
from graphrot.progress import Progress

STEP = "learning rotations"

_WARM = 10
"""Steps in which the rate rises, at most a tenth of all."""


@dataclass(frozen=True)
class Schedule:
    """How to go down.

    Args:
        steps: at most.
        rate: the largest; it rises over the first steps and falls to zero like a cosine.
        seed: of the batches.
        measurements: how often the held-out loss is taken after the start.
        patience: stop after so many measurements without a better one.
    """

    steps: int
    rate: float
    seed: int = 0
    measurements: int = 12
    patience: int = 6

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rate <= 0:
            raise UsageError("Learning takes at least one step, and a rate above zero", where="--steps")

    def rate_at(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        warm = min(1.0, (step + 1) / max(1.0, min(_WARM, self.steps / 10)))
        return self.rate * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def measures_after(self, step: int) -> bool:
        """Whether the held-out loss is taken after a step, counted from 0."""
        every = max(1, self.steps // self.measurements)
        return (step + 1) % every == 0 or step + 1 == self.steps


@dataclass(frozen=True)
class Descended:
    """What came out.

    Args:
        matrices: the best ones that were measured, ``[dim, dim]`` float64 by space id.
        steps: that were made.
        best: the step after which the best matrices were found; 0: the start.
        curve: step and loss on its batch.
        heldout: step and held-out loss; the first is the start's.
        stopped: it stopped early.
    """

    matrices: dict[str, torch.Tensor]
    steps: int
    best: int
    curve: list[tuple[int, float]] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)
    stopped: bool = False


def descend(
    task: Task,
    start: Mapping[str, torch.Tensor],
    schedule: Schedule,
    *,
    checkpoint: Checkpoint | None = None,
    progress: Progress,
) -> Descended:
    """Lower a loss over orthogonal matrices; keep the ones with the least held-out loss.

    The batch of a step depends on the seed and the step alone, and a checkpoint holds everything else: a run that is
    interrupted and gone on with gives the same bits.

    Args:
        task: the loss, and its data.
        start: ``[dim, dim]`` float64 orthogonal by space id.
        schedule: how.
        checkpoint: keeps what was done, also when the run is interrupted; None: nothing is kept.
        progress: told after every step.

    Raises:
        CheckFailed: the loss or a gradient is not finite, or a matrix is not orthogonal any more.
    """
    done = checkpoint.load(start) if checkpoint is not None else None
    if done is None:
        done = Progressed.at(start, measure(task, start))
    descent = CayleySgd(done.matrices)
    done.restore(descent)
    try:
        while done.step < schedule.steps and not _tired(done, schedule):
            done = _step(task, descent, done, schedule)
            progress(STEP, done.step, schedule.steps)
            if checkpoint is not None:
                checkpoint.keep(done)
    except BaseException:
        if checkpoint is not None:
            checkpoint.keep(done, now=True)
        raise
    return Descended(
        done.best, done.step, done.best_step, list(done.curve), list(done.heldout), done.step < schedule.steps
    )


def _step(task: Task, descent: CayleySgd, done: Progressed, schedule: Schedule) -> Progressed:
    generator = np.random.default_rng((schedule.seed, done.step))
    leaves = {key: matrix.detach().requires_grad_() for key, matrix in descent.matrices.items()}
    with torch.enable_grad():
        loss = task(leaves, task.batch(generator))
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    value = _finite(loss, done.step + 1)
    descent.step(dict(zip(leaves, gradients, strict=True)), schedule.rate_at(done.step))
    found = measure(task, descent.matrices) if schedule.measures_after(done.step) else None
    return done.after(descent, value, found)


def measure(task: Task, matrices: Mapping[str, torch.Tensor]) -> float:
    """The held-out loss: the mean over the batches.

    Raises:
        CheckFailed: it is not finite.
    """
    with torch.no_grad():
        losses = [_finite(task(matrices, batch), None) for batch in task.heldout]
    return float(np.mean(losses))


def _finite(loss: torch.Tensor, step: int | None) -> float:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise CheckFailed(
            "The loss is not finite",
            where="held-out data" if step is None else f"step {step}",
            do="check the calibration text, and the source model in float32",
        )
    return value


def _tired(done: Progressed, schedule: Schedule) -> bool:
    """No measurement of the last ones was the best."""
    since = [step for step, _ in done.heldout if step > done.best_step]
    return len(since) >= schedule.patience
