"""Tiny models to learn on, and the words that they are calibrated with."""

from __future__ import annotations

from pathlib import Path

import onnx

from graphrot.learn.subject import Subject, load_subject
from graphrot.progress import silent
from graphrot.recipe import Recipe, resolve_recipe
from tests.exported import tiny_onnx, write_tokenizer

TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom. " * 60


def recipe(**changes: object) -> Recipe:
    """Everything at 4 bits, without heads, so that only what is learned is rounded."""
    return resolve_recipe("w4a4kv4", **{"embedding": None, "head": None, **changes})


def subject(name: str, folder: Path, wanted: Recipe) -> Subject:
    (folder / "export").mkdir(parents=True)
    (folder / "scratch").mkdir()
    return load_subject(
        str(tiny_onnx(name)),
        wanted,
        export=folder / "export",
        scratch=folder / "scratch",
        written=True,
        allow_partial=False,
        progress=silent,
    )


def source(name: str, folder: Path) -> Path:
    """A tiny model with a tokenizer beside it, and a text, in one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.load(tiny_onnx(name)), folder / "model.onnx")
    write_tokenizer(folder)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder / "model.onnx"
