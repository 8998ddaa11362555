"""Rows of the tensors that are rounded, as the rotated model makes them on calibration text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.progress import Progress
from graphrot.quant.segments import LinearGroup, cut
from graphrot.quant.session import SegmentSession

STEP = "reading activations"


def tap(
    model: ir.Model,
    names: Sequence[str],
    feeds: Sequence[Mapping[str, np.ndarray]],
    positions: Sequence[np.ndarray],
    *,
    progress: Progress,
) -> dict[str, np.ndarray]:
    """Run a model part by part and keep some rows of some tensors.

    Args:
        model: rotated, float, nodes in topological order; it is only read.
        names: tensors ``[1, S, K]``, ``[S, K]`` or ``[1, H, S, D]``; graph inputs are refused.
        feeds: batches of graph inputs by name, one row of tokens each, caches empty.
        positions: for each batch the tokens to keep.
        progress: told after every tensor.

    Returns:
        ``[rows, K]`` float32 by name; of ``[1, H, S, D]`` it is ``[rows * H, D]``, the heads of a token together.

    Raises:
        InputRefused: a part of the model does not run, or a tensor has another form or numbers that are not finite.
    """
    made = {value.name: position for position, node in enumerate(model.graph) for value in node.outputs}
    order = sorted(dict.fromkeys(names), key=lambda name: made.get(name, -1))
    carried = [dict(feed) for feed in feeds]
    found: dict[str, np.ndarray] = {}
    for done, segment in enumerate(cut(model, [LinearGroup(name, ()) for name in order])):
        name = segment.group.input
        session: SegmentSession | None = None
        rows = []
        for batch, kept in zip(carried, positions, strict=True):
            if segment.outputs:
                session = session or SegmentSession(model, segment, weights={}, renamed={}, example=batch, threads=None)
                batch.update(session.run(batch))
            rows.append(_rows(batch[name], kept, name))
            for dropped in segment.drop:
                batch.pop(dropped, None)
        found[name] = np.concatenate(rows)
        progress(STEP, done + 1, len(order))
    return found


def _rows(tensor: np.ndarray, kept: np.ndarray, name: str) -> np.ndarray:
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim not in (3, 4) or tensor.shape[0] != 1 or tensor.shape[-2] <= kept.max(initial=0):
        raise InputRefused(
            "A tensor that is rounded has a form that is not read",
            where=f"tensor {name!r}, shape {list(tensor.shape)}",
            why="rows of [1, tokens, channels], [tokens, channels] or [1, heads, tokens, channels] are",
            do="use --loss data-free",
        )
    rows = np.take(tensor, kept, axis=-2)
    if tensor.ndim == 4:
        rows = np.moveaxis(rows, 1, 2)
    rows = np.ascontiguousarray(rows, dtype=np.float32).reshape(-1, tensor.shape[-1])
    if not np.isfinite(rows).all():
        raise InputRefused("The model makes numbers that are not finite", where=f"tensor {name!r}")
    return rows
