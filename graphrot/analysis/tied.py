"""Does the head read the embedding table? The same tensor, or equal numbers in either layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import EmbeddingRef, LinearRef, RotationSpace, TiedHead
from graphrot.graph import value_map

_ROWS = 2048
"""Rows of the table that are compared at once."""


def find_tied(
    model: ir.Model,
    embeddings: Sequence[EmbeddingRef],
    linears: Sequence[LinearRef],
    spaces: Sequence[RotationSpace] = (),
) -> TiedHead | None:
    """The first head and token table that hold the same numbers, or None.

    An encoder and a decoder may look up one table, and rotate what they find by matrices of their own: the lookup
    that counts is the one in a space that the head reads.
    """
    values = value_map(model)
    for head in (linear for linear in linears if linear.is_head):
        shared = {
            producer.node
            for space in spaces
            if any(consumer.node == head.node for consumer in space.consumers)
            for producer in space.producers
        }
        for embedding in sorted(embeddings, key=lambda embedding: embedding.node not in shared):
            if (embedding.rows, embedding.dim) != (head.out_features, head.in_features):
                continue
            table = _root(values[embedding.table])
            weight = _root(values[head.weight])
            if table is None or weight is None:
                continue
            # The head's operand as [V, D]: transposed once more if it is stored [D, V].
            flipped = weight[1] != (head.layout == "KN")
            if table[0] is weight[0] and table[1] == flipped:
                return TiedHead(embedding, head)
            if _equal(table[0], weight[0], table[1] != flipped):
                return TiedHead(embedding, head)
    return None


def _root(value: ir.Value) -> tuple[ir.Value, bool] | None:
    """The stored tensor behind Identity, Cast and Transpose, and whether it was transposed."""
    flipped = False
    while value.const_value is None:
        node = value.producer()
        if node is None or node.op_type not in ("Identity", "Cast", "Transpose") or node.inputs[0] is None:
            return None
        if node.op_type == "Transpose":
            flipped = not flipped
        value = node.inputs[0]
    return value, flipped


def _equal(first: ir.Value, second: ir.Value, flipped: bool) -> bool:
    """Compare stored numbers block by block; ``flipped``: one is the transpose of the other."""
    a, b = first.const_value, second.const_value
    assert a is not None and b is not None
    if tuple(a.shape) != (tuple(b.shape)[::-1] if flipped else tuple(b.shape)):
        return False
    left, right = a.numpy(), b.numpy()
    right = right.T if flipped else right
    step = _ROWS if left.shape[0] >= left.shape[1] else max(1, _ROWS * left.shape[0] // left.shape[1])
    return all(
        np.array_equal(left[start : start + step], right[start : start + step])
        for start in range(0, left.shape[0], step)
    )
