"""An example taken through the passes and an emitter, with the numpy picture of what it computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from graphrot.emit.nbits import block_layout
from graphrot.emit.ort import emit_ort
from graphrot.emit.portable import emit_portable
from graphrot.emit.report import EmitReport
from graphrot.graph import WeightStore
from graphrot.passes.quantize_activations import QuantizeActivations
from graphrot.passes.quantize_tables import QuantizeTables, TableItem
from graphrot.passes.quantize_weights import QuantizeWeights
from graphrot.passes.records import QuantizedLinear, StoredGrid
from graphrot.quant.activations import fake_quantize_blocks, fake_quantize_tokens
from graphrot.quant.grid import QuantizedTensor, WeightGrid
from graphrot.quant.rtn import quantize_rtn
from tests.passes_quant.graphs import PLAN, Example

Bits = Literal[4, 8]
Target = Literal["portable", "ort", "graphrot"]
"""``ort`` and ``graphrot``: the target ort, with the one's or the other's kernels."""


@dataclass(frozen=True)
class Setting:
    """What to quantize, and how; None: not."""

    weights: WeightGrid | None = None
    activations: Bits | None = None
    table: WeightGrid | None = None
    tied: bool = True

    def __str__(self) -> str:
        def grid(g: WeightGrid | None) -> str:
            return (
                "float"
                if g is None
                else f"{g.bits}{'' if g.group is None else f'g{g.group}'}{'' if g.symmetric else 'a'}"
            )

        tied = "" if self.table is None else "-tied" if self.tied else "-alone"
        return f"w{grid(self.weights)}-a{self.activations or 'float'}-t{grid(self.table)}{tied}"


@dataclass(frozen=True)
class Lowered:
    model: ir.Model
    report: EmitReport
    linears: tuple[QuantizedLinear, ...]


def lower(example: Example, setting: Setting, target: Target, folder: Path) -> Lowered:
    """The example in a target's form; a table that is not shared leaves the head float."""
    model = example.model()
    store = WeightStore(folder)
    rounding = None
    if setting.activations is not None:
        rounding = QuantizeActivations(PLAN, example.linears, bits=setting.activations)
        rounding(model)
    tables = None
    if setting.table is not None:
        item = TableItem(example.embedding, table_of(example, setting), example.head if setting.tied else None)
        tables = QuantizeTables(PLAN, [item], store=store)
        tables(model)
    linears: list[QuantizedLinear] = [] if tables is None else list(tables.heads)
    if setting.weights is not None:
        tensors = example.quantized(setting.weights)
        weights = QuantizeWeights(PLAN, [(x, tensors[x.node]) for x in example.linears], store=store)
        weights(model)
        linears = [*weights.records, *linears]
    records: dict[str, Any] = {
        "linears": linears,
        "tables": [] if tables is None else tables.records,
        "activations": [] if rounding is None else rounding.records,
    }
    if target == "portable":
        report = emit_portable(model, **records)
    else:
        report = emit_ort(model, store=store, kernels=target, **records)
    return Lowered(model, report, tuple(linears))


def table_of(example: Example, setting: Setting) -> QuantizedTensor:
    assert setting.table is not None
    return quantize_rtn(example.weights["table"], setting.table)


def expected(example: Example, setting: Setting, tokens: np.ndarray, target: Target) -> np.ndarray:
    """Float64 with decoded weights, and the rounding of inputs that the target stands for.

    ``portable``: per token. ``ort``: 8-bit activations, and the inputs of 8-bit weights, per block. ``graphrot``: per
    token, that of an 8-bit head with 8 bits; as ``ort`` where activations are not rounded.
    """
    widths = {"a": example.dim, "g": example.dim, "d": example.ffn, "logits": example.dim}

    def rounding(node: str, x: np.ndarray) -> np.ndarray:
        grid = setting.weights if node != "logits" else (setting.table if setting.tied else None)
        bits = None if node == "logits" else setting.activations
        single = x.astype(np.float32)
        eight = grid is not None and grid.bits == 8
        if node == "logits" and eight and setting.activations is not None and target == "graphrot":
            bits = 8
        by_block = grid is not None and (
            (target == "ort" and (bits == 8 or eight)) or (target == "graphrot" and bits is None and eight)
        )
        if bits is None and not by_block:
            return x
        if bits is not None and not (by_block and bits == 8):
            single = fake_quantize_tokens(single, bits)
        if by_block and grid is not None:
            stored = StoredGrid("", "", None, grid.bits, grid.group, grid.symmetric)
            single = fake_quantize_blocks(single, block_layout(stored, widths[node]).block)
        return single.astype(np.float64)

    table = None if setting.table is None else table_of(example, setting)
    tensors = None if setting.weights is None else example.quantized(setting.weights)
    return example.reference(tokens, tensors, table=table, head=table if setting.tied else None, rounding=rounding)
