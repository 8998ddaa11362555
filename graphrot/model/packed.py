"""How operators store weights of few bits, and the numbers that they mean: ``(code - zero) * scale``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphrot.graph import is_constant, read_constant

_PACKED_BITS = (2, 4, 8)
_INTEGERS: dict[ir.DataType, int] = {
    ir.DataType.INT4: 4,
    ir.DataType.UINT4: 4,
    ir.DataType.INT8: 8,
    ir.DataType.UINT8: 8,
    ir.DataType.INT16: 16,
    ir.DataType.UINT16: 16,
    ir.DataType.INT32: 32,
}
_CHUNK = 1 << 22
"""Numbers that are computed at once."""


@dataclass(frozen=True)
class Stored:
    """A constant operand, readable also when its node has gone; equal for the same operand."""

    value: ir.Value
    content: ir.TensorProtocol | np.ndarray = field(compare=False, repr=False)

    def array(self) -> np.ndarray:
        return self.content if isinstance(self.content, np.ndarray) else self.content.numpy()


def _stored(value: ir.Value) -> Stored:
    tensor = value.const_value
    return Stored(value, read_constant(value) if tensor is None else tensor)


@dataclass(frozen=True)
class Blocks:
    """A quantized weight: codes, scales and zero points, along ``axis`` one scale for ``block`` codes.

    Args:
        shape: of the weight.
        bits: of a code.
        codes: the stored codes, packed along the last axis where ``packed``.
        scales: one for each block, with as many axes as the weight; or axes of size 1.
        zeros: like ``scales``, or packed like the codes; None: ``zero`` for all.
        axis: along which blocks run.
        block: codes in a block; the last one of a row may be cut.
        packed: several codes lie in a byte, the first in its lowest bits.
        zero: the zero point of all codes, if ``zeros`` is None.
    """

    shape: tuple[int, ...]
    bits: int
    codes: Stored
    scales: Stored
    zeros: Stored | None
    axis: int
    block: int
    packed: bool
    zero: int
    rows: bool = False
    """Codes and scales are flattened to ``[rows, bytes]`` and ``[rows, blocks]`` (MatMulNBits)."""

    @property
    def key(self) -> tuple[object, ...]:
        operands = (self.codes, self.scales, self.zeros)
        return (*operands, self.shape, self.bits, self.axis, self.block, self.packed, self.zero, self.rows)

    @property
    def group(self) -> int | None:
        """Codes that share a scale; None: all along the axis."""
        return None if self.block >= self.shape[self.axis] else self.block

    def numbers(self) -> tuple[np.ndarray, float]:
        """The weight in float32, and the summed squared error that rounding to nearest has made on average."""
        codes, scales, zeros = self._arrays()
        result = np.empty(self.shape, np.float32)
        lost = 0.0
        for part in self._parts():
            work = self._unpack(codes[part])
            length = self.shape[self.axis]
            scale = self._spread(scales[self._of(part, scales)], length)
            if zeros is None:
                work -= np.float32(self.zero)
            else:
                work -= self._spread(zeros[self._of(part, zeros)], length)
            work *= scale
            result[part] = work
            lost += float(np.square(np.broadcast_to(scale, work.shape), dtype=np.float64).sum()) / 12
        return result, lost

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        codes, scales = self.codes.array(), self.scales.array()
        zeros = None if self.zeros is None else self.zeros.array()
        if not self.rows:
            if zeros is not None and self.packed:
                zeros = _unpacked(zeros, self.bits, scales.shape[-1])
            return codes, scales, zeros
        count = self.shape[0]
        scales = scales.reshape(count, -1)
        if zeros is not None and zeros.dtype == np.uint8:
            zeros = _unpacked(zeros.reshape(count, -1), self.bits, scales.shape[1])
        return codes.reshape(count, -1), scales, None if zeros is None else zeros.reshape(count, -1)

    def _parts(self) -> Iterator[tuple[slice, ...]]:
        """Pieces along the first axis, unless blocks run along it."""
        if self.axis == 0 or len(self.shape) < 2:
            yield (slice(None),) * len(self.shape)
            return
        step = max(1, _CHUNK // max(1, math.prod(self.shape[1:])))
        for start in range(0, self.shape[0], step):
            yield (slice(start, start + step),) + (slice(None),) * (len(self.shape) - 1)

    def _of(self, part: tuple[slice, ...], array: np.ndarray) -> tuple[slice, ...]:
        whole = slice(None)
        return tuple(whole if size == 1 else cut for cut, size in zip(part, array.shape, strict=True))

    def _unpack(self, codes: np.ndarray) -> np.ndarray:
        if self.packed:
            codes = _unpacked(codes, self.bits, self.shape[-1])
        return codes.astype(np.float32)

    def _spread(self, array: np.ndarray, length: int) -> np.ndarray:
        """One number for each code along the axis."""
        wide = array.astype(np.float32)
        if wide.shape[self.axis] == 1:
            return wide
        repeated = np.repeat(wide, self.block, axis=self.axis)
        return repeated[(slice(None),) * self.axis + (slice(length),)]


def _unpacked(codes: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes that lie packed along the last axis, the first in the lowest bits; ``count`` of each row."""
    if bits == 8:
        return codes[..., :count]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    spread = (codes[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return np.asarray(spread.reshape(*codes.shape[:-1], -1)[..., :count])


def matmul_blocks(node: ir.Node) -> Blocks | None:
    """The weight ``[N, K]`` of a MatMulNBits; None for one that is not understood."""
    codes, scales, zeros = (_operand(node, position) for position in (1, 2, 3))
    rows, length, block = (_number(node, name, 0) for name in ("N", "K", "block_size"))
    bits = _number(node, "bits", 4)
    if codes is None or scales is None or not all(v is None or is_constant(v) for v in (codes, scales, zeros)):
        return None
    if bits not in _PACKED_BITS or rows < 1 or length < 1 or block < 1 or _number(node, "weight_prepacked", 0):
        return None
    if _operand(node, 4) is not None:
        return None
    blocks = -(-length // block)
    stored, shared = read_constant(codes), read_constant(scales)
    if stored.dtype != np.uint8 or stored.size != rows * blocks * (block * bits // 8) or shared.size != rows * blocks:
        return None
    return Blocks(
        (rows, length),
        bits,
        *_all(codes, scales, zeros),
        axis=1,
        block=block,
        packed=True,
        zero=1 << (bits - 1),
        rows=True,
    )


def gathered_blocks(node: ir.Node) -> Blocks | None:
    """The table of a GatherBlockQuantized; None for one that is not understood."""
    codes, scales, zeros = (_operand(node, position) for position in (0, 2, 3))
    if codes is None or scales is None or not all(v is None or is_constant(v) for v in (codes, scales, zeros)):
        return None
    stored, shared = read_constant(codes), read_constant(scales)
    kind = ir.DataType.from_numpy(stored.dtype)
    packed = kind == ir.DataType.UINT8
    bits = _number(node, "bits", 4) if packed else 4
    if not packed and kind not in (ir.DataType.INT4, ir.DataType.UINT4):
        return None
    if bits not in _PACKED_BITS or stored.ndim < 1:
        return None
    shape = (*stored.shape[:-1], stored.shape[-1] * (8 // bits)) if packed else stored.shape
    axis, block = _number(node, "quantize_axis", 1), _number(node, "block_size", 128)
    axis += len(shape) if axis < 0 else 0
    if not 0 <= axis < len(shape) or block < 1 or not _fits(shared.shape, shape, axis, block):
        return None
    zero = 1 << (bits - 1) if packed else 0
    return Blocks(shape, bits, *_all(codes, scales, zeros), axis=axis, block=block, packed=packed, zero=zero)


def linear_blocks(node: ir.Node) -> Blocks | None:
    """The result of a DequantizeLinear of constants; None for one that is not understood."""
    codes, scales, zeros = (_operand(node, position) for position in range(3))
    if codes is None or scales is None:
        return None
    stored, shared = read_constant(codes), read_constant(scales)
    bits = _INTEGERS.get(ir.DataType.from_numpy(stored.dtype), 0)
    if not bits or (shared.dtype.kind != "f" and ir.DataType.from_numpy(shared.dtype) != ir.DataType.BFLOAT16):
        return None
    shape, axis, block = stored.shape, _number(node, "axis", 1), _number(node, "block_size", 0)
    axis += len(shape) if axis < 0 else 0
    if shared.size == 1:
        axis = max(len(shape) - 1, 0)
        block, wanted = max(shape, default=1), (1,) * len(shape)
    elif not 0 <= axis < len(shape):
        return None
    elif shared.ndim == 1 and not block:
        wanted = tuple(shared.size if k == axis else 1 for k in range(len(shape)))
        if shared.size != shape[axis]:
            return None
        block = 1
    elif block and _fits(shared.shape, shape, axis, block):
        wanted = shared.shape
    else:
        return None
    if not shape:
        return None
    parts = _all(codes, scales, zeros)
    return _Reshaped(shape, bits, *parts, axis=axis, block=block, packed=False, zero=0, wanted=wanted)


@dataclass(frozen=True)
class _Reshaped(Blocks):
    """Scales and zero points that are stored without the axes that they do not run along."""

    wanted: tuple[int, ...] = ()

    @property
    def group(self) -> int | None:
        return self.block if self.block > 1 and self.block < self.shape[self.axis] else None

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        codes, scales, zeros = super()._arrays()
        return codes, scales.reshape(self.wanted), None if zeros is None else zeros.reshape(self.wanted)


def _fits(scales: tuple[int, ...], shape: tuple[int, ...], axis: int, block: int) -> bool:
    wanted = tuple(-(-size // block) if k == axis else size for k, size in enumerate(shape))
    return scales == wanted


def _operand(node: ir.Node, position: int) -> ir.Value | None:
    return node.inputs[position] if position < len(node.inputs) else None


def _all(codes: ir.Value, scales: ir.Value, zeros: ir.Value | None) -> tuple[Stored, Stored, Stored | None]:
    return _stored(codes), _stored(scales), None if zeros is None else _stored(zeros)


def _number(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default
