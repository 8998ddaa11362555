"""Operators of other people: libraries that every session needs while a model with such nodes is worked on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from graphrot.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    import onnxruntime as ort

_LIBRARIES: ContextVar[tuple[Path, ...]] = ContextVar("graphrot_custom_ops", default=())


@contextmanager
def custom_ops(*libraries: str | Path) -> Iterator[None]:
    """Register libraries of custom operators with every session that graphrot opens inside the ``with`` block.

    Their nodes stay as they are; what they read is not rotated, and channels begin anew behind them.

    Args:
        libraries: files that export ``RegisterCustomOps``, as ``SessionOptions.register_custom_ops_library`` takes
            them.

    Raises:
        UsageError: one of the files does not exist.
    """
    paths = tuple(Path(library) for library in libraries)
    for path in paths:
        if not path.is_file():
            raise UsageError("There is no such library", where=str(path), do="give the file of the custom operators")
    token = _LIBRARIES.set((*_LIBRARIES.get(), *(path.resolve() for path in paths)))
    try:
        yield
    finally:
        _LIBRARIES.reset(token)


def has_custom_ops() -> bool:
    """Whether libraries are given here: then ONNX Runtime decides which operators there are."""
    return bool(_LIBRARIES.get())


def given_libraries() -> tuple[Path, ...]:
    """The libraries that are given here, for other processes to be given them too."""
    return _LIBRARIES.get()


def register_custom_ops(session_options: ort.SessionOptions) -> None:
    """Give sessions made with these options the libraries that are given here.

    Raises:
        EnvironmentProblem: the runtime refuses one.
    """
    for path in _LIBRARIES.get():
        try:
            session_options.register_custom_ops_library(str(path))
        except Exception as error:  # onnxruntime raises bare RuntimeError subclasses of its own
            raise EnvironmentProblem(
                "onnxruntime refused a library of custom operators",
                where=str(path),
                why=str(error).strip().splitlines()[0],
                do="check that it exports RegisterCustomOps and was built for this machine and runtime",
            ) from error
