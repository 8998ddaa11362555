"""Folders of onnxruntime-genai as a source: what genai_config.json says, and which files lie around the model."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphrot.errors import InputRefused

CONFIG = "genai_config.json"

_OTHERS = ("encoder", "embedding", "vision", "speech", "joiner", "vad", "draft", "mtp")
"""Parts of a config that name a model of their own."""
_WEIGHTS = (".onnx", ".data", ".onnx_data", ".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Ends of names of models and weights: none of these is carried over."""
_USUAL = {
    "inputs": {
        "input_ids": "input_ids",
        "attention_mask": "attention_mask",
        "position_ids": "position_ids",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    },
    "outputs": {
        "logits": "logits",
        "present_key_names": "present.%d.key",
        "present_value_names": "present.%d.value",
    },
}
"""The names of the usual contract, which are also what onnxruntime-genai takes where its config names none."""


@dataclass(frozen=True)
class GenaiFolder:
    """A folder that onnxruntime-genai loads: its config, and the name of its decoder's file."""

    folder: Path
    config: Mapping[str, Any]
    filename: str

    @property
    def model(self) -> Path:
        return self.folder / self.filename

    @property
    def library(self) -> str | None:
        """The library of custom operators that the config names."""
        named = self.config["model"]["decoder"].get("session_options", {}).get("custom_ops_library")
        return named if isinstance(named, str) and named else None

    def carried(self) -> list[Path]:
        """The files that a converted folder takes over: all but the config, models and weights."""
        files = sorted(file for file in self.folder.iterdir() if file.is_file() and file.name != CONFIG)
        return [file for file in files if file.suffix not in _WEIGHTS and not file.name.startswith(".")]

    def left(self) -> list[str]:
        """Names of models and weights that are not the decoder's own, and of folders: they stay behind."""
        from graphrot.model.tensors import data_files

        own = {self.model, *data_files(self.model)}
        return sorted(
            path.name
            for path in self.folder.iterdir()
            if not path.name.startswith(".") and (path.is_dir() or (path.suffix in _WEIGHTS and path not in own))
        )


def is_genai_folder(folder: Path) -> bool:
    """Whether a folder holds a genai_config.json."""
    return (folder / CONFIG).is_file()


def read_genai(folder: Path) -> GenaiFolder:
    """Read a folder's genai_config.json.

    Raises:
        InputRefused: it does not parse, is not that of one decoder with its tokenizer beside it, or the decoder's
            file is not there.
    """
    file = folder / CONFIG
    config = _content(file)
    model = config.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    filename = decoder.get("filename") if isinstance(decoder, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict):
        raise _broken(file, "it has no model.decoder")
    several = [name for name in _OTHERS if _names_file(model.get(name))]
    several += ["decoder.pipeline"] if decoder.get("pipeline") else []
    if several:
        raise InputRefused(
            "The folder holds several models",
            where=f"{file}: model.{', model.'.join(several)}",
            why="what runs between them would have to be rotated with them, and one decoder is converted at a time",
            do="give a folder of a decoder alone, or convert the decoder's .onnx file by itself",
        )
    if not isinstance(filename, str) or not filename:
        raise _broken(file, "model.decoder.filename names no file")
    for part in ("inputs", "outputs", "session_options"):
        if not isinstance(decoder.get(part, {}), dict):
            raise _broken(file, f"model.decoder.{part} is no table")
    if Path(filename).name != filename or not (folder / filename).is_file():
        raise InputRefused(
            "The model that genai_config.json names is not there",
            where=str(folder / filename),
            why=f"model.decoder.filename is {filename!r}",
            do="correct the name, or copy the file and its weights into the folder",
        )
    if model.get("tokenizer_dir") not in (None, "", "."):
        raise InputRefused(
            "The folder's tokenizer lies elsewhere",
            where=f"{file}: model.tokenizer_dir = {str(model['tokenizer_dir'])[:80]!r}",
            why="a converted folder holds its tokenizer itself",
            do="copy the tokenizer's files beside genai_config.json, and take tokenizer_dir out",
        )
    return GenaiFolder(folder, config, filename)


def config_folder(path: Path) -> Path | None:
    """The folder of an .onnx file, if a genai_config.json that names that very file, or a config.json, lies in it."""
    folder = path.absolute().parent
    if is_genai_folder(folder):
        with contextlib.suppress(InputRefused):  # the file is the source, and a config that is none is nothing to it
            return folder if read_genai(folder).filename == path.name else None
        return None
    return folder if (folder / "config.json").is_file() else None


def usual_names(genai: GenaiFolder, model: ir.Model) -> dict[str, str]:
    """Inputs and outputs that the config names otherwise than the usual contract does: own name -> usual name.

    Raises:
        InputRefused: the model has no tokens, logits or caches of the names that the config gives.
    """
    found: dict[str, str] = {}
    decoder = genai.config["model"]["decoder"]
    for part, values in (("inputs", model.graph.inputs), ("outputs", model.graph.outputs)):
        names = [value.name or "" for value in values]
        for key, usual in _USUAL[part].items():
            own = decoder.get(part, {}).get(key, usual)
            matches = list(_matches(str(own), usual, names))
            if not matches and key not in ("attention_mask", "position_ids"):
                raise InputRefused(
                    "The model does not have what genai_config.json names",
                    where=f"{genai.model}: {part} {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
                    why=f"model.decoder.{part}.{key} is {str(own)[:80]!r}",
                    do="correct the config, or give the model that it belongs to",
                )
            found.update((name, new) for name, new in matches if name != new)
    return found


def rename_ends(model: ir.Model, names: Mapping[str, str]) -> bool:
    """Give inputs and outputs other names, in place.

    Args:
        model: changed.
        names: old name -> new name; names that the model does not have are passed over.

    Returns:
        Whether anything changed.
    """
    ends = [value for value in (*model.graph.inputs, *model.graph.outputs) if value.name in names]
    for value in ends:
        value.name = names[value.name or ""]
    return bool(ends)


def _matches(own: str, usual: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The names that fit ``own``, a name or a pattern with ``%d``, each with what it is called usually."""
    pattern = re.compile(re.escape(own).replace("%d", r"(\d+)"))
    for name in names:
        if match := pattern.fullmatch(name):
            yield name, usual.replace("%d", match[1]) if match.groups() and "%d" in usual else usual


def _names_file(part: object) -> bool:
    return isinstance(part, dict) and bool(part.get("filename"))


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(file, str(error)) from error
    if not isinstance(content, dict):
        raise _broken(file, f"it is {str(content)[:100]!r}")
    return content


def _broken(file: Path, why: str) -> InputRefused:
    return InputRefused(
        "genai_config.json is not one of onnxruntime-genai",
        where=str(file),
        why=why,
        do="make the folder again by onnxruntime-genai's model builder, or give the .onnx file itself",
    )
