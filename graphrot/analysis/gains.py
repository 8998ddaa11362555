"""Per-channel gains that can move forward into the matmuls that read them.

A gain folds if nothing but constant matmuls reads its channels, save one constant shift on the way. The
graph stays as it is: a folded gain is visited again as if it were neutral, which may free the gain in
front of it. So folds are found in rounds, and must be replayed in the order given here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from graphrot.analysis.backward import fold_backward
from graphrot.analysis.labels import Labels, Source, coordinates
from graphrot.analysis.norms import NORM_OPS, gain_and_shift
from graphrot.analysis.provenance import Provenance
from graphrot.analysis.scope import constant_shape, node_name
from graphrot.analysis.types import GainConsumer, GainFold, WeightUse, encode_runs
from graphrot.analysis.visit import Consumer, Edge

_ROUNDS = 32
"""More gains than that, one behind the other, stay where they are."""


@dataclass
class Readers:
    """What happens to the channels of one source."""

    barred: bool = False
    """Something other than a constant matmul or an edge touches them."""
    consumers: list[Consumer] = field(default_factory=list)
    partners: dict[int, None] = field(default_factory=dict)
    """Sources that an edge joins with this one, by index."""
    edges: list[Edge] = field(default_factory=list)


def fold_gains(provenance: Provenance) -> tuple[GainFold, ...]:
    """Find all gains that fold, to a fixpoint. The labels of ``provenance`` end up as after the folds.

    Returns:
        Folds in the order in which they must be made: those that move backward (a shift that folds into the same
        linear must find its columns scaled), then by round, and in graph order.
    """
    forward: list[GainFold] = []
    backward: list[GainFold] = []
    for _ in range(_ROUNDS):
        readers = readers_of(provenance)
        found: list[tuple[int, GainFold, list[ir.Node]]] = []
        waiting: list[Source] = []
        for source in provenance.graph.table.sources:
            if source.kind != "gain" or source.node is None or source.node in provenance.graph.folded:
                continue
            fold = _try(provenance, source, readers)
            if fold is None:
                waiting.append(source)
            else:
                found.append((provenance.scope.index[source.node], *fold))
        kept = forward
        if not found:
            kept = backward
            for source in waiting:
                turned = fold_backward(provenance.scope, source)
                if turned is not None and source.node is not None:
                    found.append((provenance.scope.index[source.node], turned, [source.node]))
        if not found:
            break
        found.sort(key=lambda item: item[0])
        kept.extend(fold for _, fold, _ in found)
        provenance.fold(dict.fromkeys(node for _, _, nodes in found for node in nodes))
    return (*backward, *forward)


def readers_of(provenance: Provenance) -> dict[int, Readers]:
    """What reads the channels of each source, by its index."""
    table = provenance.graph.table
    readers: dict[int, Readers] = defaultdict(Readers)

    def owners(ids: np.ndarray) -> list[int]:
        return [int(i) for i in np.unique(table.index_of(ids))]

    for _, record in provenance.all_records():
        barred = [k.ids for k in record.keys if not k.consumed] + [b.ids for b in record.blocks]
        barred += [c.ids for c in record.contractions] + record.mixed + record.means
        for ids in barred:
            for index in owners(ids):
                readers[index].barred = True
        for edge in record.edges:
            left, right = table.index_of(edge.left), table.index_of(edge.right)
            for a, b in {(int(x), int(y)) for x, y in np.unique(np.stack([left, right], 1), axis=0)}:
                readers[a].partners[b] = None
                readers[b].partners[a] = None
                readers[a].edges.append(edge)
        for consumer in record.consumers:
            for index in owners(consumer.labels.channels):
                readers[index].consumers.append(consumer)
    return readers


def _try(provenance: Provenance, source: Source, readers: dict[int, Readers]) -> tuple[GainFold, list[ir.Node]] | None:
    own = readers[source.index]
    node, position = source.node, source.operand
    assert node is not None and position is not None
    gain = node.inputs[position]
    partners = [provenance.graph.table.sources[i] for i in own.partners if i != source.index]
    if own.barred or not own.consumers or gain is None or not gain.name:
        return None
    index = _gain_index(source, gain)
    if index is None:
        return None
    consumers: list[GainConsumer] = []
    for consumer in own.consumers:
        taken = _consumer(source, consumer, index)
        if taken is None:
            return None
        consumers.append(taken)
    fold = GainFold(
        node=node_name(node),
        op=node.op_type,
        form="norm" if node.op_type in NORM_OPS else "mul",
        gain=gain.name,
        gain_input=position,
        consumers=tuple(consumers),
    )
    shift = _shift_of(provenance, source, partners, readers)
    if shift is None:
        return (fold, [node]) if not partners else None
    holder, operand = shift
    value = holder.inputs[operand]
    shape = None if value is None else constant_shape(value)
    if value is None or not value.name or shape is None or max(shape, default=1) != source.count:
        return None
    behind = provenance.graph.labels[holder.outputs[0]]
    if any(_takes_no_shift(c) or not _as_it_was(c, behind) for c in own.consumers):
        return None
    with_shift = replace(fold, shift=value.name, shift_node=node_name(holder), shift_input=operand)
    return with_shift, list(dict.fromkeys([node, holder]))


def _shift_of(
    provenance: Provenance, source: Source, partners: list[Source], readers: dict[int, Readers]
) -> tuple[ir.Node, int] | None:
    """The node and operand of the one constant that is added right behind the gain, for all its readers."""
    node = source.node
    assert node is not None
    if node.op_type in NORM_OPS:
        position = gain_and_shift(node)[1]
        numbers = None if position is None else provenance.graph.probe.number(_input(node, position))
        if position is None or (numbers is not None and not numbers.any()) or partners:
            return None
        return node, position
    if len(partners) != 1:
        return None
    shift = partners[0]
    if shift.kind != "bias" or shift.node is None or shift.operand is None or shift.node.op_type != "Add":
        return None
    alone = not readers[shift.index].barred and set(readers[shift.index].partners) == {source.index}
    if (
        not alone
        or not _directly_behind(provenance, node, shift.node)
        or not _aligned(readers[source.index], source, shift)
    ):
        return None
    return shift.node, shift.operand


def _as_it_was(consumer: Consumer, behind: Labels) -> bool:
    """What is read was only moved since the shift was added: a factor or a sum would change the shift too."""
    return bool(np.isin(consumer.labels.copies, behind.copies).all())


def _takes_no_shift(consumer: Consumer) -> bool:
    """Only a plain matmul by a matrix has a place for ``beta @ W``, in its bias or in an Add behind it."""
    return is_picked(consumer) or is_scaled(consumer)


def is_picked(consumer: Consumer) -> bool:
    """The weight is no matrix, but several of which one is picked at run time."""
    weight = consumer.node.inputs[consumer.operand]
    shape = None if weight is None else constant_shape(weight)
    return shape is None or len(shape) != 2


def is_scaled(consumer: Consumer) -> bool:
    """The product is multiplied by a number inside of the node."""
    alpha = consumer.node.attributes.get("alpha")
    return alpha is not None and alpha.as_float() != 1.0


def _directly_behind(provenance: Provenance, gain: ir.Node, shift: ir.Node) -> bool:
    value = gain.outputs[0]
    while True:
        uses = provenance.scope.uses(value)
        if len(uses) != 1 or value.is_graph_output():
            return False
        user = uses[0][0]
        if user is shift:
            return True
        if user.op_type not in ("Cast", "Identity"):
            return False
        value = user.outputs[0]


def _aligned(own: Readers, source: Source, shift: Source) -> bool:
    """Channel k of the gain meets channel k of the shift."""
    for edge in own.edges:
        for a, b in ((edge.left, edge.right), (edge.right, edge.left)):
            here = (a >= source.base) & (a < source.base + source.count)
            if here.any() and not np.array_equal(a[here] - source.base, b[here] - shift.base):
                return False
    return True


def _gain_index(source: Source, gain: ir.Value) -> np.ndarray | None:
    """For every channel of the source, the flat index into the gain; None if that is not unique."""
    shape = constant_shape(gain)
    if shape is None:
        return None
    count = int(np.prod(shape, dtype=np.int64))
    elements = np.broadcast_to(np.arange(count).reshape(shape), source.shape)
    channels = coordinates(source.shape, source.axes)
    index = np.full(source.count, -1, dtype=np.int64)
    index[channels.reshape(-1)] = elements.reshape(-1)
    return index if np.array_equal(index[channels], elements) else None


def _consumer(source: Source, consumer: Consumer, index: np.ndarray) -> GainConsumer | None:
    """The consumer reads nothing but this gain's channels, the same ones in every row."""
    ids = consumer.labels.rows(consumer.axis).ids - source.base
    if ids.min() < 0 or ids.max() >= source.count:
        return None
    rows = index[ids]
    if not (rows == rows[:1]).all():
        return None
    operand = consumer.node.inputs[consumer.operand]
    if operand is None or not operand.name:
        return None
    use = WeightUse(
        node=node_name(consumer.node),
        op=consumer.node.op_type,
        input=consumer.operand,
        tensor=operand.name,
        axis=consumer.operand_axis,
        groups=(encode_runs(range(rows.shape[1])),),
    )
    return GainConsumer(use=use, index=encode_runs(rows[0].tolist()))


def _input(node: ir.Node, position: int) -> ir.Value:
    value = node.inputs[position]
    assert value is not None
    return value
