"""The quantized cache in the pipeline: which attention gets it, and what a user has to know about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import onnx_ir as ir

from graphrot.analysis.cached.find import find_attention
from graphrot.analysis.types import AttentionSites, Facts, Refusal
from graphrot.errors import InputRefused
from graphrot.ops.rotated_attention import row_bytes
from graphrot.passes.quantize_grouped import obstacle
from graphrot.progress import Progress, silent
from graphrot.recipe import Recipe

_OURS_NOTE = (
    "attention reads the {bits}-bit cache directly with graphrot's library (graphrot.register); without it the model "
    "answers alike, and decodes the cache in each call"
)
_STOCK_NOTE = (
    "GroupQueryAttention reads the quantized cache: this needs a recent ONNX Runtime (1.32 runs it, 1.20 does not load "
    "it), and takes a batch of more than one row only as a prompt without a past, or token by token"
)
_COUNTED_NOTE = (
    "attention on CUDA counts the ones of attention_mask: padding must be on the right, behind a row's tokens"
)
_CHANGED_NOTE = "the key/value cache is {form}: caches of the source's type do not fit"


def find_sites(
    model: ir.Model, facts: Facts, recipe: Recipe, *, allow_partial: bool, progress: Progress = silent
) -> AttentionSites:
    """The attention whose cache is to be quantized.

    Args:
        model: opened up, not yet rotated; only read.
        facts: of it.
        recipe: says whose attention it will be.
        allow_partial: go on where some of the caches cannot be quantized.
        progress: told of each place.

    Returns:
        None of it, where the recipe keeps the cache.

    Raises:
        InputRefused: there is no attention over a cache, or some of it cannot be replaced.
    """
    if recipe.kv_bits is None:
        return AttentionSites()
    found = find_attention(model, facts.caches, progress=progress)
    if recipe.stock_cache:
        found = _stock(found, recipe.kv_bits, cuda=recipe.provider == "cuda")
    refused = "; ".join(_words(found.refused))
    if not found.sites:
        raise InputRefused(
            "The model has no cache that can be quantized",
            where=refused or "no attention over past keys and values",
            why=_change(found.refused),
            do="give a model with past_key_values and present as inputs and outputs, or use --kv none",
        )
    if found.refused and not allow_partial:
        raise InputRefused(
            "Not every cache of the model can be quantized",
            where=refused,
            why=_change(found.refused),
            do="--allow-partial leaves the others as they are; --kv none leaves all",
        )
    return found


def _stock(found: AttentionSites, bits: Literal[4, 8], *, cuda: bool) -> AttentionSites:
    """Without the sites where ONNX Runtime's own attention cannot stand."""
    problems = {site.node: obstacle(site, bits, cuda=cuda) for site in found.sites}
    refused = [
        Refusal("KV", site.node, site.op, problem, "kernels graphrot, whose attention takes any mask")
        for site in found.sites
        if (problem := problems[site.node]) is not None
    ]
    if not refused:
        return found
    kept = tuple(site for site in found.sites if problems[site.node] is None)
    return replace(found, sites=kept, refused=(*found.refused, *refused), shares=False)


def cache_notes(found: AttentionSites, recipe: Recipe, kind: str) -> tuple[str, ...]:
    """What a user has to know; a checkpoint, other than an ONNX ``kind``, has no cache to compare."""
    bits = recipe.kv_bits
    if bits is None or not found.sites:
        return ()
    width = found.sites[0].head_size
    row = (width // 2 if bits == 4 else width) if recipe.stock_cache else row_bytes(width, bits)
    dtype = "int8" if recipe.stock_cache and bits == 8 else "uint8"
    notes = []
    if kind in ("onnx", "object", "genai"):
        notes.append(_CHANGED_NOTE.format(form=f"{dtype} [batch, heads, tokens, {row}]"))
    notes.append(_STOCK_NOTE if recipe.stock_cache else _OURS_NOTE.format(bits=bits))
    if recipe.stock_cache and recipe.provider == "cuda" and any(site.pads for site in found.sites):
        notes.append(_COUNTED_NOTE)
    return tuple(notes)


def cache_names(found: AttentionSites | None) -> frozenset[str]:
    """Graph inputs and outputs that are integers afterwards."""
    sites = () if found is None else found.sites
    names = ((s.past_key, s.past_value, s.present_key, s.present_value) for s in sites)
    return frozenset(name for four in names for name in four)


def _words(refused: Sequence[Refusal]) -> list[str]:
    """Refusals of one operator and reason in one phrase, by the first node."""
    groups: dict[tuple[str, str], list[str]] = {}
    for refusal in refused:
        groups.setdefault((refusal.op, refusal.reason), []).append(refusal.node)
    return [
        f"{nodes[0]} ({op}{f', and {len(nodes) - 1} more' if len(nodes) > 1 else ''}): {reason}"
        for (op, reason), nodes in groups.items()
    ]


def _change(refused: Sequence[Refusal]) -> str | None:
    changes = dict.fromkeys(refusal.change for refusal in refused if refusal.change)
    return "; ".join(f"what would change it: {change}" for change in changes) or None
