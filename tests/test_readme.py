"""Every command and snippet of the README runs.

The two long commands are covered in parts: ``.ci/run`` runs the second one as it stands, and what the
first one starts is run here on a tiny model.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.exported import tiny_onnx, write_tokenizer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Block:
    """A fenced block of the README."""

    language: str
    text: str


BLOCKS = [Block(*match.groups()) for match in re.finditer(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)]
BASH = [line for block in BLOCKS if block.language == "bash" for line in block.text.splitlines() if line]
PYTHON = [block.text for block in BLOCKS if block.language == "python"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the README's names exist: MODEL.onnx, TEXT, a tokenizer, and the command itself."""
    folder = tmp_path_factory.mktemp("readme")
    exported = tiny_onnx("llama")
    (folder / "MODEL.onnx").write_bytes(exported.read_bytes())
    # The model names its data file; it stays beside it under the same name.
    for file in exported.parent.glob("*.data"):
        (folder / file.name).write_bytes(file.read_bytes())
    write_tokenizer(folder)
    (folder / "TEXT").write_text("It was the best of times, it was the worst of times. " * 10, encoding="utf-8")
    return folder


def run(command: list[str], place: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_first_two_commands_do_all_the_setup() -> None:
    setup = "python3 -m venv .venv && . .venv/bin/activate && pip install"
    assert BASH[0] == f'{setup} ".[cpu,demo]" && python samples/demo.py'
    assert BASH[1] == f'{setup} ".[test]" && pytest -n auto'


def test_ci_runs_the_second_command_as_it_stands() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    found = re.search(r"^command=\$\(awk '(.*)' README\.md\)$", script, re.MULTILINE)
    assert found
    printed = subprocess.run(["awk", found[1], "README.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == BASH[1]


def test_the_demo_prints_its_table(place: Path) -> None:
    small = ["--source", "MODEL.onnx", "--output", "DEMO", "--window", "64", "--tokens", "4"]
    printed = run([sys.executable, str(ROOT / "samples" / "demo.py"), *small], place)
    for words in ("float32", "4-bit, not rotated", "4-bit, rotated", "perplexity", "bits per weight", "tokens/s"):
        assert words in printed
    assert (place / "DEMO" / "rotated" / "model.onnx").exists()
    assert (place / "DEMO" / "unrotated" / "model.onnx").exists()


def test_the_commands_run_in_order(place: Path) -> None:
    commands = [line for line in BASH[2:] if line.startswith("graphrot ")]
    assert commands == BASH[2:], "a command that this test does not run"
    for line in commands:
        arguments = shlex.split(line)[1:]
        if arguments[0] == "convert" and arguments[1] == "MODEL":
            arguments[1] = "MODEL.onnx"  # the README means any source; gptq runs as it stands
        run([sys.executable, "-m", "graphrot", *arguments], place)


def test_the_snippets_run(place: Path) -> None:
    if not (place / "OUT").exists():
        run([sys.executable, "-m", "graphrot", "convert", "MODEL.onnx", "-o", "OUT", "--solver", "rtn"], place)
    assert len(PYTHON) == 2
    for snippet in PYTHON:
        run([sys.executable, "-c", snippet], place)
