"""The files that a conversion reads, so that nothing it writes takes the place of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.model.files import cache_folder, path_of, tokenizer_files
from graphrot.model.genai import is_genai_folder
from graphrot.model.hub import cached_files, is_hub_id
from graphrot.model.onnxfile import external_files
from graphrot.model.tensors import data_files

if TYPE_CHECKING:
    from graphrot.model.interop import ModelObject


@dataclass(frozen=True)
class Inputs:
    """What was given to a conversion; paths are absolute.

    ``source`` is the model's path; None for the demo, for a model in memory, and for one of the hub, whose id
    is ``hub_id``. ``others`` are further files, and folders of which the tokenizer is read.
    """

    source: Path | None
    others: tuple[Path, ...] = ()
    demo: bool = False
    hub_id: str | None = None

    @classmethod
    def of(cls, source: str | Path | ModelObject, others: Iterable[str | Path | None] = ()) -> Inputs:
        """Of a source as the user names it, and of the further paths that were given; None is left out.

        Raises:
            InputRefused: no file can have one of the names.
        """
        given = [path for path in others if path is not None]
        if not isinstance(source, str | Path):
            return cls(None, _absolute([*(external_files(source) if isinstance(source, ir.Model) else ()), *given]))
        spec = str(source)
        if spec == "demo" or spec.startswith("demo:"):
            return cls(None, _absolute([*filter(None, [spec.removeprefix("demo").removeprefix(":")]), *given]), True)
        if is_hub_id(spec):
            return cls(None, _absolute(given), hub_id=spec)
        return cls(path_of(spec).absolute(), _absolute(given))

    def files(self) -> Iterator[Path]:
        """Every file that is read, external data included. Files that do not exist may be among them."""
        if self.demo:
            yield from (cache_folder() / "demo").rglob("*")
        elif self.hub_id is not None:
            yield from cached_files(self.hub_id)
        elif self.source is None:
            pass
        elif self.source.is_dir():
            yield from _folder_files(self.source)
        else:
            yield self.source
            yield from tokenizer_files(self.source.parent)
            if self.source.suffix == ".onnx":
                yield from data_files(self.source)
        for path in self.others:
            yield from tokenizer_files(path) if path.is_dir() else (path,)


def _absolute(paths: Iterable[str | Path]) -> tuple[Path, ...]:
    return tuple(path_of(path).absolute() for path in paths)


def _folder_files(folder: Path) -> Iterator[Path]:
    from graphrot.model.checkpoint import weight_files

    if is_genai_folder(folder):
        yield from (file for file in folder.rglob("*") if file.is_file())
    yield folder / "config.json"
    yield from folder.glob("*.index.json")
    with suppress(InputRefused):
        yield from weight_files(folder)
    yield from tokenizer_files(folder)
