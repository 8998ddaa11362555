"""Norm operators (the decomposed forms need no rule of their own).

A norm over the last axis without gain commutes with every rotation of whole rows; LayerNorm only with
those that keep the all-ones vector. The gain starts new channels unless it has been folded forward.
"""

from __future__ import annotations

import numpy as np

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
    if any(v.has_output(k) for k in range(1, 3)):
        v.opaque("its mean or deviation is read as well")
        return
    reason = "it normalizes a part of the channels"
    v.key_rows(labels, range(labels.rank - 1), reason)
    if op in CENTRED_OPS:
        v.mean(labels)
    if skip and v.has_output(3):
        v.set(labels, 3)
    _apply_gain(v, labels, 2 if skip else 1)


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
        target = passed
    elif v.readable(position):
        v.block(labels, "it multiplies each channel by its own gain")
        target = v.source("gain", axes=[-1], operand=position)
    else:
        v.opaque("its gain is computed at run time")
        return
    shift = position + 1
    if v.node.op_type in CENTRED_OPS and v.value(shift) is not None:
        numbers = v.number(shift)
        if numbers is not None and not numbers.any():
            return
        bias = v.bias(shift, target.shape)
        if bias is None:
            v.opaque("its shift is computed at run time")
            return
        v.edge(target, bias)
