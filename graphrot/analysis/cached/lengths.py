"""Who else reads a cache, and where the lengths of past and new tokens are known from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import onnx_ir as ir

from graphrot.analysis.cached.cut import CutFailed
from graphrot.analysis.cached.masks import PADDING
from graphrot.analysis.cached.meaning import cut_out, feeds
from graphrot.analysis.cached.reading import NotRead, Reader, ends
from graphrot.analysis.probe_sizes import Run
from graphrot.analysis.scope import is_shape_op, node_name
from graphrot.analysis.types import AttentionSite, ShapeRead
from graphrot.graph import node_of

_RUNS = (Run(1, 3, 4), Run(2, 1, 5), Run(2, 3, 0), Run(3, 1, 8))
"""Sizes that differ enough, and that every attention operator takes."""

Symbol = Literal["B", "S", "P", "T", "1"]


def counts_tokens(reader: Reader) -> bool:
    """Whether the input attention_mask is as long as past and new tokens together, wherever the graph runs."""
    if PADDING not in {value.name for value in reader.model.graph.inputs}:
        return False
    return all(
        reader.probe.choice.shapes(run).get(PADDING) == (run.batch, run.past + run.sequence)
        for run in (reader.probe.run, *_RUNS)
    )


def find_shape_reads(reader: Reader, site: AttentionSite) -> tuple[ShapeRead, ...]:
    """The nodes that read the shape of a site's cache, and what they find.

    Raises:
        NotRead: something else reads the cache, or a shape that does not follow from the sizes of the inputs.
    """
    found: dict[str, ShapeRead] = {}
    for value in _held(reader, site):
        for use in value.uses():
            if is_shape_op(use.node):
                read = _shape_read(reader, site, use.node)
                found[read.node] = read
            elif use.node not in reader.inside and not _is_end(use.node, site):
                raise NotRead(f"its cache is also read by {use.node.op_type}, which makes {node_name(use.node)!r}")
    return tuple(found.values())


def _held(reader: Reader, site: AttentionSite) -> Iterable[ir.Value]:
    """The caches of a site, and what is made of them on the way to the scores."""
    yield from (reader.values[name] for name in (site.past_key, site.past_value, site.present_key, site.present_value))
    stack = [node_of(reader.values, place.node) for place in (site.key, site.value)]
    seen = {node for node in stack if node.op_type == "Concat"}
    stack = list(seen)
    while stack:
        for output in stack.pop().outputs:
            yield output
            for use in output.uses():
                if use.node in reader.inside and use.node not in reader.products and use.node not in seen:
                    seen.add(use.node)
                    stack.append(use.node)


def _is_end(node: ir.Node, site: AttentionSite) -> bool:
    """A node that only hands a cache to its output, or the Concat of past and new rows."""
    if node.op_type == "Identity":
        return bool({site.present_key, site.present_value} & ends(node.outputs[0]))
    return node_name(node) in (site.node, site.key.node, site.value.node)


def _shape_read(reader: Reader, site: AttentionSite, node: ir.Node) -> ShapeRead:
    if node.op_type != "Shape":
        raise NotRead("the number of elements of its cache is read")
    try:
        cut = cut_out(reader, site, [node.outputs[0]])
        rows = [cut.run(run, feeds(reader, site, run))[0].reshape(-1).tolist() for run in _RUNS]
    except CutFailed as error:
        raise NotRead(f"the shape of its cache is read where it is not known ({error})") from error
    sizes = [_symbol(column) for column in zip(*rows, strict=True)]
    known = tuple(size for size in sizes if size is not None)
    if len(known) < len(sizes) or len({len(row) for row in rows}) > 1:
        raise NotRead("the shape of its cache is read where it does not follow from the inputs' sizes")
    return ShapeRead(node_name(node), known)


def _symbol(column: Sequence[int]) -> tuple[Symbol, int] | None:
    """What a size is in every run."""
    if len(set(column)) == 1:
        return "1", int(column[0])
    bases: tuple[tuple[Symbol, list[int]], ...] = (
        ("B", [run.batch for run in _RUNS]),
        ("S", [run.sequence for run in _RUNS]),
        ("P", [run.past for run in _RUNS]),
        ("T", [run.past + run.sequence for run in _RUNS]),
    )
    for name, base in bases:
        factor, rest = divmod(column[0], base[0])
        if not rest and all(size == factor * one for size, one in zip(column, base, strict=True)):
            return name, int(factor)
    return None
