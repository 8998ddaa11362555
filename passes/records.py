"""What the quantizing passes did, in names: the input of the emitters, which never match patterns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StoredGrid:
    """Where the parts of one quantized weight are. Names of initializers.

    Args:
        codes: the integers. Linears ``[K, N]`` INT4, UINT4, INT8 or UINT8; tables as
            :class:`QuantizedTable` says.
        scales: ``[G, N]`` (tables ``[V, G]``) in the weight's float type.
        zeros: zero points, or None.
        bits: 4 or 8.
        group: weights along K that share a scale; None: all of them.
        symmetric: without zero points in the grid (4-bit tables store an 8 for each scale all the same).
    """

    codes: str
    scales: str
    zeros: str | None
    bits: Literal[4, 8]
    group: int | None
    symmetric: bool


@dataclass(frozen=True)
class QuantizedLinear:
    """One linear in canonical form: DequantizeLinear, then MatMul.

    Args:
        node: first output of the MatMul.
        tensor: the weight it had before.
        grid: its parts.
        in_features: K.
        out_features: N.
        error: relative error of the weight, as its solver measured it.
        is_head: it is the LM head.
        error_without_rotation: the same for the source's weight, or None.
    """

    node: str
    tensor: str
    grid: StoredGrid
    in_features: int
    out_features: int
    error: float
    is_head: bool
    error_without_rotation: float | None = None


@dataclass(frozen=True)
class QuantizedTable:
    """One embedding table in canonical form.

    ``layout`` ``rows``: codes ``[V, D]`` (4 bits: ``[V, ceil(D/2)]`` uint8, low nibble first), scales
    ``[V, G]``. ``columns``, shared with a head: codes ``[D, V]`` (4 bits: ``[ceil(D/2), V]``), scales
    ``[G, V]``.

    Args:
        node: output of the lookup, ``[..., D]``.
        ids: the tensor of token ids.
        tensor: the table it had before.
        grid: its parts.
        rows: V.
        dim: D.
        error: relative error of the table.
        head: first output of the head's MatMul that reads the same codes, or None.
        error_without_rotation: the same for the source's table, or None.
    """

    node: str
    ids: str
    tensor: str
    grid: StoredGrid
    layout: Literal["rows", "columns"]
    rows: int
    dim: int
    error: float
    head: str | None = None
    error_without_rotation: float | None = None


@dataclass(frozen=True)
class QuantizedActivation:
    """One tensor that is rounded per token, and the linears that read the result.

    Args:
        input: the tensor before rounding.
        output: the tensor after it.
        bits: 8 or 4.
        linears: first outputs of the readers.
    """

    input: str
    output: str
    bits: Literal[4, 8]
    linears: tuple[str, ...]
