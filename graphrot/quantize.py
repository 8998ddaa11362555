"""From a rotated model to integers: solve the weights, round the activations, lower to the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import AttentionSites, CachePair, Facts, LinearRef
from graphrot.emit.ort import emit_ort
from graphrot.emit.portable import emit_portable
from graphrot.emit.report import QuantizedEntry
from graphrot.errors import InputRefused
from graphrot.graph import WeightStore, is_constant, node_of, read_constant, value_map
from graphrot.passes.quantize_activations import QuantizeActivations
from graphrot.passes.quantize_cache import QuantizeCache
from graphrot.passes.quantize_grouped import QuantizeGrouped
from graphrot.passes.quantize_tables import QuantizeTables, TableItem
from graphrot.passes.quantize_weights import QuantizeWeights
from graphrot.passes.refs import current_linears
from graphrot.plan.types import RotationPlan
from graphrot.progress import Progress
from graphrot.quant.cache import SiteScales, cache_scales
from graphrot.quant.feeds import token_feeds
from graphrot.quant.grid import QuantizedTensor, WeightGrid
from graphrot.quant.groups import SolvedGroups
from graphrot.quant.linears import quantize_linears, quantize_weights
from graphrot.quant.tables import quantize_table
from graphrot.quant.unrotated import source_shifts, source_table
from graphrot.recipe import Recipe
from graphrot.texts import Texts

CALIBRATION_TOKENS = 4096
"""Tokens of the calibration text, in windows of :data:`CALIBRATION_WINDOW`."""

SHORTEST_CALIBRATION = 64
"""Tokens that a calibration text must have."""

CALIBRATION_WINDOW = 512


@dataclass(frozen=True)
class Quantized:
    """What was quantized, and what a user has to know about how it runs."""

    entries: tuple[QuantizedEntry, ...] = ()
    notes: tuple[str, ...] = ()
    bits_per_weight: float | None = None
    """Stored bits per weight of the linears without the head, scales included."""


def quantize(
    model: ir.Model,
    source: ir.Model,
    facts: Facts,
    plan: RotationPlan,
    recipe: Recipe,
    *,
    texts: Texts,
    scratch: Path,
    solved: SolvedGroups | None = None,
    longest: int | None = None,
    sites: AttentionSites | None = None,
    compared: bool = True,
    calibration: np.ndarray | None = None,
    progress: Progress,
) -> Quantized:
    """Quantize ``model`` in place as the recipe says, and lower it to the recipe's target.

    Args:
        model: rotated, float32, opset 21 or later.
        source: the model before rotation; only read. Its weights' errors are taken beside those of the rotated ones.
        facts: of the source; names of linears and tables.
        plan: says whether embedding and head share a table, and which grids weights have where each has its own.
        recipe: what to quantize, and how.
        texts: for gptq.
        scratch: a folder for new weights, owned by the caller.
        solved: the groups that gptq has solved, kept for an interrupted run; None: nothing is kept.
        longest: tokens that the model takes at once; None: a calibration window, or more.
        sites: the attention whose cache is quantized, found in ``source``.
        compared: take the errors that the source's weights would have had, too.
        calibration: ``[T] int64``, the tokens to calibrate on; None: the first :data:`CALIBRATION_TOKENS` of the text.
        progress: told of each layer.

    Raises:
        InputRefused: something in the model cannot be quantized, or gptq has no text.
    """
    if not recipe.quantizes:
        return Quantized()
    store = WeightStore(scratch)
    read = calibration
    if read is None:
        read = texts.tokens(CALIBRATION_TOKENS) if recipe.calibrates else np.empty(0, np.int64)
    scales = _cache_scales(model, facts, recipe, sites, read, longest, progress)
    linears = current_linears(model, facts.linears)
    body = [linear for linear in linears if not linear.is_head]
    heads = [linear for linear in linears if linear.is_head]
    compared = compared and bool(plan.rotations)
    shifts = source_shifts(plan.gain_folds, source, facts.linears) if compared else None
    grids = _grids(plan, facts.linears, linears)
    tensors = _solve(model, body, recipe, grids, facts.caches, read, scratch, solved, longest, shifts, progress)
    rounding = None
    if recipe.activation_bits is not None:
        rounding = QuantizeActivations(plan, body, bits=recipe.activation_bits)
        rounding(model)
    tables = QuantizeTables(plan, _tables(model, facts, plan, heads, recipe), store=store)
    tables(model)
    shared = {plan.tie.head.node} if plan.tie is not None and recipe.head_bits is not None else set()
    alone = [linear for linear in heads if linear.node not in shared]
    items = [(linear, tensors[linear.node]) for linear in body if linear.node in tensors]
    heads_alone = _heads(model, alone, recipe, compared=compared)
    weights = QuantizeWeights(plan, chain(items, heads_alone), store=store)
    weights(model)
    if sites is not None:
        _store_cache(model, sites, plan, recipe, scales)
    written = [*weights.records, *tables.heads]
    activations = rounding.records if rounding is not None else []
    float16 = recipe.dtype == "float16"
    if recipe.target != "portable":
        report = emit_ort(
            model,
            store=store,
            linears=written,
            tables=tables.records,
            activations=activations,
            float16=float16,
            kernels=recipe.kernels,
            provider=recipe.provider,
        )
    else:
        report = emit_portable(
            model,
            linears=written,
            tables=tables.records,
            activations=activations,
            float16=float16,
            provider=recipe.provider,
        )
    model.graph.sort()
    return Quantized(report.quantized, report.notes, report.linear_bits_per_weight)


def _grid(bits: Literal[4, 8], recipe: Recipe) -> WeightGrid:
    return WeightGrid(bits, recipe.group_size, symmetric=recipe.symmetric is not False)


def _grids(
    plan: RotationPlan, linears: Sequence[LinearRef], current: Sequence[LinearRef]
) -> dict[str, WeightGrid] | None:
    """The grid of every linear by the name it has now; None where all have the recipe's."""
    if not plan.grids:
        return None
    chosen = {choice.node: WeightGrid(choice.bits, choice.group, choice.symmetric) for choice in plan.grids}
    missing = [linear.node for linear in linears if not linear.is_head and linear.node not in chosen]
    if missing:
        raise InputRefused(
            "The plan has no grid for a linear of this model",
            where=f"output {missing[0]!r}",
            do="make the plan again from this model",
        )
    return {now.node: chosen[was.node] for was, now in zip(linears, current, strict=True) if was.node in chosen}


