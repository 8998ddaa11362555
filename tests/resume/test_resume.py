"""What an interrupted run leaves, what the next one makes of it, and that the result is the same to the byte."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import graphrot
from graphrot.cli.main import run
from graphrot.errors import InputRefused, UsageError
from graphrot.model import hf, save
from graphrot.quant import linears
from graphrot.quant.groups import _plain
from graphrot.work.folder import work_path
from tests.exported import tiny_onnx, write_tokenizer
from tests.resume.runs import content
from tests.tiny import tiny

GROUPS = 8
"""Of the tiny model: q, k, v; o; gate, up; down; in two layers."""


@pytest.fixture(scope="module")
def options(text: Path) -> dict[str, Any]:
    return {"calibration": text, "certificate": None}


@pytest.fixture(scope="module")
def whole(source: Path, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an uninterrupted run writes."""
    folder = tmp_path_factory.mktemp("whole")
    graphrot.convert(source, output=folder / "out", **options)
    return content(folder)


class Interrupted(KeyboardInterrupt):
    pass


def stop_after(groups: int, step: str = "quantize weights") -> Callable[[str, int, int], None]:
    def progress(now: str, done: int, _total: int) -> None:
        if now == step and done == groups:
            raise Interrupted

    return progress


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every group that is solved."""
    calls: list[int] = []
    solve = linears.gptq_many

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(len(calls))
        return solve(*arguments, **options)

    monkeypatch.setattr(linears, "gptq_many", counted)
    return calls


def interrupt(source: Path, output: Path, options: dict[str, Any], *, groups: int, resume: bool = True) -> None:
    with pytest.raises(Interrupted):
        graphrot.convert(source, output=output, resume=resume, progress=stop_after(groups), **options)


@pytest.mark.parametrize(("groups", "symmetric"), [(1, True), (5, False), (GROUPS, True)])
def test_solved_groups_are_not_solved_again(
    source: Path, options: dict[str, Any], tmp_path: Path, solved: list[int], groups: int, symmetric: bool
) -> None:
    options = {**options, "symmetric": symmetric, "group": 32}
    (tmp_path / "whole").mkdir()
    graphrot.convert(source, output=tmp_path / "whole" / "out", **options)
    solved.clear()
    (tmp_path / "resumed").mkdir()
    output = tmp_path / "resumed" / "out"
    interrupt(source, output, options, groups=groups)
    assert [path.name for path in output.parent.iterdir()] == [".out.graphrot-work"]
    assert sorted(p.name for p in work_path(output).iterdir()) == ["groups", "lock"]
    assert len(solved) == groups
    steps: list[str] = []
    result = graphrot.convert(source, output=output, resume=True, progress=lambda s, *_: steps.append(s), **options)
    assert len(solved) == GROUPS
    assert f"resumed: {groups} groups of weights had been solved before" in result.notes
    assert steps.count(f"resuming: {groups} of {GROUPS} groups done") == groups
    assert content(tmp_path / "resumed") == content(tmp_path / "whole")


def test_nothing_stays_without_resume(source: Path, options: dict[str, Any], tmp_path: Path) -> None:
    interrupt(source, tmp_path / "out", options, groups=3, resume=False)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_resume(source: Path, text: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    arguments = ["--calibration", str(text), "--certificate", "off", "--resume"]
    assert run(["convert", str(source), "-o", str(tmp_path / "out"), *arguments]) == 0
    assert content(tmp_path) == whole


def test_a_run_that_is_refused_leaves_nothing(source: Path, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputRefused):
        graphrot.convert(tmp_path / "absent.onnx", output=tmp_path / "out", resume=True, **options)
    assert list(tmp_path.iterdir()) == []


def test_without_an_output(source: Path) -> None:
    with pytest.raises(UsageError, match="Nothing can be resumed without an output"):
        graphrot.convert(source, resume=True)


def test_a_later_run_without_resume_starts_afresh(
    source: Path, options: dict[str, Any], whole: dict[str, bytes], tmp_path: Path, solved: list[int]
) -> None:
    interrupt(source, tmp_path / "out", options, groups=3)
    solved.clear()
    graphrot.convert(source, output=tmp_path / "out", **options)
    assert len(solved) == GROUPS
    assert content(tmp_path) == whole


def test_a_run_that_is_refused_removes_no_work(source: Path, options: dict[str, Any], tmp_path: Path) -> None:
    """The output appeared meanwhile."""
    interrupt(source, tmp_path / "out", options, groups=3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    before = content(work_path(tmp_path / "out") / "groups")
    for resume in (False, True):
        with pytest.raises(UsageError, match="already exists"):
            graphrot.convert(source, output=tmp_path / "out", resume=resume, **options)
    assert content(work_path(tmp_path / "out") / "groups") == before


@pytest.mark.parametrize(
    ("change", "what"),
    [({"group": 32}, "another recipe"), ({"calibration": "other.txt"}, "another calibration text")],
    ids=["recipe", "text"],
)
def test_another_job_starts_afresh_and_says_so(
    source: Path, options: dict[str, Any], tmp_path: Path, solved: list[int], change: dict[str, Any], what: str
) -> None:
    (tmp_path / "other.txt").write_text("To be, or not to be, that is the question. " * 40)
    if "calibration" in change:
        change = {"calibration": tmp_path / change["calibration"]}
    interrupt(source, tmp_path / "out", options, groups=3)
    solved.clear()
    result = graphrot.convert(source, output=tmp_path / "out", resume=True, **{**options, **change})
    assert len(solved) == GROUPS
    note = next(note for note in result.notes if note.startswith("not resumed"))
    assert what in note and "source" not in note
    graphrot.convert(source, output=tmp_path / "again", **{**options, **change})
    for name in ("model.onnx", "model.onnx.data", "plan.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize(
    "damage",
    ["flipped", "cut", "gone", "no json", "not json", "empty json", "list", "offset", "error", "old", "folders"],
)
def test_damaged_groups_are_solved_again(
    source: Path, options: dict[str, Any], whole: dict[str, bytes], tmp_path: Path, solved: list[int], damage: str
) -> None:
    interrupt(source, tmp_path / "out", options, groups=4)
    folder = work_path(tmp_path / "out") / "groups"
    binary, words = folder / "0002.bin", folder / "0002.json"
    if damage == "flipped":
        data = bytearray(binary.read_bytes())
        data[7] ^= 1
        binary.write_bytes(data)
    elif damage == "cut":
        binary.write_bytes(binary.read_bytes()[:-1])
    elif damage == "not json":
        words.write_text('{"tensors": [')
    elif damage in ("empty json", "list"):
        words.write_text("{}" if damage == "empty json" else "[]")
    elif damage in ("offset", "error"):
        record = json.loads(words.read_text())
        record["tensors"][0]["at" if damage == "offset" else "error"] = 7
        words.write_text(json.dumps(record))
    elif damage == "old":
        record = json.loads(words.read_text())
        for entry in record["tensors"]:
            del entry["error_without_rotation"]
        record["sha256"] = hashlib.sha256(binary.read_bytes() + _plain(record["tensors"])).hexdigest()
        words.write_text(json.dumps(record))
    elif damage == "folders":
        for file in (binary, words):
            file.unlink()
            (file / "deep").mkdir(parents=True)
    else:
        (binary if damage == "gone" else words).unlink()
    solved.clear()
    graphrot.convert(source, output=tmp_path / "out", resume=True, **options)
    assert len(solved) == GROUPS - 2
    assert content(tmp_path) == whole


def test_killed_between_the_last_rename_and_the_clearing_up(
    source: Path, options: dict[str, Any], whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = save.install

    def copied(moves: Any, area: Path, **rest: Any) -> None:
        install(moves, area, **rest)
        shutil.copytree(area.parent, tmp_path / "copy")

    monkeypatch.setattr(save, "install", copied)
    graphrot.convert(source, output=tmp_path / "out", **options)
    monkeypatch.undo()
    (tmp_path / "copy").rename(work_path(tmp_path / "out"))
    graphrot.convert(source, output=tmp_path / "out", resume=True, **options)
    assert content(tmp_path) == whole


def test_a_finished_output_of_a_killed_run_stays(
    source: Path, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = save.install

    def copied(moves: Any, area: Path, **rest: Any) -> None:
        install(moves, area, **rest)
        shutil.copytree(area.parent, tmp_path / "copy")

    monkeypatch.setattr(save, "install", copied)
    graphrot.convert(source, output=tmp_path / "m.onnx", **options)
    monkeypatch.undo()
    (tmp_path / "copy").rename(work_path(tmp_path / "m.onnx"))
    before = {name: data for name, data in content(tmp_path).items() if not name.startswith(".")}
    with pytest.raises(UsageError, match="already exists"):
        graphrot.convert(source, output=tmp_path / "m.onnx", **options)
    assert content(tmp_path) == before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder of the tiny model."""
    folder = tmp_path / "hf"
    tiny("llama_tied").save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every export that is made; a copy of the one that all tests share."""
    made: list[Path] = []

    def export(_folder: Path, path: Path, **_: Any) -> None:
        made.append(path)
        for file in tiny_onnx("llama_tied").parent.iterdir():
            shutil.copyfile(file, path.parent / file.name)
        path.with_name("model.onnx").rename(path)

    monkeypatch.setattr(hf, "export_folder", export)
    return made


@pytest.mark.parametrize("damage", ["none", "half done", "flipped", "gone", "another source"])
def test_a_finished_export_is_not_made_again(
    folder: Path, options: dict[str, Any], tmp_path: Path, exports: list[Path], damage: str
) -> None:
    output = tmp_path / "out"
    with pytest.raises(Interrupted):
        graphrot.convert(folder, output=output, resume=True, progress=stop_after(0, "rotating the weights"), **options)
    export = work_path(output) / "export"
    assert sorted(p.name for p in work_path(output).iterdir()) == ["export", "lock"]
    if damage == "half done":  # killed in the middle of it
        (export / "finished.json").unlink()
        (export / "finished").rename(export / "making")
    elif damage == "flipped":
        data = bytearray((export / "finished" / "model.onnx.data").read_bytes())
        data[100] ^= 1
        (export / "finished" / "model.onnx.data").write_bytes(data)
    elif damage == "gone":
        (export / "finished" / "model.onnx.data").unlink()
    elif damage == "another source":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "note": 1}))
    exports.clear()
    steps: list[str] = []
    graphrot.convert(folder, output=output, resume=True, progress=lambda s, *_: steps.append(s), **options)
    assert len(exports) == (damage != "none")
    assert ("resuming: the export is done" in steps) == (damage == "none")
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out"}


@pytest.mark.parametrize("resume", [False, True])
def test_stopped_in_an_export(
    folder: Path, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    def export(_folder: Path, path: Path, **_: Any) -> None:
        path.write_bytes(b"the first half")
        raise Interrupted

    monkeypatch.setattr(hf, "export_folder", export)
    with pytest.raises(Interrupted):
        graphrot.convert(folder, output=tmp_path / "out", resume=resume, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
