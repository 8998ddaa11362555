"""Tell what an earlier conversion wrote from what somebody else did: only the former is ever replaced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from graphrot.model.files import TOKENIZER_FILES, sha256_of
from graphrot.model.onnxfile import OWN_MARK

_METADATA = 14
"""Field number of ``metadata_props`` in a ModelProto."""
_ENTRY = b"\x0a" + bytes([len(OWN_MARK)]) + OWN_MARK.encode()
"""How the entry of our mark begins: its field 1, the key."""
_WIDTHS = {1: 8, 5: 4}
"""Bytes of the wire types that have a fixed size."""


def read_manifest(path: Path) -> Mapping[str, Any] | None:
    """The content of a manifest that graphrot wrote, of whatever version; None: it is not there, or is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content["sizes"]["model_bytes"], int) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def is_marked(path: Path) -> bool:
    """Whether a file is a model that carries graphrot's mark. Reads only the heads of its outermost fields."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            while stream.tell() < size:
                tag = _varint(stream)
                kind = tag & 7
                if kind == 0:
                    _varint(stream)
                    continue
                length = _varint(stream) if kind == 2 else _WIDTHS[kind]
                start = stream.tell()
                if start + length > size:
                    return False
                if tag >> 3 == _METADATA and stream.read(min(length, len(_ENTRY))) == _ENTRY:
                    return True
                stream.seek(start + length)
    except (OSError, EOFError, KeyError):
        return False
    return False


def recorded_files(folder: Path) -> dict[str, object]:
    """Names of the files that an output folder's manifest says that were put beside the model, with their hashes."""
    content = read_manifest(folder / "graphrot.json") or {}
    parts = (content.get(name) for name in ("tokenizer_files", "other_files"))
    files = (entry for part in parts if isinstance(part, dict) for entry in part.items())
    return {name: digest for name, digest in files if Path(name).name == name}


def changed_files(folder: Path) -> set[str]:
    """Files beside the model of an output folder that are not what its manifest says that was put there."""
    known = recorded_files(folder)
    names = {*known, *TOKENIZER_FILES}
    present = [name for name in names if (folder / name).exists() or (folder / name).is_symlink()]
    return {name for name in present if not _is_file(folder / name, known.get(name))}


def _is_file(path: Path, digest: object) -> bool:
    try:
        return not path.is_symlink() and path.is_file() and sha256_of([path]) == digest
    except OSError:
        return False


def _varint(stream: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte:
            break
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise EOFError
