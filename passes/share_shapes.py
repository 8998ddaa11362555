"""Compute every shape once.

Exporters write the same shape arithmetic anew in each layer (Shape of this layer's tensor, Gather,
Unsqueeze, Concat): half of the nodes of a small decoder. Equal results are found in symbols
(``sizes``), the first one serves all, and constant ones become initializers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.passes.base import GraphPass
from graphrot.passes.quantize_nodes import NodeWriter, remove_unused
from graphrot.passes.shape_values import ShapeValues
from graphrot.passes.sizes import Shape

_INTEGERS = frozenset({ir.DataType.INT64, ir.DataType.INT32})


class ShareShapes(GraphPass):
    """Let equal small integer tensors of the main graph be made once; no number changes.

    Sizes count as equal when they follow from the names of the inputs' dimensions: a model that names
    two dimensions alike promises that they are.
    """

    def apply(self, model: ir.Model, done: set[str]) -> None:
        self.report.changed += share_shapes(model)
        done.add("shapes")


def share_shapes(model: ir.Model) -> list[str]:
    """See :class:`ShareShapes`; returns the names of the values that others stand in for."""
    found = ShapeValues(model.graph)
    writer = NodeWriter(model)
    first: dict[tuple[ir.DataType, int, Shape], ir.Value] = {}
    replaced: list[ir.Value] = []
    for node in list(model.graph):
        output = node.outputs[0]
        content, shape, dtype = found.contents.get(output), found.shapes.get(output), found.dtypes.get(output)
        if content is None or shape is None or len(shape) > 1 or dtype not in _INTEGERS:
            continue
        if output.is_graph_output() or not output.uses():
            continue
        key = (dtype, len(shape), content)
        if key not in first and all(size[0] == "const" for size in content):
            array = np.array([size[1] for size in content], dtype=dtype.numpy())
            first[key] = writer.constant(array if shape else array.reshape(()), "shape")
        if first.setdefault(key, output) is not output:
            output.replace_all_uses_with(first[key])
            replaced.append(output)
    for output in replaced:
        remove_unused(model, output)
    return [output.name or "" for output in replaced]
