"""Fused attention operators, read as :class:`~graphrot.analysis.types.AttentionSite`."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import onnx_ir as ir

from graphrot.analysis.cached.reading import Cache, NotRead, Reader
from graphrot.analysis.types import AttentionSite, MaskTerm, OperandRef
from graphrot.model.rewrite import integer, is_read, operand

_SINK = "it adds a sink to the softmax (head_sink, smooth_softmax), which a query could not see otherwise"
_ROTARY = "it applies rotary positions inside, and they could not be taken out"
_SCORES = "its scores are an output, too"
_LOWEST = -3.4028234663852886e38
_FILTER = -10000.0
"""What MultiHeadAttention adds to the scores of hidden tokens, if it does not say."""


def grouped(reader: Reader, node: ir.Node) -> AttentionSite:
    """GroupQueryAttention of com.microsoft.

    Raises:
        NotRead: it computes something else than an attention site.
    """
    if operand(node, 11) is not None or integer(node, "smooth_softmax") > 0:
        raise NotRead(_SINK)
    if integer(node, "do_rotary"):
        raise NotRead(_ROTARY)
    if any(operand(node, position) is not None for position in (14, 15)):
        raise NotRead("it normalizes queries and keys inside")
    if integer(node, "sliding_window_cache") or integer(node, "kv_cache_bit_width"):
        raise NotRead("it keeps its cache in a form of its own")
    if any(is_read(node, position) for position in range(3, len(node.outputs))):
        raise NotRead(_SCORES)
    seqlens, total = operand(node, 5), operand(node, 6)
    if operand(node, 1) is None or operand(node, 2) is None or seqlens is None or total is None:
        raise NotRead("its keys and values are not given one by one")
    cache = reader.fused_cache(node, pasts=(3, 4), presents=(1, 2))
    key, value = OperandRef(_name(node), 1), OperandRef(_name(node), 2)
    return replace(
        _site(node, cache, OperandRef(_name(node), 0), key, value, integer(node, "num_heads")),
        kv_heads=integer(node, "kv_num_heads"),
        softcap=_number(node, "softcap"),
        window=integer(node, "local_window_size", -1),
        seqlens=seqlens.name or "",
        total=total.name or "",
        mask=_bias(node, 10),
    )


def standard(reader: Reader, node: ir.Node) -> AttentionSite:
    """Attention of the standard domain, with caches of its own or behind a Concat of past and new rows.

    Raises:
        NotRead: it computes something else than an attention site.
    """
    if is_read(node, 3):
        raise NotRead(_SCORES)
    if operand(node, 6) is not None:
        raise NotRead("it takes the lengths of rows (nonpad_kv_seqlen), which go with a cache that is kept elsewhere")
    query = node.inputs[0]
    assert query is not None
    shape = reader.shape(query)
    if shape is None or len(shape) not in (3, 4):
        raise NotRead("the form of its queries is not known")
    form: Literal["rows", "heads"] = "rows" if len(shape) == 3 else "heads"
    key, value, cache = _new_rows(reader, node, form, pasts=(4, 5))
    mask: tuple[MaskTerm, ...] = ()
    given = operand(node, 3)
    if given is not None:
        seen = reader.probe.seen(given)
        if seen is None:
            raise NotRead("the form of its mask is not known")
        place = OperandRef(_name(node), 3, "heads")
        mask = (MaskTerm(place) if seen.is_float else MaskTerm(place, "keep", number=_LOWEST),)
    heads = integer(node, "q_num_heads") if form == "rows" else shape[1]
    return replace(
        _site(node, cache, OperandRef(_name(node), 0, form), key, value, heads),
        softcap=_number(node, "softcap"),
        causal=bool(integer(node, "is_causal")),
        output=form,
        mask=mask,
    )


def multi_head(reader: Reader, node: ir.Node) -> AttentionSite:
    """MultiHeadAttention of com.microsoft.

    Raises:
        NotRead: it computes something else than an attention site.
    """
    if is_read(node, 3):
        raise NotRead(_SCORES)
    if operand(node, 3) is not None:
        raise NotRead("it adds a bias to queries, keys and values inside")
    if any(operand(node, position) is not None for position in (8, 9)):
        raise NotRead("it keeps its cache in a form of its own")
    if operand(node, 1) is None or operand(node, 2) is None:
        raise NotRead("its keys and values are not given one by one")
    key, value, cache = _new_rows(reader, node, "rows", pasts=(6, 7))
    mask = _bias(node, 5)
    padding = operand(node, 4)
    if padding is not None:
        shape = reader.shape(padding)
        if shape is None or len(shape) != 2:
            raise NotRead("its padding mask is not of the form [batch, tokens]")
        filtered = _number(node, "mask_filter_value") or _FILTER
        mask = (*mask, MaskTerm(OperandRef(_name(node), 4), "padding", number=filtered))
    return replace(
        _site(node, cache, OperandRef(_name(node), 0), key, value, integer(node, "num_heads")),
        causal=bool(integer(node, "unidirectional")),
        mask=mask,
    )


def _site(
    node: ir.Node, cache: Cache, query: OperandRef, key: OperandRef, value: OperandRef, heads: int
) -> AttentionSite:
    """What every operator says in the same way; without a scale of its own it is one by the root of the width."""
    return AttentionSite(
        node=_name(node),
        op=node.op_type,
        query=query,
        key=key,
        value=value,
        past_key=cache.past_key,
        past_value=cache.past_value,
        present_key=cache.present_key,
        present_value=cache.present_value,
        heads=heads,
        kv_heads=cache.heads,
        head_size=cache.width,
        score_scale=_number(node, "scale") or cache.width**-0.5,
    )


def _new_rows(
    reader: Reader, node: ir.Node, form: Literal["rows", "heads"], pasts: tuple[int, int]
) -> tuple[OperandRef, OperandRef, Cache]:
    """Where new keys and values are read, and the cache: that of the node, or of the Concats in front of it."""
    if any(operand(node, position) is not None for position in pasts):
        cache = reader.fused_cache(node, pasts=pasts, presents=(1, 2))
        return OperandRef(_name(node), 1, form), OperandRef(_name(node), 2, form), cache
    if is_read(node, 1) or is_read(node, 2):
        raise NotRead("it gives its keys and values on, and takes none")
    joins = []
    reader.products.add(node)
    for position in (1, 2):
        value = node.inputs[position]
        assert value is not None
        join, factor = reader.joined(value, {node})
        if factor != 1.0:
            raise NotRead("its keys and values are scaled behind the cache")
        joins.append(join)
    cache = reader.cache([join.inputs[0] for join in joins], [join.outputs[0] for join in joins])
    first, second = (OperandRef(join.outputs[0].name or "", 1, "heads") for join in joins)
    return first, second, cache


def _bias(node: ir.Node, position: int) -> tuple[MaskTerm, ...]:
    return () if operand(node, position) is None else (MaskTerm(OperandRef(_name(node), position, "heads")),)


def _name(node: ir.Node) -> str:
    return node.outputs[0].name or ""


def _number(node: ir.Node, name: str) -> float:
    return node.attributes[name].as_float() if name in node.attributes else 0.0
