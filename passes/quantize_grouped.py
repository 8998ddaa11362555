"""Put ONNX Runtime's GroupQueryAttention with a quantized cache in the place of attention: scales are constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import AttentionSite, AttentionSites
from graphrot.graph import node_of
from graphrot.passes.cache_lengths import CacheLengths
from graphrot.passes.cache_operands import Operands
from graphrot.passes.cache_pass import CachePass, declare
from graphrot.passes.quantize_nodes import NodeWriter
from graphrot.plan.types import RotationPlan

DOMAIN = "com.microsoft"
_TYPES = {"tensor": "PER_TENSOR", "channel": "PER_CHANNEL"}
_EIGHTH = 8
"""Heads of a 4-bit cache have a multiple of this many channels."""

Scales = tuple[np.ndarray, np.ndarray]
"""Of keys and of values: ``[1]``, or ``[kv_heads, head_size]``; float32."""


def obstacle(site: AttentionSite, bits: Literal[4, 8], *, cuda: bool = False) -> str | None:
    """Why GroupQueryAttention cannot stand at a site; None if it can."""
    if bits == 4 and site.head_size % _EIGHTH:
        return f"GroupQueryAttention's 4-bit cache needs heads of a multiple of 8 channels, and it has {site.head_size}"
    if cuda and site.mask:
        return "GroupQueryAttention takes no mask on CUDA but tokens to come, a window and padding on the right"
    if site.seqlens:
        return None
    if not site.causal:
        return "GroupQueryAttention hides tokens to come, and whether its mask does is not known"
    if site.mask:
        return "its mask is more than tokens to come, a window and padding, which GroupQueryAttention takes"
    return None


class QuantizeGrouped(CachePass):
    """Let every site be a GroupQueryAttention whose cache holds int8, or uint8 with two 4-bit numbers.

    It applies no rotary positions: those stay in front of it, and the transforms of queries and keys (R3) behind them.
    On CUDA it takes no mask: there the ones of attention_mask are counted, so that padding must be on the right.

    Args:
        plan: the plan (kept for the record).
        found: the sites; :func:`obstacle` has none of them.
        bits: of a stored number.
        per: what shares a scale.
        scales: node of a site -> scales of its keys and values.
        cuda: the model is to run in ONNX Runtime's CUDA provider.
    """

    def __init__(
        self,
        plan: RotationPlan,
        found: AttentionSites,
        *,
        bits: Literal[4, 8],
        per: Literal["tensor", "channel"],
        scales: Mapping[str, Scales],
        cuda: bool = False,
    ) -> None:
        super().__init__(plan, found)
        self._bits = bits
        self._per = per
        self._scales = scales
        self._cuda = cuda

    def finish(self, model: ir.Model) -> None:
        model.opset_imports.setdefault(DOMAIN, 1)

    def replace(
        self, writer: NodeWriter, values: dict[str, ir.Value], lengths: CacheLengths, site: AttentionSite
    ) -> None:
        node = node_of(values, site.node)
        operands = Operands(writer, values, site)
        query, key, value = (
            operands.rows(operands.read(use), use.form, heads)
            for use, heads in ((site.query, site.heads), (site.key, site.kv_heads), (site.value, site.kv_heads))
        )
        bias, seqlens = operands.mask(), values[site.seqlens] if site.seqlens else None
        if site.pads and self._cuda:
            seqlens = lengths.counted()
        elif site.pads:
            bias = operands.spread(lengths.padding(), lengths)
        made = ir.node(
            "GroupQueryAttention",
            [
                *(query, key, value, values[site.past_key], values[site.past_value]),
                seqlens or lengths.seqlens(),
                values[site.total] if site.total else lengths.total(),
                *(None, None, None, bias, None),
                *(
                    writer.constant(scale, f"{name}.scale")
                    for scale, name in zip(self._scales[site.node], (site.past_key, site.past_value), strict=True)
                ),
            ],
            {
                "num_heads": site.heads,
                "kv_num_heads": site.kv_heads,
                "scale": site.score_scale,
                "softcap": site.softcap,
                "local_window_size": site.window,
                "do_rotary": 0,
                "kv_cache_bit_width": self._bits,
                "k_quant_type": _TYPES[self._per],
                "v_quant_type": _TYPES[self._per],
            },
            domain=DOMAIN,
            num_outputs=3,
        )
        for output, name in zip(made.outputs, (site.node, site.present_key, site.present_value), strict=True):
            output.name = writer.free(f"{name}.stored")
        made.metadata_props.update(node.metadata_props)
        writer.model.graph.insert_before(node, made)
        output = operands.output(made.outputs[0])
        olds = [node.outputs[0], values[site.present_key], values[site.present_value]]
        pasts = [values[site.past_key], values[site.past_value]]
        made.outputs[0].type, made.outputs[0].shape = query.type, query.shape
        writer.stand_in(zip(olds, [output, *made.outputs[1:]], strict=True))
        packed = self._bits == 4
        width, dtype = (site.head_size // 2, ir.DataType.UINT8) if packed else (site.head_size, ir.DataType.INT8)
        for past, present in zip(pasts, made.outputs[1:], strict=True):
            declare(past, [site.kv_heads, width], dtype)
            declare(present, [site.kv_heads, width], dtype)
