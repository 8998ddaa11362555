"""Write a converted model: everything into a temporary sibling, then renames. All or nothing.

Folder form: ``model.onnx``, ``model.onnx.data``, ``graphrot.json``, ``plan.json`` and the tokenizer's
files. File form: ``X.onnx``, ``X.onnx.data``, ``X.graphrot.json``, ``X.plan.json``.
Weights are streamed tensor by tensor from where they are mapped; nothing holds the whole model.

What is replaced: nothing unasked. With ``force``, the four files of the file form, or the files of a
folder that an earlier conversion wrote and that holds nothing else. Never a file that the conversion reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphrot.errors import EnvironmentProblem, UsageError
from graphrot.model.files import TOKENIZER_FILES, tokenizer_files

MODEL = "model.onnx"
DATA = ".data"
"""What a model's name gets behind it for the file of its weights."""
MANIFEST = "graphrot.json"
PLAN = "plan.json"
_OWN = frozenset({MODEL, MODEL + DATA, MANIFEST, PLAN, *TOKENIZER_FILES})
"""Everything that the folder form consists of."""


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
    plan: str | None = None,
    sources: Iterable[Path] = (),
) -> Saved:
    """Write the folder form.

    Args:
        model: the model; its metadata_props are the caller's business. It may be mapped from files that
            this call replaces.
        manifest: content of graphrot.json; ``sizes.model_bytes`` is set here, where it is first known.
        tokenizer_dir: folder whose tokenizer files are copied; None copies none.
        target: the folder to write.
        force: replace what an earlier conversion wrote there.
        plan: content of plan.json.
        sources: the files that the model was made from; see :func:`refuse_target`.

    Raises:
        UsageError: the target exists and may not be replaced, or its parent does not exist.
        EnvironmentProblem: the disk is full, or the place cannot be written. Nothing is left behind.
    """
    target = named(target)
    refuse_target(target, force=force, sources=sources)
    with _writing(target) as work:
        made = work / "made"
        made.mkdir()
        size = save_model(model, made / MODEL)
        _write_texts(made, _texts(manifest, size, plan))
        for file in tokenizer_files(tokenizer_dir) if tokenizer_dir is not None else []:
            shutil.copyfile(file, made / file.name)
        _sync(made)
        if target.is_dir():
            old = [target / name for name in sorted(_OWN) if _exists(target / name)]
            _install(_model_last(made, MODEL, target), work, remove=old)
        else:
            _install([(made, target)], work)
    return Saved(target / MODEL, size)


def save_file(
    model: ir.Model,
    manifest: Mapping[str, Any],
    target: Path,
    *,
    force: bool = False,
    plan: str | None = None,
    sources: Iterable[Path] = (),
) -> Saved:
    """Write the file form; arguments and errors as for :func:`save_directory`."""
    target = named(target)
    refuse_target(target, force=force, sources=sources)
    with _writing(target) as work:
        made = work / "made"
        made.mkdir()
        size = save_model(model, made / target.name)
        _write_texts(made, {f"{target.stem}.{name}": text for name, text in _texts(manifest, size, plan).items()})
        _sync(made)
        _install(_model_last(made, target.name, target.parent), work)
    return Saved(target, size)


def save_model(model: ir.Model, path: Path) -> int:
    """Write ``path`` and its weights to ``path`` + ``.data``; returns the bytes of both.

    Not atomic by itself. The model may be mapped from any files but these two.
    """
    data = path.with_name(path.name + DATA)
    ir.save(model, path, external_data=data.name, alignment=4096, align_threshold=0)
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0)


def named(target: Path) -> Path:
    """The target with a last part that is a name: ``.`` and ``..`` become the folders that they mean."""
    return target.resolve() if target.name in ("", "..") else target


