"""Runs a model layer by layer on calibration text, so that every layer is solved on its real inputs.

Only one segment of the model is in memory at a time (see ``segments.py``), with the tensors that
cross its ends. Each group of linears sees the rounded inputs that it will see in the written model,
computed by the already quantized layers before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import LinearRef
from graphrot.errors import InputRefused, UsageError
from graphrot.graph import read_constant, value_map
from graphrot.progress import Progress, silent
from graphrot.quant.activations import fake_quantize_tokens
from graphrot.quant.grid import QuantizedTensor
from graphrot.quant.hessian import SecondMoment
from graphrot.quant.segments import LinearGroup, Segment, cut, group_linears
from graphrot.quant.session import SegmentSession, quantized_name
from graphrot.quant.weights import load_weight, stored_layout


@dataclass(frozen=True)
class CalibratedGroup:
    """What a solver gets.

    Args:
        group: the linears, which all read one tensor.
        weights: ``[N, K]`` float32 each, in the order of ``group.linears``.
        moment: of the (rounded) inputs ``X``: ``X.T X [K, K]``, the sum of the rows, and their number.
    """

    group: LinearGroup
    weights: tuple[np.ndarray, ...]
    moment: SecondMoment

    @property
    def hessian(self) -> np.ndarray:
        """``X.T X``."""
        return self.moment.matrix

    @property
    def tokens(self) -> int:
        """Rows of ``X``."""
        return self.moment.tokens


Solve = Callable[[CalibratedGroup], Sequence[QuantizedTensor | None]]
"""Answers one tensor per linear of the group; None leaves that linear as it is."""


class LayerwiseCalibrator:
    """Walks through a model group by group.

    Args:
        model: nodes in topological order; it is only read.
        linears: the linears to quantize, in any order.
        feeds: batches of graph inputs by name; caches are empty.
        activation_bits: round the linears' inputs per token, or None.
        threads: threads of ONNX Runtime; None: its own choice.
        progress: told after every group.
        step: the name of the step in progress reports.

    Raises:
        UsageError: no batch was given.
        InputRefused: a graph input is missing in a batch, or a linear does not fit.
    """

    def __init__(
        self,
        model: ir.Model,
        linears: Sequence[LinearRef],
        feeds: Sequence[Mapping[str, np.ndarray]],
        *,
        activation_bits: Literal[4, 8] | None = None,
        threads: int | None = None,
        progress: Progress = silent,
        step: str = "calibrate",
    ) -> None:
        if not feeds:
            raise UsageError("Calibration needs at least one batch of tokens")
        self._model = model
        self._values = value_map(model)
        self._segments = cut(model, group_linears(model, linears))
        self._bits = activation_bits
        self._threads = threads
        self._progress = progress
        self._step = step
        self._carried: list[dict[str, np.ndarray]] = [dict(feed) for feed in feeds]
        wanted = {value.name for value in model.graph.inputs}
        for segment in self._segments:
            for name in segment.inputs:
                if name in wanted and any(name not in feed for feed in feeds):
                    raise InputRefused("A graph input is missing in the calibration batches", where=f"input {name!r}")

    @property
    def groups(self) -> list[LinearGroup]:
        """The groups, in the order in which they are solved."""
        return [segment.group for segment in self._segments]

    def run(
        self, solve: Solve, *, known: Sequence[Sequence[QuantizedTensor | None]] = ()
    ) -> dict[str, QuantizedTensor]:
        """Solve every group in order.

        Args:
            solve: called once per group that is not known; later groups see the weights it answers.
            known: what ``solve`` has answered for the first groups in an earlier run. The model runs through
                them all the same, so that later groups see what they saw then, bit by bit.

        Returns:
            Node (first output) -> quantized weight, without those that were left as they are.
        """
        result: dict[str, QuantizedTensor] = {}
        ready: dict[str, tuple[int, np.ndarray]] = {}
        renamed: dict[str, str] = {}
        for position, segment in enumerate(self._segments):
            group = segment.group
            moment = None if position < len(known) else SecondMoment(group.linears[0].in_features)
            self._advance(segment, ready, renamed, moment)
            weights = tuple(load_weight(self._values, linear) for linear in group.linears)
            solved = known[position] if moment is None else solve(CalibratedGroup(group, weights, moment))
            for linear, weight, tensor in zip(group.linears, weights, solved, strict=True):
                if tensor is not None:
                    result[linear.node] = tensor
                    weight = tensor.dequantize()
                ready[linear.node] = (linear.weight_input, stored_layout(weight, linear, self._dtype(linear)))
                if self._bits is not None:
                    renamed[linear.node] = group.input
            if moment is None:
                step = f"resuming: {len(known)} of {len(self._segments)} groups done"
                self._progress(step, position + 1, len(known))
            else:
                self._progress(self._step, position + 1, len(self._segments))
        return result

    def _dtype(self, linear: LinearRef) -> np.dtype[np.generic]:
        value = self._values[linear.weight]
        return read_constant(value).dtype if value.dtype is None else value.dtype.numpy()

    def _advance(
        self,
        segment: Segment,
        ready: dict[str, tuple[int, np.ndarray]],
        renamed: dict[str, str],
        moment: SecondMoment | None,
    ) -> None:
        """Run one segment over all batches and gather the moment, if it is asked for, of the tensor it ends in."""
        name = segment.group.input
        here = [node for node in ready if node in segment.made]
        weights = {node: ready.pop(node) for node in here}
        reading = {node: renamed.pop(node) for node in here if node in renamed}
        width = segment.group.linears[0].in_features
        session: SegmentSession | None = None
        for carried in self._carried:
            if segment.outputs:
                session = session or SegmentSession(
                    self._model, segment, weights=weights, renamed=reading, example=carried, threads=self._threads
                )
                carried.update(session.run(carried))
            inputs = carried[name]
            if inputs.shape[-1] != width:
                raise InputRefused(
                    f"A linear of {width} input channels reads a tensor of shape {list(inputs.shape)}",
                    where=f"tensor {name!r}",
                )
            if self._bits is not None:
                inputs = carried[quantized_name(name)] = fake_quantize_tokens(inputs, self._bits)
                if not segment.shared:
                    del carried[name]
            if moment is not None:
                moment.add(inputs)
            for dropped in segment.drop:
                carried.pop(dropped, None)
                carried.pop(quantized_name(dropped), None)
