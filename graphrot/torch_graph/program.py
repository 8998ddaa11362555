"""What of a graph has to run for some outputs, and who runs it.

Every node is of one kind. *fed*: it depends on no weight of the differentiable part, so ONNX Runtime computes it for
the feeds at hand (masks, positions, rotary tables). *sized*: it depends on such weights through shapes alone; it is
run in torch, once for each call, outside of the gradient. *live*: torch runs it, and gradients go through it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from graphrot.graph import is_constant

_SHAPES = frozenset({"Shape", "Size"})
_HEAVY = frozenset({"MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "Conv", "Einsum"})
_SEGMENT = 7
"""Products of a segment, at least: a layer of a decoder."""


@dataclass(frozen=True)
class Segment:
    """A run of live and sized nodes.

    Args:
        nodes: in order.
        reads: live values made by earlier segments that the nodes read.
        makes: live values made here that later segments read, or the caller asked for.
    """

    nodes: tuple[ir.Node, ...]
    reads: tuple[ir.Value, ...]
    makes: tuple[ir.Value, ...]


@dataclass(frozen=True)
class Program:
    """How to compute some values.

    Args:
        outputs: what was asked for.
        fed: nodes for ONNX Runtime.
        fetched: values that it hands over.
        constants: values that are read once: initializers, and what is computed from them.
        segments: the rest, cut where few values cross.
        live: values that carry gradients.
    """

    outputs: tuple[ir.Value, ...]
    fed: tuple[ir.Node, ...]
    fetched: tuple[ir.Value, ...]
    constants: tuple[ir.Value, ...]
    segments: tuple[Segment, ...]
    live: frozenset[ir.Value] = field(repr=False)


def plan_program(
    model: ir.Model, outputs: Sequence[ir.Value], roots: Collection[ir.Value], forced: Collection[ir.Node]
) -> Program:
    """Sort nodes into kinds, and cut the live ones into segments.

    Args:
        model: nodes in topological order.
        outputs: values to compute.
        roots: constants that carry gradients, or are rounded.
        forced: nodes that are live, whatever they read.
    """
    needed = _needed(model, outputs)
    live: set[ir.Value] = set(roots)
    sized: set[ir.Value] = set()
    fed: list[ir.Node] = []
    rest: list[ir.Node] = []
    for node in model.graph:
        if node not in needed:
            continue
        read_by = [*operands(node)]
        if node.op_type in _SHAPES and any(value in live or value in sized for value in read_by):
            sized.update(node.outputs)
        elif node in forced or any(value in live for value in read_by):
            live.update(node.outputs)
        elif any(value in sized for value in read_by):
            sized.update(node.outputs)
        else:
            fed.append(node)
            continue
        rest.append(node)
    read = dict.fromkeys(value for node in rest for value in operands(node))
    outer = [value for value in (*read, *outputs) if value not in live and value not in sized]
    outer += [value for value in (*read, *outputs) if value in roots]
    constants = tuple(value for value in dict.fromkeys(outer) if value in roots or is_constant(value))
    fetched = tuple(value for value in dict.fromkeys(outer) if value not in set(constants))
    wanted = _needed_for(fed, fetched)
    return Program(
        tuple(outputs),
        tuple(node for node in fed if node in wanted),
        fetched,
        constants,
        tuple(_cut(rest, live, outputs)),
        frozenset(live),
    )


def operands(node: ir.Node) -> Iterable[ir.Value]:
    """Values that a node reads, those captured by its subgraphs included."""
    for value in node.inputs:
        if value is not None:
            yield value
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            inner = [attribute.as_graph()]
        elif attribute.type == ir.AttributeType.GRAPHS:
            inner = list(attribute.as_graphs())
        else:
            continue
        for graph in inner:
            own = {value for n in graph for value in n.outputs} | set(graph.inputs)
            for n in graph:
                yield from (value for value in operands(n) if value not in own)
            yield from (value for value in graph.outputs if value not in own)


def _needed(model: ir.Model, outputs: Iterable[ir.Value]) -> set[ir.Node]:
    found: set[ir.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop().producer()
        if node is not None and node not in found and node.graph is model.graph:
            found.add(node)
            stack.extend(operands(node))
    return found


def _needed_for(nodes: Sequence[ir.Node], values: Iterable[ir.Value]) -> set[ir.Node]:
    found: set[ir.Node] = set()
    wanted = set(values)
    for node in reversed(nodes):
        if any(value in wanted for value in node.outputs):
            found.add(node)
            wanted.update(operands(node))
    return found


def _cut(nodes: Sequence[ir.Node], live: Collection[ir.Value], outputs: Sequence[ir.Value]) -> Iterable[Segment]:
    """Segments of about a layer, cut where as few live values cross as anywhere."""
    made = {value: place for place, node in enumerate(nodes) for value in node.outputs if value in live}
    last = dict.fromkeys(made, -1)
    for place, node in enumerate(nodes):
        for value in operands(node):
            if value in last:
                last[value] = place
    asked = [value for value in outputs if value in made]
    changes = [0] * (len(nodes) + 1)
    for value, place in made.items():
        if value not in asked and last[value] > place:
            changes[place + 1] += 1
            changes[last[value] + 1] -= 1
    crossing = []
    total = 0
    for change in changes:
        total += change
        crossing.append(total)
    heavy = [node.op_type in _HEAVY for node in nodes]
    first = next((place for place, is_heavy in enumerate(heavy) if is_heavy), 0)
    inner = [crossing[place] for place in range(first + 1, len(nodes)) if crossing[place]]
    least = min(inner, default=0)
    cuts = [0]
    products = 0
    for place in range(1, len(nodes)):
        products += heavy[place - 1]
        if products >= _SEGMENT and crossing[place] <= least:
            cuts.append(place)
            products = 0
    for start, end in zip(cuts, [*cuts[1:], len(nodes)], strict=True):
        part = tuple(nodes[start:end])
        reads = dict.fromkeys(v for n in part for v in operands(n) if v in made and made[v] < start)
        makes = [v for n in part for v in n.outputs if v in made and (last[v] >= end or v in asked)]
        yield Segment(part, tuple(reads), tuple(makes))
