"""How far the largest numbers of activations stand out, in the source's basis and in the new one.

Only the rotated model runs. A rotated weight ``W' = E W`` remembers what was done along its input channels, and from
``x' W' = x W`` follows the source's input ``x = x' E`` (see :mod:`graphrot.quant.unrotated`): exact, and no second
model has to be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import Facts, LinearRef
from graphrot.evaluate.compare import WINDOW, random_probes
from graphrot.evaluate.session import open_decoder
from graphrot.evaluate.watch import Watched
from graphrot.folded import Rotate, Scale
from graphrot.graph import value_map
from graphrot.passes.refs import current_linears
from graphrot.plan.types import Rotation, RotationPlan
from graphrot.quant.unrotated import input_edits, source_shifts, undo


@dataclass(frozen=True)
class Seen:
    """A tensor ``[T, W]`` float32 that a rotation of ``space`` changes: in the source's basis, and in the new one."""

    space: str
    kind: str
    tensor: str
    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class Outlier:
    """Largest over median magnitude of a tensor, zeros aside, in both bases."""

    space: str
    kind: str
    tensor: str
    before: float
    after: float


@dataclass(frozen=True)
class _Input:
    """The input of a linear: which rotation changes it, and the way back."""

    rotation: Rotation
    linear: LinearRef
    edits: tuple[Scale | Rotate, ...]
    shift: np.ndarray | None


def measure_outliers(
    path: Path, rotated: ir.Model, source: ir.Model, facts: Facts, plan: RotationPlan, tokens: np.ndarray
) -> tuple[Outlier, ...]:
    """Outliers of every tensor that a rotation of the plan changes, in graph order.

    Args:
        path: the rotated float model's file; a copy of its graph is written beside it.
        rotated: the same model, whose weights remember their edits.
        source: the model before rotation; only gains and shifts are read.
        facts: of ``source``.
        plan: what ``rotated`` was made by.
        tokens: ``[T] int64``, one row.

    Raises:
        InputRefused: the model does not run on the tokens.
    """
    seen = tensors_in_both(path, rotated, source, facts, plan, tokens, folder=path.parent)
    return tuple(
        Outlier(tensor.space, tensor.kind, tensor.tensor, crest(tensor.before), crest(tensor.after)) for tensor in seen
    )


def first_row(path: Path, text: Callable[[int], np.ndarray] | None, *, longest: int | None = None) -> np.ndarray:
    """``[T] int64``: the start of the text or, without one, the random tokens that a certificate begins with.

    Args:
        path: the model; says how many tokens there are to draw from.
        text: gives its first so many tokens; None: there is none.
        longest: what the model takes at once; None: as much as the row has.
    """
    if text is not None:
        return text(min(WINDOW, longest or WINDOW))
    probe = random_probes(open_decoder(path).vocabulary, batch=1, window=longest or WINDOW)[0]
    return np.asarray(probe.tokens[0])


def crest(array: np.ndarray) -> float:
    """Largest over median magnitude; zeros, which an activation function may make by the thousand, do not count."""
    sizes = np.abs(array[array != 0])
    return float(sizes.max() / np.median(sizes)) if sizes.size else 1.0


def tensors_in_both(
    path: Path,
    rotated: ir.Model,
    source: ir.Model,
    facts: Facts,
    plan: RotationPlan,
    tokens: np.ndarray,
    *,
    folder: Path,
) -> Iterator[Seen]:
    """Every tensor that a rotation of the plan changes, in both bases; see :func:`measure_outliers`.

    Inputs of linears go by the source's name of the tensor; what an online transform alone changes (queries and keys)
    by the tensor in front of it.
    """
    inputs = _inputs(rotated, source, facts, plan)
    online = {
        use.tensor: (rotation, use.groups, use.width)
        for rotation in plan.rotations
        if not rotation.space.consumers and not rotation.space.exits
        for use in rotation.space.online
    }
    widths = {found.linear.input: found.linear.in_features for found in inputs.values()}
    widths |= {name: width for name, (_, _, width) in online.items()}
    if not widths:
        return
    names: dict[str, list[str]] = {}
    for name, found in inputs.items():
        names.setdefault(found.linear.input, []).append(name)
    for name, array in Watched(path, widths, folder).run(tokens):
        for original in names.get(name, ()):
            found = inputs[original]
            before = undo(found.edits, array.astype(np.float64), array.ndim - 1)
            before = before if found.shift is None else before + found.shift
            space = found.rotation.space
            yield Seen(space.id, space.kind, original, before.astype(np.float32), array)
        if name in online:
            rotation, groups, _ = online[name]
            after = Rotate(array.ndim - 1, groups, rotation.matrix).apply(array)
            yield Seen(rotation.space.id, rotation.space.kind, name, array, after.astype(np.float32))


def _inputs(rotated: ir.Model, source: ir.Model, facts: Facts, plan: RotationPlan) -> dict[str, _Input]:
    """Inputs of linears that a rotation changes, by the source's name of the tensor."""
    readers: dict[tuple[str, int], Rotation] = {}
    for rotation in plan.rotations:
        for use in rotation.space.consumers:
            readers.setdefault((use.node, use.input), rotation)
    shifts = source_shifts(plan.gain_folds, source, facts.linears)
    values = value_map(rotated)
    found: dict[str, _Input] = {}
    for linear in facts.linears:
        reader = readers.get((linear.node, linear.weight_input))
        if reader is None or linear.input in found or linear.node not in values:
            continue
        (current,) = current_linears(rotated, [linear])
        edits = input_edits(values[current.weight], current)
        if edits is not None:
            found[linear.input] = _Input(reader, current, edits, shifts.get(linear.node))
    return found
