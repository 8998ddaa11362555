"""The certificate: the rotated, not yet quantized model must answer like the source.

It measures on random tokens and, where there is a tokenizer, on text. A measurement proves something
only if it can fail: the same rotated model with one inverse left out is measured too, and must be over
the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import OnlineUse, WeightUse
from graphrot.errors import CheckFailed
from graphrot.evaluate.compare import TOLERANCE, WINDOW, Difference, Reference, fitting, random_probes, text_probes
from graphrot.evaluate.double import exact_in_double, to_double
from graphrot.evaluate.session import DecoderSession, Unrunnable, open_decoder
from graphrot.folded import Rotate, edit_operand, used_names
from graphrot.graph import node_of, value_map
from graphrot.model.onnxfile import reopen_onnx
from graphrot.model.save import save_model
from graphrot.plan.types import Rotation, RotationPlan
from graphrot.progress import Progress, silent

TEXT_TOKENS = 1024
"""Tokens of text that a conversion is certified on, if there is a tokenizer."""

SMALL = 64 * 2**20
"""Models with at most so many bytes of weights are also measured in float64."""


CONTROLS = 6
"""How many inverses are left out, one at a time, before a control counts as blind. One is nearly always enough."""


@dataclass(frozen=True)
class Certificate:
    """What was measured; ``relative``, ``tolerance`` and ``control_relative`` are parts of the largest logit."""

    mode: Literal["full"]
    max_abs: float
    relative: float
    top1: float
    tolerance: float
    dtype: Literal["float32", "float64"]
    tokens: int
    control_relative: float | None


def certify(
    source: Path,
    rotated: Path,
    plan: RotationPlan,
    *,
    rotate: Callable[[ir.Model], ir.Model],
    text: Sequence[int] | np.ndarray = (),
    window: int = WINDOW,
    progress: Progress = silent,
) -> Certificate:
    """Measure ``rotated`` against ``source``, in float32 and, for small models, in float64.

    Args:
        source: the source's .onnx file.
        rotated: the rotated model's file, not quantized; scratch files are written beside it.
        plan: the plan that made it; names the inverse that the control leaves out.
        rotate: runs the same plan on another copy of the source (for float64).
        text: token ids of a text, as much of it as should be used; may be empty.
        window: the longest row of tokens that is run.
        progress: told of each run.

    Returns:
        The float64 measurement where there is one, else the float32 one.

    Raises:
        CheckFailed: a difference over the tolerance, or a control that is not.
        InputRefused: a model does not run, perhaps since ``window`` is longer than it takes.
    """
    single = _measure("float32", source, rotated, plan, text, window, progress)
    double = _in_double(source, plan, rotate, text, window, rotated.parent, progress)
    return double or single


def _measure(
    dtype: Literal["float32", "float64"],
    source: Path,
    rotated: Path,
    plan: RotationPlan,
    text: Sequence[int] | np.ndarray,
    window: int,
    progress: Progress,
) -> Certificate:
    tolerance = TOLERANCE[dtype]
    decoder = _open(source, dtype)
    drawn = fitting(random_probes(decoder.vocabulary, batch=decoder.batch, window=window), decoder)
    written = text_probes(text, limit=len(text), window=window) if decoder.batch in (None, 1) else []
    written = fitting(written, decoder)
    probes = [*drawn, *written]
    with Reference(decoder, probes, progress=progress, step="certificate: the source") as reference:
        del decoder
        found_decoder = _open(rotated, dtype)
        found = reference.compare(found_decoder, progress=progress, step="certificate: the rotated model")
        if not found.within(tolerance):
            raise _failed(found, tolerance, dtype)
        del found_decoder
        control_relative = None
        for number in range(min(CONTROLS, len(removable(plan)))):
            control = write_control(rotated, plan, rotated.with_name(f"{rotated.stem}-control.onnx"), number=number)
            missing = reference.compare(
                _open(control, dtype), count=len(drawn), progress=progress, step="certificate: one inverse left out"
            )
            control_relative = missing.relative
            if control_relative > tolerance:
                break
        if control_relative is not None and control_relative <= tolerance:
            raise CheckFailed(
                "The certificate cannot see a mistake: with one inverse left out the model answers the same",
                where=f"relative difference {control_relative:.2e}, tolerance {tolerance:.2e} ({dtype})",
                why="the rotated part of the model does not reach the logits",
                do="check that the model is the trained one; --certificate off writes it unchecked",
            )
    return Certificate(
        mode="full",
        max_abs=found.max_abs,
        relative=found.relative,
        top1=found.top1,
        tolerance=tolerance,
        dtype=dtype,
        tokens=found.tokens,
        control_relative=control_relative,
    )


def _open(path: Path, dtype: Literal["float32", "float64"]) -> DecoderSession:
    """float64 has no kernel in the library: there the function runs."""
    return open_decoder(path, library=None if dtype == "float32" else False)


def _failed(found: Difference, tolerance: float, dtype: str) -> CheckFailed:
    return CheckFailed(
        "The rotated model does not answer like the source",
        where=(
            f"max |difference| {found.max_abs:.3g}, relative {found.relative:.3g}, "
            f"tolerance {tolerance:.3g} ({dtype}), top-1 agreement {found.top1:.2%} on {found.tokens} tokens"
        ),
        why="a rotation was not undone everywhere; nothing was written",
        do="report the model, or leave sites out with --only",
    )


def _in_double(
    source: Path,
    plan: RotationPlan,
    rotate: Callable[[ir.Model], ir.Model],
    text: Sequence[int] | np.ndarray,
    window: int,
    folder: Path,
    progress: Progress,
) -> Certificate | None:
    """The same in float64; None where the model is large or an operator has no float64 kernel."""
    model = reopen_onnx(source)
    if weight_bytes(model) > SMALL:
        return None
    wide = to_double(model)
    paths = folder / "source64.onnx", folder / "rotated64.onnx"
    save_model(wide, paths[0])
    if not _runs(paths[0]):
        return None
    rotated = rotate(wide)
    if not exact_in_double(rotated):
        return None
    save_model(to_double(rotated), paths[1])
    return _measure("float64", *paths, plan, text, window, progress)


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def _runs(path: Path) -> bool:
    """Whether ONNX Runtime has a kernel for every operator at this type."""
    try:
        _open(path, "float64")
    except Unrunnable:
        return False
    return True


def write_control(rotated: Path, plan: RotationPlan, path: Path, *, number: int = 0) -> Path:
    """Write the rotated model with one inverse left out; weights are shared with ``rotated``'s files.

    Args:
        rotated: the rotated model; ``path`` must be in its folder.
        plan: the plan it was made by.
        path: where to write.
        number: which of :func:`removable` is left out.
    """
    model = ir.load(rotated)
    leave_one_out(model, plan, number=number)
    ir.save(model, path)
    return path


def removable(plan: RotationPlan) -> list[tuple[Rotation, WeightUse | OnlineUse]]:
    """What a control can leave out: first one consumer (or transform) of each rotation, then the others.

    A tied head is none of them, since it shares its table with the embedding.
    """
    tied = plan.tie.head.node if plan.tie is not None else None
    first: list[tuple[Rotation, WeightUse | OnlineUse]] = []
    others: list[tuple[Rotation, WeightUse | OnlineUse]] = []
    for rotation in plan.rotations:
        uses: list[WeightUse | OnlineUse] = [use for use in rotation.space.consumers if use.node != tied]
        uses = uses or [*rotation.space.online]
        first += [(rotation, use) for use in uses[:1]]
        others += [(rotation, use) for use in uses[1:]]
    return first + others


def leave_one_out(model: ir.Model, plan: RotationPlan, *, number: int = 0) -> None:
    """Undo the rotation of one consumer, in place; or, for a rotation that has none, take a transform out."""
    rotation, use = removable(plan)[number]
    if isinstance(use, WeightUse):
        _put_back(model, rotation, use)
        return
    value = value_map(model)[use.tensor]
    transform = next(node for node, _ in value.uses() if node.op_type == "HadamardTransform")
    transform.outputs[0].replace_all_uses_with(value)


def _put_back(model: ir.Model, rotation: Rotation, use: WeightUse) -> None:
    node = node_of(value_map(model), use.node)
    edit_operand(model, node, use.input, Rotate(use.axis, use.groups, rotation.matrix, inverse=True), used_names(model))
