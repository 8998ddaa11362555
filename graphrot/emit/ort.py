"""Target ``ort``: canonical form to packed matmuls.

Linears whose input is rounded become ``graphrot::RotatedMatMul`` (``rotated``), which multiplies integers: the
rounding, a transform in front and a bias behind go in. Where activations are rounded, the input of an 8-bit head is,
too, to 8 bits per token: ONNX Runtime's own matmul of 8-bit weights would round it as well.

All others, and with ``kernels="ort"`` these, too, become ``com.microsoft::MatMulNBits``. Which accuracy level (0: float
inputs, 4: inputs rounded to 8 bits per token and block):

* 4-bit weights: level 4 where activations are 8-bit (their QuantizeLinear chain goes), else 0. 4-bit
  activations keep their chain in front of level 0;
* 8-bit weights: always level 4; level 0 has no kernel for them and is a hundred times slower.

Scales are always initializers: when they come from an Expand that was not folded, MatMulNBits of level 4
returns wrong numbers (ONNX Runtime 1.32; level 0 is right). Narrowing keeps to that, too.

For CUDA, MatMulNBits multiplies float inputs whatever the level says: inputs that are rounded keep their chain in front
of it. Its blocks have 128 weights at most, and scales are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import onnx_ir as ir

from graphrot.emit import rotated
from graphrot.emit.cuda.check import LARGEST_BLOCK
from graphrot.emit.half_rules import Provider, is_rotated_matmul, needs_constant_scales, runs_alone, stays_float32
from graphrot.emit.nbits import BlockLayout, block_layout
from graphrot.emit.norms import fuse_residual_norms
from graphrot.emit.parts import row_zeros, split_scales, store_parts
from graphrot.emit.report import EmitReport, bits_per_weight, entries
from graphrot.emit.shared_table import look_up_blocks
from graphrot.graph import WeightStore, drop_unused_initializers, node_of, value_map
from graphrot.passes.quantize_nodes import NodeWriter
from graphrot.passes.records import QuantizedActivation, QuantizedLinear, QuantizedTable
from graphrot.passes.share_shapes import share_shapes

Kernels = Literal["graphrot", "ort"]

DOMAIN = "com.microsoft"

_OURS_NOTE = (
    "rounded inputs are multiplied as integers by graphrot's library (graphrot.register); without it the model "
    "answers alike, at float speed"
)
_HEAD_NOTE = "the input of the 8-bit head is rounded to 8 bits per token, too"
_BLOCK_NOTE = (
    "8-bit activations are rounded inside MatMulNBits, per token and block of at most 256 channels: finer than "
    "one scale per token"
)
_INT4_NOTE = "4-bit activations are rounded in float and multiplied at float speed in this target"
_FLOAT_NOTE = "8-bit activations in front of float weights are rounded and multiplied in float: they run at float speed"
_LEVEL_NOTE = (
    "ONNX Runtime rounds the inputs of 8-bit weights to 8 bits: {count} of these have float activations in the recipe"
)
_CUDA_NOTE = (
    "ONNX Runtime's CUDA provider has no matmul of rounded inputs: these are rounded by nodes of their own, and "
    "multiplied in the type of the file"
)
_VERSION_NOTE = "8-bit weights need ONNX Runtime 1.22 or later"


def emit_ort(
    model: ir.Model,
    *,
    store: WeightStore,
    linears: Sequence[QuantizedLinear] = (),
    tables: Sequence[QuantizedTable] = (),
    activations: Sequence[QuantizedActivation] = (),
    float16: bool = False,
    kernels: Kernels = "graphrot",
    provider: Provider = "cpu",
) -> EmitReport:
    """Lower a model in canonical form, in place. Lookups in tables of their own stay as they are.

    Args:
        model: what the quantizing passes left.
        store: where repacked codes go.
        linears: records of ``QuantizeWeights`` and of the shared heads of ``QuantizeTables``.
        tables: records of ``QuantizeTables``.
        activations: records of ``QuantizeActivations``.
        float16: the model is narrowed to float16 afterwards.
        kernels: what linears with rounded inputs become: ``graphrot::RotatedMatMul``, or MatMulNBits (``ort``).
        provider: where the model is to run.

    Raises:
        InputRefused: the records are of another model.
    """
    share_shapes(model)
    writer = NodeWriter(model, store)
    fuse_residual_norms(model, writer)
    values = value_map(model)
    lowering = _Lowering(writer, values, tables, activations, float16, kernels, provider)
    lowered = [lowering.lower(linear) for linear in linears]
    rotated.absorb_transforms(model)
    left = [record for record in activations if values[record.output].uses()]
    drop_unused_initializers(model)
    _drop_inferred_types(model)
    if any(not x.is_ours for x in lowered):
        model.opset_imports.setdefault(DOMAIN, 1)
    shared = {table.head for table in tables}
    current = [x.linear for linear, x in zip(linears, lowered, strict=True) if linear.node not in shared]
    return EmitReport(
        target="ort",
        notes=_notes(lowered, left, provider),
        quantized=entries(current, tables),
        linear_bits_per_weight=bits_per_weight(
            ((x.linear, x.parts) for x in lowered if not x.linear.is_head),
            float16=float16,
            single={value for x in lowered for value in x.parts if _stays_single(x, value, provider)},
        ),
    )


def _stays_single(lowered: _Lowered, value: ir.Value, provider: Provider) -> bool:
    """Whether a part of a linear stays float32 in a float16 model."""
    node = lowered.node
    if lowered.is_ours:
        return any(value is operand and stays_float32(node, index) for index, operand in enumerate(node.inputs))
    return provider == "cpu" and needs_constant_scales(node) and runs_alone(node)


@dataclass(frozen=True)
class _Lowered:
    """One linear as a packed matmul: its initializers, and how it treats its input.

    ``linear`` names the output that the linear has now.
    """

    linear: QuantizedLinear
    parts: tuple[ir.Value, ...]
    node: ir.Node
    rounding: QuantizedActivation | None

    @property
    def is_ours(self) -> bool:
        return is_rotated_matmul(self.node)


class _Lowering:
    """What is the same for all linears of a model."""

    def __init__(
        self,
        writer: NodeWriter,
        values: dict[str, ir.Value],
        tables: Sequence[QuantizedTable],
        activations: Sequence[QuantizedActivation],
        float16: bool,
        kernels: Kernels,
        provider: Provider,
    ) -> None:
        self._writer = writer
        self._values = values
        self._rounded = {record.output: record for record in activations}
        self._shared = {table.head: table for table in tables if table.head is not None}
        self._float16 = float16
        self._ours = kernels == "graphrot"
        self._cuda = provider == "cuda"

    def lower(self, linear: QuantizedLinear) -> _Lowered:
        """Put a packed matmul in the place of one linear."""
        node = node_of(self._values, linear.node)
        data = node.inputs[0]
        assert data is not None
        rounding = self._rounded.get(data.name or "")
        bits = self._activation_bits(linear, rounding)
        theirs = bits is None and self._cuda
        layout = block_layout(linear.grid, linear.in_features, most=LARGEST_BLOCK if theirs else 256)
        parts = store_parts(self._writer, linear, layout, one_scale=bits is not None, repeated=theirs)
        self._look_up(linear, parts, layout)
        if bits is None:
            return self._nbits(node, data, linear, rounding, parts, layout)
        x = data if rounding is None else self._values[rounding.input]
        old, product = rotated.multiply(self._writer, node, x, linear, parts, layout, bits)
        return self._done(replace(linear, node=old.name or ""), old, product, product, parts, rounding)

    def _activation_bits(self, linear: QuantizedLinear, rounding: QuantizedActivation | None) -> Literal[4, 8] | None:
        """What our operator rounds the input to; None: the linear is not one for it."""
        if not self._ours or not rotated.takes(linear):
            return None
        if rounding is not None:
            return rounding.bits
        return 8 if self._rounded and linear.is_head and linear.grid.bits == 8 else None

    def _look_up(self, linear: QuantizedLinear, parts: tuple[ir.Value, ...], layout: BlockLayout) -> None:
        """Let the lookup in a table that the linear shares read the linear's codes."""
        table = self._shared.get(linear.node)
        if table is None:
            return
        lookup = node_of(self._values, table.node)
        zeros = row_zeros(self._writer, table, parts)
        ids = self._values[table.ids]
        found = look_up_blocks(self._writer, lookup, ids, table, parts[0], parts[1], zeros, layout)
        self._values[table.node] = found

    def _nbits(
        self,
        node: ir.Node,
        data: ir.Value,
        linear: QuantizedLinear,
        rounding: QuantizedActivation | None,
        parts: tuple[ir.Value, ...],
        layout: BlockLayout,
    ) -> _Lowered:
        inside = rounding is not None and rounding.bits == 8 and not self._cuda
        scales, channel_scales = split_scales(self._writer, linear, parts[1], layout, self._float16)
        x = self._values[rounding.input] if rounding is not None and inside else data
        attributes = {
            "K": linear.in_features,
            "N": linear.out_features,
            "bits": linear.grid.bits,
            "block_size": layout.block,
            "accuracy_level": 4 if inside or linear.grid.bits == 8 else 0,
        }
        operands = [x, parts[0], scales, *parts[2:]]
        packed = self._writer.op(node, "MatMulNBits", operands, f"{linear.node}.nbits", attributes, domain=DOMAIN)
        product = packed
        if channel_scales is not None:
            product = self._writer.op(node, "Mul", [packed, channel_scales], f"{linear.node}.scaled")
        return self._done(linear, node.outputs[0], product, packed, (*parts, scales), rounding)

    def _done(
        self,
        linear: QuantizedLinear,
        old: ir.Value,
        product: ir.Value,
        packed: ir.Value,
        parts: tuple[ir.Value, ...],
        rounding: QuantizedActivation | None,
    ) -> _Lowered:
        node = packed.producer()
        assert node is not None
        self._writer.take_over(old, product)
        self._values[linear.node] = product
        return _Lowered(linear, parts, node, rounding)


