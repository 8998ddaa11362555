"""Who reads the mean of channels, and who takes it away.

A LayerNorm looks at its rows without their mean. Where nothing else looks at the mean, it may be taken out of
the producers instead: then the norm is an RMS norm, and any orthogonal matrix may act. That needs two facts about
every node that reads such channels: whether it treats ``x`` and ``x - mean(x)`` alike (it works on whole rows, or is
a norm of this kind), and whether what it reads is *centred* already (it comes out of such a norm).

What is not known here counts as a reader of the mean: the space then keeps the all-ones vector, as before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.analysis.labels import Labels
from graphrot.analysis.norms import CENTRED_OPS, NORM_OPS, SKIP_OPS, gain_and_shift
from graphrot.analysis.partition import Partition
from graphrot.analysis.provenance import Provenance
from graphrot.analysis.scope import is_shape_op, is_standard, node_name
from graphrot.analysis.types import MeanNorm, MeanReader
from graphrot.analysis.visit import Record, Visit

_MOVES = frozenset(
    "Identity Dropout Cast CastLike Neg Reshape Flatten Squeeze Unsqueeze Transpose Expand Tile Split Slice Gather "
    "GatherND Concat".split()
)
_SUMS = frozenset({"Add", "Sub", "Sum", "Mean"})
_PRODUCTS = frozenset({"Mul", "Div", "Where"})
_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum"})

_RAW = "it reads these channels with their mean"
_NUMBER = "it reads, or adds, one number for a whole row of these channels"
_PART = "its rows are not just these channels"
_SHIFT = "it adds a shift that does not fold"


@dataclass(frozen=True)
class _Effect:
    """What a node does to rows of channels.

    ``alike``: without their mean it makes the same, without its mean. ``keeps``: rows without mean stay so.
    ``removes``: its first output has no mean.
    """

    alike: bool = False
    keeps: bool = False
    removes: MeanNorm | None = None
    refused: str = ""
    """It is about the mean, but not in a form that can be rewritten."""


_PASSES, _ADDS, _SCALES, _READS = _Effect(True, True), _Effect(True), _Effect(keeps=True), _Effect()


class Means:
    """The norms and the other readers of the mean, for channels that some node wants the mean of.

    Args:
        provenance: labels and records, gains folded.
        partition: the blocks.
    """

    def __init__(self, provenance: Provenance, partition: Partition) -> None:
        self._provenance = provenance
        self._partition = partition
        self._centred: set[ir.Value] = set()
        self._norms: dict[int, dict[MeanNorm, frozenset[int]]] = defaultdict(dict)
        self._order: dict[MeanNorm, int] = {}
        self._readers: dict[int, MeanReader] = {}
        means = [ids for record in provenance.records for ids in record.means]
        if not means:
            return
        roots = np.unique(partition.coordinate_of[np.concatenate(means)])
        self._concerned = np.isin(partition.coordinate_of, roots)
        for node, record in zip(provenance.scope.nodes, provenance.records, strict=True):
            if not is_shape_op(node):
                self._visit(node, record)
        for end in provenance.ends.exits:
            if end.value not in self._centred:
                reader = MeanReader(end.value.name or "", "graph output", _RAW)
                for block in self._blocks(end.labels.channels):
                    self._readers.setdefault(block, reader)

    def of(self, blocks: Iterable[int]) -> tuple[tuple[MeanNorm, ...], MeanReader | None]:
        """The norms that take the mean of these blocks away (in graph order), and the first other reader."""
        own = set(blocks)
        norms: dict[MeanNorm, frozenset[int]] = {}
        reader: MeanReader | None = None
        for block in sorted(own):
            norms |= self._norms.get(block, {})
            reader = reader or self._readers.get(block)
        for norm, members in norms.items():
            if not members <= own:
                reader = reader or MeanReader(norm.node, norm.op, _PART)
        return tuple(sorted(norms, key=self._order.__getitem__)), reader

    def _visit(self, node: ir.Node, record: Record) -> None:
        labels = self._provenance.graph.labels
        found = [(v, labels[v]) for v in dict.fromkeys(node.inputs) if v is not None and v in labels]
        read = {v: self._blocks(x.channels) for v, x in found if not x.squared}
        read = {value: blocks for value, blocks in read.items() if blocks}
        if record.consumers and record.means:
            number = MeanReader(node_name(node), node.op_type, _NUMBER)
            for block in (b for ids in record.means for b in self._blocks(ids)):
                self._readers.setdefault(block, number)
        if not read:
            return
        effect = self._effect(node, record)
        if effect.removes is not None:
            members = frozenset(block for blocks in read.values() for block in blocks)
            self._order[effect.removes] = self._provenance.scope.index[node]
            for block in members:
                self._norms[block][effect.removes] = members
        for value, blocks in read.items():
            if effect.refused or not (effect.alike or value in self._centred):
                reader = MeanReader(node_name(node), node.op_type, effect.refused or _RAW)
                for block in blocks:
                    self._readers.setdefault(block, reader)
        if effect.removes is not None:
            if self._passes(node):
                self._centred.add(node.outputs[0])
        elif effect.keeps and all(value in self._centred for value in read):
            self._centred.update(record.labels)

    def _passes(self, node: ir.Node) -> bool:
        """The first output carries channels of the first input; behind a gain that stays new ones begin."""
        labels = self._provenance.graph.labels
        made = labels.get(node.outputs[0])
        read = None if node.inputs[0] is None else labels.get(node.inputs[0])
        return made is not None and read is not None and bool(np.isin(made.channels, read.channels).all())

    def _blocks(self, ids: np.ndarray) -> frozenset[int]:
        found = np.unique(self._partition.block_of[ids[self._concerned[ids]]]).tolist()
        return frozenset(block for block in found if block in self._partition.blocks)

    def _effect(self, node: ir.Node, record: Record) -> _Effect:
        op = node.op_type
        if op in CENTRED_OPS:
            return self._norm(node, record)
        if op in NORM_OPS or record.exits:
            return _SCALES if self._passes(node) else _READS
        if record.means and not record.consumers:
            return self._mean(node)
        if not is_standard(node):
            return _READS
        if op in _MOVES or node in self._provenance.graph.folded:
            return _PASSES
        if op in _SUMS:
            rotated = all(v in self._provenance.graph.labels for v in node.inputs)
            return _PASSES if rotated or not record.edges else _ADDS
        if op in _PRODUCTS:
            return _READS if any(labels.squared for labels in record.labels.values()) else _PASSES
        if op in _REDUCTIONS:
            return _PASSES
        if op == "MatMul" and record.mixed and not record.consumers and not record.contractions:
            return _PASSES
        return _READS

    def _norm(self, node: ir.Node, record: Record) -> _Effect:
        """LayerNormalization or SkipLayerNormalization whose shift, if any, was folded or stays behind its gain."""
        shift = gain_and_shift(node)[1]
        value = None if shift is None else node.inputs[shift]
        if value is not None and node not in self._provenance.graph.folded and self._passes(node):
            numbers = self._provenance.graph.probe.number(value)
            if numbers is None or numbers.any():
                return _Effect(refused=_SHIFT)
        data = node.inputs[0]
        labels = None if data is None else self._provenance.graph.labels.get(data)
        if not record.means or labels is None or not self._whole_rows(labels, labels.rank - 1):
            return _Effect(refused=_PART)
        form: Literal["op", "skip"] = "skip" if node.op_type in SKIP_OPS else "op"
        return _Effect(alike=True, removes=MeanNorm(node_name(node), node.op_type, form))

    def _mean(self, node: ir.Node) -> _Effect:
        """``x - ReduceMean(x)``: the mean, and the difference."""
        if node.op_type == "ReduceMean":
            readers = self._readers_of(node.outputs[0])
            known = readers is not None and all(self._subtracted(user) is node for user in readers)
            return _ADDS if known else _Effect(refused=_NUMBER)
        mean = self._subtracted(node)
        if mean is None:
            return _Effect(refused=_NUMBER)
        axis = self._reduced_axis(mean)
        labels = self._provenance.graph.labels.get(node.inputs[0]) if node.inputs[0] is not None else None
        if axis is None or labels is None or not self._whole_rows(labels, axis):
            return _Effect(refused=_PART)
        return _Effect(alike=True, removes=MeanNorm(node_name(node), node.op_type, "chain"))

    def _subtracted(self, node: ir.Node) -> ir.Node | None:
        """The ReduceMean of ``x``, kept in its dimension, that a Sub takes from ``x``."""
        if node.op_type != "Sub" or not is_standard(node) or len(node.inputs) != 2:
            return None
        mean = _behind_casts(node.inputs[1])
        maker = None if mean is None else mean.producer()
        if maker is None or maker.op_type != "ReduceMean" or not is_standard(maker):
            return None
        kept = "keepdims" not in maker.attributes or maker.attributes["keepdims"].as_int() == 1
        same = _behind_casts(maker.inputs[0]) is _behind_casts(node.inputs[0])
        return maker if kept and same else None

    def _readers_of(self, value: ir.Value) -> list[ir.Node] | None:
        """The nodes that read a value, or a cast of it; None: it leaves the graph."""
        if value.is_graph_output():
            return None
        found: list[ir.Node] = []
        for user, _ in self._provenance.scope.uses(value):
            if user.op_type in ("Cast", "Identity"):
                further = self._readers_of(user.outputs[0])
                if further is None:
                    return None
                found += further
            else:
                found.append(user)
        return found

    def _reduced_axis(self, mean: ir.Node) -> int | None:
        axes = Visit(self._provenance.graph, mean, self._provenance.scope.index[mean]).axes()
        return axes[0] if axes is not None and len(axes) == 1 else None

    def _whole_rows(self, labels: Labels, axis: int) -> bool:
        """Every row along ``axis`` holds the channels of one block, each once, and nothing else."""
        ids = labels.rows(axis).ids
        blocks = self._partition.block_of[ids]
        whole = all(
            int(block) in self._partition.blocks and self._partition.blocks[int(block)].size == ids.shape[1]
            for block in np.unique(blocks)
        )
        ordered = np.sort(ids, axis=1)
        return whole and bool((blocks == blocks[:, :1]).all()) and bool((np.diff(ordered, axis=1) != 0).all())


def _behind_casts(value: ir.Value | None) -> ir.Value | None:
    while value is not None and (node := value.producer()) is not None and node.op_type in ("Cast", "Identity"):
        value = node.inputs[0]
    return value
