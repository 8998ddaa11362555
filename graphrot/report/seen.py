"""The activations of a converted model, as they would be in the source's basis and as they are in its own.

From the written model alone they are rotated back by the plan's matrices, which leaves out the gains of norms: those
are part of the weights now. With the source at hand the plan is replayed on it, and nothing is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import Runs, WeightUse, decode_runs
from graphrot.evaluate.outliers import Seen, tensors_in_both
from graphrot.evaluate.watch import Watched
from graphrot.folded import Rotate
from graphrot.graph import value_map
from graphrot.plan.types import Rotation, RotationPlan
from graphrot.progress import Progress

_FUSED = "RotatedMatMul"
"""The operator that does the transform in front of it by itself."""


@dataclass(frozen=True)
class _Tap:
    """A tensor of the written model, and the rotations between the source's basis and its own."""

    space: str
    kind: str
    back: tuple[Rotate, ...]
    """What the tensor has been through, to be undone in the reverse order."""
    on: tuple[Rotate, ...]
    """What it goes through before it meets the weight."""


def seen_in_written(path: Path, plan: RotationPlan, tokens: np.ndarray, *, folder: Path) -> Iterator[Seen]:
    """What the rotations of a written model change, from its own activations.

    Args:
        path: the written .onnx file.
        plan: its plan.
        tokens: ``[T] int64``.
        folder: scratch; takes a copy of the model.
    """
    model = ir.load(path)
    taps: dict[str, tuple[int, _Tap]] = {}
    for (use, rotations), node in _readers(model, plan):
        name = node.inputs[0].name if node.inputs and node.inputs[0] is not None else None
        if not name or name in taps:
            continue
        merged = tuple(_edit(use, r) for r in rotations if r.placement == "merged")
        online = tuple(_edit(use, r) for r in rotations if r.placement == "online")
        fused = node.op_type == _FUSED and "rotate" in node.attributes and node.attributes["rotate"].as_int() == 1
        back, on = (merged, online) if fused else ((*merged, *online), ())
        space = rotations[0].space
        taps[name] = _width(use.groups), _Tap(space.id, space.kind, back, on)
    values = value_map(model)
    for rotation in plan.rotations:
        space = rotation.space
        if space.consumers or space.exits:
            continue
        for place in space.online:
            if place.tensor in values and place.tensor not in taps:
                on = (Rotate(1, place.groups, rotation.matrix),)
                taps[place.tensor] = place.width, _Tap(space.id, space.kind, (), on)
    widths = {name: width for name, (width, _) in taps.items()}
    if not widths:
        return
    del model, values
    for name, array in Watched(path, widths, folder).run(tokens):
        tap = taps[name][1]
        before = after = array.astype(np.float64)
        for edit in reversed(tap.back):
            before = edit.transposed(1).apply(before)
        for edit in tap.on:
            after = edit.apply(after)
        yield Seen(tap.space, tap.kind, name, before.astype(np.float32), after.astype(np.float32))


def seen_unrotated(
    path: Path, quantized: Sequence[Mapping[str, Any]], tokens: np.ndarray, *, folder: Path
) -> Iterator[Seen]:
    """The inputs of the quantized linears of a model that was not rotated: both bases are one.

    Args:
        path: the written .onnx file.
        quantized: what ``graphrot.json`` has of them.
        tokens: ``[T] int64``.
        folder: scratch; takes a copy of the model.
    """
    model = ir.load(path)
    nodes = _by_output(model)
    widths: dict[str, int] = {}
    for entry in quantized:
        node = nodes.get(str(entry.get("node")))
        value = node.inputs[0] if node is not None and node.op_type != "Gather" and node.inputs else None
        if node is not None and value is not None and value.name and value.producer() is not None:
            widths[value.name] = 0
    del model, nodes
    for name, array in Watched(path, widths, folder).run(tokens) if widths else ():
        yield Seen("", f"{array.shape[-1]} channels", name, array, array)


def seen_from_source(
    spec: str, plan: RotationPlan, recipe: Mapping[str, Any], tokens: np.ndarray, *, folder: Path, progress: Progress
) -> Iterator[Seen]:
    """The same from the source: the plan is replayed on it, and the rotated float model runs.

    Raises:
        UsageError: the plan was made for another source.
        InputRefused: the source cannot be used.
    """
    from graphrot.analysis.analyze import analyze
    from graphrot.folded import materialize
    from graphrot.graph import WeightStore
    from graphrot.model.load import load_source, widened
    from graphrot.model.save import save_model
    from graphrot.plan.replay import same_source
    from graphrot.prepare import opened_up, rotated_graph

    for name in ("export", "widened", "rotated", "model"):
        (folder / name).mkdir()
    source = widened(load_source(spec, workdir=folder / "export", progress=progress), folder / "widened")
    same_source(plan, source.sha256)
    rotary = any(r.space.kind == "R3" for r in plan.rotations) or recipe.get("kv") is not None
    source = opened_up(source, rotary=rotary)
    facts = analyze(source.model, progress=progress)
    rotated = rotated_graph(source.model, plan, quantizes=False)
    materialize(rotated, WeightStore(folder / "rotated"), progress=progress)
    path = folder / "model" / "model.onnx"
    save_model(rotated, path)
    yield from tensors_in_both(path, rotated, source.model, facts, plan, tokens, folder=path.parent)


def _readers(model: ir.Model, plan: RotationPlan) -> Iterator[tuple[tuple[WeightUse, tuple[Rotation, ...]], ir.Node]]:
    """Consumers of rotated channels in graph order: all rotations that meet at one of them, and its node."""
    met: dict[str, tuple[WeightUse, list[Rotation]]] = {}
    helpers = {plan.tie_matrix, *(fold.lookup.number for fold in plan.mean_folds if fold.lookup is not None)}
    if plan.tie is not None and plan.tie_matrix is not None:
        helpers.add(plan.tie.head.node)  # reads what the small matrix made
    for rotation in plan.rotations:
        for use in rotation.space.consumers:
            if use.node in helpers:  # small matrices beside a shared table
                continue
            met.setdefault(use.node, (use, []))[1].append(rotation)
    order = {id(node): number for number, node in enumerate(model.graph)}
    nodes = _by_output(model)
    found = [((use, tuple(rotations)), nodes[name]) for name, (use, rotations) in met.items() if name in nodes]
    return iter(sorted(found, key=lambda entry: order[id(entry[1])]))


def _by_output(model: ir.Model) -> dict[str, ir.Node]:
    """Nodes by their first output and, for those that took up a bias behind them, by that of the linear they were."""
    nodes = {node.outputs[0].name: node for node in model.graph if node.outputs and node.outputs[0].name}
    named = {(node.name or "").removesuffix(".rotated"): node for node in model.graph if node.op_type == _FUSED}
    return {str(name): node for name, node in {**named, **nodes}.items()}


def _edit(use: WeightUse, rotation: Rotation) -> Rotate:
    own = next(other for other in rotation.space.consumers if (other.node, other.input) == (use.node, use.input))
    return Rotate(1, own.groups, rotation.matrix)


def _width(groups: tuple[Runs, ...]) -> int:
    return 1 + max(max(decode_runs(group)) for group in groups)
