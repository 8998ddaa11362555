"""A tiny source with a tokenizer and a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exported import with_tokenizer


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied tiny Llama as an .onnx file."""
    folder = tmp_path_factory.mktemp("source")
    return with_tokenizer("llama_tied", folder)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 30, encoding="utf-8")
    return path
