"""One conversion for all tests of the report."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphrot
from tests.exported import tiny_onnx, write_tokenizer


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with every kind of rotation, rounded weights, activations and cache. Do not change the files."""
    folder = tmp_path_factory.mktemp("report")
    write_tokenizer(folder / "words")
    graphrot.convert(
        tiny_onnx("llama"), output=folder / "out", recipe="w4a8", solver="rtn", kv="int8", tokenizer=folder / "words"
    )
    return folder / "out"
