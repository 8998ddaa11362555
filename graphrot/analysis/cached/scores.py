"""Attention that is spelled out in plain operators, read backwards from its Softmax.

What is found here is a guess in the right form: :mod:`~graphrot.analysis.cached.meaning` runs the part of the graph
and compares it with what the site says. So the walk may pass operators (Reshape, Expand, Transpose) without following
what they do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import onnx_ir as ir

from graphrot.analysis.cached.reading import NotRead, Reader, handed_on
from graphrot.analysis.scope import is_shape_op, node_name
from graphrot.analysis.types import AttentionSite, MaskTerm, OperandRef
from graphrot.model.floats import is_standard

PASSED = frozenset({"Cast", "Identity", "Dropout"})
MOVED = frozenset({"Expand", "Gather", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"})

_SINK = "it adds a sink to the softmax, which a query could not see otherwise"
_HIDDEN = -1e3
"""Scores of this size and below weigh nothing beside others."""


@dataclass(frozen=True)
class _Scores:
    """What stands between a product and its softmax: ``factor * cap * tanh(inner * product) + masks``."""

    product: ir.Node
    factor: float = 1.0
    cap: float = 0.0
    terms: tuple[MaskTerm, ...] = ()


def spelled_out(reader: Reader, softmax: ir.Node) -> AttentionSite | None:
    """The site whose weights a Softmax makes; None where it is no attention.

    Raises:
        NotRead: it is attention, of another form.
    """
    scores = _scores(reader, softmax.inputs[0], 1.0)
    if scores is None:
        if _has_sink(softmax):
            raise NotRead(_SINK)
        return None
    weighted, values = _weighted(reader, softmax.outputs[0])
    _refuse_other_readers(scores.product, weighted)
    reader.products |= {scores.product, weighted}
    query, query_factor = _query(reader, scores.product)
    keys = scores.product.inputs[1]
    assert keys is not None
    key_join, key_factor = reader.joined(keys, {scores.product})
    value_join, value_factor = reader.joined(values, {weighted})
    cache = reader.cache(
        [key_join.inputs[0], value_join.inputs[0]],
        [key_join.outputs[0], value_join.outputs[0]],
    )
    factor = query_factor * key_factor
    if scores.product.op_type == "FusedMatMul" and "alpha" in scores.product.attributes:
        factor *= scores.product.attributes["alpha"].as_float()
    if value_factor != 1.0:
        raise NotRead("its values are scaled behind the cache")
    scale = scores.factor * factor * (scores.cap or 1.0)
    form = reader.form(reader.read(query))
    heads = reader.heads_of(reader.read(query), form)
    output = reader.form(weighted.outputs[0])
    return AttentionSite(
        node=node_name(weighted),
        op="MatMul, Softmax, MatMul",
        query=replace(query, form=form),
        key=OperandRef(node_name(key_join), 1, "heads"),
        value=OperandRef(node_name(value_join), 1, "heads"),
        past_key=cache.past_key,
        past_value=cache.past_value,
        present_key=cache.present_key,
        present_value=cache.present_value,
        heads=heads,
        kv_heads=cache.heads,
        head_size=cache.width,
        score_scale=scale,
        softcap=scores.cap,
        causal=False,
        output=output,
        mask=scores.terms,
    )


def _scores(reader: Reader, value: ir.Value | None, factor: float) -> _Scores | None:
    """Walk up from ``value``, which takes part in the scores ``factor`` times."""
    node = None if value is None else value.producer()
    if node is None:
        return None
    if node.domain == "com.microsoft" and node.op_type == "FusedMatMul":
        return _Scores(node, factor) if _is_product(reader, node) else None
    if not is_standard(node):
        return None
    name = node.op_type
    if name == "MatMul":
        return _Scores(node, factor) if _is_product(reader, node) else None
    if name in PASSED or name in ("Reshape", "Squeeze", "Unsqueeze"):
        return _scores(reader, node.inputs[0], factor)
    if name in ("Mul", "Div"):
        return _scaled(reader, node, factor)
    if name == "Tanh":
        inner = _scores(reader, node.inputs[0], 1.0)
        if inner is None:
            return None
        if inner.cap or inner.terms:
            raise NotRead("its scores are bounded twice, or behind the mask")
        return replace(inner, cap=factor)
    if name in ("Add", "Sub"):
        return _biased(reader, node, factor)
    if name == "Where":
        return _chosen(reader, node, factor)
    if name == "Max" and len(node.inputs) == 2:
        for position in (0, 1):
            bound = reader.number(node.inputs[1 - position])
            if bound is not None and bound <= _HIDDEN:
                return _scores(reader, node.inputs[position], factor)
    return None


def _is_product(reader: Reader, node: ir.Node) -> bool:
    """Whether both operands are computed from tokens: no weight."""
    flips = [node.attributes[n].as_int() for n in ("transA", "transBatchA", "transBatchB") if n in node.attributes]
    return not any(flips) and not any(value is None or reader.scope.trusted(value) for value in node.inputs[:2])


def _scaled(reader: Reader, node: ir.Node, factor: float) -> _Scores | None:
    for position in (0, 1):
        if node.op_type == "Div" and position:
            break
        number = reader.number(node.inputs[1 - position])
        if number is not None and number != 0.0:
            return _scores(reader, node.inputs[position], factor / number if node.op_type == "Div" else factor * number)
    return None


def _biased(reader: Reader, node: ir.Node, factor: float) -> _Scores | None:
    for position in (0, 1):
        if node.op_type == "Sub" and position:
            break
        found = _scores(reader, node.inputs[position], factor)
        if found is not None:
            sign = -1.0 if node.op_type == "Sub" else 1.0
            term = MaskTerm(OperandRef(node_name(node), 1 - position), "bias", sign * factor)
            return _with(reader, found, term, node.inputs[1 - position])
    return None


def _chosen(reader: Reader, node: ir.Node, factor: float) -> _Scores | None:
    """Where(condition, scores, number), or the other way round."""
    for position, kind in ((1, "keep"), (2, "hide")):
        number = reader.number(node.inputs[3 - position])
        if number is None:
            continue
        found = _scores(reader, node.inputs[position], factor)
        if found is None:
            continue
        if number * factor > _HIDDEN:
            raise NotRead("it hides tokens by a score that still counts")
        named: Literal["keep", "hide"] = "keep" if kind == "keep" else "hide"
        return _with(
            reader, found, MaskTerm(OperandRef(node_name(node), 0), named, number=number * factor), node.inputs[0]
        )
    return None


def _with(reader: Reader, found: _Scores, term: MaskTerm, mask: ir.Value | None) -> _Scores:
    shape = None if mask is None else reader.shape(mask)
    if shape is None:
        raise NotRead("the form of its mask is not known")
    if len(shape) > 4:
        raise NotRead(f"its mask has {len(shape)} axes")
    stacked = len(shape) == 3 and shape[0] not in (1, reader.batch)
    place = replace(term.place, form="stacked" if stacked else "heads")
    return replace(found, terms=(*found.terms, replace(term, place=place)))


def _has_sink(softmax: ir.Node) -> bool:
    data = softmax.inputs[0]
    for _ in range(4):
        node = None if data is None else data.producer()
        if node is None:
            return False
        if node.op_type == "Concat" and any(
            maker is not None and maker.op_type in ("Add", "Where", "MatMul", "Mul", "Div")
            for maker in (None if i is None else i.producer() for i in node.inputs)
        ):
            return True
        data = node.inputs[0] if node.inputs else None
    return False


def _refuse_other_readers(product: ir.Node, weighted: ir.Node) -> None:
    """Scores and weights must lead to the weighted values alone, since they are not made any more."""
    order = {node: place for place, node in enumerate(product.graph or ())}
    first = order[product]
    within, stack = {weighted}, [weighted.inputs[0]]
    while stack:
        value = stack.pop()
        node = None if value is None else value.producer()
        if node is not None and node not in within and order.get(node, -1) >= first:
            within.add(node)
            stack += node.inputs
    seen, stack = set(), list(product.outputs)
    while stack:
        value = stack.pop()
        if value is None or value in seen:
            continue
        seen.add(value)
        if value.is_graph_output():
            raise NotRead("its scores or weights are an output of the graph, too")
        for use in value.uses():
            if use.node is weighted or is_shape_op(use.node):
                continue
            if use.node not in within:
                raise NotRead(f"its scores or weights are also read by {use.node.op_type}")
            stack += use.node.outputs


def _weighted(reader: Reader, weights: ir.Value) -> tuple[ir.Node, ir.Value]:
    """The product of weights and values, and the values."""
    for _ in range(12):
        readers = [use for use in weights.uses() if use.node.op_type not in ("IsNaN", "Shape")]
        if weights.is_graph_output():
            raise NotRead("its weights are an output of the graph, too")
        if len(readers) != 1:
            raise NotRead("its weights are read by more than one node")
        node, position = readers[0].node, readers[0].idx
        values = node.inputs[1] if len(node.inputs) > 1 else None
        if node.op_type == "MatMul" and position == 0 and values is not None:
            return node, values
        if node.op_type in ("Slice", "Concat"):
            raise NotRead(_SINK)
        safe = node.op_type == "Where" and position in (1, 2) and reader.number(node.inputs[3 - position]) == 0.0
        if not safe and not (position == 0 and (node.op_type in PASSED or node.op_type in MOVED)):
            raise NotRead(f"its weights go through {node.op_type}")
        weights = node.outputs[0]
    raise NotRead("its weights do not meet values")


def _query(reader: Reader, product: ir.Node) -> tuple[OperandRef, float]:
    """Where the queries are read, before they are scaled, and the factor."""
    place, factor = OperandRef(node_name(product), 0), 1.0
    while True:
        value = handed_on(reader.read(place))
        node = value.producer()
        if node is None or not is_standard(node) or node.op_type not in ("Mul", "Div"):
            return place, factor
        for position in (0, 1):
            number = reader.number(node.inputs[1 - position])
            if number and not (node.op_type == "Div" and position):
                factor = factor / number if node.op_type == "Div" else factor * number
                place = OperandRef(node_name(node), position)
                break
        else:
            return place, factor
