"""Which output carries which cache input on, read off the labels."""

from __future__ import annotations

import numpy as np

from graphrot.analysis.labels import Labels, combine
from graphrot.analysis.types import CachePair
from graphrot.analysis.visit import Edge, Graph, Record, sum_by


def find_caches(graph: Graph, ends: Record) -> list[CachePair]:
    """Pair cache inputs with outputs, and tie all their tokens to one basis.

    An output carries an input on if it begins, along the token axis (the last but one), with the very elements of that
    input. Each input is carried by one output at most.

    Args:
        graph: with labels of all tensors.
        ends: gets the edges between the tokens of each output.
    """
    pairs: list[CachePair] = []
    taken: set[str] = set()
    inputs = [v for v in graph.scope.model.graph.inputs if graph.probe.is_cache_input(v) and v in graph.labels]
    by_base = {int(graph.labels[v].ids.min()): v for v in inputs if graph.labels[v].ids.size}
    for output in graph.scope.model.graph.outputs:
        labels = graph.labels.get(output)
        if labels is None or labels.rank not in (4, 5) or not labels.ids.size or not output.name:
            continue
        past = by_base.get(int(labels.ids.reshape(-1)[0]))
        if past is None or not past.name or past.name in taken or not _begins_with(labels, graph.labels[past]):
            continue
        taken.add(past.name)
        *_, heads, _, width = graph.labels[past].shape
        pairs.append(CachePair(past.name, output.name, heads, width))
        _tie(ends, graph.labels[past], labels, len(pairs))
    return pairs


def _begins_with(labels: Labels, past: Labels) -> bool:
    length = past.shape[-2]
    same_rest = labels.shape[:-2] == past.shape[:-2] and labels.shape[-1] == past.shape[-1]
    return same_rest and labels.shape[-2] >= length and labels[..., :length, :].same_as(past)


def _tie(ends: Record, past: Labels, present: Labels, salt: int) -> None:
    first = past.take([0], past.rank - 2)
    a, b, ca, cb = np.broadcast_arrays(first.ids, present.ids, first.copies, present.copies)
    differ = a != b
    if not differ.any():
        return
    pairs, sums = sum_by(a[differ] * np.int64(1 << 31) + b[differ], combine(ca[differ], cb[differ], salt))
    ends.edges.append(Edge(pairs >> np.int64(31), pairs & np.int64((1 << 31) - 1), combine(sums, salt)))
