"""Norm operators (the decomposed forms need no rule of their own).

A norm over the last axis without gain commutes with every rotation of whole rows; LayerNorm only with
those that keep the all-ones vector. The gain starts new channels unless it has been folded forward.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrot.analysis.labels import Labels
from graphrot.analysis.visit import Visit

NORM_OPS = frozenset(
    {
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    }
)
SKIP_OPS = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
CENTRED_OPS = frozenset({"LayerNormalization", "SkipLayerNormalization"})


def norm(v: Visit) -> None:
    """Any of :data:`NORM_OPS`."""
    op = v.node.op_type
    skip = op in SKIP_OPS
    labels = _with_skip(v) if skip else v.labels(0)
    if labels is None or labels.squared or v.integer("axis", -1) not in (-1, labels.rank - 1):
        v.opaque()
        return
    if any(v.has_output(k) and v.is_read(k) for k in range(1, 3)):
        v.opaque("its mean or deviation is read as well")
        return
    reason = "it normalizes a part of the channels"
    v.key_rows(labels, range(labels.rank - 1), reason)
    if op in CENTRED_OPS:
        v.mean(labels)
    if skip and v.has_output(3):
        v.set(labels, 3)
    _apply_gain(v, labels, gain_and_shift(v.node)[0])


def _with_skip(v: Visit) -> Labels | None:
    """Input plus skip (plus a bias) of the fused residual forms."""
    a, b = v.labels(0), v.labels(1)
    shape = v.output_shape()
    if a is None or b is None or a.squared or b.squared or a.shape != shape:
        return None
    v.edge(a, b.broadcast(shape, v.salt))
    bias = 4 if v.node.op_type == "SkipLayerNormalization" else 3
    if v.value(bias) is not None:
        extra = v.bias(bias, shape)
        if extra is None:
            return None
        v.edge(a, extra)
    return a.renamed(v.salt)


def _apply_gain(v: Visit, labels: Labels, position: int) -> None:
    passed = labels.renamed(v.salt)
    if v.node in v.graph.folded:
        v.set(passed)
        return
    gain = v.number(position) if v.value(position) is not None else np.ones(1)
    if gain is not None and gain.size and (gain == gain.reshape(-1)[0]).all():
        v.set(passed)
        _add_shift(v, passed, position + 1)
    elif v.readable(position):
        if v.node in v.graph.open:
            v.leave(labels, v.node.outputs[0], v.node)
        else:
            v.block(labels, "it multiplies each channel by its own gain")
        v.source("gain", axes=[-1], operand=position)
    else:
        v.opaque("its gain is computed at run time")


def _add_shift(v: Visit, labels: Labels, position: int) -> None:
    """A shift behind a neutral gain is a producer like any bias. Behind a gain of its own it belongs to the
    channels that start there."""
    if v.node.op_type not in CENTRED_OPS or v.value(position) is None:
        return
    if not v.add_constant(labels, position):
        v.opaque("its shift is computed at run time")


def gain_and_shift(node: ir.Node) -> tuple[int, int | None]:
    """Positions of the gain, and of the shift where the operator has one, among the inputs of a norm."""
    gain = 2 if node.op_type in SKIP_OPS else 1
    shift = gain + 1
    present = node.op_type in CENTRED_OPS and len(node.inputs) > shift and node.inputs[shift] is not None
    return gain, shift if present else None
