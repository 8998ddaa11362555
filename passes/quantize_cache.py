"""Put ``graphrot::RotatedAttention`` in the place of attention, and its rows in the place of a float cache."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from graphrot.analysis.types import AttentionSite, AttentionSites
from graphrot.graph import node_of
from graphrot.ops.hadamard import ATTRIBUTES as TRANSFORM_ATTRIBUTES
from graphrot.ops.hadamard import DOMAIN
from graphrot.ops.hadamard import OP_TYPE as TRANSFORM
from graphrot.ops.rotated_attention import AttentionForm, ensure_rotated_attention, rotated_attention_node
from graphrot.passes.base import PROVENANCE, record_provenance
from graphrot.passes.cache_lengths import CacheLengths
from graphrot.passes.cache_operands import Operands
from graphrot.passes.cache_pass import CachePass, declare
from graphrot.passes.quantize_nodes import NodeWriter
from graphrot.plan.types import RotationPlan


class QuantizeCache(CachePass):
    """Let every site store its keys and values as rows of 4 or 8 bits, and attend to what it stored.

    Transforms of queries and keys (R3) go into the operator. The caches of the graph become uint8
    ``[B, Hkv, T, R]``; other inputs and outputs stay.

    Args:
        plan: the plan (kept for the record).
        found: the sites.
        bits: of a stored number.
    """

    def __init__(self, plan: RotationPlan, found: AttentionSites, *, bits: Literal[4, 8]) -> None:
        super().__init__(plan, found)
        self._bits: Literal[4, 8] = bits

    def finish(self, model: ir.Model) -> None:
        ensure_rotated_attention(model)

    def replace(
        self, writer: NodeWriter, values: dict[str, ir.Value], lengths: CacheLengths, site: AttentionSite
    ) -> None:
        node = node_of(values, site.node)
        form = AttentionForm(
            num_heads=site.heads,
            kv_num_heads=site.kv_heads,
            head_size=site.head_size,
            bits=self._bits,
            score_scale=site.score_scale,
            softcap=site.softcap,
            window=site.window,
            causal=site.causal,
        )
        operands = Operands(writer, values, site)
        query, key, value = (operands.read(use) for use in (site.query, site.key, site.value))
        rotation: list[ir.Attr] | None = None
        items: list[str] = []
        first, second = _transform(query, site.head_size), _transform(key, site.head_size)
        if first is not None and second is not None and _same(first, second):
            rotation = [first.attributes[name] for name in TRANSFORM_ATTRIBUTES]
            items = [node.metadata_props.get(PROVENANCE, "") for node in (first, second)]
            query, key = data_of(first), data_of(second)
        past_key, past_value = values[site.past_key], values[site.past_value]
        for past in (past_key, past_value):
            declare(past, [site.kv_heads, form.row_bytes])
        made = rotated_attention_node(
            operands.rows(query, site.query.form, site.heads),
            operands.rows(key, site.key.form, site.kv_heads),
            operands.rows(value, site.value.form, site.kv_heads),
            past_key,
            past_value,
            values[site.seqlens] if site.seqlens else lengths.seqlens(),
            values[site.total] if site.total else lengths.total(),
            [writer.free(f"{name}.stored") for name in (site.node, site.present_key, site.present_value)],
            form,
            mask=lengths.padding() if site.pads else operands.mask(),
            rotation=rotation,
        )
        for item in ",".join(items).split(","):
            if item:
                record_provenance(made, item)
        writer.model.graph.insert_before(node, made)
        output = operands.output(made.outputs[0])
        olds = [node.outputs[0], values[site.present_key], values[site.present_value]]
        writer.stand_in(zip(olds, [output, *made.outputs[1:]], strict=True))
        for present in made.outputs[1:]:
            declare(present, [site.kv_heads, form.row_bytes])


def data_of(transform: ir.Node) -> ir.Value:
    """What a transform reads."""
    data = transform.inputs[0]
    assert data is not None
    return data


def _transform(value: ir.Value, head_size: int) -> ir.Node | None:
    """The transform within heads that makes ``value``."""
    node = value.producer()
    if node is None or (node.domain, node.op_type) != (DOMAIN, TRANSFORM):
        return None
    return node if head_size % node.attributes["size"].as_int() == 0 else None


def _same(first: ir.Node, second: ir.Node) -> bool:
    """Whether two transforms are by one matrix."""
    names = ("size", "construction", "scale")
    return all(first.attributes[name].value == second.attributes[name].value for name in names)
