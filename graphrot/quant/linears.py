"""Quantizes the weights of a model's linears with one of the solvers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import LinearRef
from graphrot.errors import UsageError
from graphrot.graph import value_map
from graphrot.progress import Progress, silent
from graphrot.quant.calibrate import CalibratedGroup, LayerwiseCalibrator
from graphrot.quant.clip import quantize_clip
from graphrot.quant.gptq import gptq_many
from graphrot.quant.grid import Grids, QuantizedTensor, grid_of
from graphrot.quant.groups import SolvedGroups
from graphrot.quant.rtn import quantize_rtn
from graphrot.quant.store import CodeStore
from graphrot.quant.unrotated import gptq_errors, source_weight
from graphrot.quant.weights import load_weight

Solver = Literal["rtn", "clip", "gptq"]

STEP = "quantize weights"
"""The name of the step in progress reports."""


def quantize_linears(
    model: ir.Model,
    linears: Sequence[LinearRef],
    *,
    grid: Grids,
    solver: Solver,
    activation_bits: Literal[4, 8] | None = None,
    feeds: Sequence[Mapping[str, np.ndarray]] = (),
    scratch: Path | None = None,
    solved: SolvedGroups | None = None,
    unrotated: Mapping[str, np.ndarray] | None = None,
    threads: int | None = None,
    progress: Progress = silent,
) -> dict[str, QuantizedTensor]:
    """Quantize linears; the model is only read.

    Args:
        model: float model, rotated or not, nodes in topological order, weights memory-mapped.
        linears: which linears; each has a two-dimensional constant weight.
        grid: the grid of all of them, or of each by its node.
        solver: ``rtn`` and ``clip`` look at the weights alone, ``gptq`` runs ``feeds`` through the model.
        activation_bits: what the written model will round the linears' inputs to (gptq only).
        feeds: batches of graph inputs by name, caches empty (gptq only).
        scratch: folder for the codes, owned by the caller; None: in memory.
        solved: takes every solved group, and gives those of an interrupted run (gptq only); None: nothing is kept.
        unrotated: take the errors of the source's weights, too; holds the shifts that gptq needs for that, see
            :func:`graphrot.quant.unrotated.source_shifts`. None: leave them out.
        threads: threads of ONNX Runtime; None: its own choice.
        progress: told after every tensor or group.

    Returns:
        Node (first output) -> quantized weight.

    Raises:
        UsageError: gptq without feeds.
        InputRefused: a weight or the graph does not fit.
    """
    store = CodeStore(scratch)
    if solver != "gptq":
        tensors = quantize_weights(
            model, linears, grid=grid, solver=solver, compared=unrotated is not None, progress=progress
        )
        return {linear.node: store.keep(tensor) for linear, tensor in tensors}
    if not feeds:
        raise UsageError("The solver gptq needs calibration text", do="give one, or use the solver clip")

    calibrator = LayerwiseCalibrator(
        model, linears, feeds, activation_bits=activation_bits, threads=threads, progress=progress, step=STEP
    )
    known = [] if solved is None else solved.load(calibrator.groups, grid)
    positions = count(len(known))
    values = value_map(model)

    def solve(task: CalibratedGroup) -> list[QuantizedTensor]:
        grids = [grid_of(grid, linear.node) for linear in task.group.linears]
        tensors = gptq_many(task.weights, task.hessian, grids)
        if unrotated is not None:
            errors = gptq_errors(task.group.linears, values, task.moment, tensors, grid, unrotated)
            tensors = [replace(t, error_without_rotation=e) for t, e in zip(tensors, errors, strict=True)]
        if solved is not None:
            return solved.keep(next(positions), task.group, tensors)
        return [store.keep(tensor) for tensor in tensors]

    return calibrator.run(solve, known=known)


def quantize_weights(
    model: ir.Model,
    linears: Sequence[LinearRef],
    *,
    grid: Grids,
    solver: Literal["rtn", "clip"],
    compared: bool = False,
    progress: Progress = silent,
) -> Iterator[tuple[LinearRef, QuantizedTensor]]:
    """Quantize weights one by one, without calibration; one float weight is in memory at a time.

    Args:
        model: it is only read.
        linears: which linears, answered in this order.
        grid: the grid of all of them, or of each by its node.
        solver: rounding to nearest or clip search.
        compared: take the error of the source's weight, too.
        progress: told after every tensor.

    Raises:
        InputRefused: a weight does not fit.
    """
    values = value_map(model)
    quantize = quantize_rtn if solver == "rtn" else quantize_clip
    for position, linear in enumerate(linears):
        own = grid_of(grid, linear.node)
        tensor = quantize(load_weight(values, linear), own)
        if compared:
            before = source_weight(values[linear.weight], linear)
            error = tensor.error if before is None else quantize(before.numbers, own).error
            tensor = replace(tensor, error_without_rotation=error)
        yield linear, tensor
        progress(STEP, position + 1, len(linears))