def refuse_target(target: Path, *, force: bool = False, sources: Iterable[Path] = ()) -> None:
    """Check where the output goes, before any work is done.

    Args:
        target: the folder or ``X.onnx`` to write.
        force: files of an earlier conversion may be replaced.
        sources: files that the conversion reads. They are looked at only if something is in the way.

    Raises:
        UsageError: a file that is read would be replaced; the target exists and ``force`` is not given;
            it holds what graphrot did not write; or the folder it lies in does not exist.
    """
    target = named(target)
    if not target.absolute().parent.is_dir():
        raise UsageError(
            "The folder for the output does not exist", where=str(target.absolute().parent), do="create it first"
        )
    taken = _taken(target)
    for path, file in ((path, file) for file in sources for path in taken if _is_or_holds(path, file)):
        raise UsageError(
            "The output would replace a file that the conversion reads",
            where=str(file) if path.is_file() else f"{file} in {path}",
            why="it would be lost",
            do="give another name for the output",
        )
    if taken and not force:
        raise UsageError(
            "The output already exists",
            where=", ".join(map(str, taken)),
            why="nothing is replaced unasked",
            do="give another name, or --force",
        )
    if taken and target.suffix != ".onnx":
        _refuse_foreign(target)


def _taken(target: Path) -> list[Path]:
    """What is in the way of the target; an empty folder is not.

    Raises:
        UsageError: a folder bears the name of a file.
    """
    if target.suffix != ".onnx":
        return [target] if _exists(target) and not _empty_folder(target) else []
    names = (target.name, target.name + DATA, f"{target.stem}.{MANIFEST}", f"{target.stem}.{PLAN}")
    taken = [file for file in (target.with_name(name) for name in names) if _exists(file)]
    if folders := [str(file) for file in taken if file.is_dir()]:
        raise UsageError("The output is a folder's name", where=", ".join(folders), do="give another name")
    return taken


def _refuse_foreign(folder: Path) -> None:
    """Refuse to replace what graphrot did not write."""
    if not (folder.is_dir() and (folder / MANIFEST).is_file()):
        raise UsageError(
            "The output exists and was not written by graphrot",
            where=str(folder),
            why=f"it holds no {MANIFEST}, and replacing it would delete what it holds",
            do="give another name, or remove it yourself",
        )
    others = sorted(file.name for file in folder.iterdir() if file.name not in _OWN or file.is_dir())
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise UsageError(
            "The output folder holds files that graphrot did not write",
            where=f"{folder}: {', '.join(others[:5])}{more}",
            why="a folder is replaced as a whole, or not at all",
            do="give another name, or move these files away",
        )


def _is_or_holds(path: Path, file: Path) -> bool:
    """Whether ``file``, or what it links to, is ``path`` or lies in the folder ``path``."""
    if not path.exists() or not file.exists():
        return False
    places = (file.parent.resolve() / file.name, file.resolve())
    return any(place.samefile(path) for start in places for place in (start, *start.parents))


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """A hidden folder to write in, in the target's folder or, if that exists, in the target: a rename away.

    Removed at the end, come what may.
    """
    work: Path | None = None
    try:
        place = target if target.is_dir() else target.absolute().parent
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=place))
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


def _texts(manifest: Mapping[str, Any], size: int, plan: str | None) -> dict[str, str]:
    content = {**manifest, "sizes": {**manifest.get("sizes", {}), "model_bytes": size}}
    texts = {MANIFEST: json.dumps(content, indent=2, ensure_ascii=False) + "\n"}
    return texts if plan is None else {**texts, PLAN: plan}


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


def _model_last(made: Path, model: str, folder: Path) -> list[tuple[Path, Path]]:
    """Each finished file and its place. The .onnx comes last: once it is there, all of it is."""
    files = sorted(made.iterdir(), key=lambda file: file.name == model)
    return [(file, folder / file.name) for file in files]


def _install(moves: Sequence[tuple[Path, Path]], work: Path, *, remove: Sequence[Path] = ()) -> None:
    """Rename finished files or folders to their places; on failure put back what was there.

    ``remove`` names files that go in any case, in the same all or nothing.
    """
    backup = work / "replaced"
    backup.mkdir()
    undo: list[tuple[Path, Path]] = []

    def move(source: Path, place: Path) -> None:
        source.rename(place)
        undo.append((place, source))

    try:
        for old in remove:
            move(old, backup / old.name)
        for made, target in moves:
            if _exists(target):
                move(target, backup / target.name)
            move(made, target)
    except BaseException:
        for source, place in reversed(undo):
            source.rename(place)
        raise
