"""What every pass shares: one plan in, one report out."""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass, field

import onnx_ir as ir
import onnx_ir.passes

from graphrot.plan.types import RotationPlan


@dataclass
class PassReport:
    """What a pass did.

    Args:
        name: the pass.
        changed: first outputs of nodes whose operands or wiring changed.
        skipped: items of the plan that needed nothing, with the reason.
        seconds: wall time.
    """

    name: str
    changed: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0


class GraphPass(onnx_ir.passes.InPlacePass):
    """A pass over an ``onnx_ir`` model that does what the plan says and nothing else.

    A pass reads no files and no environment, decides nothing, and finds no meaning in names. It keeps
    the model's outputs (up to rounding), its inputs and outputs, and the order of nodes; running it
    twice changes nothing more. After a call, :attr:`report` says what happened.
    """

    def __init__(self, plan: RotationPlan) -> None:
        self.plan = plan
        self.report = PassReport(type(self).__name__)

    def call(self, model: ir.Model) -> onnx_ir.passes.PassResult:
        """Run the pass; ``modified`` is true when the report lists a change."""
        start = time.perf_counter()
        done = done_items(model, type(self).__name__)
        self.report = PassReport(type(self).__name__)
        self.apply(model, done)
        self.report.seconds = time.perf_counter() - start
        return onnx_ir.passes.PassResult(model, bool(self.report.changed))

    @abstractmethod
    def apply(self, model: ir.Model, done: set[str]) -> None:
        """Do the work. ``done`` holds the plan items that an earlier call has finished."""


def done_items(model: ir.Model, name: str) -> set[str]:
    """Plan items that pass ``name`` has finished on this model (in-memory bookkeeping, not saved)."""
    record: dict[str, set[str]] = model.meta.setdefault("graphrot.done", {})
    return record.setdefault(name, set())


PROVENANCE = "graphrot.sites"
"""Key in a node's ``metadata_props``: the plan items that shaped it, comma-separated."""


def record_provenance(node: ir.Node, item: str) -> None:
    """Note on ``node`` that the plan item ``item`` changed or created it."""
    present = [part for part in node.metadata_props.get(PROVENANCE, "").split(",") if part]
    if item not in present:
        node.metadata_props[PROVENANCE] = ",".join([*present, item])
