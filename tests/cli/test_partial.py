"""Rotations that are asked for and refused: ``inspect`` tells all of it, ``convert`` stops before it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphrot.cli.main import run
from tests.analysis.graphs import Builder
from tests.dropin.deployed import deployed, write

NODE = "stands_in_the_way"


def _in_the_way(b: Builder, x: str) -> str:
    return b.result(b.op("Tanh", x), NODE)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(deployed(residual=_in_the_way), tmp_path_factory.mktemp("source") / "model.onnx")


REASON = "Tanh does not commute with a rotation of its input"
CHANGE = "keep the node off these channels: behind a linear, where channels begin anew"


def test_inspect_tells_node_reason_and_change(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(source)]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = lines.index(f"R1  refused at {NODE} (Tanh): {REASON}")
    assert lines[place + 1].strip() == f"what would change it: {CHANGE}"
    assert run(["inspect", str(source), "--json"]) == 0
    (refused,) = json.loads(capsys.readouterr().out)["refused"]
    assert refused == {"kind": "R1", "node": NODE, "op": "Tanh", "reason": REASON, "change": CHANGE}


CHECKED = ("--certificate", "off")


@pytest.mark.parametrize(
    "options",
    [("--recipe", "rotate-only"), ("--solver", "clip"), ("--recipe", "rotate-only", "--only", "R1,R4")],
    ids=["rotate-only", "w4a8", "named"],
)
def test_a_refused_rotation_that_is_asked_for_stops(
    options: tuple[str, ...], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(source), "-o", str(tmp_path / "new.onnx"), *CHECKED, *options]) == 3
    told = " ".join(capsys.readouterr().err.split())
    for words in ("Not everything that was asked for can be rotated", f"R1 at {NODE} (Tanh)", REASON, CHANGE):
        assert words in told
    assert "--allow-partial" in told and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options", [("--allow-partial",), ("--only", "R2,R4")], ids=["the rest is wanted", "it is not asked for"]
)
def test_it_goes_on_with_the_rest_where_that_is_wanted(
    options: tuple[str, ...], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("convert", str(source), "-o", str(tmp_path / "new.onnx"), "--recipe", "rotate-only")
    assert run([*arguments, *options]) == 0
    manifest = json.loads((tmp_path / "new.graphrot.json").read_text(encoding="utf-8"))
    assert manifest["certificate"]["relative"] < 6.1e-5
    refused = [entry["node"] for entry in manifest["plan"]["refused"]]
    assert refused == ([NODE] if "--allow-partial" in options else [])
