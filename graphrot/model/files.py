"""Files around a model: hashes, the tokenizer's files, where caches live."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from graphrot.errors import InputRefused

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "generation_config.json",
)
"""Everything beside a model that its tokenizer and chat template may need."""


@dataclass(frozen=True)
class Beside:
    """Further files of an output folder, by name: texts, and files that are copied."""

    texts: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

_CHUNK = 1 << 20
_SHOWN = 80


def path_of(name: str | Path) -> Path:
    """A path as a user gives it, ``~`` resolved; there need not be anything.

    Raises:
        InputRefused: no file can have this name: it is too long, holds a NUL, or begins with the ``~`` of no user.
    """
    try:
        path = Path(name).expanduser()
        os.lstat(path)
    except (ValueError, RuntimeError) as error:  # a NUL or a lone surrogate; no such user
        why = str(error)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            return path
        why = f"it is too long: {len(os.fsencode(name))} bytes"
    else:
        return path
    raise no_such_name(name, why)


def no_such_name(name: str | Path, why: str) -> InputRefused:
    """The error for a name that no file can have."""
    shown = repr(str(name))
    return InputRefused(
        "No file can have this name",
        where=shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}...",
        why=why,
        do="check the path; a shorter one may do, from another working folder",
    )


def sha256_of(files: Iterable[Path], *, base: Path | None = None) -> str:
    """Hash of the files' contents in order; with ``base``, of their names relative to it too.

    A single file without ``base`` gives the hash that ``sha256sum`` prints.
    """
    digest = hashlib.sha256()
    for file in files:
        if base is not None:
            digest.update(f"{file.relative_to(base).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files in ``folder``, in the order of :data:`TOKENIZER_FILES`."""
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def tokenizer_folder(folder: Path) -> Path | None:
    """``folder`` if a tokenizer lies in it, else None."""
    return folder if any((folder / name).is_file() for name in _TOKENIZERS) else None


def cache_folder() -> Path:
    """``$GRAPHROT_CACHE``, else ``$XDG_CACHE_HOME/graphrot``, else ``~/.cache/graphrot``. Not created."""
    if own := os.environ.get("GRAPHROT_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "graphrot"