def _solve(
    model: ir.Model,
    body: Sequence[LinearRef],
    recipe: Recipe,
    grids: Mapping[str, WeightGrid] | None,
    caches: Sequence[CachePair],
    read: np.ndarray,
    scratch: Path,
    solved: SolvedGroups | None,
    longest: int | None,
    shifts: Mapping[str, np.ndarray] | None,
    progress: Progress,
) -> dict[str, QuantizedTensor]:
    if recipe.weight_bits is None or recipe.solver is None:
        return {}
    feeds = []
    if recipe.solver == "gptq":
        window = longest or CALIBRATION_WINDOW
        feeds = calibration_feeds(model, read, caches, window=window)
    return quantize_linears(
        model,
        body,
        grid=grids or _grid(recipe.weight_bits, recipe),
        solver=recipe.solver,
        activation_bits=recipe.activation_bits,
        feeds=feeds,
        scratch=scratch,
        solved=solved,
        unrotated=shifts,
        progress=progress,
    )


def _cache_scales(
    model: ir.Model,
    facts: Facts,
    recipe: Recipe,
    sites: AttentionSites | None,
    read: np.ndarray,
    longest: int | None,
    progress: Progress,
) -> dict[str, SiteScales]:
    """Scales of a cache that ONNX Runtime's own attention reads, from the rotated model before anything is rounded."""
    if not recipe.stock_cache or sites is None:
        return {}
    assert recipe.kv_bits is not None and recipe.kv_scales is not None and recipe.kv_range is not None
    feeds = calibration_feeds(model, read, facts.caches, window=longest or CALIBRATION_WINDOW)
    model.graph.sort()
    return cache_scales(
        model,
        sites.sites,
        feeds,
        bits=recipe.kv_bits,
        per=recipe.kv_scales,
        method=recipe.kv_range,
        progress=progress,
    )


