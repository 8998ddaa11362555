"""Sizes in symbols: expressions over the named dimensions of a graph's inputs, in normal form.

An expression is a tuple:

* ``("const", n)``;
* ``("sum", ((symbol, factor), ...), n)``: a linear form, symbols sorted;
* ``("product", (symbol, ...), factor)``;
* a symbol: ``("dim", name, ...)``, or ``(op, arguments)`` for what is none of these.

Equal tuples are equal sizes; unequal ones may still be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Size = tuple[Any, ...]
Shape = tuple[Size, ...]
"""Sizes of a tensor, or the elements of a small integer tensor in row-major order."""


def const(n: int) -> Size:
    """A size that is known."""
    return ("const", int(n))


def number(size: Size) -> int | None:
    """The value of a constant, else None."""
    return size[1] if size[0] == "const" else None


def terms(size: Size) -> tuple[dict[Size, int], int]:
    """A size as ``sum(factor * symbol) + offset``: the factors by symbol, and the offset."""
    if size[0] == "const":
        return {}, size[1]
    if size[0] == "sum":
        return dict(size[1]), size[2]
    return {size: 1}, 0


def linear(parts: Sequence[tuple[Size, int]], offset: int = 0) -> Size:
    """``offset + sum(factor * size)`` in normal form."""
    total: dict[Size, int] = {}
    for size, factor in parts:
        symbols, constant = terms(size)
        offset += factor * constant
        for symbol, count in symbols.items():
            total[symbol] = total.get(symbol, 0) + factor * count
    kept = {symbol: count for symbol, count in total.items() if count}
    if not kept:
        return const(offset)
    if offset == 0 and list(kept.values()) == [1]:
        return next(iter(kept))
    return ("sum", tuple(sorted(kept.items(), key=repr)), offset)


def product(sizes: Sequence[Size]) -> Size:
    """The product, with constants multiplied and the other factors sorted."""
    factor, symbols = 1, []
    for size in sizes:
        if size[0] == "const":
            factor *= size[1]
        elif size[0] == "product":
            factor *= size[2]
            symbols += size[1]
        else:
            symbols.append(size)
    if factor == 0 or not symbols:
        return const(factor)
    if len(symbols) == 1:
        return linear([(symbols[0], factor)])
    return ("product", tuple(sorted(symbols, key=repr)), factor)


def quotient(whole: Sequence[Size], part: Sequence[Size]) -> Size:
    """``product(whole) / product(part)``, cancelled where that can be seen."""
    left, right = list(whole), []
    for size in part:
        if size in left:
            left.remove(size)
        else:
            right.append(size)
    numerator, denominator = product(left), product(right)
    if number(denominator) == 1:
        return numerator
    top, bottom = number(numerator), number(denominator)
    if top is not None and bottom and top % bottom == 0:
        return const(top // bottom)
    parts, offset = terms(numerator)
    if bottom and offset % bottom == 0 and all(count % bottom == 0 for count in parts.values()):
        return linear([(symbol, count // bottom) for symbol, count in parts.items()], offset // bottom)
    return ("quotient", numerator, denominator)


def is_size(size: Size) -> bool:
    """Whether it cannot be negative: a dimension, or a sum of such."""
    if size[0] == "const":
        return bool(size[1] >= 0)
    if size[0] == "sum":
        return size[2] >= 0 and all(count > 0 and is_size(symbol) for symbol, count in size[1])
    if size[0] == "product":
        return size[2] >= 0 and all(is_size(symbol) for symbol in size[1])
    return size[0] in ("dim", "broadcast", "slice", "range", "quotient")


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that ``shapes`` broadcast to."""
    rank = max(len(shape) for shape in shapes)
    result: list[Size] = []
    for axis in range(-rank, 0):
        sizes = {shape[axis] for shape in shapes if len(shape) >= -axis} - {const(1)}
        fixed = [size for size in sizes if number(size) is not None]
        if len(fixed) == 1:
            sizes = set(fixed)
        result.append(
            const(1) if not sizes else sizes.pop() if len(sizes) == 1 else ("broadcast", tuple(sorted(sizes, key=repr)))
        )
    return tuple(result)


def sliced(size: Size, start: Size, end: Size, step: Size) -> Size:
    """What Slice leaves of an axis of this size."""
    whole, first, last, stride = (number(part) for part in (size, start, end, step))
    if whole is not None and first is not None and last is not None and stride:
        return const(len(range(whole)[first:last:stride]))
    if first == 0 and stride == 1 and (end == size or (last is not None and last >= 1 << 30)):
        return size
    return ("slice", size, start, end, step)


def elementwise(op: str, operands: Sequence[Shape]) -> Shape | None:
    """Integer arithmetic by elements; operands of one element broadcast."""
    length = max(len(content) for content in operands)
    if any(len(content) not in (1, length) for content in operands):
        return None
    rows = [content * length if len(content) == 1 else content for content in operands]
    result = [_arithmetic(op, column) for column in zip(*rows, strict=True)]
    return None if any(size is None for size in result) else tuple(size for size in result if size is not None)


def _arithmetic(op: str, sizes: Sequence[Size]) -> Size | None:
    if op == "Where":
        condition = number(sizes[0])
        return None if condition is None else sizes[1] if condition else sizes[2]
    if len(sizes) != 2:
        return None
    a, b = sizes
    if op in ("Add", "Sub"):
        return linear([(a, 1), (b, 1 if op == "Add" else -1)])
    if op == "Mul":
        return product([a, b])
    if op == "Div":
        return quotient([a], [b]) if is_size(a) and is_size(b) and number(b) != 0 else None
    if op == "Equal":
        numbers = number(a), number(b)
        if a == b:
            return const(1)
        if None not in numbers or any(
            is_size(s) and n is not None and n < 0 for s, n in ((a, numbers[1]), (b, numbers[0]))
        ):
            return const(0)
    return None
