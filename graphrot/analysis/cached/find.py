"""Find every place where a graph attends to a cache, whatever operators it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from graphrot.analysis.cached.fused import grouped, multi_head, standard
from graphrot.analysis.cached.lengths import counts_tokens, find_shape_reads
from graphrot.analysis.cached.masks import Masks
from graphrot.analysis.cached.meaning import check_meaning
from graphrot.analysis.cached.reading import NotRead, Reader
from graphrot.analysis.cached.scores import spelled_out
from graphrot.analysis.scope import is_standard, node_name
from graphrot.analysis.types import AttentionSite, AttentionSites, CachePair, Refusal, ShapeRead
from graphrot.model.rewrite import MICROSOFT
from graphrot.progress import Progress, silent

_SHARED = "other attention reads the same cache"
_UNREAD = "no attention was found that reads it"


def find_attention(model: ir.Model, caches: Sequence[CachePair], *, progress: Progress = silent) -> AttentionSites:
    """Find the attention of a graph, and check what it computes.

    Args:
        model: fused operators taken apart, rotary positions too; only read.
        caches: what the analysis found.
        progress: told of each place.

    Returns:
        Sites in graph order, and a refusal for every place that cannot be replaced, and for every cache that no site
        reads.
    """
    return _Search(model, caches, progress).run()


class _Search:
    def __init__(self, model: ir.Model, caches: Sequence[CachePair], progress: Progress) -> None:
        self._model = model
        self._caches = caches
        self._progress = progress
        self._reader = Reader(model, caches)
        self._masks = Masks(self._reader)
        self._refused: list[Refusal] = []

    def run(self) -> AttentionSites:
        nodes = list(self._model.graph)
        sites: dict[str, AttentionSite] = {}
        for count, node in enumerate(nodes):
            try:
                site = self._read(node)
                if site is not None:
                    sites[site.node] = self._ruled(site)
            except NotRead as error:
                self._refuse(node_name(node), node.op_type, error)
            if count % 64 == 0:
                self._progress("finding attention", count, len(nodes))
        self._progress("finding attention", len(nodes), len(nodes))
        self._refuse_shared(sites)
        shapes = self._shapes(sites)
        self._refuse_unread(sites)
        counts = counts_tokens(self._reader)
        return AttentionSites(
            tuple(sites.values()), tuple(self._refused), shapes, counts, self._shares(tuple(sites.values()), counts)
        )

    def _read(self, node: ir.Node) -> AttentionSite | None:
        """The site whose node this is, checked; None where it is another node."""
        if (node.domain, node.op_type) == (MICROSOFT, "GroupQueryAttention"):
            site = grouped(self._reader, node)
        elif (node.domain, node.op_type) == (MICROSOFT, "MultiHeadAttention"):
            site = multi_head(self._reader, node)
        elif is_standard(node) and node.op_type == "Attention":
            site = standard(self._reader, node)
        elif is_standard(node) and node.op_type == "Softmax":
            found = spelled_out(self._reader, node)
            if found is None:
                return None
            site = found
        else:
            return None
        check_meaning(self._reader, site)
        return site

    def _ruled(self, site: AttentionSite) -> AttentionSite:
        """The site with its mask as a rule, where it is one."""
        rule = self._masks.rule(site) if site.mask else None
        if rule is not None and not site.seqlens:
            return replace(site, causal=rule.causal, window=rule.window, pads=rule.pads, mask=())
        if any(term.kind == "padding" for term in site.mask):
            raise NotRead("its padding mask is not the input attention_mask")
        return site

    def _refuse(self, name: str, op: str, error: NotRead) -> None:
        self._refused.append(Refusal("KV", name, op, error.reason, error.change))

    def _refuse_shared(self, sites: dict[str, AttentionSite]) -> None:
        owners: dict[str, list[str]] = {}
        for site in sites.values():
            for past in (site.past_key, site.past_value):
                owners.setdefault(past, []).append(site.node)
        for name in dict.fromkeys(name for names in owners.values() if len(names) > 1 for name in names):
            self._refuse(name, sites.pop(name).op, NotRead(_SHARED))

    def _shapes(self, sites: dict[str, AttentionSite]) -> tuple[ShapeRead, ...]:
        found: dict[str, ShapeRead] = {}
        for site in list(sites.values()):
            try:
                found.update({read.node: read for read in find_shape_reads(self._reader, site)})
            except NotRead as error:
                self._refuse(site.node, site.op, error)
                del sites[site.node]
        return tuple(found.values())

    def _refuse_unread(self, sites: dict[str, AttentionSite]) -> None:
        """A cache that no site reads, and no refusal is about."""
        taken = {past for site in sites.values() for past in (site.past_key, site.past_value)}
        if not self._refused:
            for pair in self._caches:
                if pair.past not in taken:
                    self._refuse(pair.past, "input", NotRead(_UNREAD))

    def _shares(self, sites: Sequence[AttentionSite], counts: bool) -> bool:
        """Whether the graph works alike where a past is a buffer with room for more tokens than it holds."""
        taken = {past for site in sites for past in (site.past_key, site.past_value)}
        known = all(counts or (site.seqlens and site.total) for site in sites)
        return known and bool(taken) and all(pair.past in taken for pair in self._caches)
