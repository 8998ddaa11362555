"""Whether attention writes into its cache in place."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

_OPERATORS = frozenset({("com.microsoft", "GroupQueryAttention"), ("graphrot", "RotatedAttention")})
"""They write into the buffer of a past where it is that of the present, too."""
_PRESENTS = {3: 1, 4: 2}
"""Their inputs that are caches, and the outputs that carry them on."""


def written_in_place(model: ir.Model, pairs: Iterable[tuple[str, str]]) -> bool:
    """Whether every past and its present may be one buffer of fixed capacity.

    So they may where an attention operator that can do it takes the one and makes the other, and no other node reads
    either: then nothing in the graph takes lengths from their shapes.

    Args:
        model: only read.
        pairs: names of graph inputs and outputs.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    return all(_in_place(inputs.get(past), present) for past, present in pairs)


def _in_place(past: ir.Value | None, present: str) -> bool:
    uses = [] if past is None else list(past.uses())
    if len(uses) != 1:
        return False
    node, position = uses[0]
    made = _PRESENTS.get(position)
    if (node.domain, node.op_type) not in _OPERATORS or made is None or made >= len(node.outputs):
        return False
    output = node.outputs[made]
    return output.name == present and output.is_graph_output() and not output.uses()
