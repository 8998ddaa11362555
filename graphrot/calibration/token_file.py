"""Read tokens that somebody else has made: ``.npy``, ``.npz`` and ``.tokens.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from graphrot.errors import InputRefused

_NAME = "tokens"
_FORMS = "save whole numbers, [T] or [rows, T], by numpy.save, or as a JSON list"


def read_tokens(file: Path) -> np.ndarray:
    """The tokens of a file ``[T] int64``; rows of a matrix, or lists in a list, one after the other.

    Args:
        file: ``X.npy``; ``X.npz`` with an array ``tokens``, or with one array; ``X.tokens.json``, a list of numbers,
            a list of such lists, or an object with one as ``tokens``.

    Raises:
        InputRefused: the file is missing or cannot be read, or does not hold token ids.
    """
    if not file.is_file():
        raise InputRefused(
            "The token file is a folder" if file.is_dir() else "There is no such token file",
            where=str(file),
            do="check the path",
        )
    try:
        array = _json(file) if file.suffix.lower() == ".json" else _numpy(file)
    except OSError as error:
        why = error.strerror or str(error)
        raise InputRefused("The token file cannot be read", where=str(file), why=why, do=_FORMS) from error
    except (ValueError, OverflowError, EOFError, RecursionError, BadZipFile) as error:
        raise InputRefused("The token file does not parse", where=str(file), why=str(error)[:400], do=_FORMS) from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise _no_ids(file, f"it holds {array.dtype} {list(array.shape)}")
    if array.size == 0:
        raise _no_ids(file, "it is empty")
    if int(array.min()) < 0 or int(array.max()) > np.iinfo(np.int64).max:
        raise _no_ids(file, f"token ids go from 0 on; it has {int(array.min())} to {int(array.max())}")
    return array.reshape(-1).astype(np.int64)


def _no_ids(file: Path, why: str) -> InputRefused:
    return InputRefused("The file does not hold token ids", where=str(file), why=why, do=_FORMS)


def _numpy(file: Path) -> np.ndarray:
    with file.open("rb") as stream:
        found = np.load(stream, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        names = list(found)
        name = _NAME if _NAME in names else names[0] if len(names) == 1 else None
        if name is None:
            raise _no_ids(file, f"it has the arrays {', '.join(sorted(names)) or '(none)'}, and none is called tokens")
        return np.asarray(found[name])


def _json(file: Path) -> np.ndarray:
    content = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(content, dict):
        content = content.get(_NAME)
    if not isinstance(content, list):
        raise _no_ids(file, "it is neither a list nor an object with a list called tokens")
    rows: list[Any] = content if content and all(isinstance(row, list) for row in content) else [content]
    flat = [token for row in rows for token in row]
    if not all(type(token) is int for token in flat):
        raise _no_ids(file, "not every entry is a whole number")
    return np.asarray(flat, dtype=np.int64)