def _drop_inferred_types(model: ir.Model) -> None:
    """Forget types and shapes that ONNX Runtime infers anyway: it keeps those of the file in memory (3 MiB)."""
    made = (value for node in model.graph for value in node.outputs)
    for value in (*made, *model.graph.initializers.values()):
        if not value.is_graph_input() and not value.is_graph_output():
            value.type = value.shape = None


def _notes(lowered: Sequence[_Lowered], left: Sequence[QuantizedActivation], provider: Provider) -> tuple[str, ...]:
    """What to say; ``left`` are the activations that are still rounded by nodes of their own."""
    notes: list[str] = []
    ours, theirs = [x for x in lowered if x.is_ours], [x for x in lowered if not x.is_ours]
    if ours:
        notes.append(_OURS_NOTE)
    if any(x.rounding is None for x in ours):
        notes.append(_HEAD_NOTE)
    if provider == "cuda":
        return (*notes, _CUDA_NOTE) if left else tuple(notes)
    if any(x.rounding is not None and x.rounding.bits == 8 for x in theirs):
        notes.append(_BLOCK_NOTE)
    if any(record.bits == 4 for record in left):
        notes.append(_INT4_NOTE)
    if any(record.bits == 8 for record in left):
        notes.append(_FLOAT_NOTE)
    eight = [x for x in theirs if x.linear.grid.bits == 8]
    free = sum(x.rounding is None for x in eight)
    if free:
        notes.append(_LEVEL_NOTE.format(count=free))
    if eight:
        notes.append(_VERSION_NOTE)
    return tuple(notes)
