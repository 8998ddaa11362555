"""Fused attention operators, read as :class:`~graphrot.analysis.types.AttentionSite`."""

from __future__ import annotations

import onnx_ir as ir

from graphrot.analysis.cached.reading import Cache, NotRead, Reader
from graphrot.analysis.types import AttentionSite, MaskTerm, OperandRef
from graphrot.model.rewrite import integer, is_read, operand

_SINK = "it adds a sink to the softmax (head_sink, smooth_softmax), which a query could not see otherwise"
_ROTARY = "it applies rotary positions inside, and they could not be taken out"


def grouped(reader: Reader, node: ir.Node) -> AttentionSite:
    """GroupQueryAttention of com.microsoft.

    Raises:
        NotRead: it computes something else than an attention site.
    """
    heads, kv_heads = integer(node, "num_heads"), integer(node, "kv_num_heads")
    if operand(node, 11) is not None or integer(node, "smooth_softmax") > 0:
        raise NotRead(_SINK)
    if integer(node, "do_rotary"):
        raise NotRead(_ROTARY)
    if any(operand(node, position) is not None for position in (14, 15)):
        raise NotRead("it normalizes queries and keys inside")
    if integer(node, "sliding_window_cache") or integer(node, "kv_cache_bit_width"):
        raise NotRead("it keeps its cache in a form of its own")
    if any(is_read(node, position) for position in range(3, len(node.outputs))):
        raise NotRead("its scores are an output, too")
    seqlens, total = operand(node, 5), operand(node, 6)
    if operand(node, 1) is None or operand(node, 2) is None or seqlens is None or total is None:
        raise NotRead("its keys and values are not given one by one")
    cache = reader.fused_cache(node, pasts=(3, 4), presents=(1, 2))
    terms: tuple[MaskTerm, ...] = ()
    if operand(node, 10) is not None:
        terms = (MaskTerm(OperandRef(node.outputs[0].name or "", 10)),)
    return _site(
        node,
        cache,
        heads=heads,
        kv_heads=kv_heads,
        scale=_number(node, "scale") or cache.width**-0.5,
        softcap=_number(node, "softcap"),
        window=integer(node, "local_window_size", -1),
        seqlens=seqlens.name or "",
        total=total.name or "",
        mask=terms,
    )


def _site(node: ir.Node, cache: Cache, *, heads: int, kv_heads: int, scale: float, **rest: object) -> AttentionSite:
    name = node.outputs[0].name or ""
    return AttentionSite(
        node=name,
        op=node.op_type,
        query=OperandRef(name, 0),
        key=OperandRef(name, 1),
        value=OperandRef(name, 2),
        past_key=cache.past_key,
        past_value=cache.past_value,
        present_key=cache.present_key,
        present_value=cache.present_value,
        heads=heads,
        kv_heads=kv_heads,
        head_size=cache.width,
        score_scale=scale,
        **rest,  # type: ignore[arg-type]
    )


def _number(node: ir.Node, name: str) -> float:
    return node.attributes[name].as_float() if name in node.attributes else 0.0
