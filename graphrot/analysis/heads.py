"""Places for a transform across heads: in front of the linear that takes the merged heads of an attention.

QuaRot (section 4.2, arXiv:2404.00456) transforms the concatenated heads before the output projection. The
matrix is as wide as the whole axis that the linear sums over, so it mixes heads, which R2 cannot. It always
stands in the graph (the mean over tokens is taken head by head, and no matrix across heads moves through
it), and composes with R2: ``x Q2 H`` meets ``H.T Q2.T W``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphrot.analysis.labels import Labels
from graphrot.analysis.partition import Partition
from graphrot.analysis.provenance import Provenance
from graphrot.analysis.scope import constant_shape, is_standard, node_name
from graphrot.analysis.types import GainFold, OnlineUse, Refusal, RotationSpace, WeightUse, encode_runs
from graphrot.analysis.visit import Consumer
from graphrot.rotation.hadamard import hadamard_decomposition

_OUTPUT = "its result is an output of the graph, which must stay in its own basis"
_SUBGRAPH = "a subgraph of it reads the merged heads, which it needs in their own basis"
_OTHER = "it reads the merged heads in another way than a linear over all of them"
_BESIDE = "it puts other channels beside those of the heads, and one linear reads them all"
_AXIS = "it sums the heads along another axis than the last, where no online transform can stand"
_OWN = "it multiplies each head by a matrix of its own, and a transform across heads would mix them"
_PICKED = "its weight is picked at run time, and others may read what is picked"
_SIZE = "give the linear a width for which a Hadamard matrix is known, or leave O out"


class _Refused(Exception):
    """Why one place cannot be had, and the node that says so."""

    def __init__(self, node: ir.Node, reason: str, change: str = "") -> None:
        super().__init__(reason)
        self.refusal = Refusal(kind="O", node=node_name(node), op=node.op_type, reason=reason, change=change)


@dataclass(frozen=True)
class HeadSpaces:
    """Spaces of kind O in graph order, and the places that were refused."""

    spaces: tuple[RotationSpace, ...]
    refused: tuple[Refusal, ...]


def find_heads(
    provenance: Provenance, partition: Partition, gains: Sequence[GainFold], spaces: Sequence[RotationSpace]
) -> HeadSpaces:
    """Find every linear that takes merged heads, and the tensor in front of it that may be transformed.

    Args:
        provenance: labels and records, gains folded.
        partition: says which channels are one and the same.
        gains: the folds; a gain in front of such a linear moves into it together with the transform.
        spaces: the other rotations. Where R2 spans the whole axis there is one head, and nothing to mix.

    Returns:
        One space for each tensor, of the full width of its last axis: an online use, and the operands of all
        linears that read it. A place is refused where the tensor is read by anything else, where heads are not
        summed all at once along the last axis, and where no Hadamard matrix of the width is known.
    """
    return _Search(provenance, partition, gains, spaces).run()


class _Search:
    def __init__(
        self,
        provenance: Provenance,
        partition: Partition,
        gains: Sequence[GainFold],
        spaces: Sequence[RotationSpace],
    ) -> None:
        self._provenance = provenance
        self._scope = provenance.scope
        self._labels = provenance.graph.labels
        self._partition = partition
        self._bypassed = {name for g in gains if g.form == "mul" for name in (g.node, g.shift_node) if name}
        self._whole = {
            (use.node, use.input, use.axis): s.dim
            for s in spaces
            if s.kind in ("R2", "R4")
            for use in s.consumers
            if len(use.groups) == 1
        }
        """Operands that another rotation may mix over this width: one head alone, or heads that R4 has to itself."""
        self._beside: dict[ir.Value, ir.Node] = {}
        """Rows that hold heads and other channels, and the node that joins them."""
        self._merged = self._follow()

    def run(self) -> HeadSpaces:
        found: dict[ir.Value, list[WeightUse]] = {}
        refused: dict[str, Refusal] = {}
        seen: set[ir.Value] = set()
        for value in self._read_by_linears():
            if value in seen:
                continue
            try:
                uses, visited = self._uses(value)
            except _Refused as refusal:
                refused.setdefault(refusal.refusal.node, refusal.refusal)
                continue
            seen |= visited
            if uses:
                for behind in visited & found.keys():
                    del found[behind]  # its linears are among those of the tensor in front
                found[value] = uses
        spaces = [self._space(value, uses, number) for number, (value, uses) in enumerate(found.items())]
        return HeadSpaces(tuple(spaces), tuple(refused.values()))

    def _follow(self) -> set[ir.Value]:
        """All tensors that hold what attention mixed, and nothing else."""
        merged: set[ir.Value] = set()
        for node, record in zip(self._scope.nodes, self._provenance.records, strict=True):
            if record.mixed:
                merged.add(node.outputs[0])
                continue
            for output in node.outputs:
                labels = self._labels.get(output)
                if labels is None or not any(i in merged or i in self._beside for i in node.inputs):
                    continue
                parts = self._parts(node, labels)
                joins = [self._beside[p] for p in parts if p in self._beside]
                if parts and all(part in merged for part in parts):
                    merged.add(output)
                elif joins and all(part in merged or part in self._beside for part in parts):
                    self._beside[output] = joins[0]
                elif is_standard(node) and node.op_type == "Concat":
                    self._beside[output] = node
        return merged

    def _parts(self, node: ir.Node, labels: Labels) -> list[ir.Value]:
        """The run-time inputs whose channels the output carries, or is added to."""
        coordinates = self._partition.coordinate_of
        own = np.unique(coordinates[labels.channels])
        found: list[ir.Value] = []
        for value in node.inputs:
            read = None if value is None or self._scope.trusted(value) else self._labels.get(value)
            if value is not None and read is not None and np.isin(coordinates[read.channels], own).any():
                found.append(value)
        return found

    def _read_by_linears(self) -> Iterator[ir.Value]:
        """The tensors to transform, in the order of the linears; a gain that folds is behind the transform."""
        for node, record in zip(self._scope.nodes, self._provenance.records, strict=True):
            for consumer in record.consumers:
                place = (node_name(consumer.node), consumer.operand, consumer.operand_axis)
                if self._whole.get(place) == consumer.labels.shape[consumer.axis]:
                    continue
                for value in node.inputs:
                    held = value is not None and (value in self._merged or value in self._beside)
                    if value is not None and held and self._labels.get(value) is consumer.labels:
                        yield self._before_gains(value)

    def _before_gains(self, value: ir.Value) -> ir.Value:
        node = value.producer()
        while node is not None and node_name(node) in self._bypassed:
            kept = [i for i in node.inputs if i is not None and not self._scope.trusted(i)]
            value = kept[0]
            node = value.producer()
        return value

    def _uses(self, start: ir.Value) -> tuple[list[WeightUse], set[ir.Value]]:
        """The operands that take up the inverse, and the tensors on the way to them. Every reader of the tensor must
        be one, or hand whole rows on."""
        if start in self._beside:
            raise _Refused(self._beside[start], _BESIDE)
        width = self._labels[start].shape[-1]
        rows = _row_names(self._labels[start])
        found: list[WeightUse] = []
        stack, visited = [start], {start}
        while stack:
            value = stack.pop(0)
            self._refuse_ends(value)
            for user in dict.fromkeys(user for user, _ in self._scope.uses(value)):
                consumers = self._consumers(user, value)
                if consumers:
                    found += [self._use(user, consumer, width) for consumer in consumers]
                    continue
                for output in user.outputs:
                    labels = self._labels.get(output)
                    if labels is None or labels.shape[-1:] != (width,) or not _row_names(labels) <= rows:
                        raise _Refused(user, _OTHER)
                    if output not in visited:
                        visited.add(output)
                        stack.append(output)
        self._require_matrix(width, found)
        return found, visited

    def _refuse_ends(self, value: ir.Value) -> None:
        producer = value.producer()
        if value.is_graph_output() and producer is not None:
            raise _Refused(producer, _OUTPUT)
        for user, _ in self._scope.uses(value):
            if user not in self._scope.index:
                owners = [n for n in self._scope.nodes if value in self._scope.captured(n)]
                raise _Refused((owners or [user])[0], _SUBGRAPH)

    def _consumers(self, user: ir.Node, value: ir.Value) -> list[Consumer]:
        """What a node contributes as a linear over this tensor; nothing if it also reads it elsewhere."""
        if sum(i is value for i in user.inputs) != 1:
            return []
        labels = self._labels[value]
        return [c for c in self._provenance.records[self._scope.index[user]].consumers if c.labels is labels]

    def _use(self, user: ir.Node, consumer: Consumer, width: int) -> WeightUse:
        operand = consumer.node.inputs[consumer.operand]
        shape = None if operand is None else constant_shape(operand)
        if operand is None or shape is None or shape[consumer.operand_axis] != width or not operand.name:
            raise _Refused(user, _OTHER)
        if consumer.axis != consumer.labels.rank - 1:
            raise _Refused(user, _AXIS)
        if consumer.node is not user:
            raise _Refused(user, _PICKED)
        if any(n != 1 for n in shape[:-2]):
            raise _Refused(user, _OWN)
        return WeightUse(
            node=node_name(consumer.node),
            op=consumer.node.op_type,
            input=consumer.operand,
            tensor=operand.name,
            axis=consumer.operand_axis,
            groups=(encode_runs(range(width)),),
        )

    def _require_matrix(self, width: int, uses: Sequence[WeightUse]) -> None:
        if hadamard_decomposition(width) is None:
            power = width & -width
            what = f"no Hadamard matrix of size {width} = {width // power} * {power} can be constructed"
            node = next(n for n in self._scope.nodes if node_name(n) == uses[0].node)
            raise _Refused(node, what, _SIZE)

    def _space(self, value: ir.Value, uses: Sequence[WeightUse], number: int) -> RotationSpace:
        width = self._labels[value].shape[-1]
        producer = value.producer()
        assert producer is not None and value.name
        online = OnlineUse(value.name, producer.op_type, (encode_runs(range(width)),), width)
        return RotationSpace(
            id=f"O.{number}", kind="O", placement="online", dim=width, consumers=tuple(uses), online=(online,)
        )


def _row_names(labels: Labels) -> set[bytes]:
    """The rows along the last axis, each as the bytes of its channels and copies."""
    rows = labels.rows(labels.rank - 1)
    return {i.tobytes() + c.tobytes() for i, c in zip(rows.ids, rows.copies, strict=True)}
