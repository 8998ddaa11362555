"""The files that a conversion reads, so that nothing it writes takes the place of one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from graphrot.model.files import cache_folder, tokenizer_files
from graphrot.model.onnxfile import external_files


@dataclass(frozen=True)
class Inputs:
    """What was given to a conversion; paths are absolute.

    ``source`` is the model's path; None for the demo, which lies in the cache. ``others`` are further
    files, and folders of which the tokenizer is read.
    """

    source: Path | None
    others: tuple[Path, ...] = ()

    @classmethod
    def of(cls, source: str, others: Iterable[str | Path | None] = ()) -> Inputs:
        """Of a source as the user names it, and of the further paths that were given; None is left out."""
        demo = source == "demo" or source.startswith("demo:")
        paths = [source.removeprefix("demo:")] if source.startswith("demo:") else []
        further = tuple(Path(path).expanduser().absolute() for path in (*paths, *others) if path is not None)
        return cls(None if demo else Path(source).expanduser().absolute(), further)

    def files(self) -> Iterator[Path]:
        """Every file that is read, external data included. Files that do not exist may be among them."""
        if self.source is None:
            yield from (cache_folder() / "demo").rglob("*")
        elif self.source.is_dir():
            yield from _folder_files(self.source)
        else:
            yield self.source
            yield from tokenizer_files(self.source.parent)
            # What does not parse is refused with its reasons when it is loaded.
            with contextlib.suppress(Exception):
                yield from external_files(ir.load(self.source))
        for path in self.others:
            yield from tokenizer_files(path) if path.is_dir() else (path,)


def _folder_files(folder: Path) -> Iterator[Path]:
    from graphrot.model.hf import weight_files

    yield folder / "config.json"
    yield from folder.glob("*.index.json")
    yield from weight_files(folder)
    yield from tokenizer_files(folder)
