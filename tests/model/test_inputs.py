"""What a conversion reads, by whatever way it is named."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from graphrot.model.inputs import Inputs
from tests.exported import tiny_onnx, write_tokenizer
from tests.tiny import tiny


def _names(inputs: Inputs, folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in inputs.files()}


def test_an_onnx_file_its_weights_wherever_they_lie_and_its_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat=False)
    (tmp_path / "notes.txt").write_text("not read")
    model = onnx.load(tiny_onnx("llama_tied"))
    (tmp_path / "deep").mkdir()
    onnx.save(model, tmp_path / "a.onnx", save_as_external_data=True, location="deep/b.onnx.data", size_threshold=0)
    expected = {"a.onnx", "deep/b.onnx.data", "tokenizer.json", "tokenizer_config.json"}
    assert _names(Inputs.of(str(tmp_path / "a.onnx")), tmp_path) == expected


def test_a_model_folder(tmp_path: Path) -> None:
    tiny("llama_tied").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "earlier.onnx").write_bytes(b"not read")
    expected = {"config.json", "generation_config.json", "model.safetensors"}
    words = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert _names(Inputs.of(str(tmp_path)), tmp_path) == expected | words


def test_further_files_and_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHROT_CACHE", str(tmp_path / "cache"))
    export = tmp_path / "cache" / "demo" / "export-1" / "model.onnx"
    export.parent.mkdir(parents=True)
    export.touch()
    write_tokenizer(tmp_path / "words", chat=False)
    monkeypatch.chdir(tmp_path)
    inputs = Inputs.of("demo:some.gguf", ["text.txt", None, Path("words")])
    monkeypatch.chdir("/")
    assert _names(inputs, tmp_path) == {
        "some.gguf", "text.txt", "words/tokenizer.json", "words/tokenizer_config.json",
        "cache/demo/export-1", "cache/demo/export-1/model.onnx",
    }  # fmt: skip


@pytest.mark.parametrize("content", [None, b"not a model"])
def test_what_cannot_be_read_is_named_all_the_same(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.onnx").write_bytes(content)
    assert _names(Inputs.of(str(tmp_path / "a.onnx")), tmp_path) == {"a.onnx"}
