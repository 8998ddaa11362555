"""Put finished files into their places: all of them or none, also if the process is killed in between.

Names are fixed (``X.onnx`` finds its weights in ``X.onnx.data``), so several files have to change places.
The order keeps every reader safe: the old ``.onnx`` goes first and the new one comes last, so that at every
instant there is either no ``.onnx``, or one that is whole. A journal beside the files, written before the
first move, lets the next run finish the thought of a killed one: before the new ``.onnx`` was in its place
everything is put back, afterwards all of it is new.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from graphrot.work.files import sync, write_atomic
from graphrot.work.folder import Undisturbed

_JOURNAL = "install.json"
_REPLACED = "replaced"


def install(moves: Sequence[tuple[Path, Path]], area: Path, *, remove: Sequence[Path] = ()) -> None:
    """Rename finished files or folders to their places; on failure, or when stopped, put back what was there.

    Args:
        moves: ``(finished, place)``, on one disk. The last one decides: once it is done all is done.
        area: a folder on that disk for the journal and for what is replaced; the caller empties it afterwards.
        remove: files that go, in this order, before anything comes. All of one folder.
    """
    replaced = area / _REPLACED
    replaced.mkdir()
    journal = {
        "moves": [[_relative(made, area), _relative(place, area)] for made, place in moves],
        "removed": [[_relative(old, area), _relative(replaced / old.name, area)] for old in remove],
    }
    with Undisturbed() as signals:
        write_atomic(area / _JOURNAL, json.dumps(journal).encode())
        try:
            for old in remove:
                old.rename(replaced / old.name)
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
    """
    file = area / _JOURNAL
    if not file.is_file():
        return False
    journal = json.loads(file.read_text(encoding="utf-8"))
    moves = [(area / made, area / place) for made, place in journal["moves"]]
    if not _exists(moves[-1][0]):
        return True
    for made, place in reversed(moves[:-1]):
        if not _exists(made) and _exists(place):
            place.rename(made)
    for place, kept in reversed(journal["removed"]):
        if _exists(area / kept):
            (area / kept).rename(area / place)
    file.unlink()
    return False


def _relative(path: Path, area: Path) -> str:
    """Relative paths stay right where the whole folder is moved."""
    return os.path.relpath(path.absolute(), area.absolute())


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()
