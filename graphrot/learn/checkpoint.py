"""What a descent has done so far, in one file, so that an interrupted run goes on with the same bits."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphrot.learn.stiefel import CayleySgd, State
from graphrot.work.files import write_atomic
from graphrot.work.folder import remove_tree

SECONDS = 15.0
"""Least time between two checkpoints of a run that goes on."""

_STATE = "state.safetensors"
_JOB = "job.json"
_DONE = "learned.json"
"""Says that there is a state; a work folder keeps what has such a file."""


@dataclass(frozen=True)
class Progressed:
    """A descent after some steps. Nothing in it is changed in place.

    Args:
        step: that were made.
        states: of the descent, by space id.
        best: the matrices with the least held-out loss.
        best_step: after which they were found.
        curve: step and loss on its batch.
        heldout: step and held-out loss.
    """

    step: int
    states: Mapping[str, State]
    best: dict[str, torch.Tensor]
    best_step: int
    curve: tuple[tuple[int, float], ...]
    heldout: tuple[tuple[int, float], ...]

    @classmethod
    def at(cls, start: Mapping[str, torch.Tensor], loss: float) -> Progressed:
        """The start, and its held-out loss."""
        states = {key: State(matrix, torch.zeros_like(matrix)) for key, matrix in start.items()}
        return cls(0, states, dict(start), 0, (), ((0, loss),))

    @property
    def matrices(self) -> dict[str, torch.Tensor]:
        """As they are now."""
        return {key: state.matrix for key, state in self.states.items()}

    def restore(self, descent: CayleySgd) -> None:
        """Put a descent where this one was."""
        descent.states = {key: replace(state) for key, state in self.states.items()}

    def after(self, descent: CayleySgd, loss: float, heldout: float | None) -> Progressed:
        """One step later.

        Args:
            descent: which has made the step.
            loss: on the step's batch, before it.
            heldout: the loss after it, where it was measured.
        """
        step = self.step + 1
        states = {key: replace(state) for key, state in descent.states.items()}
        later = replace(self, step=step, states=states, curve=(*self.curve, (step, loss)))
        if heldout is None:
            return later
        later = replace(later, heldout=(*self.heldout, (step, heldout)))
        if heldout < min(value for _, value in self.heldout):
            later = replace(later, best=later.matrices, best_step=step)
        return later


class Checkpoint:
    """A folder with the state of one descent.

    Args:
        folder: owned by the caller; made if it is not there. What was learned for another job goes.
        job: everything that the matrices depend on, as plain JSON.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._kept = time.monotonic()
        self.resumed = 0
        """The step that :meth:`load` went on from."""
        self.changed: tuple[str, ...] = ()
        """What is different in the job that left a state here: it was not used."""
        plain = json.loads(json.dumps(job))
        before = _read(folder / _JOB)
        if before != plain:
            if (folder / _DONE).is_file():
                names = sorted({*plain, *(before or {})})
                self.changed = tuple(n for n in names if before is None or before.get(n) != plain.get(n))
            for file in folder.iterdir():
                remove_tree(file)
            write_atomic(folder / _JOB, json.dumps(plain, indent=1).encode())

    def load(self, start: Mapping[str, torch.Tensor]) -> Progressed | None:
        """The state that an interrupted run left; None if there is none, or it is not whole."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            content = (self._folder / _STATE).read_bytes()
            tensors = load(content)
            length = int.from_bytes(content[:8], "little")
            facts = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["state"])
            found = Progressed(
                step=facts["step"],
                states={
                    key: State(tensors[f"matrix/{key}"], tensors[f"momentum/{key}"], *facts["states"][key])
                    for key in start
                },
                best={key: tensors[f"best/{key}"] for key in start},
                best_step=facts["best_step"],
                curve=tuple((int(step), loss) for step, loss in facts["curve"]),
                heldout=tuple((int(step), loss) for step, loss in facts["heldout"]),
            )
        except (OSError, SafetensorError, KeyError, ValueError, TypeError):
            return None
        self.resumed = found.step
        return found

    def keep(self, done: Progressed, *, now: bool = False) -> None:
        """Write the state, unless that was done a moment ago; ``now``: in any case."""
        if not now and time.monotonic() - self._kept < SECONDS:
            return
        from safetensors.torch import save

        tensors = {}
        for key, state in done.states.items():
            tensors[f"matrix/{key}"] = state.matrix.contiguous().clone()
            tensors[f"momentum/{key}"] = state.momentum.contiguous().clone()
            tensors[f"best/{key}"] = done.best[key].contiguous().clone()
        facts = {
            "step": done.step,
            "states": {key: (state.norm, state.steps) for key, state in done.states.items()},
            "best_step": done.best_step,
            "curve": done.curve,
            "heldout": done.heldout,
        }
        write_atomic(self._folder / _STATE, save(tensors, metadata={"state": json.dumps(facts)}))
        write_atomic(self._folder / _DONE, json.dumps({"step": done.step}).encode())
        self._kept = time.monotonic()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def as_tensors(matrices: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """``[dim, dim]`` float64 by space id, as tensors of their own."""
    return {key: torch.from_numpy(np.array(matrix, np.float64)) for key, matrix in matrices.items()}
