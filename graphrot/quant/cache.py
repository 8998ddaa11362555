"""Static scales for a quantized cache, as ONNX Runtime's GroupQueryAttention takes them.

It stores keys and values as ``x ~ scale * q`` with codes from -8 to 7 or from -128 to 127, and scales that were known
before: one for all keys of a node, or one for each channel of each head; likewise for values. They are calibrated here
on the model's own keys and values: as they go into the cache, after rotary positions and rotations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import AttentionSite
from graphrot.errors import InputRefused, UsageError
from graphrot.progress import Progress, silent
from graphrot.quant.clip import clip_scales, squared_error
from graphrot.quant.grid import WeightGrid
from graphrot.quant.segments import LinearGroup, Segment, cut
from graphrot.quant.session import SegmentSession

SHRINKS = tuple(0.94**power for power in range(40))
"""Factors on the range that are tried: from 1 to 0.09. Few keys can be far larger than the others."""


@dataclass(frozen=True)
class SiteScales:
    """Scales of one attention.

    Args:
        key: float32, positive; ``[1]``, or ``[kv_heads, head_size]`` where channels have their own.
        value: likewise.
        key_error: relative error of the stored keys on the calibration text, a ratio of norms.
        value_error: likewise.
    """

    key: np.ndarray
    value: np.ndarray
    key_error: float
    value_error: float


def cache_scales(
    model: ir.Model,
    sites: Sequence[AttentionSite],
    feeds: Sequence[Mapping[str, np.ndarray]],
    *,
    bits: Literal[4, 8],
    per: Literal["tensor", "channel"] = "channel",
    method: Literal["minmax", "mse"] = "mse",
    threads: int | None = None,
    progress: Progress = silent,
    step: str = "cache scales",
) -> dict[str, SiteScales]:
    """Calibrate the scales of quantized caches. Only a part of the model, up to the next cache, is in memory at a time.

    Args:
        model: with float caches, rotated already, nodes in topological order; it is only read.
        sites: its attention; ``present_key`` and ``present_value`` are ``[B, kv_heads, T, head_size]``.
        feeds: batches of graph inputs by name; caches are empty.
        bits: of a stored number.
        per: what shares a scale.
        method: ``minmax``: scales reach all that the batches show. ``mse``: the least squared error of keys and of
            values, on the batches.
        threads: threads of ONNX Runtime; None: its own choice.
        progress: told after every site.
        step: the name of the step in progress reports.

    Returns:
        Node (first output) of a site -> its scales.

    Raises:
        UsageError: no batch was given.
        InputRefused: a part of the model does not run, or its keys or values are not finite.
    """
    if not feeds:
        raise UsageError("Calibration needs at least one batch of tokens")
    made = {value.name: position for position, node in enumerate(model.graph) for value in node.outputs}
    names = {name for site in sites for name in (site.present_key, site.present_value)}
    order = sorted(names, key=lambda name: made.get(name, -1))
    carried = [dict(feed) for feed in feeds]
    found: dict[str, tuple[np.ndarray, float]] = {}
    for position, segment in enumerate(cut(model, [LinearGroup(name, ()) for name in order])):
        seen = _advance(model, segment, carried, threads)
        found[segment.group.input] = _scales(seen, WeightGrid(bits), per, method, segment.group.input)
        progress(step, position + 1, len(order))
    result = {}
    for site in sites:
        (key, key_error), (value, value_error) = found[site.present_key], found[site.present_value]
        result[site.node] = SiteScales(key, value, key_error, value_error)
    return result


def _advance(
    model: ir.Model, segment: Segment, carried: Sequence[dict[str, np.ndarray]], threads: int | None
) -> np.ndarray:
    """Run one segment over all batches; returns what they show of the cache it ends in, ``[heads, tokens, D]``."""
    session: SegmentSession | None = None
    name, seen = segment.group.input, []
    for batch in carried:
        if segment.outputs:
            session = session or SegmentSession(model, segment, weights={}, renamed={}, example=batch, threads=threads)
            batch.update(session.run(batch))
        seen.append(np.concatenate(list(np.asarray(batch[name], np.float32)), axis=1))
        for dropped in segment.drop:
            batch.pop(dropped, None)
    return np.concatenate(seen, axis=1)


def _scales(
    seen: np.ndarray, grid: WeightGrid, per: Literal["tensor", "channel"], method: Literal["minmax", "mse"], name: str
) -> tuple[np.ndarray, float]:
    """Scales of ``[heads, tokens, D]``, and the relative error that they leave."""
    if not np.isfinite(seen).all():
        raise InputRefused(
            "The model makes keys or values that are not finite on the calibration text", where=f"output {name!r}"
        )
    heads, _, width = seen.shape
    rows = seen.reshape(1, -1) if per == "tensor" else seen.swapaxes(1, 2).reshape(heads * width, -1)
    scales, _ = clip_scales(rows, grid, shrinks=SHRINKS if method == "mse" else SHRINKS[:1])
    error = squared_error(rows[:, None], scales, None, grid, None).sum(dtype=np.float64)
    size = np.square(rows, dtype=np.float64).sum()
    relative = float(np.sqrt(error / size)) if size else 0.0
    return scales.reshape(1) if per == "tensor" else scales.reshape(heads, width), relative
