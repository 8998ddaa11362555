"""How far a model's answers move when one of its weights is rounded.

The measure is the divergence ``KL(float || rounded)`` of the next token, in nats, on text: it is zero for the model
itself and has far less noise than a difference of likelihoods, so that some hundred tokens tell weights apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphrot.analysis.types import LinearRef
from graphrot.auto.session import model_session
from graphrot.errors import InputRefused
from graphrot.graph import drop_unused_initializers, node_of, read_constant, value_map
from graphrot.quant.weights import stored_layout

LOGITS = "logits"

_ROWS = 64
"""Positions whose logits are widened to float64 at a time."""


class WeightEffects:
    """A float model in one session, any of whose weights can be replaced for a run.

    Args:
        model: rotated or not, not quantized, sorted; it is only read.
        linears: those whose weights will be replaced, with the names that ``model`` has.
        feeds: batches of graph inputs by name.
        folder: for the session's file, owned by the caller.

    Raises:
        InputRefused: ONNX Runtime does not take the model, or it has no logits.
    """

    def __init__(
        self,
        model: ir.Model,
        linears: Sequence[LinearRef],
        feeds: Sequence[Mapping[str, np.ndarray]],
        folder: Path,
    ) -> None:
        self._feeds = [dict(feed) for feed in feeds]
        self._linears = {linear.node: linear for linear in linears}
        values = value_map(model)
        self._weights = {
            _input_name(linear.node): np.ascontiguousarray(read_constant(values[linear.weight])) for linear in linears
        }
        self._session = model_session(_with_inputs(model, linears), folder)
        self._before = [self._log_probabilities({}, feed) for feed in self._feeds]

    def divergence(self, node: str, weight: np.ndarray) -> float:
        """Mean ``KL`` over all positions with one weight replaced.

        Args:
            node: the linear, by its first output.
            weight: ``[N, K]`` float32.
        """
        return float(self.divergences({node: weight}).mean())

    def divergences(self, weights: Mapping[str, np.ndarray]) -> np.ndarray:
        """``KL`` of every position, ``[T] float64``, with some weights (``[N, K]``, by node) replaced."""
        replaced = {}
        for node, weight in weights.items():
            name = _input_name(node)
            replaced[name] = stored_layout(weight, self._linears[node], self._weights[name].dtype)
        found = []
        for before, feed in zip(self._before, self._feeds, strict=True):
            found.append(divergence(before, self._log_probabilities(replaced, feed)))
        return np.concatenate(found)

    def _log_probabilities(self, replaced: Mapping[str, np.ndarray], feed: Mapping[str, np.ndarray]) -> np.ndarray:
        try:
            (logits,) = self._session.run([LOGITS], {**feed, **self._weights, **replaced})
        except Exception as error:  # onnxruntime raises bare subclasses of its own
            raise InputRefused(
                "The model does not run on the calibration text",
                why=str(error).strip()[:300],
                do="check that it runs in ONNX Runtime, and that the text fits its vocabulary and length",
            ) from error
        return log_softmax(np.asarray(logits, dtype=np.float32).reshape(-1, logits.shape[-1]))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """``[T, V]`` float32 logits -> log probabilities, in place where possible; sums in float64."""
    for start in range(0, len(logits), _ROWS):
        rows = logits[start : start + _ROWS]
        rows -= rows.max(axis=-1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return logits


def divergence(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """``KL(before || after)`` of every row of log probabilities ``[T, V]``, ``[T] float64``."""
    result = np.empty(len(before), dtype=np.float64)
    for start in range(0, len(before), _ROWS):
        rows = slice(start, start + _ROWS)
        result[rows] = (np.exp(before[rows]) * (before[rows] - after[rows])).sum(axis=-1, dtype=np.float64)
    return result


def _input_name(node: str) -> str:
    return f"{node}//weight"


def _with_inputs(model: ir.Model, linears: Sequence[LinearRef]) -> ir.Model:
    """A copy whose weights are inputs and whose only output is the logits."""
    copy = model.clone()
    outputs = [value for value in copy.graph.outputs if value.name == LOGITS]
    if not outputs:
        raise InputRefused(
            "The model has no logits",
            where="outputs " + ", ".join(str(value.name) for value in copy.graph.outputs),
            why="choices are made by what the model answers",
            do="give a decoder with logits out, or name rotations and grids yourself",
        )
    values = value_map(copy)
    for linear in linears:
        node = node_of(values, linear.node)
        old = node.inputs[linear.weight_input]
        assert old is not None
        array = read_constant(old)
        dtype = ir.DataType.from_numpy(array.dtype)
        fed = ir.Value(name=_input_name(linear.node), shape=ir.Shape(array.shape), type=ir.TensorType(dtype))
        node.replace_input_with(linear.weight_input, fed)
        copy.graph.inputs.append(fed)
    del copy.graph.outputs[:]
    copy.graph.outputs.extend(outputs)
    RemoveUnusedNodesPass()(copy)
    drop_unused_initializers(copy)
    copy.graph.sort()
    return copy
