"""Write a converted model: everything into the work folder, then renames. All or nothing, see ``install.py``.

Folder form: ``model.onnx``, ``model.onnx.data``, ``graphrot.json``, ``plan.json``, the tokenizer's files and, for
some targets, further ones. File form: ``X.onnx``, ``X.onnx.data``, ``X.graphrot.json``, ``X.plan.json``.
Weights are streamed tensor by tensor from where they are mapped; nothing holds the whole model.

What is replaced: nothing unasked. With ``force``, the four files of the file form if an earlier conversion wrote
them, or the files of a folder that one wrote and that holds nothing else. Never a file that the conversion reads.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphrot.errors import CheckFailed, EnvironmentProblem, InputRefused, UsageError
from graphrot.model.files import TOKENIZER_FILES, Beside, sha256_of, tokenizer_files
from graphrot.model.install import install, repair, unfinished, untouched
from graphrot.model.onnxfile import open_onnx
from graphrot.model.ours import changed_files, is_marked, read_manifest, recorded_files
from graphrot.work.files import sync
from graphrot.work.folder import SUFFIX, WorkFolder, work_path

MODEL = "model.onnx"
DATA = ".data"
"""What a model's name gets behind it for the file of its weights."""
MANIFEST = "graphrot.json"
PLAN = "plan.json"
_OWN = frozenset({MODEL, MODEL + DATA, MANIFEST, PLAN, *TOKENIZER_FILES})
"""Everything that the folder form consists of, but for what a target puts beside it."""


@dataclass(frozen=True)
class Saved:
    """What was written: the .onnx file, the bytes of the graph and its weights together, hashes of copied files."""

    path: Path
    model_bytes: int
    tokenizer_files: dict[str, str] = field(default_factory=dict)
    other_files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """An output that is ours to write: its work folder is locked, and it may be replaced if it exists."""

    target: Path
    work: WorkFolder
    force: bool
    sources: tuple[Path, ...]

    def check(self) -> None:
        """Look again whether the output may be written."""
        refuse_target(self.target, force=self.force, sources=self.sources)


@contextlib.contextmanager
def claim(target: Path, *, force: bool = False, sources: Iterable[Path] = (), resume: bool = False) -> Iterator[Claim]:
    """Lock an output and its work folder, and mend what a killed run left half way.

    Args:
        target: the folder or ``X.onnx`` to write.
        force: replace what an earlier conversion wrote there.
        sources: the files that the model is made from; see :func:`refuse_target`.
        resume: keep what an earlier run can be gone on with, and leave it behind after an error. A run that was
            killed when its output had just got to its place is gone on with, too: it may be replaced, if
            nobody has touched it since.

    Raises:
        UsageError: the output may not be replaced, its parent does not exist, another run writes it, or what a
            killed run left cannot be mended without losing a file. Nothing was written.
        EnvironmentProblem: the work folder cannot be made, or what a killed run left cannot be mended.
    """
    target = named(target)
    read = tuple(sources) if _taken(target) or work_path(target).is_dir() else ()
    if not work_path(target).is_dir():
        refuse_target(target, force=force, sources=read)
    with WorkFolder(target, resume=resume) as work:
        try:
            installed = repair(work.save)
        except OSError as error:
            raise EnvironmentProblem(
                "What an interrupted run left could not be put in order",
                where=str(error.filename or work.save),
                why=error.strerror or str(error),
                do=f"check permissions and space; files of the earlier output may be kept in {work.save}",
            ) from error
        ours = installed and resume and untouched(work.save)
        if installed and not resume:
            work.clear()
        held = Claim(target, work, force or ours, read)
        held.check()
        work.begin()
        try:
            yield held
        finally:
            work.kept = (work.save,) if unfinished(work.save) else ()


