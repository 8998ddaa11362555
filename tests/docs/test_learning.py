"""Every command and snippet of docs/learning.md runs, on a tiny model under the names that the page uses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from graphrot.cli.main import run
from tests.learn.subjects import source

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "learning.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_runs_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = source("llama", tmp_path)
    found.rename(tmp_path / "MODEL.onnx")
    (tmp_path / "text.txt").rename(tmp_path / "TEXT")
    monkeypatch.chdir(tmp_path)
    commands = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
    assert len(commands) == 4 and all(line.startswith("graphrot ") for line in commands)
    for line in commands:
        quick = ["--steps", "20"] if "learn" in line and "--steps" not in line else []
        assert run([*shlex.split(line)[1:], *quick]) == 0, capsys.readouterr().err
    snippets = [text for language, text in BLOCKS if language == "python"]
    assert len(snippets) == 1
    exec(compile(snippets[0], "docs/learning.md", "exec"), {})
