"""Every command and snippet of docs/genai.md runs, in the order of the page, on tiny models under its names."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from graphrot.cli.main import run
from tests.contrib.built import built
from tests.exported import tiny_onnx, write_tokenizer
from tests.tiny import tiny_llama

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "genai.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def _chat(words: list[str]) -> str:
    """What the sample says to two questions."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(ROOT / words[1]), *words[2:]]
    asked = "It was the best\nof times\n"
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(built("llama"), "GENAI_DIR")
    tiny_llama(layers=1).save_pretrained("HF_DIR")
    write_tokenizer(Path("HF_DIR"))
    for file in tiny_onnx("llama").parent.iterdir():
        shutil.copy(file, "MODEL.onnx" if file.suffix == ".onnx" else ".")
    ran = []
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "docs/genai.md", "exec"), {})
            continue
        for line in text.splitlines():
            words = shlex.split(line)
            ran.append(words[0])
            if words[0] == "graphrot":
                assert run(words[1:]) == 0, capsys.readouterr().err
            else:
                assert _chat(words).count("\n") >= 2
    assert ran == ["graphrot"] * 6 + ["python"]
    folders = ("ROTATED", "FROM_HF", "FROM_HF_KV4", "FROM_FILE", "CHAT")
    sizes = {name: json.loads(Path(name, "genai_config.json").read_text())["model"]["decoder"] for name in folders}
    assert [sizes[name]["head_size"] for name in folders] == [12, 20, 12, 16, 20]
    assert "python -c" in PAGE and "no-library" in PAGE
