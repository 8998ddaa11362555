"""What an emitter has to say: notes for people, entries for ``graphrot.json``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphrot.passes.records import QuantizedLinear, QuantizedTable


@dataclass(frozen=True)
class QuantizedEntry:
    """One quantized tensor.

    Args:
        tensor: the weight's name before quantization.
        node: first output of the node that uses it.
        bits: 4 or 8.
        group: weights that share a scale, or ``channel``.
        error: relative error, as the solver measured it.
        error_without_rotation: the same for the source's tensor, after the same solver on the same grid; None where
            nothing was rotated.
    """

    tensor: str
    node: str
    bits: int
    group: int | str
    error: float
    error_without_rotation: float | None = None


@dataclass(frozen=True)
class EmitReport:
    """The result of an emitter.

    Args:
        target: its name.
        notes: what a user has to know about how the file runs.
        quantized: one entry for each quantized tensor; a shared table has one.
        linear_bits_per_weight: stored bits per weight of the linears without the head, with scales, zero
            points and padding; None without quantized linears.
    """

    target: str
    notes: tuple[str, ...]
    quantized: tuple[QuantizedEntry, ...]
    linear_bits_per_weight: float | None


def entries(linears: Iterable[QuantizedLinear], tables: Sequence[QuantizedTable]) -> tuple[QuantizedEntry, ...]:
    """One entry for each tensor; a head that shares a table is in the table's entry."""
    shared = {table.head for table in tables}
    every: list[QuantizedTable | QuantizedLinear] = [*tables, *(x for x in linears if x.node not in shared)]
    return tuple(
        QuantizedEntry(x.tensor, x.node, x.grid.bits, x.grid.group or "channel", x.error, x.error_without_rotation)
        for x in every
    )


def bits_per_weight(
    stored: Iterable[tuple[QuantizedLinear, Sequence[ir.Value]]],
    *,
    float16: bool = False,
    single: Container[ir.Value] = (),
) -> float | None:
    """Stored bits of the linears' initializers per weight.

    Args:
        stored: the linears that count, each with all its initializers; one that is shared counts once.
        float16: scales that are float32 now will be float16.
        single: scales that stay float32 then.
    """
    weights = 0
    parts: dict[str, int] = {}
    for linear, values in stored:
        weights += linear.in_features * linear.out_features
        for value in values:
            assert value.const_value is not None and value.name
            halved = float16 and value.const_value.dtype == ir.DataType.FLOAT and value not in single
            parts[value.name] = value.const_value.nbytes // (2 if halved else 1)
    return 8 * sum(parts.values()) / weights if weights else None
