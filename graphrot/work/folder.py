"""The work folder of a conversion: hidden, beside the output, locked while its run is alive.

    .OUT.graphrot-work/
        lock        held by the run; names its process
        scratch/    worth nothing after the run
        export/     the source as an .onnx file, once it is finished
        groups/     solved weights
        save/       the output on its way to its place

``export`` and ``groups`` are what a later run with ``resume`` goes on with.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graphrot.errors import EnvironmentProblem, UsageError
from graphrot.work.lock import Busy, Lock

SUFFIX = ".graphrot-work"
_LOCK = "lock"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def work_path(target: Path) -> Path:
    """Where the work folder of an output lies: beside it, on its disk.

    Args:
        target: a folder or ``X.onnx``; a link to a folder means that folder.

    Returns:
        A path in the target's parent; or in the target itself, if that is a mounted or lent folder in whose
        parent one cannot work.
    """
    place = target.absolute()
    place = place.resolve() if place.is_dir() else place.parent.resolve() / place.name
    parent = place.parent
    if place.is_dir() and (place.stat().st_dev != parent.stat().st_dev or not os.access(parent, os.W_OK)):
        parent = place
    return parent / f".{place.name}{SUFFIX}"


class WorkFolder:
    """The work folder of one output, as a context manager.

    On entry it is locked, and what an earlier run left is still in it. :meth:`begin` removes what this run
    does not go on with. On the way out everything goes; but after an error, with ``resume``, exports and solved
    groups stay for the next run.

    Args:
        target: the output; its parent exists.
        resume: go on with what an earlier run left, and leave something to the next.

    Raises:
        UsageError: another run that is alive writes this output, or what lies in the folder's place was not made by
            this user's runs.
        EnvironmentProblem: the folder cannot be made.
    """

    def __init__(self, target: Path, *, resume: bool = False) -> None:
        self.target = target
        self.path = work_path(target)
        self.resume = resume
        self.scratch = self.path / "scratch"
        self.export = self.path / "export"
        self.groups = self.path / "groups"
        self.save = self.path / "save"
        self.kept: tuple[Path, ...] = ()
        """What no clearing up may remove."""
        self._lock: Lock | None = None
        self._begun = False

    def __enter__(self) -> Self:
        try:
            while self._lock is None:
                with contextlib.suppress(FileExistsError):
                    self.path.mkdir()
                self._refuse_others()
                with contextlib.suppress(FileNotFoundError):  # its last user has just removed it
                    self._lock = Lock(self.path / _LOCK)
        except Busy as busy:
            stop = "" if busy.pid is None else f", stop it (kill {busy.pid})"
            raise UsageError(
                f"Another run, {busy.holder}, is writing this output",
                where=str(self.target),
                why="two runs into one place would mix",
                do=f"wait for it{stop}, or give another name",
            ) from None
        except OSError as error:
            with contextlib.suppress(OSError):  # not there, or not empty
                self.path.rmdir()
            raise EnvironmentProblem(
                "There is no place for scratch files",
                where=str(self.path),
                why=error.strerror or str(error),
                do="check permissions and space",
            ) from error
        return self

    def _refuse_others(self) -> None:
        """Refuse a folder, a lock or files on their way that are links, something else, or another user's."""
        for path, is_right in ((self.path, stat.S_ISDIR), (self.path / _LOCK, stat.S_ISREG), (self.save, stat.S_ISDIR)):
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue
            why = None
            if stat.S_ISLNK(found.st_mode):
                why = "it is a link, and what it leads to would be emptied"
            elif not is_right(found.st_mode):
                why = f"it is not a {'folder' if is_right is stat.S_ISDIR else 'file'}"
            elif sys.platform != "win32" and found.st_uid != os.geteuid():
                why = "it belongs to another user"
            if why is not None:
                raise UsageError(
                    "What lies where the work is done was not made by a run of yours",
                    where=str(path),
                    why=why,
                    do="look at it and remove it yourself, or give another name for the output",
                )

    def begin(self) -> None:
        """Make room for a run: scratch files go, and without ``resume`` the rest as well."""
        self._begun = True
        kept = (self.export, self.groups) if self.resume else ()
        self.clear(keep=[path for path in kept if path.is_dir() and not path.is_symlink()])
        for path in (self.scratch, self.export, self.groups, self.save):
            path.mkdir(exist_ok=True)

    def clear(self, *, keep: Sequence[Path] = ()) -> None:
        """Remove everything in the folder but the lock, ``keep`` and :attr:`kept`."""
        for path in self.path.iterdir():
            if path.name != _LOCK and path not in keep and path not in self.kept:
                remove_tree(path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lock is not None
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:  # of an open file
            error.filename = str(self.path)
        with Undisturbed():
            if self._begun:
                goes_on = kind is not None and self.resume
                self.clear(keep=[path for path in (self.export, self.groups) if goes_on and _holds_finished(path)])
            # Refused before it began: what an earlier run left is not this one's to remove.
            empty = all(path.name == _LOCK for path in self.path.iterdir())
            self._lock.release(remove=empty)
            if empty:
                with contextlib.suppress(OSError):  # the next run is in it already
                    self.path.rmdir()


def _holds_finished(folder: Path) -> bool:
    """Whether something in the folder is done, and not only begun."""
    return any(file.name != "job.json" for file in folder.glob("*.json"))


def remove_tree(path: Path) -> None:
    """Remove a file or a folder, as far as that is possible; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


class Undisturbed:
    """While files are put in order, a further Ctrl-C or SIGTERM waits; it strikes on the way out.

    Has no effect outside the main thread, which alone hears signals.
    """

    def __enter__(self) -> Self:
        self._came: list[int] = []
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, lambda which, _frame: self._came.append(which))
        return self

    @property
    def wanted(self) -> bool:
        """Whether a signal is waiting."""
        return bool(self._came)

    def forget(self) -> None:
        """What was to be stopped is done: a waiting signal comes too late."""
        self._came.clear()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(self._came):
            signal.raise_signal(number)
