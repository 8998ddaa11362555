"""graphrot's kernels for linears against float64 NumPy: HadamardTransform, rows of whole numbers, and the product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from gpu_check import ROUNDING, Check, checked, relative, some_numbers, twice
from gpu_device import Device, GpuError, Memory
from gpu_kernels import DTYPES, Rows, Weight, hadamard, product, product_scratch, quantize, transform

from graphrot.ops.reference import integer_product, round_rows, weight_codes
from graphrot.rotation.hadamard import Decomposition, decomposition
from graphrot.rotation.hadamard import transform as rotated

INNER = 3e-6
"""What sums in float32 change at most, relative to the largest number of a row."""
INTERLEAVED = [*range(0, 32, 2), *range(1, 32, 2)]
"""How the codes of 32 channels stand for weights of 4 bits: the channel at each place."""


@dataclass(frozen=True)
class Linear:
    """Sizes of a product to check: rows, channels, columns, group (0: all channels), bits of the weights."""

    rows: int
    channels: int
    columns: int
    group: int
    bits: int = 4
    zeros: bool = False
    bias: bool = False

    def __str__(self) -> str:
        more = [f"groups of {self.group}"] * bool(self.group) + ["zeros"] * self.zeros + ["bias"] * self.bias
        return ", ".join([f"{self.rows} x {self.channels} -> {self.columns}, {self.bits} bits", *more])


def hadamard_checks(device: Device, sizes: Sequence[int]) -> Iterator[Check]:
    """Every size in every type, the last of the types in place too."""
    for size in sizes:
        split = decomposition(size)
        for dtype in DTYPES:
            for in_place in (False, True) if dtype == "bfloat16" else (False,):
                name = f"HadamardTransform {size} = {split.order} * {size // split.order} {dtype}"
                yield checked(
                    device,
                    name + (" in place" if in_place else ""),
                    lambda memory, s=split, d=dtype, i=in_place: _hadamard(device, memory, s, d, in_place=i),
                    fits=4 * size <= device.shared_bytes,
                )


def rows_checks(device: Device, sizes: Sequence[int]) -> Iterator[Check]:
    """Rotated and not, both widths of the whole numbers, both orders; half of the channels of a block are too few."""
    for size in sizes:
        for rotate, levels, interleaved in ((True, 127, True), (True, 7, False), (False, 127, False)):
            split = decomposition(size) if rotate else None
            name = f"rows {size} to {levels} {'rotated ' if rotate else ''}{'interleaved ' if interleaved else ''}"
            for dtype in DTYPES:
                yield checked(
                    device,
                    name + dtype,
                    lambda memory, s=split, n=size, d=dtype, q=levels, i=interleaved: _rows(
                        device, memory, s, n, d, levels=q, interleaved=i
                    ),
                    fits=4 * size <= device.shared_bytes,
                )


def product_checks(device: Device, linears: Sequence[Linear]) -> Iterator[Check]:
    """Every linear in every type."""
    for linear in linears:
        for dtype in DTYPES:
            yield checked(
                device, f"product {linear} {dtype}", lambda memory, n=linear, d=dtype: _product(device, memory, n, d)
            )


def _hadamard(device: Device, memory: Memory, split: Decomposition, dtype: str, *, in_place: bool) -> float:
    blocks = 5
    x = some_numbers(split.size, (blocks, split.size), dtype)
    expected = rotated(x.astype(np.float64), split, axis=1)
    given = memory.put(x)
    with transform(device, split) as by:
        if in_place:
            device.run(lambda: hadamard(device, by, dtype, given, given, blocks))
            found = given.array(DTYPES[dtype], x.shape)
        else:
            result = memory.room(x.nbytes)
            (raw,) = twice(device, lambda: hadamard(device, by, dtype, given, result, blocks), [result])
            found = raw.view(DTYPES[dtype]).reshape(x.shape)
    largest = np.abs(expected).max(axis=1, keepdims=True)
    return relative(found, expected, ROUNDING[dtype] * np.abs(expected) + INNER * largest)


def _rows(
    device: Device,
    memory: Memory,
    split: Decomposition | None,
    channels: int,
    dtype: str,
    *,
    levels: int,
    interleaved: bool,
) -> float:
    count, lost = 6, 4
    x = some_numbers(channels, (count, channels), dtype)
    x[2] = 0
    x[lost, 3] = np.inf
    group = 32
    rows = Rows.make(memory, count, channels, group)
    given = memory.put(x)
    results = [rows.codes, rows.scales, rows.sums]

    def run() -> None:
        quantize(device, by, dtype, given, rows, levels=levels, interleaved=interleaved)

    if split is None:
        by = None
        raw = twice(device, run, results)
        z = x.astype(np.float64)
    else:
        with transform(device, split) as by:
            raw = twice(device, run, results)
        with np.errstate(invalid="ignore"):
            z = rotated(x.astype(np.float64), split, axis=1)
        z[lost] = np.nan
    codes = raw[0].view(np.int8).reshape(count, rows.stride).astype(np.int64)
    if interleaved:
        parts = codes.reshape(count, -1, len(INTERLEAVED))
        codes = np.empty_like(parts)
        codes[..., INTERLEAVED] = parts
        codes = codes.reshape(count, rows.stride)
    scales, sums = raw[1].view(np.float32), raw[2].view(np.int32).reshape(count, rows.groups)
    if codes[:, channels:].any() or codes[lost].any() or not np.isnan(scales[lost]):
        raise GpuError("the rest of a row, or a row that is not finite, has codes")
    starts = np.arange(0, channels, group)
    if (np.add.reduceat(codes[:, :channels], starts, axis=1) != sums).any():
        raise GpuError("sums are not those of the codes")
    kept = np.arange(count) != lost
    _, expected = round_rows(z[kept], levels)
    real = z[kept] / expected
    by_code = relative(codes[kept, :channels], real, np.float64(0.5 + 2 * INNER * levels))
    return max(by_code, relative(scales[kept], expected[:, 0], INNER * expected[:, 0]))


def _product(device: Device, memory: Memory, linear: Linear, dtype: str) -> float:
    rng = np.random.default_rng(linear.channels + linear.columns)
    group = linear.group or linear.channels
    block = linear.group or 32
    blocks, groups = -(-linear.channels // block), -(-linear.channels // group)
    codes = rng.integers(0, 256, (linear.columns, blocks, block * linear.bits // 8), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, (linear.columns, groups)).astype(np.float16 if dtype == "float16" else np.float32)
    zeros = None
    if linear.zeros:
        shape = (linear.columns, -(-blocks * linear.bits // 8))
        # With one scale, all zeros of a row are the same.
        zeros = rng.integers(0, 256, shape if linear.group else (linear.columns, 1), dtype=np.uint8)
        if not linear.group:
            zeros = np.repeat(zeros % 16 * 17 if linear.bits == 4 else zeros, shape[1], axis=1)
    bias = rng.standard_normal(linear.columns).astype(np.float32) if linear.bias else None
    weight = Weight(
        linear.channels, linear.columns, group, block, linear.bits, memory.put(codes), memory.put(scales),
        scales.dtype == np.float16, *(None if each is None else memory.put(each) for each in (zeros, bias)),
    )  # fmt: skip

    q = rng.integers(-127, 128, (linear.rows, linear.channels))
    rows = Rows.make(memory, linear.rows, linear.channels, group)
    stored = np.zeros((linear.rows, rows.stride), np.int8)
    stored[:, : linear.channels] = q
    if linear.bits == 4:
        stored = np.ascontiguousarray(stored.reshape(linear.rows, -1, len(INTERLEAVED))[..., INTERLEAVED])
    row_scales = rng.uniform(0.01, 0.02, (linear.rows, 1)).astype(np.float32)
    sums = np.add.reduceat(q, np.arange(0, linear.channels, group), axis=1).astype(np.int32)
    for buffer, array in ((rows.codes, stored), (rows.scales, row_scales), (rows.sums, sums)):
        buffer.fill(array)

    result = memory.room(linear.rows * linear.columns * DTYPES[dtype].itemsize)
    scratch = product_scratch(device, memory, weight, linear.rows)
    (raw,) = twice(device, lambda: product(device, weight, rows, dtype, result, scratch), [result])
    found = raw.view(DTYPES[dtype]).reshape(linear.rows, linear.columns)

    weights = weight_codes(codes, zeros, in_features=linear.channels, bits=linear.bits)
    expected = integer_product(q, row_scales, weights, scales, bias, group=linear.group)
    # A sum of so many terms in float32, each of which is exact but for its scale.
    magnitude = integer_product(np.abs(q), row_scales, np.abs(weights), scales, group=linear.group)
    allowed = ROUNDING[dtype] * np.abs(expected) + (groups + 4) * 2.0**-24 * (magnitude + np.abs(expected))
    return relative(found, expected, allowed)
