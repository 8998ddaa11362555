"""A lock holds while its process lives, and no longer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import graphrot
from graphrot.errors import UsageError
from graphrot.work import lock as module
from graphrot.work.folder import WorkFolder, work_path
from graphrot.work.lock import Busy, Lock

_HOLD = """
import sys
from pathlib import Path
from graphrot.work.folder import WorkFolder
folder = WorkFolder(Path(sys.argv[1])).__enter__()
folder.begin()
(folder.scratch / "weights").write_bytes(b"much")
print("held", flush=True)
sys.stdin.read()
"""


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first = Lock(tmp_path / "lock")
    with pytest.raises(Busy) as caught:
        Lock(tmp_path / "lock")
    assert caught.value.pid == os.getpid()
    first.release()
    second = Lock(tmp_path / "lock")
    second.release(remove=True)
    second.release(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_removed_is_not_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, the last holder takes the file away: what is gone must not be locked."""
    path = tmp_path / "lock"
    take = module._try_lock

    def late(handle: int, where: Path) -> bool:
        monkeypatch.undo()
        path.unlink()
        return take(handle, where)

    monkeypatch.setattr(module, "_try_lock", late)
    lock = Lock(path)
    assert path.read_text() == f"{os.getpid()}\n"
    with pytest.raises(Busy):
        Lock(path)
    lock.release(remove=True)


def test_waiting(tmp_path: Path) -> None:
    first = Lock(tmp_path / "lock")
    told: list[Busy] = []
    timer = threading.Timer(0.5, first.release)
    timer.start()
    second = Lock.wait(tmp_path / "lock", told.append)
    timer.join()
    second.release()
    assert [busy.pid for busy in told] == [os.getpid()]


def test_a_second_run_is_refused_and_a_dead_one_is_no_obstacle(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        for resume in (False, True):
            with pytest.raises(UsageError, match="is writing this output") as caught:
                graphrot.convert(source, output=output, resume=resume)
            message = str(caught.value)
            assert f"process {process.pid}" in message and f"stop it (kill {process.pid})" in message
        assert (work_path(output) / "scratch" / "weights").is_file()
        process.kill()
    graphrot.convert(source, output=output, recipe="rotate-only", certificate=None)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_every_way_to_name_an_output_leads_to_one_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    (tmp_path / "disk link").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path / "disk" / "out")
    ways = [tmp_path / "disk" / "out", tmp_path / "link", tmp_path / "disk link" / "out", Path("../out"), Path.cwd()]
    assert {work_path(way) for way in ways} == {tmp_path / "disk" / ".out.graphrot-work"}
    assert work_path(tmp_path / "disk link" / "m.onnx") == tmp_path / "disk" / ".m.onnx.graphrot-work"


def test_a_folder_in_a_place_that_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be made beside it, as in a container that lends one folder: the work is done inside."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    with WorkFolder(tmp_path / "out") as work:
        assert work.path == tmp_path / "out" / ".out.graphrot-work"
        assert work.path.is_dir()
    assert list((tmp_path / "out").iterdir()) == []


def test_folders_come_and_go_under_contention(tmp_path: Path) -> None:
    """Many at once: each is alone in the folder, and in the end nothing is left."""
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(30):
            try:
                with WorkFolder(tmp_path / "out") as folder:
                    inside.append(1)
                    most.append(len(inside))
                    folder.begin()
                    inside.pop()
            except UsageError:
                continue

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert list(tmp_path.iterdir()) == []
