"""Put the small matrix in front of a head that shares its table with the embedding."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.graph import add_initializer, node_of, read_constant, value_map
from graphrot.passes.base import GraphPass, record_provenance


class TieTable(GraphPass):
    """Insert ``x @ I`` before the tied head; later passes put gain and rotation into that matrix.

    Does nothing where the plan has no tied table, or where nothing touches the head.
    """

    def apply(self, model: ir.Model, done: set[str]) -> None:
        tie, name = self.plan.tie, self.plan.tie_matrix
        if tie is None or name is None:
            return
        if name in done:
            self.report.skipped.append((name, "inserted already"))
            return
        head = node_of(value_map(model), tie.head.node)
        position = 1 - tie.head.weight_input
        source = head.inputs[position]
        weight = head.inputs[tie.head.weight_input]
        assert source is not None and weight is not None
        identity = np.eye(tie.head.in_features, dtype=read_constant(weight).dtype)
        matrix = add_initializer(model, f"{name}_matrix", identity)
        product = ir.node("MatMul", [source, matrix], name=f"{name}_matmul")
        output = product.outputs[0]
        output.name, output.type, output.shape = name, source.type, source.shape
        head.replace_input_with(position, output)
        record_provenance(product, "tied table")
        model.graph.insert_before(head, product)
        done.add(name)
        self.report.changed.append(name)
