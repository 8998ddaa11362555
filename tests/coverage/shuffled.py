"""The same graph under other names, in another order."""

from __future__ import annotations

import random

import onnx_ir as ir

_WORDS = ("past_key", "down_proj.weight", "lm_head", "logits", "norm", "q_proj", "position_ids", "attention_mask", "")


def shuffled(model: ir.Model, seed: int) -> tuple[ir.Model, dict[str, str]]:
    """A copy with misleading names, and nodes and initializers in a random order.

    Returns:
        The copy (its inputs and outputs stand where they stood), and its names -> those of ``model``.
    """
    rng = random.Random(seed)
    copy = ir.from_proto(ir.to_proto(model))
    _reorder(copy.graph, rng)
    values = list(copy.graph.inputs)
    values += [v for v in copy.graph.initializers.values() if not v.is_graph_input()]
    values += [v for node in copy.graph for v in node.outputs if v.name]
    fresh = [f"{rng.choice(_WORDS)}.{n}" for n in range(len(values))]
    rng.shuffle(fresh)
    names: dict[str, str] = {}
    for value, name in zip(values, fresh, strict=True):
        names[name] = value.name or ""
        value.name = name
    for node in copy.graph:
        node.name = f"{rng.choice(_WORDS)}_{rng.random()}"
    order = list(copy.graph.initializers.values())
    rng.shuffle(order)
    copy.graph.initializers.clear()
    copy.graph.initializers.update({v.name: v for v in order if v.name})
    return copy, names


def _reorder(graph: ir.Graph, rng: random.Random) -> None:
    """Any topological order, all equally legal: of the nodes that could come next, a random one."""
    nodes = list(graph)
    reads = {node: _producers(node) for node in nodes}
    readers: dict[ir.Node, list[ir.Node]] = {node: [] for node in nodes}
    for node, producers in reads.items():
        for producer in producers:
            readers[producer].append(node)
    waiting = {node: len(producers) for node, producers in reads.items()}
    ready = [node for node in nodes if not waiting[node]]
    order: list[ir.Node] = []
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        order.append(node)
        for reader in readers[node]:
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    assert len(order) == len(nodes)
    graph.remove(nodes)
    graph.extend(order)


def _producers(node: ir.Node) -> set[ir.Node]:
    """Nodes of the same graph that this one, or a subgraph of it, reads."""
    read = list(node.inputs)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            read += [i for part in attribute.as_graph().all_nodes() for i in part.inputs]
            read += attribute.as_graph().outputs
    found = {v.producer() for v in read if v is not None}
    return {p for p in found if p is not None and p.graph is node.graph}
