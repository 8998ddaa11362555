"""Cuts a graph into segments between the linears to quantize, so that it can run layer by layer.

Linears that read the same tensor form a group. Segment ``k`` computes the input of group ``k`` and
may use the outputs of the linears of groups before ``k``, never later ones. Only the tensors that
later segments read are carried over. Constants and what is computed from constants alone belong to
no segment: every segment that reads them makes them itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphrot.analysis.types import LinearRef
from graphrot.errors import InputRefused

_SMALL_RESULT = frozenset({"Shape", "Size"})
"""Ops whose result is much smaller than their input: they run as early as they can."""

_RANDOM = frozenset({"RandomNormal", "RandomUniform", "Multinomial", "Bernoulli"})


@dataclass(frozen=True)
class LinearGroup:
    """Linears that read one tensor."""

    input: str
    linears: tuple[LinearRef, ...]


@dataclass(frozen=True)
class Segment:
    """A run of nodes that ends where the input of ``group`` is known.

    Args:
        group: the group whose input becomes known here.
        nodes: nodes in topological order, constant ones included.
        inputs: names of carried tensors and graph inputs that the nodes read.
        initializers: names of initializers that the nodes read, other than the weights to quantize.
        outputs: names of tensors made here that later segments, or ``group``, read.
        drop: names of tensors, and graph inputs, that nothing reads after this segment.
        shared: other nodes of later segments read the group's input, too.
    """

    group: LinearGroup
    nodes: tuple[ir.Node, ...]
    inputs: tuple[str, ...]
    initializers: tuple[str, ...]
    outputs: tuple[str, ...]
    drop: tuple[str, ...]
    shared: bool

    @property
    def made(self) -> set[str]:
        """Names of all tensors that the nodes make."""
        return {value.name for node in self.nodes for value in node.outputs if value.name}


def reads(node: ir.Node) -> Iterator[str]:
    """Names of the outer values that a node reads, those captured by its subgraphs included."""
    for value in node.inputs:
        if value is not None and value.name:
            yield value.name
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from _captured(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            for graph in attribute.as_graphs():
                yield from _captured(graph)


def _captured(graph: ir.Graph) -> Iterator[str]:
    inner = {value.name for value in graph.inputs} | set(graph.initializers)
    for node in graph:
        yield from (name for name in reads(node) if name not in inner)
        inner.update(value.name for value in node.outputs)
    yield from (value.name for value in graph.outputs if value.name and value.name not in inner)


def group_linears(model: ir.Model, linears: Sequence[LinearRef]) -> list[LinearGroup]:
    """Groups of linears that read the same tensor, in the order in which those tensors are made."""
    made = {value.name: position for position, node in enumerate(model.graph) for value in node.outputs}
    members: dict[str, list[LinearRef]] = {}
    for linear in linears:
        members.setdefault(linear.input, []).append(linear)
    groups = [LinearGroup(name, tuple(found)) for name, found in members.items()]
    return sorted(groups, key=lambda group: made.get(group.input, -1))


def cut(model: ir.Model, groups: Sequence[LinearGroup]) -> list[Segment]:
    """One segment per group, in order. Nodes that no group's input depends on are left out.

    Args:
        model: nodes in topological order; it is not changed.
        groups: from :func:`group_linears`.

    Raises:
        InputRefused: a linear is not in the graph, or nodes are not in topological order.
    """
    nodes = list(model.graph)
    maker = {value.name: index for index, node in enumerate(nodes) for value in node.outputs if value.name}
    inputs = {value.name for value in model.graph.inputs if value.name}
    weights = {linear.node: linear.weight for group in groups for linear in group.linears}
    operands = [
        tuple(name for name in dict.fromkeys(reads(node)) if name != weights.get(node.outputs[0].name or ""))
        for node in nodes
    ]
    for index, names in enumerate(operands):
        late = next((name for name in names if maker.get(name, -1) >= index), None)
        if late is not None:
            raise InputRefused("The nodes of the graph are not in topological order", where=f"tensor {late!r}")
    constant = _constant_nodes(nodes, operands, maker, inputs)
    needed = _needed(operands, maker, groups)
    level = _levels(nodes, operands, maker, constant, needed, groups)

    others: dict[str, int] = {}
    last_use: dict[str, int] = {group.input: rank for rank, group in enumerate(groups)}
    for index in needed:
        if not constant[index]:
            for name in operands[index]:
                last_use[name] = max(last_use.get(name, -1), level[index])
                if nodes[index].outputs[0].name not in weights:
                    others[name] = max(others.get(name, -1), level[index])
    drops: list[list[str]] = [[] for _ in groups]
    for name, last in last_use.items():
        if name in inputs or (name in maker and not constant[maker[name]]):
            drops[last].append(name)
    members: list[list[int]] = [[] for _ in groups]
    for index in sorted(needed):
        if not constant[index]:
            members[level[index]].append(index)

    segments: list[Segment] = []
    for rank, group in enumerate(groups):
        own = set(members[rank])
        own |= _constant_ancestors(members[rank], operands, maker, constant)
        order = sorted(own)
        made = {value.name for index in order for value in nodes[index].outputs if value.name}
        outer = dict.fromkeys(name for index in order for name in operands[index] if name not in made)
        carried = tuple(name for name in outer if name in maker or name in inputs)
        outputs = tuple(
            value.name
            for index in members[rank]
            for value in nodes[index].outputs
            if value.name and (last_use.get(value.name, -1) > rank or value.name == group.input)
        )
        segments.append(
            Segment(
                group,
                tuple(nodes[index] for index in order),
                carried,
                tuple(name for name in outer if name not in maker and name not in inputs),
                outputs,
                tuple(drops[rank]),
                others.get(group.input, -1) > rank,
            )
        )
    return segments


def _constant_nodes(
    nodes: Sequence[ir.Node], operands: Sequence[tuple[str, ...]], maker: dict[str, int], inputs: set[str]
) -> list[bool]:
    constant = [False] * len(nodes)
    for index, node in enumerate(nodes):
        constant[index] = node.op_type not in _RANDOM and all(
            constant[maker[name]] if name in maker else name not in inputs for name in operands[index]
        )
    return constant


def _needed(operands: Sequence[tuple[str, ...]], maker: dict[str, int], groups: Sequence[LinearGroup]) -> set[int]:
    needed: set[int] = set()
    stack = [maker[group.input] for group in groups if group.input in maker]
    while stack:
        index = stack.pop()
        if index not in needed:
            needed.add(index)
            stack.extend(maker[name] for name in operands[index] if name in maker)
    return needed


def _levels(
    nodes: Sequence[ir.Node],
    operands: Sequence[tuple[str, ...]],
    maker: dict[str, int],
    constant: Sequence[bool],
    needed: set[int],
    groups: Sequence[LinearGroup],
) -> dict[int, int]:
    """The segment of every needed node: as late as its first reader, linears and shapes as early as possible."""
    after: dict[int, int] = {}
    for rank, group in enumerate(groups):
        for linear in group.linears:
            if linear.node not in maker:
                raise InputRefused("A linear to quantize is not in the graph", where=f"output {linear.node!r}")
            after[maker[linear.node]] = rank + 1
    level: dict[int, int] = {}
    order = sorted(index for index in needed if not constant[index])
    for index in order:
        before = [level[maker[name]] for name in operands[index] if name in maker and not constant[maker[name]]]
        level[index] = max([after.get(index, 0), *before])
    first_use: dict[str, int] = {}
    for rank, group in reversed(list(enumerate(groups))):
        first_use[group.input] = rank
    for index in reversed(order):
        if index not in after and nodes[index].op_type not in _SMALL_RESULT:
            uses = [first_use[value.name] for value in nodes[index].outputs if value.name in first_use]
            level[index] = max(level[index], min(uses, default=level[index]))
        for name in operands[index]:
            first_use[name] = min(first_use.get(name, level[index]), level[index])
    return level


def _constant_ancestors(
    members: Sequence[int], operands: Sequence[tuple[str, ...]], maker: dict[str, int], constant: Sequence[bool]
) -> set[int]:
    found: set[int] = set()
    stack = list(members)
    while stack:
        for name in operands[stack.pop()]:
            index = maker.get(name)
            if index is not None and constant[index] and index not in found:
                found.add(index)
                stack.append(index)
    return found
