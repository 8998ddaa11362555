"""Residual streams that do not begin at a table, or do not end at linears: where online transforms could stand.

A stream is a family of channels in which the results of several linears, tables or other nodes are added, and that
linears read. Norms with a gain that cannot fold, and ends of the graph, hold it in its own basis. Where nothing else
does, one transform behind each beginning and an inverse in front of each end set it free.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphrot.analysis.labels import Source
from graphrot.analysis.norms import NORM_OPS
from graphrot.analysis.partition import components
from graphrot.analysis.provenance import Provenance
from graphrot.analysis.scope import is_standard


@dataclass
class _Family:
    """Sources whose channels edges join."""

    sources: list[Source] = field(default_factory=list)
    read: bool = False
    inside: bool = False
    """An attention mixes or contracts the channels: no residual stream."""
    ends: dict[ir.Node | ir.Value, None] = field(default_factory=dict)
    """What wants the channels alone, and could read them turned back."""
    held: bool = False
    """Something else wants them alone."""


def is_stream(sources: list[Source]) -> bool:
    """Results of more than one node are added, one of them a linear or a table."""
    makers = [s for s in sources if s.kind != "bias"]
    return len(makers) > 1 and any(s.kind in ("weight", "table") for s in makers)


def open_ends(provenance: Provenance) -> None:
    """Let online transforms stand at the ends of all streams that nothing but gains and ends of the graph holds.

    Args:
        provenance: labels and records, gains folded; told of the ends.
    """
    free = [f for f in _families(provenance) if f.read and not f.inside and not f.held]
    streams = [f for f in free if is_stream(f.sources)]
    ends = [end for family in streams for end in family.ends]
    begun = {s.node for family in streams for s in family.sources if s.kind == "gain"}
    provenance.open(ends, [end for end in ends if isinstance(end, ir.Node) and end in begun])


def _families(provenance: Provenance) -> list[_Family]:
    table = provenance.graph.table
    records = provenance.all_records()
    pairs = [
        np.unique(np.stack([table.index_of(e.left), table.index_of(e.right)]), axis=1)
        for _, record in records
        for e in record.edges
    ]
    left, right = np.concatenate([np.zeros((2, 0), dtype=np.int64), *pairs], axis=1)
    root = components(len(table.sources), left, right).tolist()
    families: dict[int, _Family] = defaultdict(_Family)

    def touched(ids: np.ndarray) -> list[_Family]:
        return [families[r] for r in {root[i] for i in np.unique(table.index_of(ids)).tolist()}]

    caches = {pair.past for pair in provenance.caches}
    for source in table.sources:
        family = families[root[source.index]]
        family.sources.append(source)
        family.inside |= source.kind == "input" and source.value.name in caches
    for node, record in records:
        for consumer in record.consumers:
            for family in touched(consumer.labels.channels):
                family.read = True
        for ids in [*(c.ids for c in record.contractions), *record.mixed]:
            for family in touched(ids):
                family.inside = True
        for block in record.blocks:
            end = block.at if node is None else node
            for family in touched(block.ids):
                if end is not None and _may_end(provenance, end):
                    family.ends[end] = None
                else:
                    family.held = True
    return list(families.values())


def _may_end(provenance: Provenance, end: ir.Node | ir.Value) -> bool:
    """A graph input, or an output or a node with a gain of its own in a type that transforms have."""
    value = end if isinstance(end, ir.Value) else end.outputs[0]
    seen = provenance.graph.probe.seen(value)
    if seen is None:
        return False
    if seen.is_double and not provenance.scope.is_double and not value.is_graph_input():
        return False
    return isinstance(end, ir.Value) or _keeps_a_gain(provenance, end)


def _keeps_a_gain(provenance: Provenance, node: ir.Node) -> bool:
    plain = node.op_type in NORM_OPS or (is_standard(node) and node.op_type == "Mul")
    made = provenance.graph.labels.get(node.outputs[0])
    return (
        plain
        and made is not None
        and all(s.kind == "gain" and s.node is node for s in provenance.graph.table.owners(made.channels))
    )
