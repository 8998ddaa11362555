"""The native library with the kernels: where it is, and how a session gets it."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrot.errors import EnvironmentProblem

if TYPE_CHECKING:
    import onnxruntime as ort

OVERRIDE = "GRAPHROT_LIBRARY"
"""Environment variable with the path of a library to use instead of the installed one."""

_FILE_NAMES = {"win32": "graphrot_ops.dll", "darwin": "libgraphrot_ops.dylib"}


def file_name() -> str:
    """Name of the library file on this platform."""
    return _FILE_NAMES.get(sys.platform, "libgraphrot_ops.so")


def _places() -> Iterator[Path]:
    """Where the library may lie: beside this file, in site-packages (editable), in a build tree of the checkout."""
    yield Path(__file__).resolve().parent / file_name()
    for key in ("platlib", "purelib"):
        yield Path(sysconfig.get_paths()[key]) / "graphrot" / "ops" / file_name()
    build = Path(__file__).resolve().parents[2] / "build"
    if build.is_dir():
        built = [*build.glob(file_name()), *build.glob(f"*/{file_name()}"), *build.glob(f"*/Release/{file_name()}")]
        yield from sorted(built, key=lambda path: path.stat().st_mtime, reverse=True)


def library_path() -> Path:
    """The library's path.

    Raises:
        EnvironmentProblem: there is none, or ``GRAPHROT_LIBRARY`` names a file that does not exist.
    """
    override = os.environ.get(OVERRIDE)
    if override:
        path = Path(override)
        if not path.is_file():
            raise EnvironmentProblem(
                f"{OVERRIDE} names a file that does not exist", where=override, do=f"correct or unset {OVERRIDE}"
            )
        return path.resolve()
    for path in _places():
        if path.is_file():
            return path
    raise EnvironmentProblem(
        "graphrot's native library is not installed",
        where=str(Path(__file__).resolve().parent / file_name()),
        why="the package is used without having been built",
        do=f"run 'pip install .' in the checkout (needs a C++ compiler), or set {OVERRIDE} to a built library",
    )


def is_available() -> bool:
    """True when :func:`library_path` finds a library."""
    try:
        library_path()
    except EnvironmentProblem:
        return False
    return True


def describe() -> dict[str, Any]:
    """What the library holds.

    Returns:
        ``isas``: ``[{name, built, available}]``, best first; ``kernels``: ``[{op, type}]``; ``selected``: the name
        of the instruction set that new kernels use (``GRAPHROT_ISA``, or the best available), or "invalid";
        ``cuda``: ``{built, compiler, architectures, reason}``, where ``reason`` says why the kernels are not there
        for CUDA, too.

    Raises:
        EnvironmentProblem: there is no library, or it cannot be loaded.
    """
    path = library_path()
    try:
        loaded = ctypes.CDLL(str(path))
        functions = loaded.graphrot_describe, loaded.graphrot_isa
    except (OSError, AttributeError) as error:
        raise EnvironmentProblem(
            "graphrot's native library cannot be loaded",
            where=str(path),
            why=str(error),
            do="run 'pip install --force-reinstall --no-deps .' in graphrot's folder",
        ) from error
    for function in functions:
        function.restype = ctypes.c_char_p
    text, selected = (function().decode() for function in functions)
    content: dict[str, Any] = json.loads(text)
    return content | {"selected": selected}


def register(session_options: ort.SessionOptions) -> None:
    """Give sessions made with these options the kernels of the domain ``graphrot``.

    Raises:
        EnvironmentProblem: there is no library, or the runtime refuses it.
    """
    path = library_path()
    try:
        session_options.register_custom_ops_library(str(path))
    except Exception as error:  # onnxruntime raises bare RuntimeError subclasses of its own
        raise EnvironmentProblem(
            "onnxruntime refused graphrot's native library", where=str(path), why=str(error).strip().splitlines()[0]
        ) from error
