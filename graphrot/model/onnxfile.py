"""Open an ``.onnx`` file with its external data, memory-mapped, and refuse what cannot be used."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from graphrot.errors import InputRefused

OWN_MARK = "graphrot.version"
"""Key in metadata_props of every model that graphrot has written."""


def open_onnx(path: Path) -> ir.Model:
    """Read and check an ONNX file. Weights in external data stay on disk and are mapped on use.

    Args:
        path: the .onnx file; its external data lies in the same folder or below it.

    Raises:
        InputRefused: not there, not ONNX, not valid, or its external data is missing, too short or
            outside the model's folder.
    """
    if not path.is_file():
        raise InputRefused("There is no such file", where=str(path), do="check the path")
    try:
        model = ir.load(path)
    except Exception as error:  # the parser raises whatever it meets in a broken file
        raise _corrupt(path, f"it does not parse: {type(error).__name__}: {str(error).strip()[:400]}") from error
    if not len(model.graph) or not model.opset_imports:
        raise _corrupt(path, "it holds no graph with operators")
    _check_external_data(model, path)
    try:
        onnx.checker.check_model(str(path))
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise _corrupt(path, f"the ONNX checker says: {str(error).strip()[:400]}") from error
    return model


def refuse_own(model: ir.Model, path: Path) -> None:
    """Refuse a model that graphrot wrote: rotating twice is not what its plan says.

    Raises:
        InputRefused: the model carries :data:`OWN_MARK`.
    """
    if OWN_MARK in model.metadata_props:
        raise InputRefused(
            "The model was already converted by graphrot",
            where=str(path),
            why=f"its metadata says {OWN_MARK} = {model.metadata_props[OWN_MARK]}",
            do="convert the source that it was made from",
        )


def external_files(model: ir.Model) -> list[Path]:
    """The external data files of a model opened from a file, sorted."""
    return sorted({Path(tensor.path) for tensor in _external_tensors(model)})


def _external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    return [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]


def _corrupt(path: Path, why: str) -> InputRefused:
    return InputRefused(
        "The file is not a usable ONNX model", where=str(path), why=why, do="export it again, or check the download"
    )


def _check_external_data(model: ir.Model, path: Path) -> None:
    folder = path.absolute().parent
    needed: dict[str, int] = {}
    for tensor in _external_tensors(model):
        location = str(tensor.location)
        end = (tensor.offset or 0) + (tensor.length or 0)
        needed[location] = max(needed.get(location, 0), end)
    for location, size in needed.items():
        file = folder / location
        if Path(location).is_absolute() or not file.resolve().is_relative_to(folder.resolve()):
            raise InputRefused(
                "The model's external data lies outside its folder",
                where=f"{path}: {location!r}",
                why="a model file must not point at arbitrary files",
                do="put the data beside the model and name it so",
            )
        if not file.is_file():
            raise InputRefused(
                "The model's external data is missing",
                where=str(file),
                why=f"{path.name} keeps its weights in it",
                do="put the file beside the model",
            )
        if file.stat().st_size < size:
            raise InputRefused(
                "The model's external data is too short",
                where=str(file),
                why=f"{path.name} reads up to byte {size}, the file has {file.stat().st_size}",
                do="copy or download the file again",
            )
