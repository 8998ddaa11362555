"""What can be seen at once is refused before a model is loaded, exported or analysed."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphrot
from graphrot.cli.main import run
from graphrot.errors import InputRefused
from tests.exported import tiny_onnx, write_tokenizer


@pytest.fixture(autouse=True)
def _loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object, **options: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("graphrot.model.load.load_source", load)


def folder_of(place: Path, *, tokenizer: bool) -> Path:
    place.mkdir()
    (place / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    if tokenizer:
        write_tokenizer(place)
    return place


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", tokenizer=False)
    with pytest.raises(InputRefused, match="There is no tokenizer"):
        graphrot.convert(source, output=tmp_path / "out")
    with pytest.raises(AssertionError, match="was loaded"):  # nothing reads text here
        graphrot.convert(source, output=tmp_path / "out", recipe="rotate-only", certificate="off")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("settings", "instead"),
    [
        ({"recipe": "w4a8kv8"}, "or use --solver clip"),
        ({"recipe": "w4a8kv8", "kernels": "ort"}, "or use --solver clip and --kernels graphrot"),
        ({"recipe": "rotate-only", "kv": "int8", "kernels": "ort"}, "or use --kernels graphrot"),
    ],
)
def test_what_needs_no_tokenizer_is_named(settings: dict[str, str], instead: str, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", tokenizer=False)
    with pytest.raises(InputRefused, match="There is no tokenizer") as caught:
        graphrot.convert(source, output=tmp_path / "out", **settings)
    assert str(caught.value).endswith(instead)


def test_a_calibration_text_that_is_not_there(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", tokenizer=True)
    with pytest.raises(InputRefused, match="There is no such text file"):
        graphrot.convert(source, output=tmp_path / "out", calibration=tmp_path / "absent.txt")


@pytest.mark.parametrize(("name", "words"), [("tokenizer.json", "is not a folder"), ("absent", "no such folder")])
def test_a_tokenizer_that_is_no_folder(tmp_path: Path, name: str, words: str) -> None:
    write_tokenizer(tmp_path / "words")
    with pytest.raises(InputRefused, match=words):
        graphrot.convert(tiny_onnx("llama"), output=tmp_path / "out", tokenizer=tmp_path / "words" / name)


def test_only_none_is_refused_and_not_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["convert", str(tiny_onnx("llama")), "-o", str(tmp_path / "out"), "--only"]
    assert run([*command, "none"]) == 2
    assert "'only' names no site" in capsys.readouterr().err
    assert run([*command, "R9"]) == 2
    assert "R1, R2, R3, R4, O (got 'R9')" in capsys.readouterr().err


def test_recipes_that_are_offered_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(tiny_onnx("llama")), "-o", str(tmp_path / "out"), "--recipe", "w4a4"]) == 2
    assert "name one of rotate-only, w4a16, w4a8, w4a8kv8, w4a8kv4, w4a4kv4, auto, or give" in capsys.readouterr().err