def _store_cache(
    model: ir.Model, sites: AttentionSites, plan: RotationPlan, recipe: Recipe, scales: Mapping[str, SiteScales]
) -> None:
    """Let the cache hold integers."""
    bits = recipe.kv_bits
    if bits is None or not sites.sites:
        return
    if not recipe.stock_cache:
        QuantizeCache(plan, sites, bits=bits)(model)
        return
    assert recipe.kv_scales is not None
    pairs = {node: (found.key, found.value) for node, found in scales.items()}
    cuda = recipe.provider == "cuda"
    QuantizeGrouped(plan, sites, bits=bits, per=recipe.kv_scales, scales=pairs, cuda=cuda)(model)


def _table_grid(bits: Literal[4, 8], recipe: Recipe) -> WeightGrid:
    """Rows of 8 bits need one scale; rows of 4 bits take the recipe's groups."""
    return WeightGrid(bits, recipe.group_size if bits == 4 else None, symmetric=recipe.symmetric is not False)


def _tables(
    model: ir.Model, facts: Facts, plan: RotationPlan, heads: Sequence[LinearRef], recipe: Recipe
) -> Iterator[TableItem]:
    bits = recipe.embedding_bits
    if bits is None:
        return
    values = value_map(model)
    for embedding in facts.embeddings:
        table = node_of(values, embedding.node).inputs[embedding.table_input]
        assert table is not None and table.name
        head = None
        if plan.tie is not None and plan.tie.embedding.node == embedding.node:
            head = next(linear for linear in heads if linear.node == plan.tie.head.node)
        grid, solver = _table_grid(bits, recipe), _table_solver(bits)
        tensor = quantize_table(read_constant(table), grid, solver=solver)
        if plan.rotations:
            before = source_table(table)
            error = tensor.error if before is None else quantize_table(before, grid, solver=solver).error
            tensor = replace(tensor, error_without_rotation=error)
        yield TableItem(replace(embedding, table=table.name), tensor, head)


def _table_solver(bits: Literal[4, 8]) -> Literal["rtn", "clip"]:
    return "rtn" if bits == 8 else "clip"


def _heads(
    model: ir.Model, heads: Sequence[LinearRef], recipe: Recipe, *, compared: bool
) -> Iterator[tuple[LinearRef, QuantizedTensor]]:
    bits = recipe.head_bits
    if bits is None:
        return iter(())
    return quantize_weights(model, heads, grid=_table_grid(bits, recipe), solver=_table_solver(bits), compared=compared)


def calibration_feeds(
    model: ir.Model, tokens: np.ndarray, caches: Sequence[CachePair] = (), *, window: int = CALIBRATION_WINDOW
) -> list[dict[str, np.ndarray]]:
    """Batches of graph inputs, one window of tokens each, caches empty.

    Args:
        model: a decoder.
        tokens: ``[T] int64``; a last window that is not full is left out, unless it is the only one.
        caches: what the analysis found; says how wide caches are whose declaration leaves it open.
        window: tokens of a window, at most; no more than the model has positions for.

    Raises:
        InputRefused: an input that is not a decoder's.
    """
    size = min(window, len(tokens), _longest(model))
    windows = [tokens[start : start + size][None] for start in range(0, len(tokens) - size + 1, max(size, 1))]
    return [token_feeds(model, window, caches) for window in windows if size]


def _longest(model: ir.Model) -> int:
    """Tokens that the model's tables of rotary positions are for."""
    longest = CALIBRATION_WINDOW
    for node in model.graph:
        position = {"GroupQueryAttention": 7, "RotaryEmbedding": 2}.get(node.op_type)
        table = node.inputs[position] if position is not None and position < len(node.inputs) else None
        if table is not None and node.domain == "com.microsoft" and is_constant(table):
            longest = min(longest, read_constant(table).shape[0])
    return longest
