"""Follow channels through the graph: visit every node once, and again where a folded gain changes labels."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping

import onnx_ir as ir

from graphrot.analysis import arithmetic, attention, movement, norms, products
from graphrot.analysis.caches import find_caches
from graphrot.analysis.labels import fresh_labels
from graphrot.analysis.probe import Probe
from graphrot.analysis.scope import Scope, is_shape_op, is_standard, node_name
from graphrot.analysis.types import CachePair
from graphrot.analysis.visit import Block, Graph, Record, Visit
from graphrot.errors import InputRefused
from graphrot.graph import FLOATS

Handler = Callable[[Visit], None]

STANDARD: Mapping[str, Handler] = {
    "Identity": movement.keep,
    "Dropout": movement.keep,
    "Cast": movement.keep,
    "CastLike": movement.keep,
    "Neg": movement.negate,
    "Reshape": movement.reshape,
    "Flatten": movement.reshape,
    "Squeeze": movement.reshape,
    "Unsqueeze": movement.reshape,
    "Transpose": movement.transpose,
    "Expand": movement.expand,
    "Tile": movement.tile,
    "Split": movement.split,
    "Slice": movement.slice_,
    "Gather": movement.gather,
    "GatherND": movement.gather_nd,
    "Concat": movement.concat,
    "Pad": movement.pad,
    "Add": arithmetic.add,
    "Sub": arithmetic.add,
    "Sum": arithmetic.add_many,
    "Mean": arithmetic.add_many,
    "Where": arithmetic.where,
    "Mul": arithmetic.multiply,
    "Div": arithmetic.multiply,
    "Pow": arithmetic.power,
    "ReduceMean": arithmetic.reduce,
    "ReduceSum": arithmetic.reduce,
    "ReduceL2": arithmetic.reduce,
    "ReduceSumSquare": arithmetic.reduce,
    "Conv": products.conv,
    "LayerNormalization": norms.norm,
    "RMSNormalization": norms.norm,
    "SimplifiedLayerNormalization": norms.norm,
    "MatMul": products.matmul,
    "Gemm": products.gemm,
    "Attention": attention.attention,
}
"""Handlers of the standard domain; a node without one is opaque. (ONNX Runtime's
SimplifiedLayerNormalization lives in the standard domain.)"""

MICROSOFT: Mapping[str, Handler] = {
    "SimplifiedLayerNormalization": norms.norm,
    "SkipLayerNormalization": norms.norm,
    "SkipSimplifiedLayerNormalization": norms.norm,
    "GroupQueryAttention": attention.grouped,
    "MultiHeadAttention": attention.multi_head,
    "Attention": attention.whole,
    "DecoderMaskedMultiHeadAttention": attention.whole,
    "SparseAttention": attention.whole,
    "FusedMatMul": products.fused_matmul,
}


_MOVES = frozenset(
    {
        *(movement.keep, movement.reshape, movement.transpose, movement.expand, movement.tile, movement.pad),
        *(movement.split, movement.slice_, movement.gather, movement.gather_nd, movement.concat),
    }
)
"""Handlers that are right for tensors without elements."""

_EMPTY = "no row of its result was there in the runs that show the shapes, so its channels are not known"


def handler_of(node: ir.Node) -> Handler | None:
    if is_standard(node):
        return STANDARD.get(node.op_type)
    return MICROSOFT.get(node.op_type) if node.domain == "com.microsoft" else None


class Provenance:
    """The labels of all tensors of a graph and the records of all nodes.

    Args:
        scope: the graph.
        probe: its shapes.
    """

    def __init__(self, scope: Scope, probe: Probe) -> None:
        self.graph = Graph(scope, probe)
        self.records: list[Record] = [Record() for _ in scope.nodes]
        self.caches: list[CachePair] = []
        self.ends = Record()
        """What graph inputs and outputs contribute."""
        self._inputs()
        for index, node in enumerate(scope.nodes):
            self._visit(index, node)
        self._outputs()

    @property
    def scope(self) -> Scope:
        return self.graph.scope

    def all_records(self) -> list[tuple[ir.Node | None, Record]]:
        """Records in graph order; the ends of the graph last, without a node."""
        return [*zip(self.scope.nodes, self.records, strict=True), (None, self.ends)]

    def fold(self, nodes: Iterable[ir.Node]) -> None:
        """Treat the gains (and shifts) of ``nodes`` as neutral, and bring all labels up to date."""
        waiting: list[int] = []
        for node in nodes:
            self.graph.folded.add(node)
            waiting.append(self.scope.index[node])
        heapq.heapify(waiting)
        last = -1
        while waiting:
            index = heapq.heappop(waiting)
            if index == last:
                continue
            last = index
            for value in self._visit(index, self.scope.nodes[index]):
                for user, _ in self.scope.uses(value):
                    if user in self.scope.index:
                        heapq.heappush(waiting, self.scope.index[user])
        self._outputs()

    def open(self, ends: Iterable[ir.Node | ir.Value], between: Iterable[ir.Node]) -> None:
        """Let online transforms stand at these ends of streams; labels stay as they are.

        Args:
            ends: nodes whose gain stays, graph inputs and outputs.
            between: those nodes at which one stream ends and another begins.
        """
        self.graph.between.update(between)
        for end in ends:
            self.graph.open.add(end)
            if isinstance(end, ir.Node):
                self._visit(self.scope.index[end], end)
        self._outputs()

    def _inputs(self) -> None:
        """Caches start channels of their own, per head and element; other float inputs too, but blocked."""
        for value in self.scope.model.graph.inputs:
            seen = self.graph.probe.seen(value)
            if seen is None or value.dtype not in FLOATS:
                continue
            cache = self.graph.probe.is_cache_input(value)
            tokens = len(seen.shape) - 2
            axes = [a for a, static in enumerate(seen.static) if static and not (cache and a == tokens)]
            source = self.graph.table.get("input", value, None, seen.shape, axes)
            self.graph.labels[value] = fresh_labels(source)

    def _visit(self, index: int, node: ir.Node) -> list[ir.Value]:
        """Visit a node; returns the outputs whose labels are not what they were."""
        scope, graph = self.scope, self.graph
        if is_shape_op(node) or (
            all(scope.trusted(o) and o not in scope.followed for o in node.outputs)
            and all(i is None or (i not in scope.followed and i not in graph.labels) for i in node.inputs)
        ):
            return []
        visit = Visit(graph, node, index)
        handler = handler_of(node)
        if scope.captured(node) or handler is None or graph.probe.seen(node.outputs[0]) is None:
            visit.opaque()
        else:
            try:
                if visit.reads_nothing() and handler not in _MOVES:
                    visit.opaque(_EMPTY)
                elif not movement.passed_selection(visit):
                    handler(visit)
            except (ValueError, IndexError) as error:  # numpy: shapes, ranks or indices that contradict each other
                raise InputRefused(
                    f"The shapes at the {node.op_type} that makes {node_name(node)!r} do not fit together",
                    where=node_name(node),
                    why=str(error),
                    do="check that the model runs in ONNX Runtime",
                ) from error
            if visit.lost_rows():
                visit = Visit(graph, node, index)
                visit.opaque(_EMPTY)
        changed: list[ir.Value] = []
        for value, labels in visit.record.labels.items():
            old = graph.labels.get(value)
            if old is None or not old.same_as(labels):
                graph.labels[value] = labels
                changed.append(value)
        self.records[index] = visit.record
        return changed

    def _begins(self, value: ir.Value) -> bool:
        """An output of the graph that lies in front of a transform: a stream begins behind it, and is not read here.

        Not where one stream ends in a norm operator and the next begins there: its gain moves out of it, and the
        output's name with the gain.
        """
        node = value.producer()
        between = node in self.graph.between and node.op_type in norms.NORM_OPS if node is not None else False
        if value not in self.graph.open or between:
            return False
        owners = self.graph.table.owners(self.graph.labels[value].channels)
        return all(s.value is value and s.kind in ("gain", "opaque", "input") for s in owners)

    def _outputs(self) -> None:
        """Graph outputs stay in their own basis, but for caches that come back as inputs."""
        self.ends = Record()
        self.caches = find_caches(self.graph, self.ends)
        for number, value in enumerate(self.scope.model.graph.outputs):
            labels = self.graph.labels.get(value)
            if labels is None or value.name in {pair.present for pair in self.caches} or self._begins(value):
                continue
            if value in self.graph.open and (node := value.producer()) is not None:
                visit = Visit(self.graph, node, len(self.scope.nodes) + number)
                visit.leave(labels, value, None)
                self.ends.keys += visit.record.keys
                self.ends.edges += visit.record.edges
                self.ends.exits += visit.record.exits
            else:
                self.ends.blocks.append(Block(labels.channels, f"it is the graph output {value.name!r}", value))
        paired = {pair.past for pair in self.caches}
        for value in self.scope.model.graph.inputs:
            labels = self.graph.labels.get(value)
            if labels is not None and value.name not in paired and value not in self.graph.open:
                self.ends.blocks.append(Block(labels.channels, f"it is the graph input {value.name!r}", value))
