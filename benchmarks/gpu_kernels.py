"""graphrot's CUDA kernels on a :class:`gpu_device.Device`: what each takes, as buffers and numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from gpu_device import Buffer, Device, Memory

from graphrot.rotation.hadamard import Decomposition, factor_matrix

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""The types of tensors, in the order of the library."""
ROW_ALIGNMENT = 64
"""Codes of a row lie at a multiple of so many bytes."""


def element(dtype: str) -> ctypes.c_int:
    """The library's number of a type."""
    return ctypes.c_int(list(DTYPES).index(dtype))


def address(buffer: Buffer | None) -> ctypes.c_void_p:
    """Of a buffer; none for None."""
    return ctypes.c_void_p(buffer.address if buffer is not None else None)


@dataclass(frozen=True)
class Transform:
    """A Hadamard transform whose factor lies on the device."""

    split: Decomposition
    handle: ctypes.c_void_p


@contextmanager
def transform(device: Device, split: Decomposition) -> Iterator[Transform]:
    """The orthogonal transform of ``split``, for a ``with`` block."""
    factor = np.ascontiguousarray(factor_matrix(split), np.float32)
    handle = ctypes.c_void_p()
    scale = ctypes.c_float(split.size**-0.5)
    numbers = (split.size, split.order, split.levels, scale, ctypes.c_void_p(factor.ctypes.data))
    device.call("bench_transform", *numbers, ctypes.byref(handle))
    try:
        yield Transform(split, handle)
    finally:
        device.call("bench_drop_transform", handle)


def hadamard(device: Device, by: Transform, dtype: str, given: Buffer, result: Buffer, blocks: int) -> None:
    """Transform ``blocks`` blocks; ``given`` and ``result`` may be one buffer."""
    device.call("bench_hadamard", by.handle, element(dtype), address(given), address(result), blocks)


@dataclass(frozen=True)
class Rows:
    """Room for rows of whole numbers, their scales and sums.

    Args:
        memory: where the room is taken.
        count: rows.
        channels: K.
        group: channels that share a scale of the weights.
    """

    count: int
    channels: int
    group: int
    codes: Buffer
    scales: Buffer
    sums: Buffer

    @classmethod
    def make(cls, memory: Memory, count: int, channels: int, group: int) -> Rows:
        stride = cls.stride_of(channels)
        groups = -(-channels // group)
        buffers = [memory.room(count * each) for each in (stride, 4, 4 * groups)]
        return cls(count, channels, group, *buffers)

    @staticmethod
    def stride_of(channels: int) -> int:
        return -(-channels // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def stride(self) -> int:
        """Bytes from row to row."""
        return self.stride_of(self.channels)

    @property
    def groups(self) -> int:
        return -(-self.channels // self.group)


def quantize(
    device: Device, by: Transform | None, dtype: str, given: Buffer, rows: Rows, *, levels: int, interleaved: bool
) -> None:
    """Rotate (None: not), scale and round rows."""
    device.call(
        "bench_rows", None if by is None else by.handle, element(dtype), address(given), rows.count, rows.channels,
        rows.group, ctypes.c_int(levels), ctypes.c_int(interleaved), address(rows.codes), rows.stride,
        address(rows.scales), address(rows.sums),
    )  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """A weight ``[N, K]`` as MatMulNBits stores it.

    Args:
        channels: K.
        columns: N.
        group: channels that share a scale; K for all.
        block: channels of a block of the storage.
        bits: 4 or 8.
        codes: packed.
        scales: ``[N, groups]``.
        half_scales: they are float16, else float32.
        zeros: packed, or None.
        bias: float32 ``[N]``, or None.
    """

    channels: int
    columns: int
    group: int
    block: int
    bits: int
    codes: Buffer
    scales: Buffer
    half_scales: bool
    zeros: Buffer | None = None
    bias: Buffer | None = None

    @property
    def groups(self) -> int:
        return -(-self.channels // self.group)

    @property
    def nbytes(self) -> int:
        """Of codes, scales and zeros: what one product reads at least."""
        return sum(each.nbytes for each in (self.codes, self.scales, self.zeros) if each is not None)

    def numbers(self) -> tuple[object, ...]:
        """As the library takes them."""
        return (
            self.channels, self.columns, self.group, self.block, ctypes.c_int(self.bits), address(self.codes),
            address(self.scales), ctypes.c_int(self.half_scales), address(self.zeros), address(self.bias),
        )  # fmt: skip


def product_scratch(device: Device, memory: Memory, weight: Weight, rows: int) -> Buffer:
    """What :func:`product` needs beside its operands."""
    nbytes = ctypes.c_size_t()
    device.call("bench_product_scratch", *weight.numbers(), rows, ctypes.byref(nbytes))
    return memory.room(nbytes.value)


def product(device: Device, weight: Weight, rows: Rows, dtype: str, result: Buffer, scratch: Buffer) -> None:
    """Multiply rows of whole numbers by a weight."""
    device.call(
        "bench_product", *weight.numbers(), address(rows.codes), rows.stride, address(rows.scales), address(rows.sums),
        rows.count, element(dtype), address(result), address(scratch),
    )  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """Sizes of a call of attention.

    Args:
        heads: of queries.
        kv_heads: of keys and values.
        head_size: D.
        bits: of the cache, 4 or 8.
        batch: rows.
        tokens: new ones of each row.
        slots: of the cache.
    """

    heads: int
    kv_heads: int
    head_size: int
    bits: int
    batch: int
    tokens: int
    slots: int

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_size}, {self.bits} bits"
        return f"{heads}, {self.batch} x {self.tokens} tokens behind {self.slots} slots"


@dataclass(frozen=True)
class Attention(Heads):
    """A call of attention whose past and present are one buffer.

    Args:
        query: ``[batch, tokens, heads * D]``.
        key: ``[batch, tokens, kv_heads * D]``.
        value: likewise.
        present_key: ``[batch, kv_heads, slots, row]``.
        present_value: likewise.
        last_slots: int32 ``[batch]``.
        output: as ``query``.
    """

    query: Buffer
    key: Buffer
    value: Buffer
    present_key: Buffer
    present_value: Buffer
    last_slots: Buffer
    output: Buffer

    def numbers(self) -> tuple[object, ...]:
        """As the library takes them."""
        sizes = (
            self.heads,
            self.kv_heads,
            self.head_size,
            ctypes.c_int(self.bits),
            self.batch,
            self.tokens,
            self.slots,
        )
        tensors = (self.query, self.key, self.value, self.present_key, self.present_value, self.last_slots, self.output)
        return (*sizes, ctypes.c_float(self.head_size**-0.5), *map(address, tensors))


def attention_scratch(device: Device, memory: Memory, call: Attention) -> Buffer:
    """What :func:`attention` needs beside its operands."""
    nbytes = ctypes.c_size_t()
    device.call("bench_attention_scratch", *call.numbers(), ctypes.byref(nbytes))
    return memory.room(nbytes.value)


def attention(device: Device, by: Transform | None, dtype: str, call: Attention, scratch: Buffer) -> None:
    """Store the new rows and attend to all of them; queries and keys are rotated (None: not)."""
    handle = None if by is None else by.handle
    device.call("bench_attention", handle, element(dtype), *call.numbers(), address(scratch))
