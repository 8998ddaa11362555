"""Element provenance: which channel, and which copy of it, stands at every element of a tensor.

A tensor carries two integer arrays of its own shape. ``ids`` names the *channel*: a number that was
given out where the channel came into being (the output of a constant matmul, an embedding lookup, ...).
``copies`` names the *copy* (token, repeated head, ...). Two elements with the same id and the same copy
always hold the same number; within one tensor, no two elements have both in common.

Most labels are constant along most axes, so arrays are kept as broadcast views (stride 0) where that
is possible, and hashing works on the small array behind the view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_PRIME = np.uint64(1000003)


def mix(numbers: np.ndarray | int) -> np.ndarray:
    """Hash integers to uint64 (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        z = np.asarray(numbers).astype(np.uint64) + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
        return np.asarray(z ^ (z >> np.uint64(31)))


def combine(*parts: np.ndarray | int) -> np.ndarray:
    """Hash several arrays element by element (they broadcast) to one uint64 array."""
    arrays = [np.asarray(part) for part in parts]
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    total: np.ndarray | None = None
    with np.errstate(over="ignore"):
        for array in arrays:
            hashed = mix(_behind(array))
            total = hashed if total is None else mix(total * _PRIME + hashed)
    assert total is not None
    return np.broadcast_to(total, shape)


def _behind(array: np.ndarray) -> np.ndarray:
    """The small array behind a broadcast view: one element along axes of stride 0."""
    if 0 not in array.strides:
        return array
    return array[tuple(slice(0, 1) if step == 0 else slice(None) for step in array.strides)]


def coordinates(shape: Sequence[int], axes: Iterable[int]) -> np.ndarray:
    """Number the index combinations of ``axes`` in row-major order; broadcast to ``shape``, int64."""
    axes = list(axes)
    small = [shape[d] if d in axes else 1 for d in range(len(shape))]
    numbers = np.arange(int(np.prod(small, dtype=np.int64))).reshape(small)
    return np.broadcast_to(numbers, tuple(shape))


def other_axes(rank: int, *axes: int) -> list[int]:
    """All axes of a tensor but these."""
    left_out = {a % rank for a in axes}
    return [d for d in range(rank) if d not in left_out]


@dataclass(frozen=True, slots=True)
class Labels:
    """Channel ids (int64) and copies (uint64) of a tensor, both of its shape.

    ``squared`` marks the elementwise square of labelled elements: only a sum over whole blocks may
    read it.
    """

    ids: np.ndarray
    copies: np.ndarray
    squared: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ids.shape

    @property
    def rank(self) -> int:
        return self.ids.ndim

    @property
    def channels(self) -> np.ndarray:
        """The distinct ids, sorted."""
        return np.unique(_behind(self.ids))

    def __getitem__(self, index: Any) -> Labels:
        return Labels(self.ids[index], self.copies[index], self.squared)

    def reshape(self, shape: Sequence[int]) -> Labels:
        return Labels(self.ids.reshape(tuple(shape)), self.copies.reshape(tuple(shape)), self.squared)

    def transpose(self, order: Sequence[int]) -> Labels:
        return Labels(self.ids.transpose(tuple(order)), self.copies.transpose(tuple(order)), self.squared)

    def rows(self, axis: int) -> Labels:
        """``[R, K]``: the vectors along ``axis``, K long."""
        width = self.shape[axis]
        return self.transpose([*other_axes(self.rank, axis), axis % self.rank]).reshape((-1, width))

    def take(self, index: np.ndarray | Sequence[int], axis: int) -> Labels:
        return Labels(np.take(self.ids, index, axis=axis), np.take(self.copies, index, axis=axis), self.squared)

    def renamed(self, *parts: np.ndarray | int) -> Labels:
        """The same channels after an operation that changes their values: new copies."""
        return Labels(self.ids, combine(self.copies, *parts), self.squared)

    def distinct(self, salt: int) -> Labels:
        """Elements that stand here more than once, told apart: each repetition, in row-major order, is a copy
        of its own."""
        pairs = combine(self.ids, self.copies).reshape(-1)
        order = np.argsort(pairs, kind="stable")
        ordered = pairs[order]
        starts = np.r_[True, ordered[1:] != ordered[:-1]] if ordered.size else np.zeros(0, dtype=bool)
        if starts.all():
            return self
        places = np.arange(pairs.size)
        turn = np.empty(pairs.size, dtype=np.int64)
        turn[order] = places - np.maximum.accumulate(np.where(starts, places, 0))
        turn = turn.reshape(self.shape)
        return Labels(self.ids, np.where(turn > 0, combine(self.copies, turn, salt), self.copies), self.squared)

    def square(self, salt: int) -> Labels:
        return Labels(self.ids, combine(self.copies, salt), squared=True)

    def broadcast(self, shape: Sequence[int], salt: int) -> Labels:
        """Repeat along axes of size 1 (and new leading axes); each repetition is a copy of its own."""
        shape = tuple(shape)
        own = (1,) * (len(shape) - self.rank) + self.shape
        grown = [d for d in range(len(shape)) if own[d] == 1 and shape[d] > 1]
        ids, copies = np.broadcast_to(self.ids, shape), np.broadcast_to(self.copies, shape)
        if not grown:
            return Labels(ids, copies, self.squared)
        return Labels(ids, combine(copies, coordinates(shape, grown), salt), self.squared)

    def same_as(self, other: Labels) -> bool:
        return (
            self.squared == other.squared
            and np.array_equal(self.ids, other.ids)
            and np.array_equal(self.copies, other.copies)
        )

    def uniform(self, axis: int) -> bool:
        """Every index of ``axis`` has the same channels in the same places, in the same pattern of copies."""
        ids = np.moveaxis(self.ids, axis, 0).reshape(self.shape[axis], -1)
        if not (ids == ids[:1]).all():
            return False
        copies = np.moveaxis(self.copies, axis, 0).reshape(self.shape[axis], -1)
        patterns = [first_positions(row) for row in copies]
        return all(np.array_equal(patterns[0], pattern) for pattern in patterns[1:])

    def varies(self, axis: int) -> bool:
        """The ids are not the same all along ``axis``."""
        if self.rank == 0 or self.shape[axis] < 2 or self.ids.strides[axis] == 0:
            return False
        first = np.take(self.ids, [0], axis=axis)
        return bool((self.ids != first).any())


def first_positions(values: np.ndarray) -> np.ndarray:
    """For each element of a 1-D array, the position of the first element equal to it."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return np.asarray(first[inverse.reshape(-1)])


def concatenate(parts: Sequence[Labels], axis: int) -> Labels:
    return Labels(
        np.concatenate([part.ids for part in parts], axis),
        np.concatenate([part.copies for part in parts], axis),
        any(part.squared for part in parts),
    )


SourceKind = Literal["weight", "table", "bias", "input", "opaque", "gain"]
"""Where channels come into being.

``weight``: output of a matmul by a constant. ``table``: rows of a constant picked or repeated.
``bias``: a constant that is added. ``input``: a graph input. ``gain``: output of a per-channel
multiplication by a constant. ``opaque``: output of anything else.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """A run of ids ``base .. base + count`` that came into being in one place."""

    index: int
    kind: SourceKind
    base: int
    count: int
    value: ir.Value
    """The tensor whose channels these are: a run-time tensor, or the constant of a ``bias``."""
    node: ir.Node | None
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    """Axes of ``value`` that the ids number, in row-major order."""
    operand: int | None = None
    """Index of the constant among the node's inputs (weight, table, bias, gain)."""
    operand_axis: int | None = None
    """Axis of that constant on which the channels lie."""

    @property
    def ids(self) -> np.ndarray:
        return np.arange(self.base, self.base + self.count)


class SourceTable:
    """All sources of a graph. Asking twice for the same place gives the same ids."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.total = 0
        self._known: dict[tuple[ir.Value, ir.Node | None, SourceKind], Source] = {}
        self._bases: np.ndarray | None = None

    def get(
        self,
        kind: SourceKind,
        value: ir.Value,
        node: ir.Node | None,
        shape: Sequence[int],
        axes: Sequence[int],
        *,
        operand: int | None = None,
        operand_axis: int | None = None,
    ) -> Source:
        key = (value, node, kind)
        found = self._known.get(key)
        if found is not None:
            return found
        count = int(np.prod([shape[a] for a in axes], dtype=np.int64)) if axes else 1
        source = Source(
            len(self.sources), kind, self.total, count, value, node, tuple(shape), tuple(axes), operand, operand_axis
        )
        self._known[key] = source
        self.sources.append(source)
        self.total += count
        self._bases = None
        return source

    @property
    def bases(self) -> np.ndarray:
        if self._bases is None:
            self._bases = np.asarray([s.base for s in self.sources], dtype=np.int64)
        return self._bases

    def index_of(self, ids: np.ndarray) -> np.ndarray:
        """The index of the source of each id."""
        return np.searchsorted(self.bases, ids, side="right") - 1

    def owners(self, ids: np.ndarray) -> list[Source]:
        """The distinct sources of some ids, in order of creation."""
        return [self.sources[i] for i in np.unique(self.index_of(ids)).tolist()]


def fresh_labels(source: Source) -> Labels:
    """Labels of a tensor whose channels begin at ``source``: other axes number the copies."""
    rest = other_axes(len(source.shape), *source.axes) if source.shape else []
    ids = _behind(coordinates(source.shape, source.axes)) + source.base
    copies = _behind(coordinates(source.shape, rest)).astype(np.uint64)
    return Labels(np.broadcast_to(ids, source.shape), np.broadcast_to(copies, source.shape))
