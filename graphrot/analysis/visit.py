"""What one node says about channels: the record of a visit, and the tools to write it.

A record holds *keys* (channels may stay in one block only if their multisets of (copy, key) agree),
*blocks* (channels that must stay alone), *edges* (pairs of channels that take the same coordinate of
the same matrix), and the constant operands that take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphrot.analysis.labels import Labels, SourceKind, SourceTable, combine, coordinates, fresh_labels, mix
from graphrot.analysis.probe import Probe
from graphrot.analysis.scope import Scope, constant_dtype, constant_shape, reads_type_only
from graphrot.graph import FLOATS, read_constant

_COPIES = "it joins copies of channels that do not match"


@dataclass(frozen=True, slots=True)
class Key:
    """``sums[i]`` is a hash of the multiset of (copy, key) of channel ``ids[i]`` (sorted, distinct)."""

    ids: np.ndarray
    sums: np.ndarray
    reason: str
    consumed: bool = False
    """The key of a constant matmul, into whose weight a gain may fold, or of a product, which a gain may pass."""


@dataclass(frozen=True, slots=True)
class Block:
    """Channels that a node wants in their own basis."""

    ids: np.ndarray
    reason: str
    at: ir.Value | None = None
    """The graph input or output that wants it, where no node does."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Pairs of channels that go together; ``weights`` hash the pairs of copies in which they meet."""

    left: np.ndarray
    right: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True, slots=True)
class Consumer:
    """A constant operand whose axis ``operand_axis`` meets ``labels`` along ``axis``."""

    labels: Labels
    axis: int
    node: ir.Node
    operand: int
    operand_axis: int


@dataclass(frozen=True, slots=True)
class Contraction:
    """Two run-time tensors multiplied over channels that both carry: a rotation of both cancels."""

    ids: np.ndarray
    refused: str = ""
    """Why no rotation can cancel here, if so."""


@dataclass(frozen=True, slots=True)
class Exit:
    """Rows of ``labels`` along their last axis, which may be turned back in front of ``node``, or of a graph output."""

    labels: Labels
    node: ir.Node | None
    value: ir.Value
    """The run-time tensor that is read, the one before the gain where ``node`` is a norm."""


@dataclass(slots=True)
class Record:
    """All that one node contributes."""

    keys: list[Key] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    consumers: list[Consumer] = field(default_factory=list)
    contractions: list[Contraction] = field(default_factory=list)
    mixed: list[np.ndarray] = field(default_factory=list)
    """Ids of tensors whose rows are averaged with run-time weights (attention values)."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Why there are no channels inside the node that could rotate, and what would change it."""
    means: list[np.ndarray] = field(default_factory=list)
    """Ids whose matrix must keep the all-ones vector."""
    exits: list[Exit] = field(default_factory=list)
    labels: dict[ir.Value, Labels] = field(default_factory=dict)
    cut: bool = False
    """The node was not understood as linear: its output starts new channels."""


@dataclass(frozen=True, slots=True)
class Selected:
    """A constant picked at run time (expert weights): its last two axes are ``axes`` of the operand."""

    node: ir.Node
    operand: int
    axes: tuple[int, int]


class Graph:
    """What the visits share: the scope, the probe, sources, labels, decisions on gains."""

    def __init__(self, scope: Scope, probe: Probe) -> None:
        self.scope = scope
        self.probe = probe
        self.table = SourceTable()
        self.labels: dict[ir.Value, Labels] = {}
        self.selected: dict[ir.Value, Selected] = {}
        self.folded: set[ir.Node] = set()
        """Nodes whose gain (or shift) has been folded forward: they are visited as if it were neutral."""
        self.open: set[ir.Node | ir.Value] = set()
        """Ends of a stream where an online transform may stand: nodes whose gain stays, graph inputs and outputs."""
        self.between: set[ir.Node] = set()
        """Those nodes among them that end one stream and begin the next (norms in the stream itself)."""


