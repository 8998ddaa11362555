"""Quantizes embedding tables and heads: many rows, one at a time, straight from the file."""

from __future__ import annotations

from typing import Literal

import numpy as np

from graphrot.quant.clip import quantize_clip
from graphrot.quant.grid import QuantizedTensor, WeightGrid
from graphrot.quant.rtn import quantize_rtn


def quantize_table(
    table: np.ndarray, grid: WeightGrid, *, solver: Literal["rtn", "clip"] = "rtn", out: np.ndarray | None = None
) -> QuantizedTensor:
    """Quantize a table, row by row.

    At 8 bits rounding is as good as the clip search; at 4 bits the search is worth its time.

    Args:
        table: ``[V, D]``, any float dtype, memory-mapped or not (a transposed view will do); read in chunks of rows.
        grid: the grid; without groups each row has one scale.
        solver: rounding to nearest or clip search.
        out: where to put the codes, ``[V, D]`` of the grid's dtype (such as a memory-mapped array).
    """
    quantize = quantize_rtn if solver == "rtn" else quantize_clip
    return quantize(table, grid, out=out)
