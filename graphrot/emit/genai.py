"""Target ``genai``: what lies beside the model of target ``ort``, so that onnxruntime-genai loads the folder.

genai_config.json is the source's own, changed where the model has changed, or made from config.json and
generation_config.json. The tokenizer's files are the source's; our library lies beside the model, and the config
names it. Without it the functions inside the model run.

``head_size`` is the last dimension of the cache inputs, bytes of a row where the cache is quantized: onnxruntime-genai
takes it for nothing else, and cuts its caches right in ``rewind_to`` only if it is that.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphrot.emit.genai_config import made_config, provider_options
from graphrot.emit.genai_model import Caches, caches_of
from graphrot.emit.genai_tokenizer import mended_config
from graphrot.errors import InputRefused, UsageError
from graphrot.model.files import Beside, path_of, tokenizer_files, tokenizer_folder
from graphrot.model.genai import CONFIG, GenaiFolder, config_folder, is_genai_folder, read_genai, rename_ends
from graphrot.model.hub import is_hub_id
from graphrot.model.load import Source
from graphrot.ops import library
from graphrot.recipe import Recipe

_TOKENIZER_CONFIG = "tokenizer_config.json"


def settle_target(recipe: Recipe, source: object, output: Path | None, tokenizer: Path | None) -> Recipe:
    """The recipe with its target, and a refusal of what cannot become a folder of onnxruntime-genai.

    A folder of onnxruntime-genai becomes one again, unless the recipe names a target or the output is a file.

    Args:
        recipe: what is asked for.
        source: as the user names it: text, or a model in memory.
        output: what is written, or None.
        tokenizer: the folder that was given for the tokenizer, or None.

    Raises:
        UsageError: the output is a file.
        InputRefused: the source has no config or no tokenizer, and none was given.
    """
    path = path_of(source) if isinstance(source, str) and not is_hub_id(source) else None
    is_file = output is not None and output.suffix == ".onnx"
    if path is not None and path.is_dir() and is_genai_folder(path):
        read_genai(path)
        if "target" not in recipe.model_fields_set and not is_file:
            recipe = recipe.model_copy(update={"target": "genai"})
    if recipe.target != "genai":
        return recipe
    if is_file:
        raise UsageError(
            "The genai target writes a folder",
            where=str(output),
            why="onnxruntime-genai loads a model with its config and its tokenizer",
            do=f"name a folder, or use --target ort for the file {output.name if output else ''}".rstrip(),
        )
    if not isinstance(source, str):
        given = tokenizer is not None and _has_config(tokenizer)
    else:
        given = path is None or path.suffix != ".onnx" or config_folder(path) is not None
        given = given or (tokenizer is not None and _has_config(tokenizer))
    if not given:
        raise _no_config(source if isinstance(source, str) else "a model in memory")
    beside = tokenizer or (None if path is None else path if path.is_dir() else path.absolute().parent)
    looked_at = not isinstance(source, str) or (path is not None and (path.is_dir() or path.suffix == ".onnx"))
    if looked_at and (beside is None or tokenizer_folder(beside) is None):
        raise _no_tokenizer(str(beside or "a model in memory"))
    return recipe


@dataclass(frozen=True)
class GenaiParts:
    """What lies beside the model (None: target genai is not asked for), and what a user has to know about it."""

    beside: Beside | None = None
    notes: tuple[str, ...] = ()


@dataclass
class _Made:
    """Collects the parts."""

    texts: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def genai_parts(recipe: Recipe, model: ir.Model, source: Source, tokenizer_dir: Path | None) -> GenaiParts:
    """Everything that lies beside a model for target genai; nothing for other targets.

    Args:
        recipe: says which target.
        model: finished; or the source's, which tells early whether anything is missing.
        source: where it comes from.
        tokenizer_dir: holds the tokenizer; a config may lie there, too, for a source that has none.

    Raises:
        InputRefused: there is no config or tokenizer, or onnxruntime-genai could not feed the model.
    """
    if recipe.target != "genai":
        return GenaiParts()
    folders = [folder for folder in (source.config_dir, tokenizer_dir) if folder is not None and _has_config(folder)]
    if not folders:
        raise _no_config(source.name)
    if tokenizer_dir is None:
        raise _no_tokenizer(source.name)
    made, caches = _Made(), caches_of(model)
    genai = read_genai(folders[0]) if is_genai_folder(folders[0]) else None
    if genai is None:
        config = made_config(model, caches, folders[0], tokenizer_dir, provider=recipe.provider)
    else:
        config = _changed(genai, caches, recipe.provider, made)
        made.copies.update({file.name: file for file in genai.carried()})
    if genai is None or tokenizer_dir != genai.folder:
        made.copies.update({file.name: file for file in tokenizer_files(tokenizer_dir)})
        text = mended_config(tokenizer_dir)
        made.texts.update({} if text is None else {_TOKENIZER_CONFIG: text})
    _add_library(model, config, made)
    made.texts[CONFIG] = json.dumps(config, indent=4, ensure_ascii=False) + "\n"
    return GenaiParts(Beside(made.texts, made.copies), tuple(made.notes))


def restore_names(model: ir.Model, source: Source) -> None:
    """Give inputs and outputs the names back that they have in the source's file, in place."""
    rename_ends(model, source.names)


