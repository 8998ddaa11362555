"""An export that is kept in a work folder, so that an interrupted conversion need not make it again."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from graphrot.model.files import sha256_of
from graphrot.progress import Progress, silent
from graphrot.work.files import write_atomic
from graphrot.work.folder import remove_tree

EXPORTER_VERSION = 1
"""Raised whenever the graph that our exporter writes changes: cached and kept exports are keyed by it."""

_NAME = "source.onnx"
_PACKAGES = ("torch", "transformers")


def exported(workdir: Path, sha256: str, make: Callable[[Path], None], *, progress: Progress = silent) -> Path:
    """The export of a source: the finished one of an earlier run, if it is of the same source, or a new one.

    Args:
        workdir: a folder that the caller owns; made if it is not there.
        sha256: of the source.
        make: writes the export to the path that it is given, and its weights beside it.
        progress: told that there is something to go on with.

    Returns:
        The path of the .onnx file.
    """
    folder, making, marker = workdir / "finished", workdir / "making", workdir / "finished.json"
    key = {"source": sha256, "exporter": EXPORTER_VERSION, **{name: _version(name) for name in _PACKAGES}}
    if _is_whole(marker, folder, key):
        progress("resuming: the export is done", 1, 1)
        return folder / _NAME
    for old in (marker, folder, making):
        remove_tree(old)
    making.mkdir(parents=True)
    make(making / _NAME)
    making.rename(folder)
    files = {file.name: sha256_of([file]) for file in sorted(folder.iterdir())}
    write_atomic(marker, json.dumps({"key": key, "files": files}).encode())
    return folder / _NAME


def _is_whole(marker: Path, folder: Path, key: dict[str, Any]) -> bool:
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
        return content["key"] == key and all(
            sha256_of([folder / name]) == digest for name, digest in content["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
