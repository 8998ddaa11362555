"""Between a kill and the next run the places are the user's: nothing of theirs, and nothing old, is lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import onnx_ir as ir
import pytest

from graphrot.errors import UsageError
from graphrot.model import install as module
from graphrot.model.install import install, repair, unfinished, untouched
from graphrot.model.save import claim, save_directory, save_file
from graphrot.work.folder import WorkFolder, work_path
from tests.exported import tiny_onnx

RENAMES = 6
"""Of an installation over an old one: the old .onnx, its data and its manifest go, the new ones come."""
FORMS = ("m.onnx", "out")


class Killed(BaseException):
    """Stands for kill -9: nothing that follows it runs."""


@pytest.fixture(scope="module")
def model() -> ir.Model:
    return ir.load(tiny_onnx("llama_tied"))


def _save(model: ir.Model, target: Path, run: int, *, force: bool = False) -> None:
    if target.suffix:
        save_file(model, {"run": run}, target, force=force)
    else:
        save_directory(model, {"run": run}, None, target, force=force)


def _onnx(target: Path) -> Path:
    return target if target.suffix else target / "model.onnx"


def _kill(model: ir.Model, target: Path, renames: int) -> None:
    """Save over what is there, and die after some renames of the installation."""
    rename, left = os.rename, renames

    def counted(source: Path, place: Path) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        rename(source, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", counted)
        patch.setattr(module, "repair", lambda _: None)
        patch.setattr(module.Undisturbed, "forget", lambda _: (_ for _ in ()).throw(Killed))
        patch.setattr(WorkFolder, "__exit__", lambda self, *_: self._lock.release())
        with pytest.raises(Killed):
            _save(model, target, 2, force=True)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("renames", range(RENAMES + 1))
def test_a_file_made_after_the_kill_stays(model: ir.Model, tmp_path: Path, form: str, renames: int) -> None:
    target = tmp_path / form
    _save(model, target, 1)
    old = _onnx(target).read_bytes()
    _kill(model, target, renames)
    _onnx(target).write_bytes(b"precious")
    before = _files(tmp_path)
    with pytest.raises(UsageError) as caught, claim(target):
        pass
    assert _onnx(target).read_bytes() == b"precious"
    if 0 < renames < RENAMES:  # the old one is in the hidden folder, which the message names
        kept = work_path(target) / "save" / "replaced" / _onnx(target).name
        assert kept.read_bytes() == old
        assert str(_onnx(target)) in str(caught.value) and str(kept) in str(caught.value)
        assert _files(tmp_path) == before
        _onnx(target).unlink()
        with pytest.raises(UsageError, match="already exists"), claim(target):
            pass
        assert _onnx(target).read_bytes() == old


@pytest.mark.parametrize("form", FORMS)
def test_what_was_written_to_after_the_kill_stays(model: ir.Model, tmp_path: Path, form: str) -> None:
    """The new weights had come, and somebody changed them."""
    target = tmp_path / form
    _save(model, target, 1)
    _kill(model, target, RENAMES - 1)
    data = _onnx(target).with_name(_onnx(target).name + ".data")
    with data.open("ab") as stream:
        stream.write(b"more")
    before = _files(tmp_path)
    with pytest.raises(UsageError, match="A file is in the way"), claim(target, resume=True):
        pass
    assert _files(tmp_path) == before


@pytest.mark.parametrize("gone", ["removed", "a file"])
@pytest.mark.parametrize("renames", range(RENAMES + 1))
def test_the_folder_went_after_the_kill(model: ir.Model, tmp_path: Path, gone: str, renames: int) -> None:
    target = tmp_path / "out"
    _save(model, target, 1)
    _kill(model, target, renames)
    shutil.rmtree(target)
    if gone == "a file":
        target.write_bytes(b"precious")
    before = _files(tmp_path)
    if 0 < renames < RENAMES:
        with pytest.raises(UsageError, match="a folder that is gone") as caught:
            _save(model, target, 3)
        assert str(work_path(target) / "save" / "replaced") in str(caught.value)
        assert _files(tmp_path) == before
        shutil.rmtree(work_path(target))
    if gone == "a file":
        with pytest.raises(UsageError, match="already exists"):
            _save(model, target, 3)
        assert target.read_bytes() == b"precious"
    else:
        _save(model, target, 3)
        assert json.loads((target / "graphrot.json").read_text())["run"] == 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", ["none", "another file", "written to", "weights"])
def test_resuming_replaces_only_what_the_killed_run_installed(
    model: ir.Model, tmp_path: Path, form: str, change: str
) -> None:
    target = tmp_path / form
    _save(model, target, 1)
    _kill(model, target, RENAMES)
    path = _onnx(target)
    if change == "another file":
        (tmp_path / "other").write_bytes(b"precious")
        (tmp_path / "other").replace(path)
    elif change != "none":
        if change == "weights":
            path = path.with_name(path.name + ".data")
        with path.open("ab") as stream:
            stream.write(b"more")
    before = path.read_bytes()
    if change == "none":
        with claim(target, resume=True):
            pass
    else:
        with pytest.raises(UsageError, match="already exists"), claim(target, resume=True):
            pass
    assert path.read_bytes() == before


def test_a_new_folder_is_known_by_its_files(tmp_path: Path) -> None:
    area, target = tmp_path / "area", tmp_path / "out"
    (area / "made").mkdir(parents=True)
    (area / "made" / "m.onnx").write_bytes(b"new")
    install([(area / "made", target)], area)
    assert repair(area) and untouched(area) and not unfinished(area)
    (target / "m.onnx").write_bytes(b"mine")
    assert repair(area) and not untouched(area)


@pytest.mark.parametrize("words", ["", "[]", '{"moves": [], "removed": []}', '{"moves": [["a", "b"]], "removed": []}'])
def test_a_journal_that_is_none_is_refused(model: ir.Model, tmp_path: Path, words: str) -> None:
    target = tmp_path / "m.onnx"
    _save(model, target, 1)
    _kill(model, target, 1)
    (work_path(target) / "save" / "install.json").write_text(words)
    before = _files(tmp_path)
    with pytest.raises(UsageError, match="journal of an interrupted run cannot be read"):
        _save(model, target, 3)
    assert _files(tmp_path) == before


def test_a_put_back_that_fails_keeps_what_was_replaced(
    model: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails in the middle, and somebody has made a file where the old one was."""
    target = tmp_path / "m.onnx"
    _save(model, target, 1)
    old = target.read_bytes()
    rename = os.rename

    def failing(source: Path, place: Path) -> None:
        if Path(source).parent.name == "made":
            target.write_bytes(b"precious")
            raise OSError(5, "Input/output error")
        rename(source, place)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(UsageError, match="A file is in the way"):
        _save(model, target, 2, force=True)
    assert target.read_bytes() == b"precious"
    assert (work_path(target) / "save" / "replaced" / "m.onnx").read_bytes() == old
