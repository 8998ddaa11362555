"""Whole decoders: the answers are those of ONNX Runtime, and losses know their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphrot.quant.grid import WeightGrid
from graphrot.torch_graph.graph import TorchGraph
from graphrot.torch_graph.loss import EndToEnd
from graphrot.torch_graph.rounding import Rounding
from tests.torch_graph.learnable import Learnable, answer, rows, tiny_learnable


@pytest.mark.parametrize("checkpointed", [False, True])
def test_llama_answers_as_in_onnx_runtime(checkpointed: bool) -> None:
    case = tiny_learnable("llama")
    feeds = case.feeds(rows())
    expected = answer(case.fixed, feeds)
    graph = TorchGraph(case.model)
    assert graph.keys == {key: len(matrix) for key, matrix in case.matrices.items()}
    found = graph.run(feeds, ["logits"], matrices=case.start(), checkpointed=checkpointed)["logits"]
    assert found.requires_grad
    assert np.abs(found.detach().numpy() - expected).max() < 3e-6 * np.abs(expected).max()


def full_rounding(case: Learnable) -> Rounding:
    return Rounding(case.linears, 4, WeightGrid(4), sites=case.sites, kv_bits=4)


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_segments_give_the_same_loss_and_gradient(loss: str) -> None:
    case = tiny_learnable("llama")
    found = []
    for checkpointed in (False, True):
        objective = EndToEnd(case.model, full_rounding(case), loss, caches=case.facts.caches, checkpointed=checkpointed)
        matrices = case.start()
        value = objective(matrices, rows())
        value.backward()
        found.append((value, [matrix.grad for matrix in matrices.values()]))
    (first, grads), (second, again) = found
    assert torch.equal(first, second)
    for one, other in zip(grads, again, strict=True):
        assert one.abs().max() > 1e-3
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
