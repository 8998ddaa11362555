"""How fast graphrot's CUDA kernels are, as parts of what the device at hand does at most.

Operands rotate through memory that is larger than any cache of the device, so that weights stream as in a model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gpu_device import Buffer, Device, Memory
from gpu_kernels import (
    DTYPES,
    Attention,
    Rows,
    Transform,
    Weight,
    attention,
    attention_scratch,
    hadamard,
    product,
    product_scratch,
    quantize,
    transform,
)

from graphrot.ops.attention_reference import store_rows
from graphrot.rotation.hadamard import decomposition


@dataclass(frozen=True)
class Limits:
    """What the device does at most.

    Args:
        copy: bytes per second of copying, read and written ones counted.
        products: operations per second of products of bytes, by the instruction of our kernels.
        stream: bytes after which nothing is in a cache any more.
        budget: seconds per figure.
    """

    copy: float
    products: float
    stream: int
    budget: float


@dataclass(frozen=True)
class Shape:
    """A linear of a model."""

    model: str
    name: str
    channels: int
    columns: int


SHAPES = (
    Shape("1B", "up", 2048, 8192),
    Shape("1B", "down", 8192, 2048),
    Shape("8B", "qkv", 4096, 6144),
    Shape("8B", "up", 4096, 14336),
    Shape("8B", "down", 14336, 4096),
    Shape("70B", "up", 8192, 28672),
    Shape("70B", "down", 28672, 8192),
)


def pool(dtype: np.dtype, count: int = 1 << 19) -> np.ndarray:
    """Random numbers of which larger tensors are made by repetition. Zeros would take less power."""
    rng = np.random.default_rng(0)
    if dtype == np.uint8:
        return rng.integers(0, 256, count, dtype=np.uint8)
    return rng.standard_normal(count, np.float32).astype(dtype)


def limits(device: Device, *, stream: int, budget: float) -> Limits:
    """Measure a copy of ``stream`` bytes, and products in registers."""
    blocks, rounds = (8 * device.multiprocessors, 2048) if not device.on_cpu else (1, 2)
    with device.memory() as memory:
        given, result = memory.room(stream).fill(pool(np.dtype(np.uint8))), memory.room(stream)
        copied = device.seconds(lambda: device.call("bench_copy", result.address, given.address, stream), budget=budget)
        sums = memory.room(4 * 256 * blocks)
        operations = ctypes.c_double()

        def multiply() -> None:
            numbers = (ctypes.c_uint(blocks), ctypes.c_uint(rounds))
            device.call("bench_peak", *numbers, ctypes.c_void_p(sums.address), ctypes.byref(operations))

        multiplied = device.seconds(multiply, budget=budget)
        memory.check()
    return Limits(
        2 * stream / float(np.median(copied)), operations.value / float(np.median(multiplied)), stream, budget
    )


def transforms(device: Device, most: Limits, rows: int, channels: int, dtype: str = "float16") -> dict[str, Any]:
    """HadamardTransform of rows x channels, by the bytes that it reads and writes, against copying as many."""
    nbytes = rows * channels * DTYPES[dtype].itemsize
    with device.memory() as memory, transform(device, decomposition(channels)) as by:
        pairs = [
            (memory.room(nbytes).fill(pool(DTYPES[dtype])), memory.room(nbytes))
            for _ in range(copies_of(2 * nbytes, most.stream))
        ]

        def run() -> None:
            for given, result in pairs:
                hadamard(device, by, dtype, given, result, rows)

        def copy() -> None:
            for given, result in pairs:
                device.call("bench_copy", result.address, given.address, nbytes)

        own, other = (_median(device, work, most) / len(pairs) for work in (run, copy))
    return {
        "rows": rows, "channels": channels, "order": by.split.order, "dtype": dtype, "us": own * 1e6,
        "gb_per_s": 2 * nbytes / own / 1e9, "of_copy": other / own, "of_copy_bandwidth": 2 * nbytes / own / most.copy,
    }  # fmt: skip


@dataclass(frozen=True)
class Operands:
    """Weights of one linear in several copies, and rows for them."""

    shape: Shape
    count: int
    group: int
    weights: tuple[Weight, ...]
    given: Buffer
    rows: Rows
    result: Buffer
    scratch: Buffer

    @property
    def operations(self) -> float:
        """Of one product; a multiplication and an addition are two."""
        return 2.0 * self.count * self.shape.channels * self.shape.columns


def operands(device: Device, memory: Memory, shape: Shape, count: int, group: int, stream: int) -> Operands:
    """Random weights of 4 bits in float16's company, enough of them that they stream."""
    blocks = -(-shape.channels // (group or 32))
    block = group or 32
    nbytes = shape.columns * blocks * block // 2
    groups = blocks if group else 1

    def weight() -> Weight:
        codes = memory.room(nbytes).fill(pool(np.dtype(np.uint8)))
        scales = memory.room(2 * shape.columns * groups).fill(np.full(4096, 0.01, np.float16))
        return Weight(shape.channels, shape.columns, group or shape.channels, block, 4, codes, scales, half_scales=True)

    weights = tuple(weight() for _ in range(copies_of(nbytes, stream)))
    rows = Rows.make(memory, count, shape.channels, group or shape.channels)
    given = memory.room(2 * count * shape.channels).fill(pool(np.dtype(np.float16)))
    result = memory.room(2 * count * shape.columns)
    return Operands(
        shape, count, group, weights, given, rows, result, product_scratch(device, memory, weights[0], count)
    )


def linear(device: Device, most: Limits, shape: Shape, count: int, group: int) -> dict[str, Any]:
    """W4A8 of one linear: rows, product, both, and what the rotation adds to both."""
    with device.memory() as memory, transform(device, decomposition(shape.channels)) as by:
        has = operands(device, memory, shape, count, group, most.stream)

        def rows(rotation: Transform | None) -> None:
            quantize(device, rotation, "float16", has.given, has.rows, levels=127, interleaved=True)

        def products() -> None:
            for weight in has.weights:
                product(device, weight, has.rows, "float16", has.result, has.scratch)

        def whole(rotation: Transform | None) -> None:
            for weight in has.weights:
                rows(rotation)
                product(device, weight, has.rows, "float16", has.result, has.scratch)

        copies = len(has.weights)
        plain_rows, rotated_rows = (_median(device, lambda r=r: rows(r), most) for r in (None, by))
        alone, plain, rotated = (
            _median(device, work, most) / copies for work in (products, lambda: whole(None), lambda: whole(by))
        )
        weight_bytes = has.weights[0].nbytes
    return {
        "model": shape.model, "linear": shape.name, "K": shape.channels, "N": shape.columns, "M": count,
        "group": group or "channel", "copies": copies,
        "rows_us": plain_rows * 1e6, "rotated_rows_us": rotated_rows * 1e6, "product_us": alone * 1e6,
        "us": plain * 1e6, "rotated_us": rotated * 1e6,
        "hadamard_percent": 100 * (rotated / plain - 1),
        "weights_gb_per_s": weight_bytes / alone / 1e9, "of_copy_bandwidth": weight_bytes / alone / most.copy,
        "tops": has.operations / alone / 1e12, "of_peak": has.operations / alone / most.products,
        "fused_tops": has.operations / rotated / 1e12,
    }  # fmt: skip


def attend(
    device: Device,
    most: Limits,
    *,
    heads: int,
    kv_heads: int,
    size: int,
    slots: int,
    batch: int,
    bits: int,
    tokens: int,
) -> dict[str, Any]:
    """Attention of ``tokens`` new tokens behind a cache of ``slots``: the bytes of the cache by the time."""
    row = size * bits // 8 + 4
    nbytes = batch * kv_heads * slots * row
    with device.memory() as memory, transform(device, decomposition(size)) as by:
        numbers = np.random.default_rng(0).standard_normal((256, size), np.float32)
        stored = store_rows(numbers, bits)
        widths = (heads, kv_heads, kv_heads)

        def call() -> Attention:
            new = [memory.room(2 * batch * tokens * w * size).fill(pool(np.dtype(np.float16))) for w in widths]
            caches = [memory.room(nbytes).fill(stored) for _ in "kv"]
            last = memory.put(np.full(batch, slots - 1, np.int32))
            output = memory.room(2 * batch * tokens * heads * size)
            return Attention(heads, kv_heads, size, bits, batch, tokens, slots, *new, *caches, last, output)

        calls = [call() for _ in range(copies_of(2 * nbytes + 4 * batch * tokens * heads * size, most.stream))]
        scratch = attention_scratch(device, memory, calls[0])

        def run() -> None:
            for each in calls:
                attention(device, by, "float16", each, scratch)

        seconds = _median(device, run, most) / len(calls)
    seen = tokens * (slots - (tokens - 1) / 2)
    operations = 4.0 * batch * heads * size * seen
    return {
        "heads": heads, "kv_heads": kv_heads, "head_size": size, "slots": slots, "batch": batch, "bits": bits,
        "tokens": tokens, "us": seconds * 1e6, "gb_per_s": 2 * nbytes / seconds / 1e9,
        "of_copy_bandwidth": 2 * nbytes / seconds / most.copy, "tflops": operations / seconds / 1e12,
    }  # fmt: skip


def copies_of(nbytes: int, stream: int) -> int:
    """How many tensors of so many bytes stream."""
    return max(1, -(-stream // max(nbytes, 1)))


def _median(device: Device, work: Callable[[], None], most: Limits) -> float:
    return float(np.median(device.seconds(work, budget=most.budget)))
