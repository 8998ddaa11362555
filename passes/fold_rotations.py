"""Fold the merged rotations (R1, R2, and R3 where no rotary embedding is in the way) into weights."""

from __future__ import annotations

import onnx_ir as ir

from graphrot.folded import used_names
from graphrot.graph import value_map
from graphrot.passes.base import GraphPass
from graphrot.passes.rotate import rotate_operands


class FoldRotations(GraphPass):
    """Rotate producers and consumers of every merged rotation of the plan.

    Producers become ``W @ Q``, consumers ``Q.T @ W``, biases and tables rotate like producers. No node
    is added (SpinQuant, section 3.1, arXiv:2405.16406; QuaRot, section 4, arXiv:2404.00456).
    """

    def apply(self, model: ir.Model, done: set[str]) -> None:
        names, values = used_names(model), value_map(model)
        for rotation in self.plan.rotations:
            if rotation.placement != "merged":
                continue
            if rotation.space.id in done:
                self.report.skipped.append((rotation.space.id, "folded already"))
                continue
            self.report.changed += rotate_operands(model, rotation, values, names)
            done.add(rotation.space.id)
