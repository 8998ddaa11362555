"""Saving is all or nothing, keeps every number, and replaces only what it may."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphrot.errors import CheckFailed, EnvironmentProblem, UsageError
from graphrot.model import save
from graphrot.model.save import refuse_target, save_directory, save_file
from tests.exported import tiny_onnx, write_tokenizer


@pytest.fixture
def model() -> ir.Model:
    return ir.load(tiny_onnx("llama_tied"))


@pytest.fixture
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder)
    (folder / "model.safetensors").write_bytes(b"not a tokenizer's file")
    return folder


def _content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _numbers(path: Path) -> dict[str, np.ndarray]:
    weights = ir.load(path).graph.initializers
    return {name: v.const_value.numpy().copy() for name, v in weights.items() if v.const_value is not None}


def test_folder_form(model: ir.Model, words: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    saved = save_directory(model, {"a": 1, "sizes": {"source_bytes": 7}}, words, target, plan="[]\n")
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert set(_content(target)) == {"model.onnx", "model.onnx.data", "graphrot.json", "plan.json", *tokenizer}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    size = sum((target / name).stat().st_size for name in ("model.onnx", "model.onnx.data"))
    hashes = {name: hashlib.sha256((target / name).read_bytes()).hexdigest() for name in tokenizer}
    assert saved == save.Saved(target / "model.onnx", size, hashes)
    manifest = json.loads((target / "graphrot.json").read_text(encoding="utf-8"))
    assert manifest == {"a": 1, "sizes": {"source_bytes": 7, "model_bytes": size}, "tokenizer_files": hashes}
    onnx.checker.check_model(str(target / "model.onnx"), full_check=True)
    before = _numbers(tiny_onnx("llama_tied"))
    after = _numbers(target / "model.onnx")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_file_form(model: ir.Model, tmp_path: Path) -> None:
    target = tmp_path / "m.v1.onnx"
    saved = save_file(model, {}, target, plan="[]")
    assert set(_content(tmp_path)) == {"m.v1.onnx", "m.v1.onnx.data", "m.v1.graphrot.json", "m.v1.plan.json"}
    assert saved.path == target
    onnx.checker.check_model(str(target), full_check=True)


def test_metadata_and_names_are_kept(model: ir.Model, tmp_path: Path) -> None:
    model.metadata_props["graphrot.version"] = "9"
    save_file(model, {}, tmp_path / "m.onnx")
    again = ir.load(tmp_path / "m.onnx")
    assert again.metadata_props == {"graphrot.version": "9"}
    assert [node.name for node in again.graph] == [node.name for node in model.graph]


@pytest.mark.parametrize("name", ["out", "out.onnx"])
def test_an_invalid_model_is_not_installed(model: ir.Model, tmp_path: Path, name: str) -> None:
    def write(broken: ir.Model, target: Path) -> None:
        if target.suffix:
            save_file(broken, {}, target)
        else:
            save_directory(broken, {}, None, target)

    broken = model.clone()
    last = broken.graph[-1]
    broken.graph.remove(last)
    broken.graph.insert_before(broken.graph[0], last)
    with pytest.raises(CheckFailed, match="The converted model is not valid") as caught:
        write(broken, tmp_path / name)
    assert "not sorted" in str(caught.value.why)
    assert list(tmp_path.iterdir()) == []


def test_existing_outputs_are_kept_unless_forced(model: ir.Model, tmp_path: Path) -> None:
    save_directory(model, {"run": 1}, None, tmp_path / "out")
    save_file(model, {"run": 1}, tmp_path / "m.onnx")
    names = _content(tmp_path).keys()
    for target, write in ((tmp_path / "out", save_directory), (tmp_path / "m.onnx", save_file)):
        before = _content(tmp_path)
        arguments: tuple[Any, ...] = (None, target) if write is save_directory else (target,)
        with pytest.raises(UsageError, match="The output already exists"):
            write(model, {"run": 2}, *arguments)
        assert _content(tmp_path) == before
        write(model, {"run": 2}, *arguments, force=True)
    assert json.loads((tmp_path / "out" / "graphrot.json").read_text(encoding="utf-8"))["run"] == 2
    assert json.loads((tmp_path / "m.graphrot.json").read_text(encoding="utf-8"))["run"] == 2
    assert _content(tmp_path).keys() == names


def test_a_model_can_replace_the_file_it_is_mapped_from(model: ir.Model, tmp_path: Path) -> None:
    target = tmp_path / "m.onnx"
    save_file(model, {}, target)
    before = _numbers(target)
    save_file(ir.load(target), {}, target, force=True)
    after = _numbers(target)
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["m.onnx.data", "m.graphrot.json", "m.plan.json"])
def test_a_leftover_beside_the_file_is_in_the_way(model: ir.Model, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"someone's")
    with pytest.raises(UsageError, match="already exists") as caught:
        save_file(model, {}, tmp_path / "m.onnx", plan="[]")
    assert name in str(caught.value)
    assert _content(tmp_path) == {name: b"someone's"}


@pytest.mark.parametrize("name", ["m.onnx", "m.onnx.data", "m.graphrot.json", "m.plan.json"])
@pytest.mark.parametrize("road", ["itself", "dots", "link", "linked folder"])
def test_no_file_that_is_read_is_replaced_even_by_force(model: ir.Model, tmp_path: Path, name: str, road: str) -> None:
    (tmp_path / "a").mkdir()
    source = tmp_path / "a" / name
    source.write_bytes(b"irreplaceable")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "link").symlink_to(source)
    roads = {
        "itself": source,
        "dots": tmp_path / "a" / ".." / "a" / name,
        "link": tmp_path / "link",
        "linked folder": tmp_path / "b" / name,
    }
    with pytest.raises(UsageError, match="would replace a file that the conversion reads") as caught:
        save_file(model, {}, tmp_path / "a" / "m.onnx", force=True, plan="[]", sources=[roads[road]])
    assert str(roads[road]) in str(caught.value)
    assert _content(tmp_path / "a") == {name: b"irreplaceable"}


@pytest.mark.parametrize("place", ["model.onnx", "deep/down/model.onnx"])
def test_a_folder_that_holds_what_is_read_is_not_replaced(model: ir.Model, tmp_path: Path, place: str) -> None:
    target = tmp_path / "out"
    (target / place).parent.mkdir(parents=True)
    for name in (place, "graphrot.json"):
        (target / name).write_bytes(b"irreplaceable")
    before = _content(tmp_path)
    with pytest.raises(UsageError, match="would replace a file that the conversion reads"):
        save_directory(model, {}, None, target, force=True, sources=[target / place])
    assert _content(tmp_path) == before


def test_files_beside_the_output_are_not_in_the_way(model: ir.Model, tmp_path: Path) -> None:
    save_file(model, {}, tmp_path / "m.onnx")
    (tmp_path / "source.onnx").write_bytes(b"read")
    save_file(model, {}, tmp_path / "m.onnx", force=True, sources=[tmp_path / "source.onnx", tmp_path / "absent"])


@pytest.mark.parametrize("mine", ["notes.txt", "model.onnx.bak", "vocab.json/mine.txt"])
def test_a_folder_with_other_files_is_not_replaced(model: ir.Model, tmp_path: Path, mine: str) -> None:
    target = tmp_path / "out"
    save_directory(model, {}, None, target)
    (target / mine).parent.mkdir(exist_ok=True)
    (target / mine).write_bytes(b"mine")
    before = _content(tmp_path)
    with pytest.raises(UsageError, match="holds files that graphrot did not write") as caught:
        save_directory(model, {}, None, target, force=True)
    assert mine.split("/")[0] in str(caught.value)
    assert _content(tmp_path) == before


@pytest.mark.parametrize("change", ["added", "changed", "linked"])
def test_a_users_tokenizer_in_the_folder_is_not_replaced(
    model: ir.Model, words: Path, tmp_path: Path, change: str
) -> None:
    target = tmp_path / "out"
    save_directory(model, {}, words, target)
    name = "vocab.txt" if change == "added" else "tokenizer_config.json"
    if change == "linked":
        (target / name).rename(tmp_path / "mine")
        (target / name).symlink_to(tmp_path / "mine")
    else:
        (target / name).write_bytes(b"mine")
    before = _content(tmp_path)
    for folder in (words, None):
        with pytest.raises(UsageError, match="did not write, or that were changed since") as caught:
            save_directory(model, {}, folder, target, force=True)
        assert f"{target}: {name}" in str(caught.value)
        assert _content(tmp_path) == before


@pytest.mark.parametrize("name", ["m.onnx", "m.onnx.data", "m.graphrot.json", "m.plan.json"])
@pytest.mark.parametrize("content", ["model", "words", "{}", "[[["])
def test_foreign_files_are_not_replaced_even_by_force(model: ir.Model, tmp_path: Path, name: str, content: str) -> None:
    """A model of somebody else is one, too; and a manifest has to be a manifest."""
    if content == "model":
        save.save_model(model, tmp_path / name)
    else:
        (tmp_path / name).write_text(content)
    before = _content(tmp_path)
    with pytest.raises(UsageError, match="was not written by graphrot") as caught:
        save_file(model, {}, tmp_path / "m.onnx", force=True)
    assert name in str(caught.value) and "remove it yourself" in str(caught.value)
    assert _content(tmp_path) == before


@pytest.mark.parametrize("left", ["m.graphrot.json", "m.onnx"])
def test_what_is_left_of_an_earlier_conversion_is_replaced(model: ir.Model, tmp_path: Path, left: str) -> None:
    """The manifest tells it, or the model's mark, wherever in its metadata that is."""
    model.metadata_props.update({"another": "x" * 300, "graphrot.version": "9", "graphrot.plan": ""})
    save_file(model, {}, tmp_path / "m.onnx", plan="[]")
    for path in tmp_path.iterdir():
        if path.name not in (left, "m.plan.json"):
            path.unlink()
    save_file(model, {}, tmp_path / "m.onnx", force=True)
    assert set(_content(tmp_path)) == {"m.onnx", "m.onnx.data", "m.graphrot.json"}