class Visit:
    """One node's visit. Handlers read labels here and write the record."""

    def __init__(self, graph: Graph, node: ir.Node, index: int) -> None:
        self.graph = graph
        self.node = node
        self.index = index
        self.record = Record()
        self._events = 0

    # reading

    @property
    def salt(self) -> int:
        return self.index + 1

    def value(self, position: int) -> ir.Value | None:
        return self.node.inputs[position] if position < len(self.node.inputs) else None

    def labels(self, position: int) -> Labels | None:
        value = self.value(position)
        return None if value is None else self.graph.labels.get(value)

    def constant(self, position: int) -> bool:
        value = self.value(position)
        return value is not None and value in self.graph.scope.constant

    def readable(self, position: int) -> bool:
        return self.graph.scope.readable(self.value(position))

    def trusted(self, position: int) -> bool:
        value = self.value(position)
        return value is not None and self.graph.scope.trusted(value)

    def number(self, position: int) -> np.ndarray | None:
        """Numbers of a data-independent input, None if it is absent or depends on data."""
        value = self.value(position)
        return None if value is None else self.graph.probe.number(value)

    def operand(self, position: int) -> np.ndarray:
        """A readable constant input."""
        value = self.value(position)
        assert value is not None
        return read_constant(value)

    def shape_of_constant(self, position: int) -> tuple[int, ...]:
        """Shape of a readable constant input, without loading it where that can be avoided."""
        value = self.value(position)
        assert value is not None
        shape = constant_shape(value)
        return tuple(read_constant(value).shape) if shape is None else shape

    def operand_is_float(self, position: int) -> bool:
        value = self.value(position)
        return value is not None and constant_dtype(value) in FLOATS

    def shape(self, position: int) -> tuple[int, ...] | None:
        value = self.value(position)
        seen = None if value is None else self.graph.probe.seen(value)
        return None if seen is None else seen.shape

    def output_shape(self, position: int = 0) -> tuple[int, ...]:
        seen = self.graph.probe.seen(self.node.outputs[position])
        assert seen is not None
        return seen.shape

    def static_axes(self, position: int = 0) -> list[int]:
        seen = self.graph.probe.seen(self.node.outputs[position])
        assert seen is not None
        return [d for d, static in enumerate(seen.static) if static]

    def has_output(self, position: int) -> bool:
        return (
            position < len(self.node.outputs)
            and bool(self.node.outputs[position].name)
            and self.graph.probe.seen(self.node.outputs[position]) is not None
        )

    def is_read(self, position: int) -> bool:
        """Some node, or the graph's end, takes this output."""
        output = self.node.outputs[position]
        return output.is_graph_output() or bool(output.uses())

    def integer(self, name: str, default: int) -> int:
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_int()

    def real(self, name: str, default: float) -> float:
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_float()

    def integers(self, name: str) -> list[int] | None:
        attribute = self.node.attributes.get(name)
        return None if attribute is None else list(attribute.as_ints())

    def axes(self, position: int = 1) -> list[int] | None:
        """The ``axes`` attribute, or the data-independent input that took its place."""
        given = self.integers("axes")
        if given is not None:
            return given
        numbers = self.number(position)
        return None if numbers is None else [int(a) for a in np.atleast_1d(numbers)]

    def reads_nothing(self) -> bool:
        """An input that carries channels has no elements."""
        labels = (self.labels(k) for k in range(len(self.node.inputs)))
        return any(x is not None and not x.ids.size for x in labels)

    def lost_rows(self) -> bool:
        """By something that depends on data, a result has no elements, and so no channels that could be seen."""
        if all(x.ids.size for x in self.record.labels.values()):
            return False
        fixed = all(value is None or self.constant(k) for k, value in enumerate(self.node.inputs) if k)
        return not fixed and not self.reads_nothing()

    # writing

    def set(self, labels: Labels, position: int = 0) -> None:
        self.record.labels[self.node.outputs[position]] = labels

    def source(
        self,
        kind: SourceKind,
        position: int = 0,
        axes: Sequence[int] | None = None,
        *,
        node: ir.Node | None = None,
        operand: int | None = None,
        operand_axis: int | None = None,
    ) -> Labels:
        """Begin new channels at an output: along ``axes``, or along all static axes."""
        shape = self.output_shape(position)
        chosen = self.static_axes(position) if axes is None else [a % len(shape) for a in axes]
        value, owner = self.node.outputs[position], node or self.node
        source = self.graph.table.get(kind, value, owner, shape, chosen, operand=operand, operand_axis=operand_axis)
        labels = fresh_labels(source)
        self.set(labels, position)
        return labels

    def bias(self, position: int, target: tuple[int, ...]) -> Labels | None:
        """Labels of a constant that is added to a tensor of shape ``target``: channels on its last long axis."""
        value = self.value(position)
        if value is None or not self.readable(position):
            return None
        shape = constant_shape(value)
        if shape is None:
            return None
        long = [d for d, n in enumerate(shape) if n > 1]
        axis = long[-1] if long else max(len(shape) - 1, 0)
        source = self.graph.table.get(
            "bias", value, self.node, shape, [axis] if shape else [], operand=position, operand_axis=axis
        )
        labels = fresh_labels(source)
        return labels.broadcast(target, self.salt) if np.broadcast_shapes(shape, target) == target else None

    def add_constant(self, labels: Labels, position: int) -> bool:
        """A constant is added to channels: zeros change nothing, one number for all of them passes if the matrix keeps
        the all-ones vector, and any other constant is a producer (bias).

        Returns:
            False if it is a constant that cannot be rewritten.
        """
        numbers = self.number(position)
        if numbers is not None and numbers.size <= 1 << 20 and not numbers.any():
            return True
        if numbers is not None and numbers.size == 1 and any(labels.varies(d) for d in range(labels.rank)):
            self.mean(labels)
            return True
        bias = self.bias(position, labels.shape)
        if bias is not None:
            self.edge(labels, bias)
        return bias is not None

    def key(self, labels: Labels, key: np.ndarray | int, reason: str, *, consumed: bool = False) -> None:
        """Channels stay together only if they appear in the same copies with the same keys."""
        self._events += 1
        ids = labels.ids.reshape(-1)
        hashed = combine(labels.copies, key, self._events).reshape(-1)
        unique, sums = sum_by(ids, hashed)
        salted = combine(sums, self.salt, self._events)
        self.record.keys.append(Key(unique, salted, reason, consumed))

    def key_rows(self, labels: Labels, axes: Sequence[int], reason: str, *, consumed: bool = False) -> None:
        """The key of an operation that works on whole rows: the coordinates along ``axes``."""
        self.key(labels, coordinates(labels.shape, axes), reason, consumed=consumed)

    def block(self, labels: Labels | None, reason: str) -> None:
        if labels is not None and labels.ids.size:
            self.record.blocks.append(Block(labels.channels, reason))

    def edge(self, left: Labels, right: Labels, reason: str = _COPIES, *, consumed: bool = False) -> None:
        """Channels that stand at the same element take the same coordinate; shapes broadcast.

        Where a channel meets itself, its copies must pair up as those of the other channels do.
        """
        a, b, ca, cb = np.broadcast_arrays(left.ids, right.ids, left.copies, right.copies)
        differ = a != b
        self._events += 1
        if not differ.all():
            same = ~differ
            self.key(Labels(a[same], ca[same]), cb[same], reason, consumed=consumed)
        if not differ.any():
            return
        a, b, ca, cb = a[differ], b[differ], ca[differ], cb[differ]
        pairs, sums = sum_by(a * np.int64(1 << 31) + b, combine(ca, cb, self._events))
        self.record.edges.append(
            Edge(pairs >> np.int64(31), pairs & np.int64((1 << 31) - 1), combine(sums, self.salt, self._events))
        )

    def mean(self, labels: Labels) -> None:
        self.record.means.append(labels.channels)

    def leave(self, labels: Labels, value: ir.Value, node: ir.Node | None) -> None:
        """Whole rows are read here in their own basis, and may be turned back first."""
        self.key_rows(labels, range(labels.rank - 1), "it reads a part of the channels")
        rows = labels.rows(labels.rank - 1)
        self.edge(rows, rows[:1])
        self.record.exits.append(Exit(labels, node, value))

    def opaque(self, reason: str | None = None) -> None:
        """The node is not understood: what it reads stays in its own basis, what it makes starts anew."""
        why = reason or f"{self.node.op_type} does not commute with a rotation of its input"
        self.record.cut = True
        read = [i for k, i in enumerate(self.node.inputs) if i is not None and not reads_type_only(self.node, k)]
        for value in dict.fromkeys([*read, *self.graph.scope.captured(self.node)]):
            self.block(self.graph.labels.get(value), why)
        for position, output in enumerate(self.node.outputs):
            seen = self.graph.probe.seen(output) if output.name else None
            if seen is not None and seen.is_float:
                self.source("opaque", position)


def sum_by(groups: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values of ``groups`` (sorted), and the sum (mod 2**64) of mixed ``numbers`` over each."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if ordered.size else np.zeros(0, dtype=np.int64)
    sums = np.add.reduceat(mix(numbers)[order], starts) if ordered.size else np.zeros(0, dtype=np.uint64)
    return ordered[starts], sums
