"""Where an online transform can stand behind the channels of a source: along the last axis, in equal blocks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.analysis.labels import Source
from graphrot.analysis.provenance import Provenance
from graphrot.analysis.scope import is_standard
from graphrot.analysis.types import OnlineUse, encode_runs

_MOVES = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Cast"})


def online_use(provenance: Provenance, source: Source, groups: list[np.ndarray]) -> OnlineUse | None:
    """The place: the tensor where the channels begin or, if they do not lie along its last axis, one further on that
    nothing but moves and constant factors lead to.

    Args:
        provenance: the labels of all tensors.
        source: where the channels begin.
        groups: ids of each block, in the order of the basis.

    Returns:
        The first tensor whose rows are whole blocks, side by side; None if there is none.
    """
    value: ir.Value | None = source.value
    while value is not None:
        found = _tiles(provenance, value, groups)
        if found is not None:
            return found
        value = _moved(provenance, value)
    return None


def _tiles(provenance: Provenance, value: ir.Value, groups: list[np.ndarray]) -> OnlineUse | None:
    labels = provenance.graph.labels.get(value)
    size = groups[0].size
    seen = provenance.graph.probe.seen(value)
    if labels is None or not value.name or labels.rank == 0 or labels.shape[-1] % size or seen is None:
        return None
    if seen.is_double and not provenance.scope.is_double:
        return None  # transforms work in float32 at most: behind the Cast, if there is one
    rows = np.unique(labels.rows(labels.rank - 1).ids, axis=0).reshape(-1, size)
    expected = np.stack(groups)
    expected = expected[np.argsort(expected[:, 0])]
    place = np.searchsorted(expected[:, 0], rows[:, 0])
    inside = place < len(expected)
    if not inside.all() or not np.array_equal(expected[place], rows) or np.unique(place).size != len(expected):
        return None
    width = labels.shape[-1]
    node = value.producer()
    return OnlineUse(
        tensor=value.name,
        op="graph input" if node is None else node.op_type,
        groups=tuple(encode_runs(range(start, start + size)) for start in range(0, width, size)),
        width=width,
    )


def _moved(provenance: Provenance, value: ir.Value) -> ir.Value | None:
    """The one tensor that the elements of ``value`` are moved to, if nothing else reads them."""
    if not provenance.scope.single_use(value):
        return None
    node, position = provenance.scope.uses(value)[0]
    if not is_standard(node):
        return None
    others = [i for k, i in enumerate(node.inputs) if k != position and i is not None]
    moves = position == 0 and node.op_type in _MOVES
    scales = node.op_type in ("Mul", "Div") and all(i in provenance.scope.constant for i in others)
    return node.outputs[0] if moves or scales else None
