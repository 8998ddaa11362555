"""What lies in the place of a work folder, or in one, and was not made by a run."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import graphrot
from graphrot.errors import UsageError
from graphrot.model.finished import exported
from graphrot.work import folder as module
from graphrot.work.folder import WorkFolder, work_path


@pytest.mark.parametrize("part", ["", "lock", "save"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_link_is_refused_and_its_target_stays(source: Path, tmp_path: Path, part: str, resume: bool) -> None:
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    link = work_path(output) / part
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere / "mine" if part == "lock" else elsewhere)
    with pytest.raises(UsageError, match="was not made by a run of yours") as caught:
        graphrot.convert(source, output=output, recipe="rotate-only", certificate=None, resume=resume)
    assert str(link) in str(caught.value) and "it is a link" in str(caught.value)
    assert link.is_symlink() and (elsewhere / "mine").read_text() == "mine"
    assert not output.exists()


@pytest.mark.parametrize("part", ["export", "groups", "scratch"])
def test_links_in_it_are_not_followed(tmp_path: Path, part: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("mine")
    work_path(tmp_path / "out").mkdir()
    (work_path(tmp_path / "out") / part).symlink_to(tmp_path / "elsewhere")
    with WorkFolder(tmp_path / "out", resume=True) as work:
        work.begin()
        assert (work.path / part).is_dir() and not (work.path / part).is_symlink()
    assert (tmp_path / "elsewhere" / "mine").read_text() == "mine"


@pytest.mark.parametrize("part", ["", "save", "lock"])
def test_something_else_in_its_place_is_refused(tmp_path: Path, part: str) -> None:
    path = work_path(tmp_path / "out") / part
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if part == "lock" else path.write_text("mine")
    kind = "file" if part == "lock" else "folder"
    with pytest.raises(UsageError, match=f"it is not a {kind}"), WorkFolder(tmp_path / "out"):
        pass
    assert path.exists()


@pytest.mark.skipif(os.name == "nt", reason="owners of POSIX")
def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_path(tmp_path / "out").mkdir()
    monkeypatch.setattr(module.os, "geteuid", lambda: (tmp_path.stat().st_uid) + 1)
    with pytest.raises(UsageError, match="it belongs to another user"), WorkFolder(tmp_path / "out"):
        pass


@pytest.mark.parametrize("part", ["export", "groups"])
def test_files_in_the_place_of_its_folders_make_it_start_afresh(tmp_path: Path, part: str) -> None:
    work_path(tmp_path / "out").mkdir()
    (work_path(tmp_path / "out") / part).write_text("junk")
    with WorkFolder(tmp_path / "out", resume=True) as work:
        work.begin()
        assert (work.path / part).is_dir()


def test_a_folder_in_the_place_of_a_marker(tmp_path: Path) -> None:
    (tmp_path / "finished.json" / "deep").mkdir(parents=True)
    path = exported(tmp_path, "hash", lambda made: made.write_text("made") and None)
    assert path.read_text() == "made" and (tmp_path / "finished.json").is_file()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """Writing to an open file says no name."""

    def run() -> None:
        with WorkFolder(tmp_path / "out") as work:
            work.begin()
            raise OSError(errno.EFBIG, "File too large")

    with pytest.raises(OSError, match="too large") as caught:
        run()
    assert caught.value.filename == str(work_path(tmp_path / "out"))
