"""What the passes that quantize a cache share: every site is replaced once, and nothing reads the shape of a cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import onnx_ir as ir

from graphrot.analysis.types import AttentionSite, AttentionSites
from graphrot.graph import value_map
from graphrot.passes.base import GraphPass
from graphrot.passes.cache_lengths import CacheLengths
from graphrot.passes.quantize_nodes import NodeWriter, remove_unused, require_opset
from graphrot.plan.types import RotationPlan


class CachePass(GraphPass):
    """Puts another operator in the place of each site's attention.

    Args:
        plan: the plan (kept for the record).
        found: the sites.
    """

    def __init__(self, plan: RotationPlan, found: AttentionSites) -> None:
        super().__init__(plan)
        self._found = found

    def apply(self, model: ir.Model, done: set[str]) -> None:
        require_opset(model)
        writer, values = NodeWriter(model), value_map(model)
        lengths = CacheLengths(writer, self._found)
        _read_shapes(writer, values, lengths, self._found, done)
        for site in self._found.sites:
            if site.node in done:
                self.report.skipped.append((site.node, "replaced already"))
                continue
            self.replace(writer, values, lengths, site)
            done.add(site.node)
            self.report.changed.append(site.node)
        if self.report.changed:
            self.finish(model)

    @abstractmethod
    def replace(
        self, writer: NodeWriter, values: dict[str, ir.Value], lengths: CacheLengths, site: AttentionSite
    ) -> None:
        """Replace the attention of one site."""

    @abstractmethod
    def finish(self, model: ir.Model) -> None:
        """What a model with such operators needs."""


def _read_shapes(
    writer: NodeWriter, values: dict[str, ir.Value], lengths: CacheLengths, found: AttentionSites, done: set[str]
) -> None:
    """Let nothing read the shape of a cache any more: it follows from other inputs, and its last size changes."""
    for read in found.shapes:
        old = values.get(read.node)
        maker = None if old is None else old.producer()
        if read.node in done or old is None or maker is None or maker.op_type != "Shape":
            continue
        old.replace_all_uses_with(lengths.shape(read))
        remove_unused(writer.model, old)
        done.add(read.node)


def declare(cache: ir.Value, sizes: Sequence[int], dtype: ir.DataType = ir.DataType.UINT8) -> None:
    """Say what a graph input or output holds now: ``[B, heads, T, row]``; names of free sizes stay."""
    shape = [None, None, None, None] if cache.shape is None else list(cache.shape)
    cache.shape = ir.Shape([shape[0], sizes[0], shape[2], sizes[1]])
    cache.type = ir.TensorType(dtype)
