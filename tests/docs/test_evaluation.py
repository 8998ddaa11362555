"""Every command and snippet of docs/evaluation.md runs, on a tiny model under the names that the page uses."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import graphrot
from graphrot import quantize
from graphrot.calibration import samples
from graphrot.calibration.fingerprint import RUN, WINDOW
from graphrot.cli.main import run
from graphrot.evaluate.tasks import ROLLING
from graphrot.evaluate.text import Tokenizer
from graphrot.report.manifest import Manifest
from tests.exported import tiny_onnx, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
CALIBRATION = "".join(f"Sentence number {n} says that {n * n} is a square. " for n in range(40))
PARAGRAPH = (
    "In the {} house by the river lived a man who had seen many rivers, and who told everybody who came to the door "
    "that of all the waters he had known in a long life none was as quiet as his own little river."
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    for file in tiny_onnx("llama").parent.iterdir():
        name = "MODEL.onnx" if file.suffix == ".onnx" else file.name
        shutil.copyfile(file, folder / name)
    write_tokenizer(folder)
    (folder / "CALIBRATION.txt").write_text(CALIBRATION, encoding="utf-8")
    ids = Tokenizer(folder).encode(CALIBRATION)
    (folder / "CALIBRATION.tokens.json").write_text(json.dumps(ids), encoding="utf-8")
    text = "\n".join(PARAGRAPH.format(word) for word in ("first", "second", "third", "last", "other"))
    (folder / "TEXT").write_text(text, encoding="utf-8")
    (folder / "DATA_DIR").mkdir()
    rows = "".join(json.dumps({"text": line}) + "\n" for line in CALIBRATION.split(". "))
    (folder / "DATA_DIR" / "train.jsonl").write_text(rows, encoding="utf-8")
    (folder / "docs.jsonl").write_text(json.dumps({"question": "What is", "answer": " it"}) + "\n", encoding="utf-8")
    task: dict[str, Any] = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "docs.jsonl"}, "cache_dir": "cache"},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "TASK.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return folder


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(quantize, "CALIBRATION_TOKENS", 512)
    monkeypatch.setattr(samples, "LENGTH", 32)
    return place


def test_every_command_runs(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In their order: later ones measure what earlier ones wrote."""
    assert len(COMMANDS) == 10
    for command in COMMANDS:
        program, *arguments = shlex.split(command)
        if program == "graphrot":
            assert run(arguments) == 0, f"{command}\n{capsys.readouterr().err}"
            continue
        assert (program, arguments[0]) == ("python", "benchmarks/last_word.py")
        monkeypatch.setattr(sys, "argv", arguments)
        capsys.readouterr()
        runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
        printed = capsys.readouterr().out
        assert printed.startswith("4 items; 2 windows of 64 tokens")
        rows = [line.split() for line in printed.splitlines() if line.startswith(("MODEL.onnx", "OUT"))]
        assert [len(row) for row in rows] == [6, 6] and rows[0][-2:] == ["-", "-"] and rows[1][-1].endswith("%")
    kept = Manifest.read(here / "OUT" / "graphrot.json").evaluations
    assert len(kept) == 1 and kept[0].reference == "MODEL.onnx" and kept[0].kl is not None
    kinds = {name: Manifest.read(here / name / "graphrot.json").calibration for name in _KINDS}
    assert {name: part and part.kind for name, part in kinds.items()} == _KINDS


_KINDS = {"OUT": "text", "FROM_TOKENS": "tokens", "FROM_DATA": "dataset", "FROM_ITSELF": "self"}


def test_the_line_of_python(here: Path) -> None:
    if not (here / "OUT").exists():
        graphrot.convert("MODEL.onnx", output="OUT", recipe="w4a8", calibration="CALIBRATION.txt")
    found = re.search(r"`graphrot\.evaluate\((.*)\)`", PAGE)
    assert found
    arguments = eval(f"dict(model={found[1]}, window=64, windows=2)")
    assert graphrot.evaluate(**arguments).tasks == {"tiny": {"acc": pytest.approx(0.5, abs=0.5)}}


def test_the_numbers_of_the_page() -> None:
    assert f"its runs of {RUN} tokens" in PAGE and f"one\nof {RUN + WINDOW - 1} tokens is always found" in PAGE
    assert f"pieces of {ROLLING} tokens" in PAGE
    assert "each of 512 tokens" in PAGE and samples.LENGTH == 512 and samples.ROWS == 8
