"""Write a converted model: everything into a temporary sibling, then renames. All or nothing.

Folder form: ``model.onnx``, ``model.onnx.data``, ``graphrot.json`` and the tokenizer's files. File form:
``X.onnx``, ``X.onnx.data``, ``X.graphrot.json``. Further texts, such as the plan, go beside them.
Weights are streamed tensor by tensor from where they are mapped; nothing holds the whole model.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from graphrot.errors import EnvironmentProblem, UsageError
from graphrot.model.files import tokenizer_files

MODEL = "model.onnx"
MANIFEST = "graphrot.json"


@dataclass(frozen=True)
class Saved:
    """What was written: the .onnx file, and the bytes of the graph and its weights together."""

    path: Path
    model_bytes: int


def save_directory(
    model: ir.Model,
    manifest: Mapping[str, Any],
    tokenizer_dir: Path | None,
    target: Path,
    *,
    force: bool = False,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> Saved:
    """Write the folder form.

    Args:
        model: the model; its metadata_props are the caller's business. It may be mapped from files that
            this call replaces.
        manifest: content of graphrot.json; ``sizes.model_bytes`` is set here, where it is first known.
        tokenizer_dir: folder whose tokenizer files are copied; None copies none.
        target: the folder to write.
        force: replace a folder that an earlier conversion wrote.
        texts: name -> content of further files, such as ``plan.json``.

    Raises:
        UsageError: the target exists and may not be replaced, or its parent does not exist.
        EnvironmentProblem: the disk is full, or the place cannot be written. Nothing is left behind.
    """
    refuse_target(target, force=force)
    with _writing(target) as work:
        made = work / target.name
        made.mkdir()
        size = save_model(model, made / MODEL)
        _write_texts(made, {MANIFEST: _with_size(manifest, size), **texts})
        for file in tokenizer_files(tokenizer_dir) if tokenizer_dir is not None else []:
            shutil.copyfile(file, made / file.name)
        _sync(made)
        _install([(made, target)], work)
    return Saved(target / MODEL, size)


def save_file(
    model: ir.Model,
    manifest: Mapping[str, Any],
    target: Path,
    *,
    force: bool = False,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> Saved:
    """Write the file form; arguments and errors as for :func:`save_directory`.

    ``texts`` get the target's stem in front of their names (``X.plan.json``).
    """
    refuse_target(target, force=force)
    with _writing(target) as work:
        made = work / "made"
        made.mkdir()
        size = save_model(model, made / target.name)
        named = {MANIFEST: _with_size(manifest, size), **texts}
        _write_texts(made, {f"{target.stem}.{name}": text for name, text in named.items()})
        _sync(made)
        # The .onnx comes last: once it is there, all of it is.
        files = sorted(made.iterdir(), key=lambda file: file.name == target.name)
        _install([(file, target.with_name(file.name)) for file in files], work)
    return Saved(target, size)


def save_model(model: ir.Model, path: Path) -> int:
    """Write ``path`` and its weights to ``path`` + ``.data``; returns the bytes of both.

    Not atomic by itself. The model may be mapped from any files but these two.
    """
    data = path.with_name(path.name + ".data")
    ir.save(model, path, external_data=data.name, alignment=4096, align_threshold=0)
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0)


def refuse_target(target: Path, *, force: bool = False) -> None:
    """Check where the output goes, before any work is done.

    Raises:
        UsageError: the target exists and ``force`` is not given, or it is not ours to replace, or the
            folder it lies in does not exist.
    """
    if not target.absolute().parent.is_dir():
        raise UsageError(
            "The folder for the output does not exist", where=str(target.absolute().parent), do="create it first"
        )
    if target.suffix == ".onnx":
        names = (target.name, f"{target.name}.data", f"{target.stem}.{MANIFEST}")
        taken = [file for file in (target.with_name(name) for name in names) if _exists(file)]
        if any(file.is_dir() for file in taken):
            raise UsageError("The output is a folder's name", where=str(target), do="give another name")
    else:
        taken = [target] if _exists(target) and not _empty_folder(target) else []
    if taken and not force:
        raise UsageError(
            "The output already exists",
            where=", ".join(map(str, taken)),
            why="nothing is replaced unasked",
            do="give another name, or --force",
        )
    if taken and target.suffix != ".onnx" and not _ours(target):
        raise UsageError(
            "The output exists and was not written by graphrot",
            where=str(target),
            why=f"it holds no {MANIFEST}, and replacing it would delete what it holds",
            do="give another name, or remove it yourself",
        )


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _ours(folder: Path) -> bool:
    return folder.is_dir() and (folder / MANIFEST).is_file()


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """A hidden sibling folder to write in; removed at the end, come what may."""
    work: Path | None = None
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.absolute().parent))
        yield work
    except OSError as error:
        raise EnvironmentProblem(
            "The output could not be written",
            where=str(error.filename or target),
            why=f"{error.strerror or error}; nothing was left behind",
            do="make room on the disk or choose another place",
        ) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def _with_size(manifest: Mapping[str, Any], size: int) -> str:
    content = {**manifest, "sizes": {**manifest.get("sizes", {}), "model_bytes": size}}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        if os.name == "nt" and path.is_dir():
            continue
        handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _install(moves: Sequence[tuple[Path, Path]], work: Path) -> None:
    """Rename finished files or folders to their places; on failure put back what was there."""
    backup = work / "replaced"
    backup.mkdir()
    undo: list[tuple[Path, Path]] = []
    try:
        for made, target in moves:
            if _exists(target):
                target.rename(backup / target.name)
                undo.append((backup / target.name, target))
            made.rename(target)
            undo.append((target, made))
    except BaseException:
        for source, place in reversed(undo):
            source.rename(place)
        raise
