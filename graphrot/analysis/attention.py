"""Fused attention operators, in terms of :func:`~graphrot.analysis.products.contract` and ``mix``.

Everything is brought to ``[B, H, S, D]`` labels first. Caches are ``[B, H, T, D]``.
"""

from __future__ import annotations

import numpy as np

from graphrot.analysis.labels import Labels, combine, concatenate, coordinates
from graphrot.analysis.products import contract, mix, refuse_contraction
from graphrot.analysis.visit import Visit
from graphrot.model.fused_attention import obstacle

_NORMS = "it normalizes queries and keys inside, behind which no transform can stand"
_ROTARY = "it applies rotary positions inside (do_rotary=1), where no transform can stand behind them"
_WITHIN = "it keeps keys and values in an order of its own, which is not followed"
_BEFORE = "give the model as it was before its attention was fused, or converted for a beam search"


def attention(v: Visit) -> None:
    """Attention of the standard domain: inputs q, k, v, mask, past key, past value."""
    q, k, x = v.labels(0), v.labels(1), v.labels(2)
    if q is None or k is None or x is None:
        v.opaque()
        return
    flat = q.rank == 3
    q, k, x = (
        _heads(q, v.integer("q_num_heads", 0)),
        _heads(k, v.integer("kv_num_heads", 0)),
        _heads(x, v.integer("kv_num_heads", 0)),
    )
    if q is None or k is None or x is None or q.shape[1] % k.shape[1] or v.has_output(3):
        v.opaque()
        return
    _run(v, q, k, x, pasts=(4, 5), presents=(1, 2), flat=flat)


def grouped(v: Visit) -> None:
    """GroupQueryAttention of com.microsoft: q, k, v (or packed in q), past key, past value, lengths, ..."""
    heads, kv = v.integer("num_heads", 0), v.integer("kv_num_heads", 0)
    query = v.labels(0)
    if query is None or query.rank != 3 or not heads or not kv or heads % kv:
        v.opaque()
        return
    if v.value(1) is None:
        width = query.shape[2] // (heads + 2 * kv)
        cuts = (heads * width, (heads + kv) * width)
        parts = query[..., : cuts[0]], query[..., cuts[0] : cuts[1]], query[..., cuts[1] :]
    else:
        key, value = v.labels(1), v.labels(2)
        if key is None or value is None:
            v.opaque()
            return
        parts = query, key, value
    q, k, x = _heads(parts[0], heads), _heads(parts[1], kv), _heads(parts[2], kv)
    if q is None or k is None or x is None:
        v.opaque()
        return
    reason = _ROTARY if v.integer("do_rotary", 0) else ""
    if v.value(14) is not None or v.value(15) is not None:
        reason = _NORMS
    _run(v, q, k, x, pasts=(3, 4), presents=(1, 2), flat=True, reason=reason)


def multi_head(v: Visit) -> None:
    """MultiHeadAttention of com.microsoft: q, k, v, bias, padding mask, attention bias, past key, past value."""
    heads = v.integer("num_heads", 0)
    q, k, x = v.labels(0), v.labels(1), v.labels(2)
    if q is None or k is None or x is None or v.has_output(3) or not _add_bias(v, (q, k, x)):
        v.opaque()
        return
    q4, k4, x4 = _heads(q, heads), _heads(k, heads), _heads(x, heads)
    if q4 is None or k4 is None or x4 is None:
        v.opaque()
        return
    _run(v, q4, k4, x4, pasts=(6, 7), presents=(1, 2), flat=True)


def whole(v: Visit) -> None:
    """Attention operators whose queries, keys and values are not followed. Those that can be were taken apart."""
    reason = obstacle(v.node) if v.node.op_type == "Attention" else _WITHIN
    v.opaque(reason)
    v.record.refused.append((reason or _WITHIN, _BEFORE))


def _add_bias(v: Visit, parts: tuple[Labels, Labels, Labels]) -> bool:
    """The one bias for queries, keys and values, end to end; False if it cannot be followed."""
    if v.value(3) is None:
        return True
    widths = [part.shape[-1] for part in parts]
    bias = v.bias(3, (sum(widths),))
    if bias is None or any(part.rank != 3 or part.squared for part in parts):
        return False
    start = 0
    for part, width in zip(parts, widths, strict=True):
        v.edge(part, bias[start : start + width].broadcast(part.shape, v.salt))
        start += width
    return True


def _heads(labels: Labels, heads: int) -> Labels | None:
    """``[B, S, H*D]`` or ``[B, H, S, D]`` to the latter."""
    if labels.squared:
        return None
    if labels.rank == 4:
        return labels
    if labels.rank != 3 or heads <= 0 or labels.shape[2] % heads:
        return None
    batch, length, width = labels.shape
    return labels.reshape((batch, length, heads, width // heads)).transpose((0, 2, 1, 3))


def _run(
    v: Visit,
    q: Labels,
    k: Labels,
    x: Labels,
    *,
    pasts: tuple[int, int],
    presents: tuple[int, int],
    flat: bool,
    reason: str = "",
) -> None:
    """The attention itself; ``pasts`` and ``presents`` are positions of the caches, ``flat`` the output's form.

    ``reason`` says why queries and keys cannot be rotated, if so.
    """
    stored: list[Labels] = []
    for fresh, position, output in zip((k, x), pasts, presents, strict=True):
        past = v.labels(position)
        if v.value(position) is not None and past is None:
            v.opaque("its cache does not carry channels")
            return
        shape = v.output_shape(output) if v.has_output(output) else None
        joined = fresh if past is None else _joined(fresh, past, shape)
        if joined is None:
            v.opaque("its cache does not fit its new keys and values")
            return
        stored.append(joined)
        if shape is not None:
            v.set(joined if joined.shape == shape else joined[:, :, : shape[2]], output)
    keys, values = stored
    if reason:
        refuse_contraction(v, [q, keys], reason)
    else:
        contract(v, q, _repeat(keys, q.shape[1], v.salt))
    rows = _repeat(values, q.shape[1], v.salt)
    for position in range(len(v.node.inputs)):
        if position not in (0, 1, 2, *pasts) and not v.readable(position):
            v.block(v.labels(position), "it shapes the attention weights")
    result = mix(v, rows, (*q.shape[:3], rows.shape[3]))
    if flat:
        result = result.transpose((0, 2, 1, 3)).reshape(v.output_shape())
    v.set(result)


def _joined(fresh: Labels, past: Labels, shape: tuple[int, ...] | None) -> Labels | None:
    """Past and new rows along the token axis.

    A cache of fixed length is written in place: then both are kept in view, one behind the other, and the
    present is as long as the past.
    """
    if past.rank != 4 or past.shape[:2] != fresh.shape[:2] or past.shape[3] != fresh.shape[3]:
        return None
    if shape is not None and shape[2] not in (past.shape[2] + fresh.shape[2], past.shape[2]):
        return None
    return concatenate([past, fresh], 2)


def _repeat(labels: Labels, heads: int, salt: int) -> Labels:
    """Each key or value head serves a group of query heads: copies."""
    group = heads // labels.shape[1]
    if group == 1:
        return labels
    ids, copies = np.repeat(labels.ids, group, axis=1), np.repeat(labels.copies, group, axis=1)
    member = coordinates(ids.shape, [1]) % group
    return Labels(ids, combine(copies, member, salt))
