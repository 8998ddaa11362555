"""Find NaN and infinite numbers among the weights, in chunks that are read and dropped again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.graph import FLOATS

_CHUNK = 1 << 22
"""Bytes that are looked at together: they stay in the processor's cache."""

_MULTIPLIED = frozenset({"MatMul", "Gemm", "Conv", "Gather"})
_MOVED = frozenset({"Cast", "Identity", "Reshape", "Transpose"})


def refuse_not_finite(model: ir.Model) -> None:
    """Refuse weights that are not numbers. Where the model masks, it may hold infinities.

    A table of rank 2 or more that is only added or chosen from is a mask, a single number a constant of the
    computation; in vectors and in what is multiplied or looked up, an infinity is as wrong as a NaN.

    Raises:
        InputRefused: names the tensor and the first index.
    """
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.dtype not in FLOATS:
                continue
            mask = tensor.size == 1 or (len(tensor.shape) > 1 and not _multiplied(value))
            place = first_not_finite(tensor, nan_only=mask)
            if place is not None:
                index, number = place
                raise InputRefused(
                    f"A weight of the model is {number}",
                    where=f"tensor {value.name!r} at {list(index)}",
                    why="every result that it reaches would be too",
                    do="go back to a checkpoint before the training or the cast that broke it",
                )


def first_not_finite(tensor: ir.TensorProtocol, *, nan_only: bool = False) -> tuple[tuple[int, ...], float] | None:
    """The index and the value of the first number that is NaN or, unless ``nan_only``, infinite."""
    start = 0
    for chunk in _chunks(tensor):
        if not _surely_finite(chunk):
            wide = chunk.astype(np.float32) if chunk.dtype.itemsize < 4 else chunk
            wrong = np.flatnonzero(np.isnan(wide) if nan_only else ~np.isfinite(wide))
            if len(wrong):
                place = int(wrong[0])
                shape = tuple(int(n) for n in tensor.shape.numpy())
                index = tuple(int(n) for n in np.unravel_index(start + place, shape))
                return index, float(wide[place])
        start += len(chunk)
    return None


def _surely_finite(chunk: np.ndarray) -> bool:
    """One pass that needs no memory: a sum takes every NaN and infinity along. It may overflow without one."""
    if chunk.dtype.itemsize < 4:
        return False
    with np.errstate(all="ignore"):
        return math.isfinite(float(chunk.sum()))


def _chunks(tensor: ir.TensorProtocol) -> Iterator[np.ndarray]:
    """Flat pieces of the tensor; files are read, not mapped, so that no page stays."""
    dtype = tensor.dtype.numpy()
    if not isinstance(tensor, ir.ExternalTensor):
        flat = tensor.numpy().reshape(-1)
        step = _CHUNK // dtype.itemsize
        yield from (flat[start : start + step] for start in range(0, len(flat), step))
        return
    left = tensor.nbytes
    little = dtype.newbyteorder("<") if dtype.kind == "f" else dtype
    buffer = memoryview(bytearray(min(_CHUNK, left)))
    with Path(tensor.path).open("rb") as file:
        file.seek(tensor.offset or 0)
        while left > 0:
            size = file.readinto(buffer[: min(_CHUNK, left)])
            if size % dtype.itemsize or not size:
                raise InputRefused("The model's external data is too short", where=str(tensor.path))
            yield np.frombuffer(buffer[:size], dtype=little)
            left -= size


def _multiplied(value: ir.Value) -> bool:
    """Whether the value, or what movements make of it, is a factor of a product or a table."""
    for use in value.uses():
        if use.node.op_type in _MULTIPLIED:
            return True
        if use.node.op_type in _MOVED and any(_multiplied(output) for output in use.node.outputs):
            return True
    return False
