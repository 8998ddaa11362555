"""Tiny decoders with one attention over a cache that is not only float; their tables are random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir

from graphrot.ops.hadamard import transform_attributes
from graphrot.ops.rotated_attention import AttentionForm, ensure_rotated_attention, rotated_attention_node
from graphrot.plan.types import MatrixRef

VOCABULARY, HEADS, KV_HEADS, WIDTH = 11, 4, 2, 16

Kind = Literal["rows4", "rows8", "float", "int8"]
"""Stored rows of 4 and 8 bits (RotatedAttention); GroupQueryAttention over float and over int8."""
KINDS: tuple[Kind, ...] = ("rows4", "rows8", "float", "int8")

_LENGTHS = {
    "counts": "ones = ReduceSum <keepdims = 0> (attention_mask, axis) less = Sub(ones, axis)",
    "columns": "last = Sub(width, axis) rows = Shape <start = 0, end = 1> (input_ids) less = Expand(last, rows)",
}
"""Where the slots in use are read: from the ones of the mask, or from its columns."""


def decoder(
    folder: Path, kind: Kind, lengths: Literal["counts", "columns"] = "counts", *, metadata: bool = True
) -> Path:
    """Write a decoder without positions.

    Args:
        folder: where to.
        kind: of the cache.
        lengths: from what attention has its lengths; with "columns" zeros of the mask hide tokens (rows only).
        metadata: whether the file says what its cache holds.
    """
    bits = {"rows4": 4, "rows8": 8, "int8": 8}.get(kind, 32)
    stored = kind.startswith("rows")
    width = WIDTH * bits // 8 + 4 if stored else WIDTH
    cache = {"float": "float", "int8": "int8"}.get(kind, "uint8")
    more = ', kv_cache_bit_width = 8, k_quant_type = "PER_TENSOR", v_quant_type = "PER_TENSOR"'
    body = (
        "width = Shape <start = 1, end = 2> (attention_mask) scalar = Squeeze(width) total = Cast <to = 6> (scalar) "
        f"{_LENGTHS[lengths]} seqlens = Cast <to = 6> (less) "
        "axes = Constant <value_ints = [1, 2]> () four = Unsqueeze(attention_mask, axes) seen = Cast <to = 9> (four) "
        "mask = Where(seen, zero, low) "
        "q = Gather(table_q, input_ids) k = Gather(table_k, input_ids) v = Gather(table_v, input_ids) "
        "o, present_key, present_value = com.microsoft.GroupQueryAttention "
        f"<num_heads = {HEADS}, kv_num_heads = {KV_HEADS}{more if kind == 'int8' else ''}> "
        f"(q, k, v, past_key, past_value, seqlens, total{', , , , , , step, step' if kind == 'int8' else ''}) "
        "logits = MatMul(o, head)"
    )
    ends = [", ".join(f"{cache}[b,{KV_HEADS},n,{width}] {end}_{part}" for part in ("key", "value")) for end in _ENDS]
    text = (
        '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "graphrot": 1]> '
        f"g (int64[b,s] input_ids, int64[b,t] attention_mask, {ends[0]}) => "
        f"(float[b,s,{VOCABULARY}] logits, {ends[1]}) "
        f"<int64[1] axis = {{1}}, float zero = {{0}}, float low = {{-1e35}}, float[1] step = {{0.04}}> {{ {body} }}"
    )
    proto = onnx.parser.parse_model(text)
    generator = np.random.default_rng(5)
    for name, shape in _TABLES.items():
        table = generator.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(table, name))
    model = ir.from_proto(proto)
    if stored:
        _store(model, 4 if bits == 4 else 8, masked=lengths == "columns")
    for value in (*model.graph.inputs, *model.graph.outputs):
        for end, name in _ENDS.items():
            value.name = (value.name or "").replace(f"{end}_", f"{name}.0.")
    if metadata:
        layout = "rows" if stored else {"int8": "gqa"}.get(kind, "float")
        scales = {"rows": "token", "gqa": "tensor"}.get(layout)
        content = {"bits": bits, "layout": layout, "rotated": stored, "scales": scales, "shared_buffers": True}
        model.metadata_props["graphrot.kv"] = json.dumps(content)
    path = folder / f"{kind}-{lengths}.onnx"
    ir.save(model, path)
    return path


_ENDS = {"past": "past_key_values", "present": "present"}
_TABLES = {
    "table_q": (VOCABULARY, HEADS * WIDTH),
    "table_k": (VOCABULARY, KV_HEADS * WIDTH),
    "table_v": (VOCABULARY, KV_HEADS * WIDTH),
    "head": (HEADS * WIDTH, VOCABULARY),
}


def _store(model: ir.Model, bits: Literal[4, 8], *, masked: bool) -> None:
    """Put RotatedAttention in the place of GroupQueryAttention."""
    node = next(node for node in model.graph if node.op_type == "GroupQueryAttention")
    query, key, value, past_key, past_value, seqlens, total = node.inputs
    assert query and key and value and past_key and past_value and seqlens and total
    mask = next(value for other in model.graph for value in other.outputs if value.name == "mask")
    new = rotated_attention_node(
        query, key, value, past_key, past_value, seqlens, total,
        [output.name or "" for output in node.outputs],
        AttentionForm(HEADS, KV_HEADS, WIDTH, bits, WIDTH**-0.5),
        mask=mask if masked else None,
        rotation=transform_attributes(MatrixRef("hadamard", WIDTH)),
    )  # fmt: skip
    ir.convenience.replace_nodes_and_values(model.graph, node, [node], [new], node.outputs, new.outputs)
    ensure_rotated_attention(model)
