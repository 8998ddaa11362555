"""A tiny source with a tokenizer and a text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.exported import tiny_onnx, write_tokenizer


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied tiny Llama as an .onnx file."""
    folder = tmp_path_factory.mktemp("source")
    for file in tiny_onnx("llama_tied").parent.iterdir():
        shutil.copyfile(file, folder / file.name)
    write_tokenizer(folder)
    return folder / "model.onnx"


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 30, encoding="utf-8")
    return path
