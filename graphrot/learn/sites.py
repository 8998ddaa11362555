"""The data of the local and of the data-free loss, taken from the model at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from graphrot.analysis.types import LinearRef
from graphrot.errors import InputRefused
from graphrot.graph import read_constant, value_map
from graphrot.learn.checkpoint import as_tensors
from graphrot.learn.data_free import DataFreeTask, split_vectors
from graphrot.learn.local import GPTQ_SHARE, LocalTask, Rows, Weight
from graphrot.learn.parts import Operand, Turned, operands
from graphrot.learn.subject import Subject, named_in
from graphrot.learn.tap import tap
from graphrot.progress import Progress
from graphrot.quant.grid import WeightGrid
from graphrot.quant.weights import load_weight
from graphrot.quantize import calibration_feeds
from graphrot.recipe import Recipe

ROW_BYTES = 512 << 20
"""Bytes that the rows of all tensors take, at most."""

HELDOUT_TOKENS = 64
"""Tokens of every tensor that the held-out loss looks at, at most."""


def data_free_task(subject: Subject, seed: int) -> DataFreeTask:
    """From the weights alone.

    Raises:
        InputRefused: no weight of the rotations can be read.
    """
    generator = np.random.default_rng((seed, 1))
    values = value_map(subject.model)
    found = []
    for operand in operands(subject.rotations, subject.shapes):
        value = subject.operand(operand.node, operand.input, values)
        assert value is not None
        numbers = read_constant(value)
        for axis, parts in operand.axes.items():
            found += [split_vectors(part, numbers, axis, generator) for part in parts]
    if not found:
        raise InputRefused("No weight of the rotations can be read", where=", ".join(subject.start))
    return DataFreeTask(as_tensors(subject.start), found)


def local_task(
    subject: Subject, recipe: Recipe, sequences: np.ndarray, *, heldout: int, seed: int, progress: Progress
) -> LocalTask:
    """From rows of the tensors that the recipe rounds, as the model makes them on text.

    Args:
        subject: the model.
        recipe: what is rounded.
        sequences: ``[count, length] int64``.
        heldout: how many of them, the last ones, are not learned on.
        seed: picks the tokens.
        progress: told of every tensor.

    Raises:
        InputRefused: nothing that is learned is rounded, or the model does not run.
    """
    found = [linear for linear in subject.linears if not linear.is_head]
    turned = _weights(subject, found)
    activations: dict[str, dict[str, Turned]] = {}
    if recipe.activation_bits is not None:
        for linear in found:
            for part in turned[linear.node].inputs:
                activations.setdefault(linear.input, {})[part.key] = part
    caches = _caches(subject, recipe)
    weights = [weight for weight in turned.values() if weight.inputs or weight.outputs]
    if not activations and not caches and (recipe.weight_bits is None or not weights):
        raise InputRefused(
            "Nothing that the recipe rounds depends on rotations that can be learned",
            where=", ".join(subject.start),
            do="round weights, activations or the cache, or learn more sites",
        )
    read = (
        {}
        if not activations and not caches
        else _read(subject, [*activations, *caches], sequences, heldout=heldout, seed=seed, progress=progress)
    )
    rows = [Rows("activation", *_tensors(read[name]), tuple(parts.values())) for name, parts in activations.items()]
    rows += [Rows("cache", *_tensors(read[name]), (part,), heads) for name, (part, heads) in caches.items()]
    grid = None
    if recipe.weight_bits is not None:
        grid = WeightGrid(recipe.weight_bits, recipe.group_size, symmetric=recipe.symmetric is not False)
    return LocalTask(
        as_tensors(subject.start),
        rows,
        weights,
        activation_bits=recipe.activation_bits,
        kv_bits=recipe.kv_bits,
        grid=grid,
        share=GPTQ_SHARE if recipe.solver == "gptq" else 1.0,
    )


def _tensors(pair: tuple[np.ndarray, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(pair[0]), torch.from_numpy(pair[1])


def _weights(subject: Subject, linears: Sequence[LinearRef]) -> dict[str, Weight]:
    """The linears' weights by node, with what acts on their channels."""
    values = value_map(subject.model)
    uses = {(operand.node, operand.input): operand for operand in operands(subject.rotations, subject.shapes)}
    result = {}
    for linear in linears:
        operand = uses.get((linear.node, linear.weight_input), Operand(linear.node, linear.weight_input, {}))
        first, second = operand.axes.get(0, ()), operand.axes.get(1, ())
        inputs, outputs = (first, second) if linear.layout == "KN" else (second, first)
        result[linear.node] = Weight(partial(load_weight, values, linear), inputs, outputs)
    return result


def _caches(subject: Subject, recipe: Recipe) -> dict[str, tuple[Turned, int]]:
    """Values and keys of quantized caches that a learnable matrix acts on: tensor -> what acts, and heads."""
    result: dict[str, tuple[Turned, int]] = {}
    if recipe.kv_bits is None:
        return result
    for site in subject.sites.sites:
        for name in (site.present_key, site.present_value):
            rotation = named_in(subject.rotations, name)
            if rotation is not None and rotation.space.dim == site.head_size:
                whole = Turned.of(rotation.space.id, (((0, 1, site.head_size),),), site.head_size)
                result[name] = (whole, site.kv_heads)
    return result


def _read(
    subject: Subject, names: Sequence[str], sequences: np.ndarray, *, heldout: int, seed: int, progress: Progress
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rows to learn on, and held-out ones, by name."""
    count, length = sequences.shape
    learned = count - heldout
    width = sum(_width(subject, name) for name in names)
    budget = max(HELDOUT_TOKENS, ROW_BYTES // (4 * width))
    generator = np.random.default_rng((seed, 2))
    each = min(length, -(-budget // learned))
    few = min(length, -(-HELDOUT_TOKENS // heldout))
    positions = [
        np.sort(generator.choice(length, each if number < learned else few, replace=False)) for number in range(count)
    ]
    feeds = calibration_feeds(subject.model, sequences.reshape(-1), subject.facts.caches, window=length)
    rows = tap(subject.model, names, feeds, positions, progress=progress)
    shares = each * learned / (each * learned + few * heldout)
    result = {}
    for name, numbers in rows.items():
        at = round(len(numbers) * shares)
        result[name] = (numbers[:at], numbers[at:])
    return result


def _width(subject: Subject, name: str) -> int:
    """Numbers of a token in a tensor."""
    widths = {linear.input: linear.in_features for linear in subject.linears}
    heads: Mapping[str, int] = {
        present: site.kv_heads * site.head_size
        for site in subject.sites.sites
        for present in (site.present_key, site.present_value)
    }
    return widths.get(name, heads.get(name, 0))
