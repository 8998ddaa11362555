"""Hugging Face directories of decoders: check, load with torch, export."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrot.errors import EnvironmentProblem, InputRefused
from graphrot.model.checkpoint import check_weights, index_files, refuse_adapter, weight_files
from graphrot.model.files import sha256_of
from graphrot.model.keys import some, unused
from graphrot.model.tables import Tables, check_sizes, check_tables, rounded, torch_table
from graphrot.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def require_torch() -> None:
    """Say how to get torch and transformers if one of them is not installed.

    Raises:
        EnvironmentProblem: one of them is not installed.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise EnvironmentProblem(
                f"Exporting a torch model needs a package that is not installed: {package}",
                why="only .onnx sources work without torch",
                do="pip install 'graphrot[hf]'",
            )


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` and refuse what is not a plain decoder with whole weights.

    Raises:
        InputRefused: no or a broken config, not a decoder, already quantized, or weights that are missing,
            cut short or corrupt.
    """
    refuse_adapter(folder)
    file = folder / "config.json"
    if not file.is_file():
        raise InputRefused(
            "The folder holds no config.json",
            where=str(folder),
            why="a Hugging Face model folder has one",
            do="give a folder with config.json and weights, or an .onnx file",
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputRefused(
            "config.json does not parse", where=str(file), why=str(error), do="download it again"
        ) from error
    if not isinstance(config, dict):
        raise InputRefused(
            "config.json holds no table of settings",
            where=str(file),
            why=f"it is {str(config)[:100]!r}",
            do="give config.json as transformers writes it",
        )
    if not config.get("model_type"):
        raise InputRefused("config.json names no model_type", where=str(file), do="give a transformers model folder")
    architectures = config.get("architectures") or []
    for key, good, kind in (
        ("model_type", isinstance(config["model_type"], str), "a text"),
        ("architectures", _is_texts(architectures), "a list of texts"),
    ):
        if not good:
            raise InputRefused(
                f"{key} in config.json is not {kind}",
                where=str(file),
                why=f"it is {str(config[key])[:100]!r}",
                do="give config.json as transformers writes it",
            )
    if not architectures or config.get("is_encoder_decoder"):
        raise InputRefused(
            "The model is not a decoder",
            where=str(file),
            why="is_encoder_decoder is true" if architectures else "config.json names no architecture",
            do="give a decoder of the AutoModelForCausalLM kind",
        )
    if "quantization_config" in config:
        raise InputRefused(
            "The model's weights are already quantized",
            where=str(file),
            why="config.json has a quantization_config",
            do="give the model before quantization",
        )
    check_sizes(config, check_weights(folder), file)
    return config


def rounding(folder: Path) -> str | None:
    """What a user has to know of weights that are wider than float32, or None."""
    return rounded(_tables(folder))


def _tables(folder: Path) -> Tables:
    """The tables of all weight files of a folder that :func:`read_config` let pass."""
    torchs = [file for file in weight_files(folder) if file.suffix != ".safetensors"]
    return dict(check_weights(folder)) | {file: torch_table(file) for file in torchs}


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def hash_of(folder: Path) -> str:
    """sha256 over config.json, the weights and their index."""
    return sha256_of([folder / "config.json", *index_files(folder), *weight_files(folder)], base=folder)


def lacking(model: PreTrainedModel, info: dict[str, Any]) -> str:
    """The weights that a checkpoint did not have, in a few words; "" if it had all of them.

    transformers fills them with random numbers and goes on. Weights tied to one that was there are not among them.

    Args:
        model: the loaded model.
        info: what ``from_pretrained(..., output_loading_info=True)`` gives beside it.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = set(info["missing_keys"])
    loaded = {id(parameter) for name, parameter in parameters.items() if name not in missing}
    absent = sorted(n for n in missing if n not in parameters or id(parameters[n]) not in loaded)
    absent += sorted(str(entry[0]) for entry in info.get("mismatched_keys") or ())
    return some(absent)


def unread(model: PreTrainedModel, info: dict[str, Any]) -> str:
    """The weights of a checkpoint that its model leaves out and should not, in a few words; "" if there are none.

    Args:
        model: the loaded model.
        info: as for :func:`lacking`.
    """
    return some(
        unused(
            info.get("unexpected_keys") or (),
            modules=(name for name, _ in model.named_modules()),
            parameters=(name for name, _ in model.named_parameters(remove_duplicate=False)),
            prefix=model.base_model_prefix,
        )
    )


def load_decoder(folder: Path) -> PreTrainedModel:
    """Load a decoder in float32 from disk; no network, no code from the folder.

    Raises:
        InputRefused: transformers does not know it as a decoder, or cannot load it.
        EnvironmentProblem: torch or transformers is missing.
    """
    config = read_config(folder)
    require_torch()
    tables = _tables(folder)
    check_tables(tables)
    check_sizes(config, tables, folder / "config.json")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
    names = {known} if isinstance(known, str) else set(known or ())
    if not names & set(config["architectures"]):
        raise InputRefused(
            "transformers does not know the model as a decoder",
            where=str(folder / "config.json"),
            why=f"architecture {', '.join(config['architectures'])} of type {config['model_type']!r}; "
            f"the decoder of that type is {known or 'not there'}",
            do="give a decoder that transformers knows without code from the folder, or an .onnx file",
        )
    with quiet_loading():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:  # transformers raises many kinds here
            raise InputRefused(
                "transformers cannot load the model",
                where=str(folder),
                why=f"{type(error).__name__}: {str(error).strip()[:400]}",
                do="check that the folder is complete",
            ) from error
    model: PreTrainedModel = loaded[0]
    if missing := lacking(model, loaded[1]):
        raise InputRefused(
            "The checkpoint lacks weights of its model",
            where=f"{folder}: {missing}",
            why="they would be random numbers",
            do="check that the folder is complete and that config.json belongs to the weights",
        )
    if extra := unread(model, loaded[1]):
        raise InputRefused(
            "The checkpoint holds weights that its model does not use",
            where=f"{folder}: {extra}",
            why="config.json describes a model without them, which would compute something else",
            do="check that config.json belongs to the weights (number of layers, attention_bias and the like)",
        )
    model.train(False)
    return model


def export_folder(folder: Path, path: Path, *, progress: Progress = silent) -> None:
    """Export the decoder in ``folder`` to ``path`` and ``path.data``.

    Raises:
        InputRefused: see :func:`load_decoder` and :func:`graphrot.model.export.export_decoder`.
    """
    export(lambda: load_decoder(folder), path, progress=progress)


def export(load: Callable[[], PreTrainedModel], path: Path, *, progress: Progress = silent) -> None:
    """Export the decoder that ``load`` gives to ``path`` and ``path.data``; it is let go afterwards.

    Raises:
        InputRefused: what ``load`` raises, and :func:`graphrot.model.export.export_decoder`.
    """
    progress("loading the torch model", 0, 1)
    model = load()
    from graphrot.model.export import export_decoder

    progress("loading the torch model", 1, 1)
    export_decoder(model, path, progress=progress)
    del model
    gc.collect()


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Without transformers' own progress bars, which would mix with ours."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    active = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if active:
            logging.enable_progress_bar()
