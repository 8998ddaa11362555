"""Attention operators: everything is brought to ``[B, H, S, D]`` and meets in :func:`attend`."""

from __future__ import annotations

import torch

from graphrot.torch_graph.ops.call import MICROSOFT, Call, Op
from graphrot.torch_graph.ops.rotary import rotate_heads

_LOWEST = torch.finfo(torch.float32).min


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    added: torch.Tensor | None = None,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(softcap(scale q k) + added) v``.

    Args:
        query: ``[B, Hq, S, D]``.
        keys: ``[B, Hkv, T, D]``; Hq is a multiple of Hkv.
        values: ``[B, Hkv, T, Dv]``.
        scale: factor on the products.
        added: broadcasts to ``[B, Hq, S, T]``.
        softcap: bound of the scores; 0: none.
        sink: ``[Hq]`` scores that take part in the sum of the softmax and weigh no value.

    Returns:
        ``[B, Hq, S, Dv]``.
    """
    group = query.shape[1] // keys.shape[1]
    if group > 1:
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
    scores = (query * scale) @ keys.transpose(-1, -2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if added is not None:
        scores = scores + added
    if sink is None:
        return torch.softmax(scores, -1) @ values
    beside = sink.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, beside], -1), -1)[..., :-1] @ values


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, S, H * D]`` as ``[B, H, S, D]``; the latter stays."""
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def _joined(past: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new if past is None or not past.shape[2] else torch.cat([past, new], 2)


def _hidden(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores: nothing where ``seen``."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, _LOWEST)


def _causal(tokens: int, slots: int, window: int = -1) -> torch.Tensor:
    """``[S, T]``: which slots the last ``tokens`` see."""
    position = torch.arange(slots - tokens, slots)[:, None]
    slot = torch.arange(slots)
    seen = slot <= position
    return seen & (slot > position - window) if window >= 0 else seen


def _standard(call: Call) -> list[torch.Tensor | None]:
    query, key, value = call.tensor(0), call.tensor(1), call.tensor(2)
    flat = query.ndim == 3
    query = _heads(query, call.integer("q_num_heads"))
    key, value = (_heads(part, call.integer("kv_num_heads")) for part in (key, value))
    keys, values = _joined(call.maybe(4), key), _joined(call.maybe(5), value)
    if call.has(6):
        raise call.refuse("its rows have lengths of their own (nonpad_kv_seqlen)")
    if len(call.about.wanted) > 3 and call.about.wanted[3]:
        raise call.refuse("its scores are an output")
    tokens, slots = query.shape[2], keys.shape[2]
    mask = call.maybe(3)
    added = None
    if mask is not None:
        added = _hidden(mask, query.dtype) if mask.dtype == torch.bool else mask
        if added.shape[-1] < slots:
            rest = torch.full((*added.shape[:-1], slots - added.shape[-1]), _LOWEST, dtype=query.dtype)
            added = torch.cat([added, rest], -1)
    if call.integer("is_causal"):
        seen = _hidden(_causal(tokens, slots), query.dtype)
        added = seen if added is None else added + seen
    scale = call.floating("scale") or query.shape[-1] ** -0.5
    result = attend(query, keys, values, scale=scale, added=added, softcap=call.floating("softcap"))
    return [_rows(result) if flat else result, keys, values]


def _grouped(call: Call) -> list[torch.Tensor | None]:
    heads, kv = call.integer("num_heads"), call.integer("kv_num_heads")
    if call.has(12) or call.has(13):
        raise call.refuse("its cache is quantized")
    if call.has(14) or call.has(15):
        raise call.refuse("it normalizes queries and keys inside")
    query = call.tensor(0)
    if call.has(1):
        key, value = call.tensor(1), call.tensor(2)
    else:
        width = query.shape[-1] // (heads + 2 * kv)
        query, key, value = torch.split(query, [heads * width, kv * width, kv * width], -1)
    query, key, value = _heads(query, heads), _heads(key, kv), _heads(value, kv)
    past_key, past_value = call.maybe(3), call.maybe(4)
    tokens = query.shape[2]
    start = 0 if past_key is None else past_key.shape[2]
    totals = call.tensor(5).reshape(-1) + 1
    if start and bool((totals != start + tokens).any()):
        raise call.refuse("its rows have pasts of different lengths, or a cache of fixed length")
    if call.integer("do_rotary"):
        positions = call.maybe(9)
        if positions is None:
            positions = torch.arange(start, start + tokens)[None]
        cos, sin = (call.tensor(at)[positions] for at in (7, 8))
        interleaved = bool(call.integer("rotary_interleaved"))
        query, key = (rotate_heads(part, cos, sin, interleaved=interleaved) for part in (query, key))
    keys, values = _joined(past_key, key), _joined(past_value, value)
    added = _hidden(_causal(tokens, start + tokens, call.integer("local_window_size", -1)), query.dtype)
    bias = call.maybe(10)
    sink = call.maybe(11)
    if sink is None and call.integer("smooth_softmax"):
        sink = torch.zeros(heads, dtype=query.dtype)
    result = attend(
        query,
        keys,
        values,
        scale=call.floating("scale") or query.shape[-1] ** -0.5,
        added=added if bias is None else added + bias[..., : added.shape[-1]],
        softcap=call.floating("softcap"),
        sink=sink,
    )
    return [_rows(result), keys, values]


def _multi_head(call: Call) -> list[torch.Tensor | None]:
    heads = call.integer("num_heads")
    if not call.has(1) or not call.has(2) or call.tensor(0).ndim != 3:
        raise call.refuse("its queries, keys and values are packed in one tensor")
    query, key, value = call.tensor(0), call.tensor(1), call.tensor(2)
    bias = call.maybe(3)
    if bias is not None:
        widths = [query.shape[-1], heads * key.shape[-1] if key.ndim == 4 else key.shape[-1]]
        q, k, v = torch.split(bias, [*widths, bias.shape[0] - sum(widths)])
        query = query + q
        key, value = (
            part + (part_bias.reshape(heads, 1, -1) if part.ndim == 4 else part_bias)
            for part, part_bias in ((key, k), (value, v))
        )
    query, key, value = (_heads(part, heads) for part in (query, key, value))
    keys, values = _joined(call.maybe(6), key), _joined(call.maybe(7), value)
    added = _masked(call, call.maybe(4), call.maybe(5), query.shape[2], keys.shape[2], query.dtype)
    scale = call.floating("scale") or query.shape[-1] ** -0.5
    return [_rows(attend(query, keys, values, scale=scale, added=added)), keys, values]


def _packed(call: Call) -> list[torch.Tensor | None]:
    """Attention of com.microsoft: the weights of queries, keys and values stand inside of it."""
    heads = call.integer("num_heads")
    if call.has(6) or call.integer("do_rotary"):
        raise call.refuse("it shares a cache of fixed length, or applies rotary positions inside")
    rows = call.tensor(0) @ call.tensor(1)
    rows = rows if not call.has(2) else rows + call.tensor(2)
    sizes = call.about.attributes.get("qkv_hidden_sizes") or [rows.shape[-1] // 3] * 3
    query, key, value = (_heads(part, heads) for part in torch.split(rows, [int(size) for size in sizes], -1))
    past = call.maybe(4)
    keys, values = (_joined(None if past is None else past[at], part) for at, part in enumerate((key, value)))
    added = _masked(call, call.maybe(3), call.maybe(5), query.shape[2], keys.shape[2], query.dtype)
    scale = call.floating("scale") or query.shape[-1] ** -0.5
    present = torch.stack([keys, values]) if len(call.about.wanted) > 1 and call.about.wanted[1] else None
    return [_rows(attend(query, keys, values, scale=scale, added=added)), present]


def _masked(
    call: Call,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    tokens: int,
    slots: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """What is added to scores: causality, padding (a number that the node says), a bias."""
    added = None
    if call.integer("unidirectional"):
        added = _hidden(_causal(tokens, slots), dtype)
    if mask is not None:
        if mask.ndim not in (2, 3) or mask.shape[-1] != slots:
            raise call.refuse("its padding is given in another form than [batch, tokens]")
        number = call.floating("mask_filter_value", -10000.0)
        hidden = torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask <= 0, number)
        hidden = hidden[:, None, None] if mask.ndim == 2 else hidden[:, None]
        added = hidden if added is None else added + hidden
    if bias is not None:
        added = bias if added is None else added + bias
    return added


ATTENTION: dict[tuple[str, str], Op] = {
    ("", "Attention"): _standard,
    (MICROSOFT, "Attention"): _packed,
    (MICROSOFT, "GroupQueryAttention"): _grouped,
    (MICROSOFT, "MultiHeadAttention"): _multi_head,
}
