"""Target ``portable``: the canonical form as it is, standard operators of opset 21 and later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import onnx_ir as ir

from graphrot.emit.report import EmitReport, bits_per_weight, entries
from graphrot.graph import drop_unused_initializers
from graphrot.passes.quantize_nodes import require_opset
from graphrot.passes.records import QuantizedActivation, QuantizedLinear, QuantizedTable
from graphrot.passes.share_shapes import share_shapes

ACCURACY_LEVEL_OPTION = ("session.qdq_matmulnbits_accuracy_level", "0")
"""The session option with which ONNX Runtime computes this target as written."""

_LEVEL_NOTE = (
    "ONNX Runtime on CPU rounds the inputs of 4-bit matmuls to 8 bits unless the session option "
    f"{ACCURACY_LEVEL_OPTION[0]} is {ACCURACY_LEVEL_OPTION[1]}"
)
_GROUP_NOTE = "8-bit weights in groups run several times slower than float in ONNX Runtime with that option"
_INT4_NOTE = "4-bit activations are computed in float: they run at float speed"
_INT8_NOTE = "8-bit activations are rounded by QuantizeLinear and multiplied in float: they run at float speed"
_CUDA_NOTE = "{bits}-bit activations are rounded by Div and Round, and multiplied in the type of the file"
_CUDA_WEIGHTS_NOTE = (
    "8-bit weights are decoded when the model is loaded: ONNX Runtime's CUDA provider has no kernel that reads them "
    "in blocks, and they lie in its memory in the type of the file"
)


def emit_portable(
    model: ir.Model,
    *,
    linears: Sequence[QuantizedLinear] = (),
    tables: Sequence[QuantizedTable] = (),
    activations: Sequence[QuantizedActivation] = (),
    float16: bool = False,
    provider: Literal["cpu", "cuda"] = "cpu",
) -> EmitReport:
    """Finish a model in canonical form: shapes are shared, unused initializers go.

    Args:
        model: what the quantizing passes left.
        linears: records of ``QuantizeWeights`` and of the shared heads of ``QuantizeTables``.
        tables: records of ``QuantizeTables``.
        activations: records of ``QuantizeActivations``.
        float16: the model is narrowed to float16 afterwards.
        provider: where the model is to run.

    Raises:
        InputRefused: the model's opset is below 21.
    """
    if linears or tables or activations:
        require_opset(model)
    share_shapes(model)
    drop_unused_initializers(model)
    return EmitReport(
        target="portable",
        notes=_notes(linears, activations, cuda=provider == "cuda"),
        quantized=entries(linears, tables),
        linear_bits_per_weight=bits_per_weight(
            ((linear, _parts(model, linear)) for linear in linears if not linear.is_head), float16=float16
        ),
    )


def _notes(
    linears: Sequence[QuantizedLinear], activations: Sequence[QuantizedActivation], *, cuda: bool
) -> tuple[str, ...]:
    if cuda:
        rounded = tuple(_CUDA_NOTE.format(bits=bits) for bits in sorted({a.bits for a in activations}, reverse=True))
        return (_CUDA_WEIGHTS_NOTE, *rounded) if any(linear.grid.bits == 8 for linear in linears) else rounded
    notes: list[str] = []
    blocked = any(x.grid.bits == 8 and x.grid.group is not None for x in linears)
    if blocked or any(x.grid.bits == 4 for x in linears):
        notes.append(_LEVEL_NOTE)
    if blocked:
        notes.append(_GROUP_NOTE)
    bits = {a.bits for a in activations}
    notes += [note for width, note in ((8, _INT8_NOTE), (4, _INT4_NOTE)) if width in bits]
    return tuple(notes)


def _parts(model: ir.Model, linear: QuantizedLinear) -> list[ir.Value]:
    grid = linear.grid
    names = [grid.codes, grid.scales] + ([] if grid.zeros is None else [grid.zeros])
    return [model.graph.initializers[name] for name in names]
