"""Whether online transforms of a residual stream stand at its ends, or within the layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from graphrot.analysis.labels import Source
from graphrot.analysis.provenance import Provenance
from graphrot.analysis.scope import Scope
from graphrot.analysis.visit import Exit


def inner(
    provenance: Provenance,
    sources: Sequence[Source],
    entries: Sequence[Source],
    exits: Sequence[Exit],
    readers: Sequence[ir.Node],
) -> bool:
    """Whether a place depends on what the stream was read for, or is read to go on with it: then there are as many
    as there are layers (norms behind the branches).

    Args:
        provenance: the graph.
        sources: all places where channels of the stream come into being.
        entries: those with a transform behind them.
        exits: places with an inverse transform in front.
        readers: linears that read the stream.
    """
    ends = {s.node for s in entries} | {e.node for e in exits}
    if ends & provenance.graph.between:
        return True
    behind = reached(provenance.scope, readers)
    if any(entry.node in behind for entry in entries):
        return True
    after = reached(provenance.scope, [exit.node for exit in exits if exit.node is not None])
    return any(source.node in after for source in sources)


def reached(scope: Scope, nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """All nodes that read, directly or not, what some nodes make."""
    found: set[ir.Node] = set()
    stack = list(nodes)
    while stack:
        for output in stack.pop().outputs:
            for user, _ in scope.uses(output):
                if user not in found:
                    found.add(user)
                    stack.append(user)
    return found
