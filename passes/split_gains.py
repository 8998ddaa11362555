"""Take the gain (and shift) of a norm out of the operator, where an inverse transform must stand in front of it."""

from __future__ import annotations

import onnx_ir as ir

from graphrot.analysis.norms import NORM_OPS, gain_and_shift
from graphrot.folded import used_names
from graphrot.graph import RENAMED, iter_values, node_of, unique_name, value_map
from graphrot.passes.base import GraphPass, record_provenance
from graphrot.passes.fold_gains import make_neutral

SCALED = "graphrot.scaled"
"""``model.meta`` key: a norm's output -> the product (or sum) behind it that its readers read."""


def behind_gain(model: ir.Model, tensor: str) -> ir.Value | None:
    """The tensor of this name in the source, behind its gain where that was split off; None if there is none."""
    scaled: dict[str, str] = model.meta.get(SCALED, {})
    if tensor not in scaled:
        return value_map(model).get(tensor)
    # Not by value_map: a graph output's name went to the product, and stands there for the norm.
    return next((value for value in iter_values(model) if value.name == scaled[tensor]), None)


class SplitGains(GraphPass):
    """``norm(x; gain, shift)`` becomes ``norm(x; 1, 0) * gain + shift`` where a rotation of the plan ends at a norm.

    The norm keeps the name of its output; its readers read the product (or sum) behind it.
    """

    def apply(self, model: ir.Model, done: set[str]) -> None:
        names, values = used_names(model), value_map(model)
        for rotation in self.plan.rotations:
            for end in rotation.space.exits:
                if end.op not in NORM_OPS:
                    continue
                if end.node in done:
                    self.report.skipped.append((end.node, "split already"))
                    continue
                self._split(model, node_of(values, end.node), names, rotation.space.id)
                done.add(end.node)
                self.report.changed.append(end.node)

    def _split(self, model: ir.Model, norm: ir.Node, names: set[str], site: str) -> None:
        output = norm.outputs[0]
        norm_name = output.name
        parts: list[ir.Node] = []
        value = output
        for op, position in zip(("Mul", "Add"), gain_and_shift(norm), strict=True):
            operand = None if position is None else norm.inputs[position]
            if position is None or operand is None:
                continue
            part = ir.node(op, [value, operand], name=unique_name(names, f"{output.name}__{op.lower()}"))
            record_provenance(part, site)
            value = part.outputs[0]
            value.name, value.type, value.shape = part.name, output.type, output.shape
            parts.append(part)
            make_neutral(model, norm, position, 1.0 if op == "Mul" else 0.0, names)
        first = parts[0]
        if output.is_graph_output():
            value.name, output.name = output.name, unique_name(names, f"{output.name}__normalized")
            model.meta.setdefault(RENAMED, {})[value.name] = output.name
        output.replace_all_uses_with(value, replace_graph_outputs=True)
        first.replace_input_with(0, output)
        model.meta.setdefault(SCALED, {})[norm_name] = value.name
        model.graph.insert_after(norm, parts)
