"""The data of the losses under other matrices are what a model that is rotated by these matrices holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from graphrot.folded import materialize
from graphrot.graph import value_map
from graphrot.learn.checkpoint import as_tensors
from graphrot.learn.local import LocalTask
from graphrot.learn.parts import Turned, changes, turned
from graphrot.learn.sites import data_free_task, local_task
from graphrot.learn.subject import Subject
from graphrot.learn.tap import tap
from graphrot.passes.refs import current_linears
from graphrot.plan.learned import with_file
from graphrot.prepare import rotated_graph
from graphrot.progress import silent
from graphrot.quant.weights import load_weight
from graphrot.quantize import calibration_feeds
from graphrot.rotation.file import read_rotations, write_rotations
from tests.learn.subjects import recipe, subject


def other(found: Subject, seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {key: np.linalg.qr(generator.standard_normal(matrix.shape))[0] for key, matrix in found.start.items()}


def task_of(found: Subject, **changes: object) -> LocalTask:
    tokens = np.random.default_rng(1).integers(0, 131, (6, 24))
    return local_task(found, recipe(**changes), tokens, heldout=2, seed=0, progress=silent)


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "qwen3"])
def test_rows_and_weights_turn_with_the_matrices(name: str, tmp_path: Path) -> None:
    found = subject(name, tmp_path, recipe())
    matrices = other(found, 5)
    write_rotations(tmp_path / "r.safetensors", matrices, {})
    plan = with_file(found.plan, read_rotations(tmp_path / "r.safetensors"))
    model = rotated_graph(found.source.model, plan, quantizes=True)
    materialize(model, None)
    linears = current_linears(model, found.facts.linears)
    turns = changes(as_tensors(found.start), as_tensors(matrices))
    parts, weights = data_of(found)

    tokens = np.random.default_rng(2).integers(0, 131, (2, 9))
    positions = [np.arange(9)] * 2
    feeds = calibration_feeds(model, tokens.reshape(-1), found.facts.caches, window=9)
    names = dict.fromkeys([linear.input for linear in linears if not linear.is_head])
    before = tap(found.model, [*names], feeds, positions, progress=silent)
    after = tap(model, [*names], feeds, positions, progress=silent)
    assert parts and set(parts) <= set(names)
    for tensor, acting in parts.items():
        moved = turned(torch.from_numpy(before[tensor]), acting, turns).numpy()
        scale = np.abs(after[tensor]).max()
        assert np.abs(before[tensor] - after[tensor]).max() > 0.1 * scale
        assert np.abs(moved - after[tensor]).max() < 1e-4 * scale
    values = value_map(model)
    compared = 0
    for linear in linears:
        if linear.node in weights:
            moved = weights[linear.node](turns)
            wanted = load_weight(values, linear)
            assert np.abs(moved - wanted).max() < 1e-5 * np.abs(wanted).max()
            compared += 1
    assert compared >= 4


def data_of(found: Subject) -> tuple[dict[str, tuple[Turned, ...]], Mapping[str, object]]:
    """What acts on which input, and a way to turn each weight, as the local loss sees them."""
    from graphrot.learn import sites

    linears = [linear for linear in found.linears if not linear.is_head]
    acting: dict[str, tuple[Turned, ...]] = {}
    moved = {}
    for node, weight in sites._weights(found, linears).items():
        linear = next(linear for linear in linears if linear.node == node)
        if weight.inputs:
            acting[linear.input] = weight.inputs

        def turn(turns: Mapping[str, torch.Tensor], weight: sites.Weight = weight) -> np.ndarray:
            numbers = turned(torch.from_numpy(weight.load()), weight.inputs, turns)
            return turned(numbers.T, weight.outputs, turns).T.numpy()

        if weight.inputs or weight.outputs:
            moved[node] = turn
    return acting, moved


def test_the_cache_is_among_the_rows(tmp_path: Path) -> None:
    found = subject("llama", tmp_path, recipe())
    task = task_of(found)
    kinds = [entry.kind for entry in task._rows]
    assert kinds.count("cache") == 2 and kinds.count("activation") == 6, "values, and inputs of qkv, o, gate and up"
    cached = next(entry for entry in task._rows if entry.kind == "cache")
    assert cached.heads == 1 and cached.learned.shape[1] == 16
    assert len(cached.learned) == 4 * 24 and 2 * 24 <= len(cached.heldout) <= 64


def test_held_out_rows_are_of_other_sequences(tmp_path: Path) -> None:
    found = subject("llama", tmp_path, recipe())
    same = [int((e.learned[:, None, :] == e.heldout[None]).all(-1).sum()) for e in task_of(found)._rows]
    assert sum(count == 0 for count in same) >= 5, "all but the first layer's, which knows the token alone"


def test_what_the_recipe_does_not_round_is_not_in_the_loss(tmp_path: Path) -> None:
    found = subject("llama", tmp_path, recipe())
    start = as_tensors(found.start)
    full = task_of(found)
    parts = [
        task_of(found, activations=None, kv=None),
        task_of(found, weights=None, kv=None),
        task_of(found, weights=None, activations=None),
    ]
    losses = [float(task(start, task.heldout[0])) for task in (full, *parts)]
    assert losses[0] == pytest.approx(sum(losses[1:]), rel=1e-5)
    assert all(loss > 1e-4 for loss in losses)


def test_the_loss_does_not_hang_on_the_basis_of_its_data(tmp_path: Path) -> None:
    """Data from a model that other matrices rotate give the same loss for the same matrices."""
    first = subject("llama", tmp_path / "0", recipe(seed=0, weights=None))
    second = subject("llama", tmp_path / "1", recipe(seed=1, weights=None))
    matrices = as_tensors(other(first, 7))
    losses = []
    for found in (first, second):
        task = task_of(found, weights=None)
        losses.append(float(task(matrices, task.heldout[0])))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_gradients_reach_every_matrix(tmp_path: Path) -> None:
    found = subject("gpt2", tmp_path, recipe())
    for task in (task_of(found), data_free_task(found, 0)):
        leaves = {key: matrix.requires_grad_() for key, matrix in as_tensors(found.start).items()}
        loss = task(leaves, task.batch(np.random.default_rng(0)))
        loss.backward()
        for key, leaf in leaves.items():
            assert leaf.grad is not None and float(leaf.grad.abs().max()) > 0, key


def test_batches_depend_on_the_generator_alone(tmp_path: Path) -> None:
    task = task_of(subject("llama", tmp_path, recipe()))
    one, same, another = (task.batch(np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert one.tokens is not None and same.tokens is not None and another.tokens is not None
    assert torch.equal(one.tokens, same.tokens) and one.weights == same.weights
    assert not torch.equal(one.tokens, another.tokens)
