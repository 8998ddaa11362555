"""The weight files of a Hugging Face folder: which are read, and whether they are whole.

Nothing here needs torch: headers and sizes tell what a download that broke off left behind.
"""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

from graphrot.errors import InputRefused
from graphrot.model.tables import Entry, Tables, check_tables

SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_LEGACY_PICKLE = b"\x80"


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads weights from: safetensors before torch's own, one before shards.

    Files that an index names are among them whether they exist or not.

    Raises:
        InputRefused: an index does not parse.
    """
    for single, index in zip(SINGLE, INDEXES, strict=True):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return sorted({folder / name for name in _index(folder / index).values()})
    return []


def index_files(folder: Path) -> list[Path]:
    """The index that :func:`weight_files` follows, or []."""
    for single, index in zip(SINGLE, INDEXES, strict=True):
        if (folder / single).is_file():
            return []
        if (folder / index).is_file():
            return [folder / index]
    return []


def check_weights(folder: Path) -> Tables:
    """Refuse weights that are missing, cut short, no floats, or not what their index says.

    Returns:
        The tables of the safetensors files; those of torch's own files need torch and are not among them.

    Raises:
        InputRefused: naming the file.
    """
    files = weight_files(folder)
    if not files:
        raise _without(folder)
    named = _named(folder)
    tables: dict[Path, dict[str, Entry]] = {}
    for file in files:
        if not file.is_file():
            raise InputRefused(
                "A part of the model's weights is missing",
                where=str(file),
                why=f"{index_files(folder)[0].name} names it",
                do="download it into the folder",
            )
        if file.suffix == ".safetensors":
            tables[file] = _check_safetensors(file)
            if absent := sorted(named.get(file.name, set()) - set(tables[file])):
                raise InputRefused(
                    "A part of the model's weights is not the one that its index means",
                    where=str(file),
                    why=f"the index finds {', '.join(absent[:3])}{' and more' if len(absent) > 3 else ''} in it",
                    do="download index and weights again, from one place",
                )
        else:
            _check_pickle(file)
    check_tables(tables)
    return tables


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder with the files of an adapter and no model.

    Raises:
        InputRefused: it is one.
    """
    if (folder / "adapter_config.json").is_file() and not weight_files(folder):
        raise InputRefused(
            "The folder holds an adapter and no model",
            where=str(folder),
            why="an adapter's weights are changes to those of another model",
            do="merge it into its model (peft: model.merge_and_unload()), save that, and give the saved folder",
        )


def _without(folder: Path) -> InputRefused:
    others = sorted(f.name for e in ("safetensors", "bin", "gguf", "onnx") for f in folder.glob(f"*.{e}"))
    why = "found none of model.safetensors, pytorch_model.bin and their indexes"
    listed = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
    return InputRefused(
        "The folder holds no weights",
        where=str(folder),
        why=f"{why}; it holds {listed}" if others else why,
        do="download the weights into the folder"
        + ("; a .gguf or .onnx file is given by its own path" if others else ""),
    )


def _index(file: Path) -> dict[str, str]:
    """Tensor -> file of a safetensors or torch index."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        weights = content["weight_map"]
        if not weights or not all(isinstance(name, str) for name in weights.values()):
            raise ValueError("weight_map is not a table of file names")
        if outside := [name for name in weights.values() if Path(name).name != name]:
            raise ValueError(f"it names a file outside the folder: {outside[0]!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputRefused(
            "The index of the weights is not usable",
            where=str(file),
            why=f"{type(error).__name__}: {error}",
            do="download it again",
        ) from error
    return dict(weights)


def _named(folder: Path) -> dict[str, set[str]]:
    """File -> the tensors that the index finds in it."""
    named: dict[str, set[str]] = {}
    for index in index_files(folder):
        for tensor, file in _index(index).items():
            named.setdefault(file, set()).add(tensor)
    return named


def _check_safetensors(file: Path) -> dict[str, Entry]:
    """The table of a safetensors file whose header and length fit each other."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise ValueError(f"its header would be {length} bytes long, the file has {size}")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        table = {name: Entry(str(entry["dtype"]), tuple(map(int, entry["shape"]))) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, struct.error) as error:
        raise _corrupt(file, f"{type(error).__name__}: {str(error)[:300]}") from error
    if end != size:
        raise _corrupt(file, f"its header describes {end} bytes, the file has {size}")
    return table


def _check_pickle(file: Path) -> None:
    """A torch file is a zip archive, whose table stands at its end; before torch 1.6 it was a bare pickle."""
    with file.open("rb") as stream:
        start = stream.read(2)
    whole = zipfile.is_zipfile(file)
    if start[:1] == _LEGACY_PICKLE or (start == b"PK" and whole):
        return
    if start == b"PK":
        raise _corrupt(file, f"it is cut short: it has {file.stat().st_size} bytes and no end")
    raise _corrupt(file, "it is no file of torch's")


def _corrupt(file: Path, why: str) -> InputRefused:
    return InputRefused("The model's weights are corrupt", where=str(file), why=why, do="download the file again")
