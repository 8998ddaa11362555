from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.exported import with_tokenizer

WORDS = "We the people of a small test, in order to form a more perfect model, do ordain and establish these weights. "


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    order = np.random.default_rng(0).integers(0, len(WORDS.split()), 400)
    path.write_text(" ".join(WORDS.split()[k] for k in order), encoding="utf-8")
    return path


def beside(name: str, folder: Path) -> Path:
    return with_tokenizer(name, folder)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights and a tokenizer beside it."""
    return beside("llama", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with one channel of the residual stream eight times as large as the others."""
    path = beside("llama", tmp_path_factory.mktemp("outliers"))
    model = onnx.load(path)
    rows = max(tensor.dims[0] for tensor in model.graph.initializer if len(tensor.dims) == 2)
    (table,) = [t for t in model.graph.initializer if list(t.dims)[:1] == [rows] and _is_looked_up(model, t.name)]
    numbers = np.array(numpy_helper.to_array(table))
    numbers[:, 3] *= 8
    table.CopyFrom(numpy_helper.from_array(numbers, table.name))
    onnx.save(model, path)
    return path


def _is_looked_up(model: onnx.ModelProto, name: str) -> bool:
    return any(node.op_type == "Gather" and node.input[0] == name for node in model.graph.node)
