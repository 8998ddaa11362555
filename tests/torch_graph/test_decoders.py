"""Whole decoders: the answers are those of ONNX Runtime, and losses know their gradients."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

import graphrot
from graphrot.errors import UsageError
from graphrot.quant.grid import WeightGrid
from graphrot.torch_graph import graph as graph_module
from graphrot.torch_graph.graph import TorchGraph
from graphrot.torch_graph.loss import EndToEnd
from graphrot.torch_graph.ops.call import Call, Op, Result
from graphrot.torch_graph.ops.table import operator
from graphrot.torch_graph.rounding import Rounding
from tests.exported import tiny_onnx
from tests.torch_graph.learnable import Learnable, answer, rows, tiny_learnable

NAMES = ("llama", "llama_tied", "qwen3", "phi3", "gpt2", "built/llama", "built/qwen2")
Kind = Literal["ce", "kl"]


def rounding(case: Learnable, **options: bool) -> Rounding:
    return Rounding(case.linears, 4, WeightGrid(4), sites=case.sites, kv_bits=4, **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_answers_as_in_onnx_runtime(name: str) -> None:
    case = tiny_learnable(name)
    feeds = case.feeds(rows())
    expected = answer(case.fixed, feeds)
    graph = TorchGraph(case.model)
    assert graph.keys == {key: len(matrix) for key, matrix in case.matrices.items()}
    found = graph.run(feeds, ["logits"], matrices=case.start())["logits"]
    plain = graph.run(feeds, ["logits"], plain=True)["logits"]
    assert found.requires_grad and not plain.requires_grad
    for result in (found, plain):
        assert np.abs(result.detach().numpy() - expected).max() < 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_float64_twin_answers_to_the_last_digits(name: str) -> None:
    case = tiny_learnable(name, double=True)
    feeds = case.feeds(rows())
    expected = answer(case.fixed, feeds, double=True)
    found = TorchGraph(case.model, dtype=torch.float64).run(feeds, ["logits"], matrices=case.matrices)["logits"]
    assert found.dtype == torch.float64
    assert np.abs(found.numpy() - expected).max() < 1e-12 * np.abs(expected).max()


def test_tokens_after_others_answer_as_in_onnx_runtime() -> None:
    case = tiny_learnable("llama")
    tokens = rows()
    feeds = case.feeds(tokens)
    expected = answer(case.fixed, feeds)
    graph = TorchGraph(case.model)
    pairs = {pair.past: pair.present for pair in case.facts.caches}
    first = case.feeds(tokens[:, :7])
    stored = graph.run(first, list(pairs.values()), matrices=case.matrices)
    later = {**feeds, "input_ids": tokens[:, 7:], "position_ids": feeds["position_ids"][:, 7:]}
    later |= {past: stored[present].numpy() for past, present in pairs.items()}
    found = graph.run(later, ["logits"], matrices=case.matrices)["logits"].numpy()
    assert np.abs(found - expected[:, 7:]).max() < 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["llama", "gpt2", "built/llama"])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_segments_give_the_same_loss_and_gradient(name: str, loss: Kind) -> None:
    case = tiny_learnable(name)
    found = []
    for checkpointed in (False, True):
        objective = EndToEnd(case.model, rounding(case), loss, caches=case.facts.caches, checkpointed=checkpointed)
        matrices = case.start()
        value = objective(matrices, rows())
        value.backward()
        found.append((value, [matrix.grad for matrix in matrices.values()]))
    (first, grads), (second, again) = found
    assert torch.equal(first, second)
    for one, other in zip(grads, again, strict=True):
        assert one is not None and other is not None
        assert one.abs().max() > 1e-3
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_segments_compute_their_softmax_again_and_their_products_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counting(domain: str, op_type: str) -> Op | None:
        run = operator(domain, op_type)

        def counted(call: Call) -> Result:
            calls.append(op_type)
            assert run is not None
            return run(call)

        return counted

    monkeypatch.setattr(graph_module, "operator", counting)
    case = tiny_learnable("llama")
    objective = EndToEnd(case.model, rounding(case), caches=case.facts.caches, checkpointed=True)
    value = objective(case.start(), rows())
    forwards = calls.count("Softmax")
    value.backward()
    assert (forwards, calls.count("Softmax")) == (2, 4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("loss", "top_k"), [("ce", None), ("kl", None), ("kl", 5)])
def test_the_gradient_is_that_of_finite_differences(name: str, loss: Kind, top_k: int | None) -> None:
    """In float64 and without rounding; the matrices are moved off the orthogonal ones, where the loss changes."""
    case = tiny_learnable(name, double=True)
    caches = case.facts.caches
    objective = EndToEnd(case.model, Rounding(), loss, top_k, caches=caches, dtype=torch.float64, checkpointed=True)
    generator = torch.Generator().manual_seed(3)

    def noise(matrix: torch.Tensor) -> torch.Tensor:
        return torch.randn(matrix.shape, generator=generator, dtype=torch.float64)

    moved = {key: (m + 0.02 * noise(m)).requires_grad_() for key, m in case.matrices.items()}
    directions = {key: noise(m) for key, m in moved.items()}
    tokens = rows(2, 6)
    objective(moved, tokens).backward()
    expected = sum(float((m.grad * directions[key]).sum()) for key, m in moved.items() if m.grad is not None)
    step = 1e-5
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            there = {key: m + sign * step * directions[key] for key, m in moved.items()}
            sides.append(float(objective(there, tokens)))
    measured = (sides[0] - sides[1]) / (2 * step)
    assert abs(expected) > 1e-2
    assert abs(measured - expected) < 1e-6 * abs(expected)


def test_without_rounding_the_divergence_is_zero_and_flat() -> None:
    case = tiny_learnable("llama", double=True)
    objective = EndToEnd(case.model, Rounding(), "kl", caches=case.facts.caches, dtype=torch.float64)
    matrices = case.start()
    value = objective(matrices, rows())
    value.backward()
    assert abs(value.item()) < 1e-12
    assert all(m.grad is not None and m.grad.abs().max() < 1e-12 for m in matrices.values())


def test_the_divergence_is_the_sum_over_tokens() -> None:
    case = tiny_learnable("llama")
    tokens = rows()
    feeds = case.feeds(tokens)
    rounded, plain = (
        TorchGraph(case.model, rounding=rounding(case)).run(feeds, ["logits"], matrices=case.matrices, plain=plain)
        for plain in (False, True)
    )
    q, p = (torch.log_softmax(part["logits"][:, :-1].double(), -1) for part in (rounded, plain))
    full = float((p.exp() * (p - q)).sum(-1).mean())
    values = {}
    for top_k in (None, 130, 7):
        objective = EndToEnd(case.model, rounding(case), "kl", top_k, caches=case.facts.caches)
        values[top_k] = float(objective(case.matrices, tokens))
    assert values[None] == pytest.approx(full, rel=1e-5)
    assert values[130] == pytest.approx(full, rel=1e-5)
    assert 0 < values[7] < full


def test_rounded_answers_are_those_of_the_written_model() -> None:
    """Its codes, too: what is left is the summation order, and a code that it tips now and then."""
    case = tiny_learnable("llama")
    options = {"group": "channel", "embedding": "none", "head": "none", "solver": "rtn", "certificate": "off"}
    written = graphrot.convert(tiny_onnx("llama"), recipe="w4a4kv4", **options).model
    feeds = case.feeds(rows())
    caches = {v.name: v for v in written.graph.inputs if v.name and v.name.startswith("past")}
    empty = {
        name: np.zeros((2, int(v.shape[1]), 0, int(v.shape[3])), v.dtype.numpy())
        for name, v in caches.items()
        if v.shape is not None and v.dtype is not None
    }
    expected = answer(written, {**feeds, **empty})
    exact = answer(case.fixed, feeds)
    found = TorchGraph(case.model, rounding=rounding(case)).run(feeds, ["logits"], matrices=case.matrices)["logits"]
    assert np.linalg.norm(found.numpy() - expected) < 0.02 * np.linalg.norm(exact - expected)


def test_what_is_missing_or_contradicts_is_refused() -> None:
    case = tiny_learnable("llama")
    graph = TorchGraph(case.model)
    feeds = case.feeds(rows())
    key = next(iter(case.matrices))
    with pytest.raises(UsageError, match="A rotation has no matrix"):
        graph.run(feeds, ["logits"])
    with pytest.raises(UsageError, match=r"shape \[3, 3\]"):
        graph.run(feeds, ["logits"], matrices={**case.matrices, key: torch.eye(3)})
    with pytest.raises(UsageError, match="no value 'answers'"):
        graph.run(feeds, ["answers"], matrices=case.matrices)
    with pytest.raises(UsageError, match="'input_ids' is not fed"):
        graph.run({k: v for k, v in feeds.items() if k != "input_ids"}, ["logits"], matrices=case.matrices)
    with pytest.raises(UsageError, match="top_k"):
        EndToEnd(case.model, Rounding(), "ce", 5)
    with pytest.raises(UsageError, match="rows of two tokens"):
        EndToEnd(case.model, Rounding(), caches=case.facts.caches)(case.matrices, rows(2, 1))
    with pytest.raises(UsageError, match="sites"):
        Rounding(kv_bits=4)
    with pytest.raises(UsageError, match="float32 or float64"):
        TorchGraph(case.model, dtype=torch.float16)
