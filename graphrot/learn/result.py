"""What learning gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrot.report.parts import LearningPart


@dataclass(frozen=True)
class Distance:
    """How far the matrices of one kind went: ``|R - R0|`` (Frobenius)."""

    count: int
    least: float
    mean: float
    most: float


@dataclass(frozen=True)
class Learned:
    """A file of learned rotations, and how they came about.

    Args:
        path: of the file.
        part: what graphrot.json says of it, too.
        best: the step after which the matrices in the file were found; 0: the start was best.
        stopped: learning stopped early, since the held-out loss fell no more.
        resumed: the step that an interrupted run had reached; 0: none.
        seconds: by step.
        notes: what a user has to know.
    """

    path: Path
    part: LearningPart
    best: int
    stopped: bool
    resumed: int
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def start_loss(self) -> float:
        """The held-out loss of the start."""
        return self.part.heldout[0][1]

    @property
    def end_loss(self) -> float:
        """The held-out loss of the matrices in the file."""
        return next(loss for step, loss in self.part.heldout if step == self.best)

    @property
    def distances(self) -> dict[str, Distance]:
        """By kind."""
        kinds: dict[str, list[float]] = {}
        for space, distance in self.part.distance.items():
            kinds.setdefault(space.partition(".")[0], []).append(distance)
        return {
            kind: Distance(len(found), min(found), sum(found) / len(found), max(found))
            for kind, found in sorted(kinds.items())
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``graphrot learn --json`` prints them."""
        return {
            **self.part.model_dump(),
            "heldout_start": self.start_loss,
            "heldout_end": self.end_loss,
            "best_step": self.best,
            "stopped_early": self.stopped,
            "resumed_from": self.resumed,
            "distance_by_kind": {kind: vars(found) for kind, found in self.distances.items()},
            "seconds": self.seconds,
            "notes": list(self.notes),
        }
