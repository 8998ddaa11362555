"""The widths that a cache may have where its declaration leaves them open."""

from __future__ import annotations

import onnx

_COUNTS = ("num_heads", "kv_num_heads", "q_num_heads")


def possible_head_sizes(proto: onnx.ModelProto) -> list[int]:
    """Widths of weights divided by the head counts that attention operators declare, in ascending order.

    Args:
        proto: the model; no weights are read.
    """
    counts: set[int] = set()
    widths: set[int] = set()
    for node in proto.graph.node:
        numbers = {attribute.name: attribute.i for attribute in node.attribute}
        heads = [numbers[name] for name in _COUNTS if numbers.get(name)]
        if heads:
            counts |= {*heads, heads[0] + 2 * heads[-1]}
        if node.op_type in ("MatMulNBits", "RotatedMatMul"):
            widths.add(numbers.get("N", 0))
    if not counts:
        return []
    for tensor in proto.graph.initializer:
        if len(tensor.dims) == 2:
            widths.update(tensor.dims)
    return sorted({width // count for width in widths for count in counts if width > count and width % count == 0})
