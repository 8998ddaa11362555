"""The same decoders in another package's interpreter, where it is installed."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from unittest.mock import MagicMock

import numpy as np
import onnx
import pytest
import torch

from graphrot.torch_graph.graph import TorchGraph
from tests.exported import tiny_onnx
from tests.torch_graph.learnable import rows, tiny_learnable


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """onnx2pytorch; it imports torchvision for operators on images, which no decoder has."""
    for name in ("torchvision", "torchvision.io", "torchvision.ops"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: ModuleType = pytest.importorskip("onnx2pytorch")
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_both_interpreters_agree(name: str, package: ModuleType) -> None:
    case = tiny_learnable(name)
    feeds = case.feeds(rows())
    source = onnx.load(tiny_onnx(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = package.ConvertModel(source, experimental=True)
        answers = theirs(*(torch.from_numpy(feeds[value.name]) for value in source.graph.input))
    expected = answers[0].detach().numpy()
    found = TorchGraph(case.model).run(feeds, ["logits"], matrices=case.matrices)["logits"].numpy()
    assert np.abs(found - expected).max() < 5e-6 * np.abs(expected).max()