@pytest.mark.parametrize(("form", "length"), [("", 241), ("", 255), ("", 300), (".onnx", 241), (".onnx", 255)])
def test_too_long_a_name_is_refused(model: ir.Model, tmp_path: Path, form: str, length: int) -> None:
    name = "n" * (length - len(form)) + form
    with pytest.raises(UsageError, match="The output's name is too long"), save.claim(tmp_path / name):
        pass
    with pytest.raises(UsageError, match="The output's name is too long"):
        refuse_target(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["", ".onnx"])
def test_the_longest_name(model: ir.Model, words: Path, tmp_path: Path, form: str) -> None:
    target = tmp_path / ("n" * (240 - len(form)) + form)
    for force in (False, True):
        if form:
            save_file(model, {}, target, force=force, plan="[]")
        else:
            save_directory(model, {}, words, target, force=force, plan="[]")
    assert target.exists()


@pytest.mark.parametrize("form", ["", ".onnx"])
def test_dots_behind_a_folder_that_is_not_there(
    model: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for force in (False, True):
        if form:
            save_file(model, {}, Path("absent/../x.onnx"), force=force)
        else:
            save_directory(model, {}, None, Path("absent/../x"), force=force)
    assert (tmp_path / f"x{form}").exists() and not (tmp_path / "absent").exists()


def test_nothing_of_the_earlier_conversion_stays(model: ir.Model, words: Path, tmp_path: Path) -> None:
    save_directory(model, {}, words, tmp_path / "out", plan="[]")
    save_directory(model, {}, None, tmp_path / "out", force=True)
    assert set(_content(tmp_path / "out")) == {"model.onnx", "model.onnx.data", "graphrot.json"}


@pytest.mark.parametrize("name", [".", "../here", "../down/../here"])
def test_the_folder_one_is_in(model: ir.Model, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays the same folder: whoever is in it sees the files."""
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "down").mkdir()
    monkeypatch.chdir(here)
    inode = here.stat().st_ino
    for force in (False, True):
        save_directory(model, {}, None, Path(name), force=force)
        assert set(_content(here)) == {"model.onnx", "model.onnx.data", "graphrot.json"}
    assert here.stat().st_ino == inode


def test_a_linked_folder_is_filled_where_it_is(model: ir.Model, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for force in (False, True):
        save_directory(model, {}, None, tmp_path / "out", force=force)
    assert (tmp_path / "out").is_symlink()
    assert set(_content(tmp_path / "disk")) == {"model.onnx", "model.onnx.data", "graphrot.json"}


def test_foreign_folders_are_not_replaced_even_by_force(model: ir.Model, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"cat")
    with pytest.raises(UsageError, match="was not written by graphrot"):
        save_directory(model, {}, None, tmp_path / "photos", force=True)
    assert _content(tmp_path) == {"photos/cat.png": b"cat"}


def test_an_empty_folder_is_filled(model: ir.Model, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    save_directory(model, {}, None, tmp_path / "out")
    assert (tmp_path / "out" / "model.onnx").is_file()


def test_a_missing_parent_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="The folder for the output does not exist"):
        refuse_target(tmp_path / "no" / "out")


@pytest.mark.parametrize("form", ["folder", "file"])
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("failing", ["copy", "model", "sync", "rename"])
def test_a_failure_leaves_nothing_behind(
    model: ir.Model,
    words: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    existing: bool,
    failing: str,
) -> None:
    """The disk fills up at one point of the way; what was there before is still there, and nothing else."""

    def run() -> None:
        if form == "folder":
            save_directory(model, {"run": 2}, words, tmp_path / "out", force=True)
        else:
            save_file(model, {"run": 2}, tmp_path / "m.onnx", force=True)

    if existing:
        save_directory(model, {"run": 1}, words, tmp_path / "out")
        save_file(model, {"run": 1}, tmp_path / "m.onnx")
    before = _content(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "copy":
        if form == "file":
            monkeypatch.setattr(save, "_write_texts", full)
        monkeypatch.setattr(save.shutil, "copyfile", full)
    elif failing == "model":
        monkeypatch.setattr(save.ir, "save", full)
    elif failing == "sync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        _fail_last_rename(monkeypatch, full)
    with pytest.raises(EnvironmentProblem, match="could not be written") as caught:
        run()
    assert "No space left on device; nothing was left behind" in str(caught.value)
    monkeypatch.undo()
    assert _content(tmp_path) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    run()


def _fail_last_rename(monkeypatch: pytest.MonkeyPatch, full: Any) -> None:
    """Let the move of the finished model fail, after everything before it was moved."""
    rename = os.rename

    def sometimes(source: str | Path, target: str | Path) -> None:
        if (
            Path(target).name in ("out", "m.onnx", "model.onnx")
            and "replaced" not in str(target)
            and "replaced" not in str(source)
        ):
            full()
        rename(source, target)

    monkeypatch.setattr(os, "rename", sometimes)


def test_a_place_without_permission_is_named(model: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(EnvironmentProblem, match="no place for scratch files") as caught:
        save_file(model, {}, tmp_path / "m.onnx")
    assert str(tmp_path) in str(caught.value) and "Permission denied" in str(caught.value)
