"""What a decoder is fed: tokens, their masks and positions, empty caches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import CachePair
from graphrot.errors import InputRefused


def token_feeds(model: ir.Model, tokens: np.ndarray, caches: Sequence[CachePair] = ()) -> dict[str, np.ndarray]:
    """The inputs of a decoder for rows of tokens that start anew.

    Args:
        model: a decoder.
        tokens: ``[B, S]`` int64.
        caches: what the analysis found; says how wide caches are whose declaration leaves it open.

    Returns:
        Arrays for the inputs that the graph reads.

    Raises:
        InputRefused: an input that is not a decoder's.
    """
    known = {pair.past: pair for pair in caches}
    read = [value for value in model.graph.inputs if value.uses()]
    return {value.name or "": _feed(value, tokens, known.get(value.name or "")) for value in read}


def _feed(value: ir.Value, tokens: np.ndarray, cache: CachePair | None) -> np.ndarray:
    assert value.dtype is not None
    dtype = value.dtype.numpy()
    batch, length = tokens.shape
    if value.name == "input_ids":
        return tokens.astype(dtype)
    if value.name == "attention_mask":
        return np.ones(tokens.shape, dtype)
    if value.name == "position_ids":
        return np.broadcast_to(np.arange(length, dtype=dtype), tokens.shape).copy()
    if value.name == "token_type_ids":
        return np.zeros(tokens.shape, dtype)
    shape = [] if value.shape is None else list(value.shape)
    if cache is not None:
        return np.zeros((*[2] * (len(shape) == 5), batch, cache.heads, 0, cache.width), dtype)
    if len(shape) != 4 or not isinstance(shape[1], int) or not isinstance(shape[3], int):
        raise InputRefused(
            "Calibration does not know what to feed to an input",
            where=f"input {value.name!r}, shape [{', '.join(str(size) for size in shape)}]",
            why="it is neither tokens, mask, positions, token types nor a cache [batch, heads, length, width]",
            do="use --solver clip",
        )
    return np.zeros((batch, shape[1], 0, shape[3]), dtype)