def save_directory(
    model: ir.Model,
    manifest: Mapping[str, Any],
    tokenizer_dir: Path | None,
    target: Path,
    *,
    force: bool = False,
    plan: str | None = None,
    beside: Beside | None = None,
    sources: Iterable[Path] = (),
    held: Claim | None = None,
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
        beside: further files; of those that are the tokenizer's, too, these are written.
        sources: the files that the model was made from; see :func:`refuse_target`.
        held: the target's claim, where the caller has made one; then ``force`` and ``sources`` are its own.

    Raises:
        UsageError: the target exists and may not be replaced, its parent does not exist, or another run
            writes it.
        EnvironmentProblem: the disk is full, or the place cannot be written. Nothing is left behind.
        CheckFailed: see :func:`check_written`. Nothing is left behind.
    """
    with _writing(target, held, force, sources) as (target, area):
        made = area / "made"
        made.mkdir()
        size = save_model(model, made / MODEL)
        check_written(made / MODEL)
        for file in tokenizer_files(tokenizer_dir) if tokenizer_dir is not None else []:
            shutil.copyfile(file, made / file.name)
        others = _write_beside(made, beside)
        copied = {file.name: sha256_of([file]) for file in tokenizer_files(made)}
        recorded = {"tokenizer_files": copied} if copied else {}
        recorded |= {"other_files": others} if others else {}
        _write_texts(made, _texts({**manifest, **recorded}, size, plan))
        _sync(made)
        if target.is_dir():
            names = _own(target) - changed_files(target)
            old = [target / name for name in sorted(names, key=_model_first) if _exists(target / name)]
            install(_model_last(made, MODEL, target), area, remove=old)
        else:
            install([(made, target)], area)
    return Saved(target / MODEL, size, copied, others)


def save_file(
    model: ir.Model,
    manifest: Mapping[str, Any],
    target: Path,
    *,
    force: bool = False,
    plan: str | None = None,
    sources: Iterable[Path] = (),
    held: Claim | None = None,
) -> Saved:
    """Write the file form; arguments and errors as for :func:`save_directory`."""
    with _writing(target, held, force, sources) as (target, area):
        made = area / "made"
        made.mkdir()
        size = save_model(model, made / target.name)
        check_written(made / target.name)
        _write_texts(made, {f"{target.stem}.{name}": text for name, text in _texts(manifest, size, plan).items()})
        _sync(made)
        install(_model_last(made, target.name, target.parent), area, remove=_taken(target))
    return Saved(target, size)


def save_model(model: ir.Model, path: Path) -> int:
    """Write ``path`` and its weights to ``path`` + ``.data``; returns the bytes of both.

    Not atomic by itself. The model may be mapped from any files but these two.
    """
    data = path.with_name(path.name + DATA)
    ir.save(model, path, external_data=data.name, alignment=4096, align_threshold=0)
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0)


def check_written(path: Path) -> None:
    """Open a model that was just written, as its users will.

    Raises:
        CheckFailed: it is not a valid ONNX model.
    """
    try:
        open_onnx(path)
    except InputRefused as error:
        raise CheckFailed(
            "The converted model is not valid", where=path.name, why=error.why or error.what, do="report the model"
        ) from error


def named(target: Path) -> Path:
    """The target without ``..``, and with a last part that is a name: ``.`` becomes the folder that it means.

    Raises:
        UsageError: the name is too long for the disk, for the output itself or for what is written beside it.
    """
    if target.name in ("", ".."):
        target = target.resolve()
    elif ".." in target.parts:
        target = target.parent.resolve() / target.name
    work = f".{target.name}{SUFFIX}"
    longest = max(work, f"{target.stem}.{MANIFEST}", target.name + DATA, key=lambda name: len(os.fsencode(name)))
    for path in (target.with_name(longest), target.with_name(work) / "save" / "replaced" / longest):
        try:
            path.lstat()
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise UsageError(
                    "The output's name is too long",
                    where=str(target),
                    why=f"files with longer names are written beside it, as {longest}",
                    do="give a shorter name",
                ) from error
    return target


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
    read = sources if taken else ()
    for path, file in ((path, file) for file in read for path in taken if _is_or_holds(path, file)):
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
    elif taken and read_manifest(target.with_name(f"{target.stem}.{MANIFEST}")) is None and not is_marked(target):
        raise UsageError(
            "The output exists and was not written by graphrot",
            where=", ".join(map(str, taken)),
            why=f"no {target.stem}.{MANIFEST} of a conversion lies beside it, and the model does not carry its mark",
            do="give another name, or remove it yourself",
        )


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
    if not (folder.is_dir() and (read_manifest(folder / MANIFEST) is not None or is_marked(folder / MODEL))):
        raise UsageError(
            "The output exists and was not written by graphrot",
            where=str(folder),
            why=f"it holds no {MANIFEST} of a conversion, and replacing it would delete what it holds",
            do="give another name, or remove it yourself",
        )
    files = [file for file in folder.iterdir() if file.name != work_path(folder).name]
    changed, own = changed_files(folder), _own(folder)
    others = sorted(file.name for file in files if file.name not in own or file.name in changed or file.is_dir())
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise UsageError(
            "The output folder holds files that graphrot did not write, or that were changed since",
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
    return path.is_dir() and all(file.name == work_path(path).name for file in path.iterdir())


@contextlib.contextmanager
def _writing(target: Path, held: Claim | None, force: bool, sources: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """The target, and an empty folder to write in that is a rename away from it."""
    try:
        with claim(target, force=force, sources=sources) if held is None else contextlib.nullcontext(held) as mine:
            mine.check()
            yield mine.target, mine.work.save
    except OSError as error:
        raise EnvironmentProblem(
            "The output could not be written",
            where=str(error.filename or target),
            why=f"{error.strerror or error}; nothing was left behind",
            do="make room on the disk or choose another place",
        ) from error


def _texts(manifest: Mapping[str, Any], size: int, plan: str | None) -> dict[str, str]:
    content = {**manifest, "sizes": {**manifest.get("sizes", {}), "model_bytes": size}}
    texts = {MANIFEST: json.dumps(content, indent=2, ensure_ascii=False) + "\n"}
    return texts if plan is None else {**texts, PLAN: plan}


def _own(folder: Path) -> frozenset[str]:
    """The names of all files that graphrot wrote into an output folder."""
    return _OWN | recorded_files(folder).keys()


def _write_beside(made: Path, beside: Beside | None) -> dict[str, str]:
    """Write further files; returns the hashes of those that are not the tokenizer's."""
    if beside is None:
        return {}
    for name, file in beside.copies.items():
        shutil.copyfile(file, made / name)
    _write_texts(made, beside.texts)
    names = sorted({*beside.copies, *beside.texts} - set(TOKENIZER_FILES))
    return {name: sha256_of([made / name]) for name in names}


def _write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        sync(path)


def _model_first(name: str) -> tuple[bool, str]:
    return not name.endswith(".onnx"), name


def _model_last(made: Path, model: str, folder: Path) -> list[tuple[Path, Path]]:
    """Each finished file and its place. The .onnx comes last: once it is there, all of it is."""
    files = sorted(made.iterdir(), key=lambda file: (file.name == model, file.name))
    return [(file, folder / file.name) for file in files]
