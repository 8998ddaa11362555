"""Say what a file really is, where it is not the ONNX model that it is called."""

from __future__ import annotations

from pathlib import Path

from graphrot.errors import InputRefused

LARGEST = 2**31 - 1
"""Bytes that one protobuf message can have."""

_HEAD = 1024
_DOWNLOAD = "download the file itself"
_STARTS: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "it is a Git LFS pointer, not the file it stands for", "run git lfs pull"),
    (b"<!doctype html", "it is a web page", _DOWNLOAD),
    (b"<html", "it is a web page", _DOWNLOAD),
    (b"<?xml", "it is an XML document, as servers send with an error", _DOWNLOAD),
    (b"pk\x03\x04", "it is a zip archive or a file of torch", "unpack it, or give the folder that torch's file is in"),
    (b"gguf", "it is a GGUF file", "give it a name that ends in .gguf"),
    (b"\x1f\x8b", "it is compressed by gzip", "unpack it"),
    (b"ortm", "it is in ONNX Runtime's own format", "give the .onnx file that it was made from"),
)
"""How a file begins (in lower case), what it is then, and what to do."""


def refuse_other_files(path: Path) -> None:
    """Refuse what is plainly no ONNX file, by its size and its first bytes.

    Raises:
        InputRefused: not there, a folder, empty, over 2 GiB, or something else under an ONNX model's name.
    """
    if path.is_dir():
        raise InputRefused("The model is a folder", where=str(path), do="give the .onnx file in it")
    if not path.is_file():
        raise InputRefused("There is no such file", where=str(path), do="check the path")
    size = path.stat().st_size
    if size == 0:
        raise _unusable(path, "it is empty: it holds no graph with operators", "download or export it again")
    if size > LARGEST:
        raise _unusable(
            path,
            f"it has {size} bytes, and a protobuf file cannot have more than {LARGEST}",
            "export it with external data: onnx.save(model, path, save_as_external_data=True)",
        )
    with path.open("rb") as file:
        head = file.read(_HEAD)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for begin, what, do in _STARTS:
        if start.startswith(begin):
            raise _unusable(path, what, do)
    # ORT's format has its mark behind an offset of four bytes; safetensors begin with the length of their header.
    if head[4:8] == b"ORTM":
        raise _unusable(path, *_STARTS[-1][1:])
    if head[8:10] == b'{"':
        raise _unusable(path, "it is a safetensors file", "give the folder that it is in")
    if not head.strip(b"\0"):
        raise _unusable(path, "it begins with zeros, as files do whose download broke off", "download it again")


def _unusable(path: Path, why: str, do: str) -> InputRefused:
    return InputRefused("The file is not a usable ONNX model", where=str(path), why=why, do=do)
