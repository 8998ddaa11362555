"""Put finished files into their places: all of them or none, also if the process is killed in between.

Names are fixed (``X.onnx`` finds its weights in ``X.onnx.data``), so several files have to change places.
The order keeps every reader safe: the old ``.onnx`` goes first and the new one comes last, so that at every
instant there is either no ``.onnx``, or one that is whole. A journal beside the files, written before the
first move, lets the next run finish the thought of a killed one: before the new ``.onnx`` was in its place
everything is put back, afterwards all of it is new.

Between the two runs the places are the user's. So the journal says which files were moved (inode, size, time), and
mending touches a place only if it is empty, or holds just what the journal says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrot.errors import UsageError
from graphrot.work.files import sync, write_atomic
from graphrot.work.folder import Undisturbed

_JOURNAL = "install.json"
_REPLACED = "replaced"


@dataclass(frozen=True)
class _Move:
    """A file or folder, the way that it goes, and what it is (see :func:`_identity`)."""

    start: Path
    end: Path
    identity: Any

    @property
    def done(self) -> bool:
        return not _exists(self.start)

    @property
    def arrived(self) -> bool:
        """Whether the very thing that was moved lies at the end of the way."""
        return bool(_identity(self.end) == self.identity)


def install(moves: Sequence[tuple[Path, Path]], area: Path, *, remove: Sequence[Path] = ()) -> None:
    """Rename finished files or folders to their places; on failure, or when stopped, put back what was there.

    Args:
        moves: ``(finished, place)``, on one disk. The last one decides: once it is done all is done.
        area: a folder on that disk for the journal and for what is replaced; the caller empties it afterwards,
            unless it is :func:`unfinished`.
        remove: files that go, in this order, before anything comes. All of one folder.
    """
    replaced = area / _REPLACED
    replaced.mkdir()
    goes = [(old, replaced / old.name) for old in remove]
    journal = {"moves": [_entry(*way, area) for way in moves], "removed": [_entry(*way, area) for way in goes]}
    with Undisturbed() as signals:
        write_atomic(area / _JOURNAL, json.dumps(journal).encode())
        try:
            for old, kept in goes:
                old.rename(kept)
            for made, place in moves[:-1]:
                made.rename(place)
            made, place = moves[-1]
            sync(place.parent)
            if signals.wanted:
                raise KeyboardInterrupt
            made.rename(place)
        except BaseException:
            repair(area)
            raise
        signals.forget()
        sync(place.parent)


def repair(area: Path) -> bool:
    """Mend what a killed :func:`install` left; does nothing where there was none.

    Returns:
        Whether that installation is complete, and only the cleaning up was not.

    Raises:
        UsageError: what was replaced cannot be put back, since its place is taken or gone. Nothing was moved.
    """
    journal = _read(area)
    if journal is None:
        return False
    moves, removed = journal
    if moves[-1].done:
        return True
    undone = [move for move in moves[:-1] if move.done and move.arrived]
    kept = [move for move in removed if _exists(move.end)]
    free = {move.end for move in undone}
    _refuse_taken([move for move in kept if move.start not in free], area)
    for move in reversed(undone):
        move.end.rename(move.start)
    for move in reversed(kept):
        move.end.rename(move.start)
    (area / _JOURNAL).unlink()
    return False


def untouched(area: Path) -> bool:
    """Whether a complete installation was, and every place still holds exactly what was put there."""
    journal = _read(area)
    return journal is not None and all(move.done and move.arrived for move in journal[0])


def unfinished(area: Path) -> bool:
    """Whether the area holds files that belong elsewhere: they are not to be removed."""
    try:
        journal = _read(area)
    except UsageError:
        return True
    return journal is not None and not journal[0][-1].done


def _refuse_taken(moves: Sequence[_Move], area: Path) -> None:
    """Refuse to put something back into a place that is taken, or whose folder is gone."""
    kept = (area / _REPLACED).resolve()
    do = f"move the files in {kept} where you want them, then remove {kept.parent.parent}"
    for move in moves:
        place = Path(os.path.normpath(move.start))
        if not place.parent.is_dir():
            raise UsageError(
                "An interrupted run was replacing files in a folder that is gone",
                where=str(place.parent),
                why=f"what it held is partly kept in {kept}",
                do=do,
            )
        if _exists(place):
            raise UsageError(
                "A file is in the way of what an interrupted run has to put back",
                where=str(place),
                why=f"it is not that run's, and the file that was there before is kept as {kept / place.name}",
                do=f"move it away and run again; or, to keep it, {do}",
            )


def _entry(start: Path, end: Path, area: Path) -> list[Any]:
    return [_relative(start, area), _relative(end, area), _identity(start)]


def _read(area: Path) -> tuple[list[_Move], list[_Move]] | None:
    """The moves and removals of the journal; None: there is none.

    Raises:
        UsageError: it is not a journal.
    """
    file = area / _JOURNAL
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        moves, removed = (
            [_Move(area / start, area / end, identity) for start, end, identity in content[name]]
            for name in ("moves", "removed")
        )
        if not moves:
            raise ValueError("nothing was moved")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "The journal of an interrupted run cannot be read",
            where=str(file),
            why=f"{error}; files of an earlier output may be kept beside it",
            do=f"save what you need of {area}, then remove {area.parent}",
        ) from error
    return moves, removed


def _identity(path: Path) -> Any:
    """What tells a file from any other at its place, and from itself after it was written to, as plain JSON.

    The disk is not part of it, since its number may change when a machine starts again; all is on one disk.
    Of a folder, it is the folder and every file in it. None: there is nothing.
    """
    try:
        found = path.lstat()
        if not path.is_dir() or path.is_symlink():
            return [found.st_ino, found.st_size, found.st_mtime_ns]
        return [found.st_ino, {file.name: _identity(file) for file in sorted(path.iterdir())}]
    except (FileNotFoundError, NotADirectoryError):
        return None


def _relative(path: Path, area: Path) -> str:
    """Relative paths stay right where the whole folder is moved."""
    return os.path.relpath(path.absolute(), area.absolute())


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()