def _changed(source: GenaiFolder, caches: Caches, provider: str, made: _Made) -> dict[str, Any]:
    """The source's config, as it has to be for the converted model."""
    config: dict[str, Any] = copy.deepcopy(dict(source.config))
    decoder = config["model"]["decoder"]
    decoder["filename"] = "model.onnx"
    if caches.width is not None:
        decoder["head_size"] = caches.width
    options = decoder.setdefault("session_options", {})
    entries = [entry for entry in options.get("provider_options") or [] if isinstance(entry, Mapping)]
    kept = [entry for entry in entries if provider in entry]
    dropped = [next(iter(entry), "") for entry in entries if entry not in kept]
    wanted = kept or provider_options(provider)
    if entries or wanted:
        options["provider_options"] = wanted
    if dropped:
        place = {"cpu": "the CPU", "cuda": "CUDA"}[provider]
        made.notes.append(f"the model is for {place}: {', '.join(dropped)} is no longer in {CONFIG}")
    search = config.setdefault("search", {})
    if search.get("past_present_share_buffer") and not caches.shared:
        search["past_present_share_buffer"] = False
        made.notes.append("the cache grows with the text: this model cannot write into one shared buffer")
    if "sliding_window" in decoder and caches.rows:
        del decoder["sliding_window"]  # the window is in the operator, and the cache keeps every row
    if left := source.left():
        made.notes.append(f"not carried over from {source.folder.name}: {', '.join(left)}")
    return config


def _add_library(model: ir.Model, config: dict[str, Any], made: _Made) -> None:
    """Our library beside the model, if the model has operators for it."""
    if not any(node.domain == "graphrot" for node in model.graph.all_nodes()):
        return
    options = config["model"]["decoder"].setdefault("session_options", {})
    if theirs := options.get("custom_ops_library"):
        made.notes.append(
            f"onnxruntime-genai loads one library, and {theirs} stays it: graphrot's operators run as functions"
        )
    elif library.is_available():
        made.copies[library.file_name()] = library.library_path()
        options["custom_ops_library"] = library.file_name()
    else:
        made.notes.append(
            "graphrot's library is not installed, so none lies in the folder: its operators run as functions, slower"
        )


def _has_config(folder: Path) -> bool:
    return is_genai_folder(folder) or (folder / "config.json").is_file()


def _no_config(where: str) -> InputRefused:
    return InputRefused(
        "The source has no config for onnxruntime-genai",
        where=where,
        why=f"neither {CONFIG} nor config.json lies beside it, and the file alone does not say which tokens end a text "
        "and how long it may be",
        do=f"give --tokenizer DIR with config.json (or {CONFIG}) and the tokenizer, or use --target ort",
    )


def _no_tokenizer(where: str) -> InputRefused:
    return InputRefused(
        "The source has no tokenizer for onnxruntime-genai",
        where=where,
        why="the folder could not turn text into tokens",
        do="give --tokenizer DIR with tokenizer.json and tokenizer_config.json, or use --target ort",
    )
