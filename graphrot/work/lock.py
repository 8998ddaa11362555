"""A lock that dies with its process: it holds while a process lives, and is no obstacle afterwards."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from graphrot.errors import EnvironmentProblem

_POLL = 0.2
"""Seconds between two tries of :meth:`Lock.wait`."""


class Busy(Exception):
    """Another holder is alive; ``pid`` is its process, or None where it has not said so yet."""

    def __init__(self, pid: int | None) -> None:
        super().__init__(f"held by process {pid}")
        self.pid = pid

    @property
    def holder(self) -> str:
        """The holder in words."""
        return "another process" if self.pid is None else f"process {self.pid}"


class Lock:
    """An exclusive lock on a file, from the moment it is made to :meth:`release`.

    The file holds the holder's process id. It stays when the lock is released, unless ``remove`` is asked
    for. Child processes do not inherit it.

    Args:
        path: the lock's file; it is made if it is not there.

    Raises:
        Busy: another holder is alive, in this process or elsewhere.
        FileNotFoundError: the folder of the lock is not there (any more).
        EnvironmentProblem: the file system has no locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if not _try_lock(handle, path):
                    raise Busy(_read_pid(handle))
                if _is_file(handle, path):
                    break
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)  # its last holder has removed the file meanwhile
        try:
            os.ftruncate(handle, 0)
            os.lseek(handle, 0, os.SEEK_SET)
            os.write(handle, f"{os.getpid()}\n".encode())
        except OSError:  # the disk is full
            path.unlink(missing_ok=True)
            os.close(handle)
            raise
        self._handle: int | None = handle

    @classmethod
    def wait(cls, path: Path, told: Callable[[Busy], None]) -> Lock:
        """The lock, as soon as it is free; ``told`` hears once who holds it."""
        silent = False
        while True:
            try:
                return cls(path)
            except Busy as busy:
                if not silent:
                    told(busy)
                silent = True
                time.sleep(_POLL)

    def release(self, *, remove: bool = False) -> None:
        """Let go; with ``remove`` the file goes, too. A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if remove and os.name != "nt":
            self.path.unlink(missing_ok=True)
        os.close(handle)
        if remove and os.name == "nt":  # where open files cannot be removed
            try:
                self.path.unlink(missing_ok=True)
            except OSError:
                return


def _is_file(handle: int, path: Path) -> bool:
    """Whether ``path`` still is the open file."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _read_pid(handle: int) -> int | None:
    text = os.pread(handle, 32, 0) if hasattr(os, "pread") else os.read(handle, 32)
    digits = text.split(b"\n")[0]
    return int(digits) if digits.isdigit() else None


if sys.platform == "win32":
    import msvcrt

    _FAR = 1 << 30
    """The byte that is locked: what is locked cannot be read there, and the process id must be."""

    def _try_lock(handle: int, path: Path) -> bool:
        del path
        os.lseek(handle, _FAR, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(handle, 0, os.SEEK_SET)
        return True

else:
    import fcntl

    def _try_lock(handle: int, path: Path) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise EnvironmentProblem(
                "The file system has no locks",
                where=str(path),
                why=f"{error.strerror}; two runs into one place could mix",
                do="write to another disk",
            ) from error
        return True
