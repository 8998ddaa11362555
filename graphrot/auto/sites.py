"""What the linears behind one site lose by rounding, with the site's rotation and without it.

Both figures are taken on the activations of one rotated float model: without the rotation, inputs and weight are turned
back by the site's own matrix, and everything else stays as it is. Such an error is local. It proposes which sites might
do without their rotation; whether they do, the whole model says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphrot.analysis.types import LinearRef
from graphrot.auto.session import model_session
from graphrot.folded import Rotate
from graphrot.graph import drop_unused_initializers, value_map
from graphrot.passes.refs import current_linears
from graphrot.plan.types import Rotation, RotationPlan
from graphrot.quant.activations import fake_quantize_tokens
from graphrot.quant.clip import quantize_clip
from graphrot.quant.gptq import gptq_many
from graphrot.quant.grid import WeightGrid
from graphrot.quant.hessian import SecondMoment
from graphrot.quant.rtn import quantize_rtn
from graphrot.quant.weights import load_weight
from graphrot.recipe import Recipe

TOKENS = 1024
"""Tokens whose activations are taken."""


def site_errors(
    model: ir.Model,
    linears: Sequence[LinearRef],
    plan: RotationPlan,
    recipe: Recipe,
    feeds: Sequence[Mapping[str, np.ndarray]],
    folder: Path,
) -> dict[str, tuple[float, float]]:
    """Relative squared output errors of the linears behind each site, of kinds that have several sites.

    Args:
        model: rotated by ``plan``, float, sorted; only read.
        linears: of the source.
        plan: the rotations.
        recipe: how weights and inputs are rounded.
        feeds: batches of graph inputs.
        folder: for the session's file, owned by the caller.

    Returns:
        Space -> ``(without the rotation, with it)``; sites in front of no linear are left out.
    """
    now = dict(zip((was.node for was in linears), current_linears(model, linears), strict=True))
    kinds = Counter(rotation.space.kind for rotation in plan.rotations)
    found = [(rotation, list(_readers(rotation, now))) for rotation in plan.rotations if kinds[rotation.space.kind] > 1]
    wanted = sorted({linear.input for _, readers in found for linear, _ in readers})
    if not wanted:
        return {}
    session = model_session(_with_outputs(model, wanted), folder)
    inputs: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for feed in feeds:
        for name, array in zip(wanted, session.run(wanted, dict(feed)), strict=True):
            inputs[name].append(np.asarray(array, np.float32).reshape(-1, array.shape[-1]))
    rows = {name: np.concatenate(parts) for name, parts in inputs.items()}
    values = value_map(model)
    result = {}
    for rotation, readers in found:
        lost = np.zeros((2, 2))
        for linear, back in readers:
            x, weight = rows[linear.input], load_weight(values, linear)
            x0, weight0 = (back.apply(array.astype(np.float64)).astype(np.float32) for array in (x, weight))
            lost += [_lost(x0, weight0, recipe), _lost(x, weight, recipe)]
        if readers and lost[:, 1].all():
            without, with_it = (lost[:, 0] / lost[:, 1]).tolist()
            result[rotation.space.id] = (without, with_it)
    return result


def _readers(rotation: Rotation, now: Mapping[str, LinearRef]) -> Iterator[tuple[LinearRef, Rotate]]:
    """The linears behind a site, and what turns their inputs ``[T, K]`` and weights ``[N, K]`` back."""
    for use in rotation.space.consumers:
        linear = now.get(use.node)
        if linear is not None and not linear.is_head and use.input == linear.weight_input:
            yield linear, Rotate(1, use.groups, rotation.matrix, inverse=True)


def _lost(x: np.ndarray, weight: np.ndarray, recipe: Recipe) -> tuple[float, float]:
    """Squared error of the product after rounding, and the squared product."""
    exact = x @ weight.T
    rounded = x if recipe.activation_bits is None else fake_quantize_tokens(x, recipe.activation_bits)
    weight = _rounded(weight, rounded, recipe)
    return float(np.square(rounded @ weight.T - exact).sum()), float(np.square(exact).sum())


def _rounded(weight: np.ndarray, inputs: np.ndarray, recipe: Recipe) -> np.ndarray:
    """A weight as the recipe's solver rounds it, on the recipe's own grid."""
    if recipe.weight_bits is None:
        return weight
    grid = WeightGrid(recipe.weight_bits, recipe.group_size, symmetric=recipe.symmetric is not False)
    if recipe.solver == "gptq":
        moment = SecondMoment(weight.shape[1])
        moment.add(inputs)
        return gptq_many([weight], moment.matrix, grid)[0].dequantize()
    return (quantize_rtn if recipe.solver == "rtn" else quantize_clip)(weight, grid).dequantize()


def _with_outputs(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """A copy whose only outputs are some of its tensors."""
    copy = model.clone()
    values = value_map(copy)
    del copy.graph.outputs[:]
    for name in names:
        value = values[name]
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        copy.graph.outputs.append(value)
    RemoveUnusedNodesPass()(copy)
    drop_unused_initializers(copy)
    copy.graph.sort()
    return copy
