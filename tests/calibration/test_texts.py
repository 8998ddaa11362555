"""Tokens, sequences, and what is written down of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import graphrot
from graphrot import quantize
from graphrot.calibration import samples
from graphrot.calibration.fingerprint import overlap
from graphrot.cli.main import run
from graphrot.errors import InputRefused
from graphrot.evaluate.text import Tokenizer
from graphrot.texts import Texts
from tests.exported import tiny_onnx, with_tokenizer

WORDS = "".join(f"Sentence number {n} says that {n * n} is a square. " for n in range(60))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, a text, and the same as tokens."""
    folder = tmp_path_factory.mktemp("texts")
    with_tokenizer("llama", folder)
    (folder / "text.txt").write_text(WORDS, encoding="utf-8")
    np.save(folder / "text.npy", np.asarray(Tokenizer(folder).encode(WORDS), np.int32))
    return folder


def test_sequences_follow_each_other(place: Path) -> None:
    texts = Texts(place, place / "text.txt")
    ids = texts.look(300)
    assert texts.part() is None
    found = texts.sequences(3, 32, 2)
    assert found.shape == (3, 32) and found.dtype == np.int64
    assert found.ravel().tolist() == ids[64:160].tolist()
    part = texts.part()
    assert part is not None and part.tokens == 160
    assert part.sha256 == hashlib.sha256(ids[:160].astype("<i8").tobytes()).hexdigest()
    assert overlap(ids[80:160], part.fingerprint) is not None and overlap(ids[160:], part.fingerprint) is None


def test_too_few_sequences(place: Path) -> None:
    texts = Texts(place, str(place / "text.npy"))
    there = len(texts.look(10**6))
    with pytest.raises(InputRefused, match="too short") as caught:
        texts.sequences(50, 100)
    assert f"text.npy: {there} tokens" in str(caught.value)
    assert "50 sequences of 100 tokens need 5000" in str(caught.value)


def test_tokens_are_the_text(place: Path) -> None:
    """And they need no tokenizer."""
    ids, text = Texts(None, str(place / "text.npy")), Texts(place, str(place / "text.txt"))
    assert ids.available and ids.tokens(500).tolist() == text.tokens(500).tolist()


def test_tokens_of_another_model(place: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(100, 200))
    texts = Texts(None, str(tmp_path / "ids.npy"))
    texts.fit(ir.load(place / "model.onnx"))
    with pytest.raises(InputRefused, match="not the model's own") as caught:
        texts.tokens(5)
    assert "token 199, and the model knows 131 tokens" in str(caught.value)


def test_a_conversion_writes_down_what_it_read(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and tokens give the same model; the certificate alone leaves nothing."""
    monkeypatch.setattr(quantize, "CALIBRATION_TOKENS", 300)
    options = {"recipe": "w4a8", "certificate": None}
    models = {}
    for name in ("text.txt", "text.npy"):
        converted = graphrot.convert(place / "model.onnx", calibration=place / name, output=tmp_path / name, **options)
        part = json.loads((tmp_path / name / "graphrot.json").read_text(encoding="utf-8"))["calibration"]
        assert converted.report.calibration is not None and part == converted.report.calibration.model_dump()
        assert (part["name"], part["kind"]) == (name, "text" if name == "text.txt" else "tokens")
        models[name] = (tmp_path / name / "model.onnx.data").read_bytes(), part["sha256"], part["fingerprint"]
    assert models["text.txt"] == models["text.npy"]
    checked = graphrot.convert(place / "model.onnx", recipe="rotate-only", calibration=place / "text.txt")
    assert checked.report.certificate is not None and checked.report.calibration is None


def test_the_models_own_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tokenizer and text."""
    monkeypatch.setattr(samples, "LENGTH", 32)
    monkeypatch.setattr(quantize, "CALIBRATION_TOKENS", 300)
    source = tmp_path / "model.onnx"
    for file in tiny_onnx("llama").parent.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    line = ["convert", str(source), "-o", str(tmp_path / "out"), "--recipe", "w4a8", "--calibration", "self"]
    assert run([*line, "--certificate", "off"]) == 0
    part = json.loads((tmp_path / "out" / "graphrot.json").read_text(encoding="utf-8"))["calibration"]
    assert (part["kind"], part["name"], part["tokens"]) == ("self", "self:0", 300)


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        ("datasets:owner/name:test", 3, "This split is kept for measuring"),
        ("datasets:", 2, "datasets:ID[/CONFIG][:SPLIT[:COLUMN]]"),
        ("self:x", 2, "whole number"),
        ("nowhere.npy", 3, "There is no such token file"),
    ],
)
def test_refused_before_anything_is_done(
    spec: str, code: int, words: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "convert",
        str(place / "model.onnx"),
        "-o",
        str(tmp_path / "out"),
        "--recipe",
        "w4a8",
        "--calibration",
        spec,
    ]
    assert run(line) == code
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
