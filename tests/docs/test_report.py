"""Every command and figure of docs/report.md is as it says, in the order of the page, on a tiny model."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import graphrot
from graphrot.cli.main import run
from graphrot.report.manifest import Manifest
from graphrot.report.trace import Trace
from tests.exported import tiny_onnx, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for file in tiny_onnx("llama").parent.iterdir():
        shutil.copy(file, "MODEL.onnx" if file.suffix == ".onnx" else ".")
    write_tokenizer(Path())
    Path("TEXT").write_text("It was the best of times. " * 20, encoding="utf-8")
    graphrot.convert("MODEL.onnx", output="OUT", recipe="w4a8", solver="rtn", only=("R1", "R2", "R4"))
    ran = 0
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            assert run(shlex.split(line)[1:]) == 0, capsys.readouterr().err
            ran += 1
    assert ran == 3
    assert Path("OUT.report.html").is_file() and Path("PAGE.html").is_file()
    (call,) = re.findall(r"From Python: `(.*?)`", PAGE)
    assert eval(call, {"graphrot": graphrot}).is_file()


def test_the_table_names_parts_of_the_manifest() -> None:
    (table,) = re.findall(r"^\| part \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`(\w+)`", table)
    assert set(named) <= set(Manifest.model_fields)
    (figure,) = re.findall(r"`(<data .*?</data>)`", PAGE)
    assert figure == '<data value="4.046875" data-from="sizes.bits_per_weight">4.05</data>'

    record = json.loads('{"sizes": {"bits_per_weight": 4.046875}}')
    assert Trace(record).figure("sizes.bits_per_weight", "two") == figure
