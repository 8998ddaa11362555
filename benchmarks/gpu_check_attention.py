"""graphrot's attention over a quantized cache against float64 NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir
from gpu_check import ROUNDING, Check, checked, relative, twice
from gpu_device import Device, GpuError, Memory
from gpu_kernels import DTYPES, Attention, Heads, attention, attention_scratch, transform

from graphrot.ops.attention_reference import attend_stored, load_rows, store_rows
from graphrot.ops.hadamard import transform_attributes
from graphrot.ops.rotated_attention import AttentionForm, rotated_attention_node
from graphrot.rotation.hadamard import decomposition
from graphrot.rotation.hadamard import transform as rotated
from graphrot.rotation.orthogonal import choose_matrix

INNER = 2e-4
"""What attention changes at most, relative to the largest value: queries and weights are rounded inside."""


def attention_checks(device: Device, shapes: Sequence[Heads]) -> Iterator[Check]:
    """Every shape in every type."""
    for heads in shapes:
        for dtype in DTYPES:
            yield checked(
                device, f"attention {heads} {dtype}", lambda memory, h=heads, d=dtype: _attention(device, memory, h, d)
            )


def _attention(device: Device, memory: Memory, heads: Heads, dtype: str) -> float:
    rng = np.random.default_rng(heads.slots)
    size = heads.head_size
    q, k, v = (
        rng.standard_normal((heads.batch, heads.tokens, count * size)).astype(DTYPES[dtype])
        for count in (heads.heads, heads.kv_heads, heads.kv_heads)
    )
    past = [
        store_rows(rng.standard_normal((heads.batch, heads.kv_heads, heads.slots, size), np.float32), heads.bits)
        for _ in "kv"
    ]
    # Rows of the batch end at different slots; one of them at the last.
    lasts = heads.slots - 1 - 3 * np.arange(heads.batch, dtype=np.int32)
    starts = lasts + 1 - heads.tokens
    output = memory.room(q.nbytes)
    keys, values = (memory.put(each) for each in past)
    call = Attention(
        heads.heads, heads.kv_heads, size, heads.bits, heads.batch, heads.tokens, heads.slots,
        *(memory.put(each) for each in (q, k, v)), keys, values, memory.put(lasts), output,
    )  # fmt: skip
    scratch = attention_scratch(device, memory, call)
    split = decomposition(size)
    with transform(device, split) as by:
        (raw,) = twice(device, lambda: attention(device, by, dtype, call, scratch), [output])
    found = raw.view(DTYPES[dtype]).reshape(q.shape)
    stored = [buffer.array(np.uint8, each.shape) for buffer, each in zip((keys, values), past, strict=True)]

    rotated_k = rotated(k.astype(np.float64).reshape(heads.batch, heads.tokens, heads.kv_heads, size), split, axis=3)
    new = (rotated_k, v.astype(np.float64).reshape(rotated_k.shape))
    errors = [
        _stored_error(rows, before, now.swapaxes(1, 2), starts, heads.bits)
        for rows, before, now in zip(stored, past, new, strict=True)
    ]
    node = _attention_node(heads)
    expected = attend_stored(node, q.astype(np.float64), stored[0], stored[1], starts)
    largest = np.abs(load_rows(stored[1], heads.bits)).max()
    allowed = ROUNDING[dtype] * np.abs(expected) + INNER * largest
    return max(*errors, relative(found, expected, allowed))


def _stored_error(stored: np.ndarray, before: np.ndarray, new: np.ndarray, starts: np.ndarray, bits: int) -> float:
    """How well new rows were stored, by half a step; rows that are not new must be as they were."""
    error = 0.0
    tokens = new.shape[2]
    for row, start in enumerate(starts):
        here = slice(int(start), int(start) + tokens)
        untouched = np.ones(stored.shape[2], bool)
        untouched[here] = False
        if (stored[row][:, untouched] != before[row][:, untouched]).any():
            raise GpuError("rows of the cache that are not new were changed")
        values = load_rows(stored[row][:, here], bits)
        span = new[row].max(axis=-1, keepdims=True) - new[row].min(axis=-1, keepdims=True)
        # Half a step, and the step and the least value are float16.
        allowed = span / (2**bits - 1) * 0.5 + 2.0**-10 * (span + np.abs(new[row]).max(axis=-1, keepdims=True))
        error = max(error, relative(values, new[row], allowed))
    return error


def _attention_node(heads: Heads) -> ir.Node:
    size, bits = heads.head_size, heads.bits
    form = AttentionForm(heads.heads, heads.kv_heads, size, 4 if bits == 4 else 8, size**-0.5)
    inputs = [ir.Value(name=name) for name in ("q", "k", "v", "past_k", "past_v", "last", "total")]
    matrix = choose_matrix(size, rotations="hadamard", seed=None)
    return rotated_attention_node(*inputs, ["y", "present_k", "present_v"], form, rotation=transform_attributes(matrix))
