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
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graphrot.errors import EnvironmentProblem, UsageError
from graphrot.work.lock import Busy, Lock

SUFFIX = ".graphrot-work"
_LOCK = "lock"


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
        UsageError: another run that is alive writes this output.
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
        self._lock: Lock | None = None
        self._begun = False

    def __enter__(self) -> Self:
        try:
            while self._lock is None:
                self.path.mkdir(exist_ok=True)
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

    def begin(self) -> None:
        """Make room for a run: scratch files go, and without ``resume`` the rest as well."""
        self._begun = True
        self.clear(keep=(self.export, self.groups) if self.resume else ())
        for path in (self.scratch, self.export, self.groups, self.save):
            path.mkdir(exist_ok=True)

    def clear(self, *, keep: Sequence[Path] = ()) -> None:
        """Remove everything in the folder but the lock and ``keep``."""
        for path in self.path.iterdir():
            if path.name != _LOCK and path not in keep:
                remove_tree(path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lock is not None
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
