"""What all readings of attention share: the caches of a graph, and where its values come from and go to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from graphrot.analysis.types import CachePair
from graphrot.graph import is_constant
from graphrot.model.floats import is_standard

_NO_CACHE = "it has no cache: its keys and values are not handed from one call to the next"
_OTHER_CACHE = "its cache is not of the form [batch, heads, tokens, width]"
_WIDTHS = "its keys and values differ in heads or width"


class NotRead(Exception):
    """Why attention cannot be read as a site.

    Args:
        reason: for the refusal.
        change: what would change it.
    """

    def __init__(self, reason: str, change: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.change = change


@dataclass(frozen=True)
class Cache:
    """The caches of one site: names of graph inputs and outputs, heads and width of a head."""

    past_key: str
    past_value: str
    present_key: str
    present_value: str
    heads: int
    width: int


class Reader:
    """The caches of a graph.

    Args:
        model: only read.
        pairs: its caches, as the analysis found them.
    """

    def __init__(self, model: ir.Model, pairs: Iterable[CachePair]) -> None:
        self.model = model
        self._pairs = {pair.past: pair for pair in pairs}

    def fused_cache(self, node: ir.Node, pasts: tuple[int, int], presents: tuple[int, int]) -> Cache:
        """The cache that a node takes and gives itself.

        Args:
            node: the node.
            pasts: positions of past keys and values among its inputs.
            presents: positions of present keys and values among its outputs.

        Raises:
            NotRead: it has none, or one of another form.
        """
        taken = [node.inputs[position] if position < len(node.inputs) else None for position in pasts]
        given = [node.outputs[position] if position < len(node.outputs) else None for position in presents]
        return self.cache(taken, given)

    def cache(self, taken: Iterable[ir.Value | None], given: Iterable[ir.Value | None]) -> Cache:
        """The cache of past keys and values ``taken``, and present ones ``given``.

        Raises:
            NotRead: they are no inputs and outputs of the graph, or of another form.
        """
        pairs = []
        for past, present in zip(taken, given, strict=True):
            if past is None or present is None:
                raise NotRead(_NO_CACHE)
            source = handed_on(past)
            if not source.is_graph_input() or source.name not in self._pairs:
                raise NotRead(_NO_CACHE if not source.is_graph_input() else _OTHER_CACHE)
            pair = self._pairs[source.name]
            if pair.present not in ends(present):
                raise NotRead(_OTHER_CACHE)
            if source.shape is not None and len(source.shape) != 4:
                raise NotRead(_OTHER_CACHE)
            pairs.append(pair)
        key, value = pairs
        if (key.heads, key.width) != (value.heads, value.width):
            raise NotRead(_WIDTHS)
        if key.width % 2:
            raise NotRead(f"its heads have {key.width} channels, an odd number")
        return Cache(key.past, value.past, key.present, value.present, key.heads, key.width)


def handed_on(value: ir.Value) -> ir.Value:
    """What ``value`` is, behind nodes that only hand it on."""
    while True:
        node = value.producer()
        if node is None or node.op_type != "Identity" or not is_standard(node) or node.inputs[0] is None:
            return value
        value = node.inputs[0]


def ends(value: ir.Value) -> set[str]:
    """Names of the graph outputs that ``value`` is, itself or behind nodes that only hand it on."""
    found = {value.name} if value.is_graph_output() and value.name else set()
    for use in value.uses():
        if use.node.op_type == "Identity" and is_standard(use.node):
            found |= ends(use.node.outputs[0])
    return found


def scalar_operand(node: ir.Node) -> tuple[ir.Value, ir.Value, int] | None:
    """``(data, number, position of data)`` of a Mul or Div whose other operand is a constant."""
    first, second = node.inputs[0], node.inputs[1]
    assert first is not None and second is not None
    if is_constant(second):
        return first, second, 0
    return (second, first, 1) if is_constant(first) else None
