"""Find every place where a graph attends to a cache, whatever operators it uses."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphrot.analysis.cached.fused import grouped
from graphrot.analysis.cached.reading import NotRead, Reader
from graphrot.analysis.scope import node_name
from graphrot.analysis.types import AttentionSite, AttentionSites, CachePair, Refusal
from graphrot.model.rewrite import MICROSOFT


def find_attention(model: ir.Model, caches: Sequence[CachePair]) -> AttentionSites:
    """Find the attention of a graph.

    Args:
        model: fused operators taken apart, rotary positions too; only read.
        caches: what the analysis found.

    Returns:
        Sites in graph order, and a refusal for every place that cannot be replaced, and for every cache that no site
        reads.
    """
    reader = Reader(model, caches)
    sites: list[AttentionSite] = []
    refused: list[Refusal] = []
    for node in model.graph:
        if (node.domain, node.op_type) != (MICROSOFT, "GroupQueryAttention"):
            continue
        try:
            sites.append(grouped(reader, node))
        except NotRead as error:
            refused.append(Refusal("KV", node_name(node), node.op_type, error.reason, error.change))
    return AttentionSites(tuple(sites), tuple(refused), shares=_shares(model, sites, caches))


def _shares(model: ir.Model, sites: Sequence[AttentionSite], caches: Sequence[CachePair]) -> bool:
    """Whether the graph works alike where a past is a buffer with room for more tokens than it holds."""
    taken = {name for site in sites for name in (site.past_key, site.past_value)}
    pasts = [value for value in model.graph.inputs if value.name in {pair.past for pair in caches}]
    if any(value.name not in taken for value in pasts):
        return False
    kept = {name for site in sites for name in (site.present_key, site.present_value)}
    if any(value.uses() for value in model.graph.outputs if value.name in kept):
        return False
    nodes = {site.node for site in sites if site.seqlens and site.total}
    return all(node_name(use.node) in nodes for value in pasts for use in value.uses())
