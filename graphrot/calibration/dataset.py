"""Read a data set's text by the package ``datasets``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from graphrot.calibration.choice import DatasetChoice
from graphrot.errors import EnvironmentProblem, InputRefused

LARGEST = 2_000_000
"""Characters that are read; with four to a token, enough for 256 sequences of 1024 tokens."""
_COLUMN = "text"


def refuse_without_package(name: str) -> None:
    """Refuse to go on without the package.

    Args:
        name: of the data set, for the error.

    Raises:
        EnvironmentProblem: it is not installed.
    """
    if find_spec("datasets") is None:
        raise EnvironmentProblem(
            "Reading a data set needs the package 'datasets'",
            where=f"--calibration {name}",
            do='pip install "graphrot[data]", or give a text file',
        )


def read_dataset(choice: DatasetChoice, name: str) -> str:
    """The first :data:`LARGEST` characters of a column, rows apart by an empty line; empty rows are left out.

    Args:
        choice: which column of which data set.
        name: as the user wrote it, for errors.

    Raises:
        EnvironmentProblem: the package is missing, or the hub cannot be reached.
        InputRefused: there is no such data set, configuration, split or column, or no text in it.
    """
    refuse_without_package(name)
    rows = _rows(choice, name)
    pieces: list[str] = []
    length = 0
    column = choice.column
    with _Refusing(name):
        for row in rows:
            column = column or _text_column(row, name)
            piece = row.get(column)
            if not isinstance(piece, str):
                raise _no_column(f"column {column!r} of the first row is {type(piece).__name__}", row, name)
            if piece.strip():
                pieces.append(piece.strip())
                length += len(pieces[-1]) + 2
            if length >= LARGEST:
                break
    if not pieces:
        raise InputRefused("The data set has no text", where=f"--calibration {name}", do="name another column or split")
    return ("\n\n".join(pieces) + "\n")[:LARGEST]


def _rows(choice: DatasetChoice, name: str) -> Iterable[Mapping[str, Any]]:
    import datasets

    streams = "[" not in choice.split  # slices need the whole data set
    with _Refusing(name):
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
            choice.id, choice.config, split=choice.split, streaming=streams
        )
        return rows


class _Refusing:
    """Turns what the package raises into the words of an error."""

    def __init__(self, name: str) -> None:
        self._where = f"--calibration {name}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, InputRefused):
            return
        why = " ".join(str(error).split())[:400]
        if isinstance(error, ConnectionError):
            raise EnvironmentProblem(
                "The data set cannot be reached", where=self._where, why=why, do="check the network, or give a file"
            ) from error
        raise InputRefused(
            "The data set cannot be read",
            where=self._where,
            why=f"{type(error).__name__}: {why}",
            do="check its id, configuration and split",
        ) from error


def _text_column(row: Mapping[str, Any], name: str) -> str:
    texts = [column for column, value in row.items() if isinstance(value, str)]
    if _COLUMN in texts:
        return _COLUMN
    if len(texts) == 1:
        return texts[0]
    raise _no_column(f"{len(texts) or 'none'} of its columns hold text, and none is called text", row, name)


def _no_column(why: str, row: Mapping[str, Any], name: str) -> InputRefused:
    return InputRefused(
        "It is not plain which column of the data set to read",
        where=f"--calibration {name}",
        why=f"{why}; there are {', '.join(sorted(row))}",
        do="name one: datasets:ID:SPLIT:COLUMN",
    )
