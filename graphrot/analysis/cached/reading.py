"""What all readings of attention share: the caches of a graph, and where its values come from and go to."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.analysis.cached.cut import Cut, CutFailed
from graphrot.analysis.probe import Probe
from graphrot.analysis.probe_sizes import Run
from graphrot.analysis.scope import Scope
from graphrot.analysis.types import CachePair, OperandRef
from graphrot.graph import is_constant, node_of, read_constant, value_map
from graphrot.model.floats import is_standard

NO_CACHE = "it has no cache: its keys and values are not handed from one call to the next"
_OTHER_CACHE = "its cache is not of the form [batch, heads, tokens, width]"
_WIDTHS = "its keys and values differ in heads or width"
_MOVED = frozenset({"Cast", "Expand", "Gather", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"})
_RUNS = (Run(2, 3, 4), Run(1, 5, 3), Run(1, 2, 0))
_SHORT = 8


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
    """A graph whose attention is read.

    Args:
        model: only read.
        pairs: its caches, as the analysis found them.
    """

    def __init__(self, model: ir.Model, pairs: Iterable[CachePair]) -> None:
        self.model = model
        self.scope = Scope(model)
        self.probe = Probe(self.scope)
        self.batch = self.probe.run.batch
        self.values = value_map(model)
        self.inside: set[ir.Node] = set()
        """Nodes between a cache and the product that reads it, and the products."""
        self.products: set[ir.Node] = set()
        self._pairs = {pair.past: pair for pair in pairs}
        self._numbers: dict[ir.Value, float | None] = {}

    def read(self, place: OperandRef) -> ir.Value:
        """What an operand reads."""
        value = node_of(self.values, place.node).inputs[place.input]
        assert value is not None
        return value

    def shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """The shape in the probe's run."""
        seen = self.probe.seen(value)
        return None if seen is None else seen.shape

    def form(self, value: ir.Value) -> Literal["heads", "stacked"]:
        """Whether heads have an axis of their own.

        Raises:
            NotRead: neither form.
        """
        shape = self.shape(value)
        if shape is None or len(shape) not in (3, 4):
            raise NotRead("its queries are not of the form [batch, heads, tokens, width]")
        return "heads" if len(shape) == 4 else "stacked"

    def heads_of(self, value: ir.Value, form: Literal["heads", "stacked"]) -> int:
        """Heads of queries."""
        shape = self.shape(value)
        assert shape is not None
        return shape[1] if form == "heads" else shape[0] // self.batch

    def number(self, value: ir.Value | None) -> float | None:
        """The one number that a tensor holds in every run, whatever the sizes; None where it does not."""
        if value is None:
            return None
        if value not in self._numbers:
            self._numbers[value] = self._number(value)
        return self._numbers[value]

    def _number(self, value: ir.Value) -> float | None:
        if is_constant(value):
            return _single([read_constant(value)])
        if value.producer() is None or not self.scope.trusted(value):
            return None
        try:
            cut = Cut(self.scope, self.probe, [value])
            few = [cut.run(run, {})[0] for run in _RUNS]
        except CutFailed:
            return None
        return None if _single(few) is None else _single([*few, *_at_lengths(cut)])

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
                raise NotRead(NO_CACHE)
            source = handed_on(past)
            if not source.is_graph_input():
                raise NotRead(_OTHER_CACHE if source.producer() is not None else NO_CACHE)
            pair = self._pairs.get(source.name or "")
            if pair is None or pair.present not in ends(present) or len(source.shape or ()) not in (0, 4):
                raise NotRead(_OTHER_CACHE)
            pairs.append(pair)
        key, value = pairs
        if (key.heads, key.width) != (value.heads, value.width):
            raise NotRead(_WIDTHS)
        if key.width % 2:
            raise NotRead(f"its heads have {key.width} channels, an odd number")
        return Cache(key.past, value.past, key.present, value.present, key.heads, key.width)

    def joined(self, value: ir.Value, passed: set[ir.Node]) -> tuple[ir.Node, float]:
        """The Concat of a past and new rows that ``value`` comes from, and the factor between.

        Args:
            value: keys or values that a product reads.
            passed: the product; gets the nodes between.

        Raises:
            NotRead: there is no such Concat.
        """
        factor = 1.0
        for _ in range(24):
            node = value.producer()
            if node is None or not is_standard(node):
                break
            if node.op_type == "Concat":
                first = node.inputs[0]
                if len(node.inputs) == 2 and first is not None and handed_on(first).is_graph_input():
                    self.inside |= passed
                    return node, factor
                break
            found = node.inputs[0]
            if node.op_type in ("Mul", "Div"):
                scale = self.number(node.inputs[1])
                if scale is None and node.op_type == "Mul":
                    scale, found = self.number(node.inputs[0]), node.inputs[1]
                if not scale:
                    break
                factor = factor / scale if node.op_type == "Div" else factor * scale
            elif node.op_type not in _MOVED:
                break
            if found is None:
                break
            passed.add(node)
            value = found
        raise NotRead(NO_CACHE)


def _at_lengths(cut: Cut) -> list[np.ndarray]:
    """The tensor behind pasts of many lengths, as far as it can be made: some factors are one number at first only."""
    found = []
    past = cut.affordable(lambda _: {})
    while past >= _SHORT:
        with suppress(CutFailed):
            found.append(cut.run(Run(1, 1, past), {})[0])
        past //= 2
    return found


def _single(arrays: Iterable[np.ndarray]) -> float | None:
    """The number that all elements of all arrays are."""
    every = np.concatenate([np.asarray(array).reshape(-1) for array in arrays])
    if not every.size or every.dtype == bool or not np.issubdtype(every.dtype, np.number):
        return None
    return float(every[0]) if (every == every[0]).all() else None


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
