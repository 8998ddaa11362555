"""Every command and snippet of docs/contrib.md runs, in the order of the page, on tiny models under its names."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import onnx_ir as ir
import pytest

from graphrot.cli.main import run
from tests.contrib.built import built
from tests.contrib.decoders import decoder
from tests.contrib.optimized import optimized

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "contrib.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def _command(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    words = shlex.split(line)
    if words[0] == "cp":
        *sources, target = [word for word in words[1:] if not word.startswith("-")]
        for source in sources:
            shutil.copytree(source, target) if "-r" in words else shutil.copy(source, target)
        return ""
    assert words[0] == "graphrot"
    code = run(words[1:])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(built("llama"), "GENAI_DIR")
    shutil.copytree(built("llama_tied", "int4"), "INT4_DIR")
    ir.save(decoder(), "OPTIMIZED.onnx")
    shutil.copy(optimized("bert", "bert"), "ENCODER.onnx")
    printed: dict[str, str] = {}
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "docs/contrib.md", "exec"), {})
        else:
            assert language == "bash"
            printed |= {line: _command(line, capsys) for line in text.splitlines()}
    told = {line for line, said in printed.items() if "the source was quantized already" in said}
    assert len(printed) == 7 and len(told) == 1 and "INT4_DIR" in told.pop()
    output = capsys.readouterr().out.splitlines()
    assert output[-1] == str(["input_ids", "position_ids", "attention_mask", "past_0", "past_1"])
    assert (tmp_path / "NEW_DIR").is_dir() and len(output) >= 2
