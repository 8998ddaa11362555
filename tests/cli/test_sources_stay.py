"""--force never costs the user what a conversion reads; -o . is a folder like any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest

import graphrot
from graphrot.cli.main import run
from graphrot.errors import UsageError
from tests.exported import tiny_onnx, write_tokenizer

QUICK = ("--recipe", "rotate-only", "--certificate", "off")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    shutil.copytree(tiny_onnx("llama_tied").parent, folder)
    write_tokenizer(folder)
    return folder / "model.onnx"


def _content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _refused(source: Path, output: Path, *options: str | Path) -> None:
    before = _content(source.parent)
    assert run(["convert", str(source), "-o", str(output), "--force", *QUICK, *map(str, options)]) == 2
    assert _content(source.parent) == before


def test_the_source_itself(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _refused(source, source)
    err = capsys.readouterr().err
    assert err.startswith("usage: The output would replace a file that the conversion reads")
    assert str(source) in err


def test_a_file_that_holds_the_sources_weights(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.load(source)
    onnx.save(model, source.with_name("a.onnx"), save_as_external_data=True, location="b.onnx.data", size_threshold=0)
    _refused(source.with_name("a.onnx"), source.with_name("b.onnx"))
    assert "b.onnx.data" in capsys.readouterr().err


def test_a_folder_around_the_source(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source.parent / "graphrot.json").write_text("{}", encoding="utf-8")
    _refused(source, source.parent)
    assert "would replace a file that the conversion reads" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--plan", "--tokenizer", "--calibration", "--recipe"])
def test_further_files(source: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them lie in the folder that an earlier conversion wrote."""
    out = tmp_path / "out"
    assert run(["convert", str(source), "-o", str(out), *QUICK]) == 0
    (out / "vocab.txt").write_text("It was the best of times. " * 20, encoding="utf-8")
    (out / "added_tokens.json").write_text('{"recipe": "rotate-only"}', encoding="utf-8")
    given: dict[str, list[str | Path]] = {
        "--plan": ["--plan", out / "plan.json"],
        "--tokenizer": ["--tokenizer", out],
        "--calibration": ["--calibration", out / "vocab.txt", "--certificate", "full"],
        "--recipe": ["--recipe", out / "added_tokens.json"],
    }
    before = _content(out)
    _refused(source, out, *given[option])
    assert "would replace a file that the conversion reads" in capsys.readouterr().err
    assert _content(out) == before


def test_saving_later(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    result = graphrot.convert("model.onnx", recipe="rotate-only", certificate=None)
    monkeypatch.chdir(tmp_path)
    before = _content(source.parent)
    with pytest.raises(UsageError, match="would replace a file that the conversion reads"):
        result.save(source, force=True)
    assert _content(source.parent) == before


def test_the_folder_one_is_in(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for options in ([], ["--force"]):
        assert run(["convert", str(source), "-o", ".", *QUICK, *options]) == 0
        assert (here / "model.onnx").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "here"}
    assert Path.cwd() == here
