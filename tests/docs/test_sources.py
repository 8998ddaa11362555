"""Every command and snippet of docs/sources.md runs, on tiny models under the names that the page uses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import onnx
import pytest
from huggingface_hub import constants

import graphrot
from graphrot.cli.main import run
from tests.exported import tiny_onnx, write_tokenizer
from tests.model.gguf_files import Q8, write_gguf
from tests.tiny import tiny_llama, tiny_qwen2

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sources.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
SNIPPETS = [text for language, text in BLOCKS if language == "python"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    tiny_llama(layers=1).save_pretrained(folder / "HF_DIR", max_shard_size="40KB")
    write_tokenizer(folder / "HF_DIR")
    write_gguf(tiny_qwen2(layers=1), folder / "MODEL.gguf", kind=Q8)
    onnx.save(onnx.load(tiny_onnx("llama")), folder / "MODEL.onnx")
    write_tokenizer(folder)
    (folder / "OPTIMUM_DIR").mkdir()
    onnx.save(onnx.load(tiny_onnx("qwen2")), folder / "OPTIMUM_DIR" / "model.onnx")
    write_tokenizer(folder / "OPTIMUM_DIR")
    repo = folder / "hub" / "models--ORG--NAME"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c" * 40)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / ("c" * 40)).symlink_to(folder / "HF_DIR", target_is_directory=True)
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(place)
    return place


def test_the_page_speaks_of_every_kind() -> None:
    assert len(COMMANDS) == 8 and len(SNIPPETS) == 2
    assert all(line.startswith("graphrot ") for line in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split(command)[1:]
    if arguments[0] == "verify" and not (here / "FROM_FILE").exists():
        graphrot.convert("MODEL.onnx", output="FROM_FILE", recipe="rotate-only", certificate="off")
    code = run(arguments)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    if arguments[0] == "convert":
        assert (here / arguments[3] / "model.onnx").is_file()
        assert ("note       the source was quantized already: Q8_0" in printed.out) == ("gguf" in command)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_the_snippet_runs(snippet: str, here: Path) -> None:
    exec(compile(snippet, "docs/sources.md", "exec"), {})
