"""Let the head read the embedding's table again, once both hold the same rotated numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.folded import exact_sample
from graphrot.graph import drop_dead_constant, node_of, value_map
from graphrot.passes.base import GraphPass


class ShareTable(GraphPass):
    """Replace the head's own copy by the table: as it is for a Gemm with transB, else by a Transpose.

    The plan says that the two are one table; a sample of rows is compared all the same, because a
    wrong share would change the answers silently.
    """

    def apply(self, model: ir.Model, done: set[str]) -> None:
        tie = self.plan.tie
        if tie is None:
            return
        if tie.head.node in done:
            self.report.skipped.append((tie.head.node, "shared already"))
            return
        values = value_map(model)
        head = node_of(values, tie.head.node)
        table = node_of(values, tie.embedding.node).inputs[tie.embedding.table_input]
        weight = head.inputs[tie.head.weight_input]
        assert table is not None and weight is not None
        self._compare(table, weight, transposed=tie.head.layout == "KN")
        if tie.head.layout == "NK":
            head.replace_input_with(tie.head.weight_input, table)
        else:
            flip = ir.node("Transpose", [table], {"perm": [1, 0]}, name=f"{tie.head.node}__table_transpose")
            output = flip.outputs[0]
            output.name, output.type, output.shape = f"{tie.head.node}__table", table.type, weight.shape
            head.replace_input_with(tie.head.weight_input, output)
            model.graph.insert_before(head, flip)
        drop_dead_constant(model, weight)
        done.add(tie.head.node)
        self.report.changed.append(tie.head.node)

    def _compare(self, table: ir.Value, weight: ir.Value, *, transposed: bool) -> None:
        ours = exact_sample(table, 0)
        theirs = exact_sample(weight, 1).T if transposed else exact_sample(weight, 0)
        if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=1e-6, atol=1e-9):
            raise AssertionError(f"{weight.name!r} is not the table {table.name!r}: the plan ties what is not tied")
