"""RotatedAttention in NumPy: the rows of the cache to the bit, attention in float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray

from graphrot.ops.reference import evaluate_hadamard

_LARGEST = np.float32(65504.0)
_UNSEEN = -1e30


def store_rows(z: ArrayLike, bits: int) -> NDArray[np.uint8]:
    """Rows of a cache, in the float32 arithmetic that defines them.

    Args:
        z: ``[..., D]``, taken as float32.
        bits: 4 or 8.

    Returns:
        ``[..., D * bits / 8 + 4]``.
    """
    given = np.asarray(z, np.float32)
    finite = np.isfinite(given).all(axis=-1, keepdims=True)
    known = np.where(finite, given, np.float32(0))
    low, high = known.min(axis=-1, keepdims=True), known.max(axis=-1, keepdims=True)
    levels = np.float32((1 << bits) - 1)
    with np.errstate(over="ignore"):
        step, base = (
            np.clip(number, -_LARGEST, _LARGEST).astype(np.float16)
            for number in ((high - low) / levels, low + np.float32(0))
        )
        divisor = np.where(step == 0, np.float16(1), step).astype(np.float32)
        steps = np.rint((known - base.astype(np.float32)) / divisor)
    codes = np.where(step == 0, 0, np.clip(steps, 0, levels)).astype(np.uint8)
    base = np.where(finite, base, np.float16(np.nan))
    halves = np.split(codes, 2, axis=-1)
    packed = codes if bits == 8 else halves[0] | halves[1] << np.uint8(4)
    ends = [np.ascontiguousarray(part.astype("<f2")).view(np.uint8) for part in (step, base)]
    return np.concatenate([packed, *ends], axis=-1)


def load_rows(rows: ArrayLike, bits: int) -> NDArray[np.float64]:
    """What rows of a cache stand for.

    Args:
        rows: ``[..., R]`` uint8.
        bits: 4 or 8.

    Returns:
        ``[..., D]``; NaN in rows whose step or base is not finite.
    """
    stored = np.asarray(rows, np.uint8)
    packed = stored[..., :-4]
    codes = packed if bits == 8 else np.concatenate([packed & 15, packed >> 4], axis=-1)
    ends = np.ascontiguousarray(stored[..., -4:]).view("<f2").astype(np.float64)
    finite = np.isfinite(ends).all(axis=-1, keepdims=True)
    known = np.where(finite, ends, 0)
    return np.where(finite, known[..., 1:] + known[..., :1] * codes, np.nan)


def attend(
    query: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    visible: ArrayLike,
    *,
    scale: float,
    softcap: float = 0.0,
    added: ArrayLike = 0.0,
) -> NDArray[np.float64]:
    """Attention in float64.

    Args:
        query: ``[B, Hq, S, D]``.
        keys: ``[B, Hkv, T, D]``; Hq is a multiple of Hkv.
        values: likewise.
        visible: bool, broadcasts to ``[B, Hq, S, T]``.
        scale: factor on the products.
        softcap: bound of the scores; 0: none.
        added: broadcasts to ``[B, Hq, S, T]``; counts where ``visible``.

    Returns:
        ``[B, Hq, S, D]``; zeros where a query sees nothing.
    """
    queries = np.asarray(query, np.float64)
    group = queries.shape[1] // np.asarray(keys).shape[1]
    shared, weighted = (np.repeat(np.asarray(part, np.float64), group, axis=1) for part in (keys, values))
    scores = scale * (queries @ shared.swapaxes(-1, -2))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    seen = np.broadcast_to(np.asarray(visible), scores.shape)
    with np.errstate(invalid="ignore"):
        scores = np.where(seen, scores + np.asarray(added, np.float64), -np.inf)
        largest = scores.max(axis=-1, keepdims=True)
        weights = np.where(seen, np.exp(scores - np.where(np.isneginf(largest), 0, largest)), 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        parts = weights / np.where(total == 0, 1, total)
    lost = seen.astype(np.float64) @ np.isnan(weighted).any(axis=-1, keepdims=True)
    return np.where(lost > 0, np.nan, parts @ np.nan_to_num(weighted))


def visible_slots(
    starts: ArrayLike, tokens: int, slots: int, *, causal: bool = True, window: int = -1
) -> NDArray[np.bool_]:
    """Which slots the new tokens see, apart from a mask.

    Args:
        starts: ``[B]``, the first new slot of each row of the batch.
        tokens: S.
        slots: T.
        causal: no later slot than the own.
        window: slots that are seen at most; -1: all.

    Returns:
        ``[B, 1, S, T]``.
    """
    first = np.asarray(starts, np.int64)[:, None, None, None]
    position = first + np.arange(tokens)[None, None, :, None]
    slot = np.arange(slots)
    seen = slot < (position + 1 if causal else first + tokens)
    return np.asarray(seen & (slot > position - window) if window >= 0 else seen & (position >= 0), np.bool_)


def evaluate_rotated_attention(
    node: ir.Node,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    past_key: ArrayLike,
    past_value: ArrayLike,
    seqlens_k: ArrayLike,
    total: int,
    mask: ArrayLike | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.uint8], NDArray[np.uint8]]:
    """What a ``graphrot::RotatedAttention`` node answers: its attributes, and its inputs as numbers.

    Args:
        node: the node.
        query: ``[B, S, Hq * D]``.
        key: ``[B, S, Hkv * D]``.
        value: likewise.
        past_key: uint8 ``[B, Hkv, P, R]``.
        past_value: likewise.
        seqlens_k: ``[B]`` or ``[B, 1]``.
        total: ``total_sequence_length``.
        mask: broadcasts to ``[B, Hq, S, M]``, or None.

    Returns:
        ``output``, ``present_key`` and ``present_value``.
    """
    kv_heads, bits = (node.attributes[name].as_int() for name in ("kv_num_heads", "bits"))
    starts = np.maximum(np.asarray(seqlens_k, np.int64).reshape(-1) + 1 - np.asarray(query).shape[1], 0)
    present_key, present_value = (
        _stored(np.asarray(past, np.uint8), store_rows(_heads(new, kv_heads), bits), starts, total)
        for past, new in ((past_key, _rotated(node, key)), (past_value, np.asarray(value, np.float64)))
    )
    return attend_stored(node, query, present_key, present_value, starts, mask), present_key, present_value


def attend_stored(
    node: ir.Node,
    query: ArrayLike,
    present_key: NDArray[np.uint8],
    present_value: NDArray[np.uint8],
    starts: ArrayLike,
    mask: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """The node's first output, from the rows that it stored.

    Args:
        node: the node.
        query: ``[B, S, Hq * D]``.
        present_key: ``[B, Hkv, T, R]``.
        present_value: likewise.
        starts: ``[B]``, the first new slot of each row of the batch.
        mask: broadcasts to ``[B, Hq, S, M]``, or None.

    Returns:
        ``[B, S, Hq * D]``.
    """
    names = ("num_heads", "bits", "local_window_size", "causal")
    heads, bits, window, causal = (node.attributes[name].as_int() for name in names)
    queries = _heads(_rotated(node, query), heads)
    batch, _, tokens, _ = queries.shape
    slots = present_key.shape[2]
    added = np.zeros((1, 1, 1, slots))
    if mask is not None:
        given = np.asarray(mask, np.float64)[..., :slots]
        added = np.pad(given, [(0, 0)] * 3 + [(0, slots - given.shape[-1])])
    output = attend(
        queries,
        load_rows(present_key, bits),
        load_rows(present_value, bits),
        visible_slots(starts, tokens, slots, causal=bool(causal), window=window) & (added > _UNSEEN),
        scale=node.attributes["score_scale"].as_float(),
        softcap=node.attributes["softcap"].as_float(),
        added=added,
    )
    return output.swapaxes(1, 2).reshape(batch, tokens, -1)


def _rotated(node: ir.Node, x: ArrayLike) -> NDArray[np.float64]:
    return evaluate_hadamard(node, x) if node.attributes["rotate"].as_int() else np.asarray(x, np.float64)


def _heads(x: NDArray[np.float64], heads: int) -> NDArray[np.float64]:
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).swapaxes(1, 2)


def _stored(
    past: NDArray[np.uint8], rows: NDArray[np.uint8], starts: NDArray[np.int64], total: int
) -> NDArray[np.uint8]:
    batch, heads, slots, width = past.shape
    present = np.zeros((batch, heads, max(slots, total), width), np.uint8)
    present[:, :, :slots] = past
    for row, start in enumerate(starts):
        present[row, :, start : start + rows.shape[2]] = rows[row]
    return present
