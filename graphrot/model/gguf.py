"""GGUF files of decoders: check the file itself, dequantize it with transformers, rebuild its tokenizer."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphrot.errors import EnvironmentProblem, InputRefused
from graphrot.model.hf import lacking, quiet_loading, require_torch
from graphrot.model.keys import some

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAGIC = b"GGUF"
_FLOATS = ("F32", "F16", "BF16", "F64")
_ROPE_FACTORS = "rope_freqs.weight"
_UNREAD = ("rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of the format that change what the model computes, and that transformers does not read."""


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about itself.

    ``types`` counts its matrices by their storage type (``Q4_K``, ``F16`` ...); ``scaling`` is how it says
    that rotary positions are stretched, or None.
    """

    architecture: str
    types: tuple[tuple[str, int], ...]
    has_tokens: bool
    scaling: str | None
    tensors: frozenset[str] = field(repr=False)

    @property
    def quantized(self) -> str | None:
        """The quantized types of its matrices, most frequent first, or None if they are all floats."""
        found = [f"{name} ({count} matrices)" for name, count in self.types if name not in _FLOATS]
        return ", ".join(found) or None


def read_header(path: Path) -> Header:
    """Read and check metadata and the table of tensors; no weights are read.

    Raises:
        InputRefused: not there, not GGUF, cut short, corrupt, or one part of several.
        EnvironmentProblem: a package is missing.
    """
    require_packages()
    if not path.is_file():
        raise InputRefused("There is no such file", where=str(path), do="check the path")
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise _corrupt(path, "it does not begin with the four letters GGUF")
    reader = _reader(path)
    split = _scalar(reader, "split.count", path)
    if isinstance(split, int) and split > 1:
        raise InputRefused(
            "The GGUF file is one part of several",
            where=str(path),
            why=f"it says split.count = {split}",
            do="join the parts with llama.cpp's gguf-split --merge and give the one file",
        )
    architecture = _scalar(reader, "general.architecture", path)
    if not isinstance(architecture, str) or not architecture or not reader.tensors:
        raise _corrupt(path, "it names no architecture" if reader.tensors else "it holds no tensors")
    unread = sorted(t.name for t in reader.tensors if t.name in _UNREAD)
    if unread:
        raise InputRefused(
            "The GGUF file holds tensors that transformers does not read",
            where=f"{path}: {', '.join(unread)}",
            why="the converted model would compute something else at long contexts",
            do="give the model as a Hugging Face folder",
        )
    types = Counter(t.tensor_type.name for t in reader.tensors if len(t.shape) > 1)
    names = frozenset(str(t.name) for t in reader.tensors)
    scaling = _scalar(reader, f"{architecture}.rope.scaling.type", path)
    scaling = None if scaling in (None, "", "none") else str(scaling)
    has_tokens = "tokenizer.ggml.tokens" in reader.fields
    return Header(architecture, tuple(types.most_common()), has_tokens, scaling, names)


def load_gguf(path: Path) -> PreTrainedModel:
    """Load a decoder in float32, quantized tensors multiplied out.

    Raises:
        InputRefused: as for :func:`read_header`; transformers does not know the architecture or leaves out
            a part of it, or the file lacks tensors.
        EnvironmentProblem: a package is missing.
    """
    header = read_header(path)
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    from graphrot.model.trace import quiet

    # The reader of GGUF files draws a bar of its own.
    with quiet(), quiet_loading(), contextlib.redirect_stderr(io.StringIO()):
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.absolute().parent,
                gguf_file=path.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:  # transformers raises many kinds here
            raise InputRefused(
                "transformers cannot load the GGUF file",
                where=f"{path}: architecture {header.architecture!r}",
                why=f"{type(error).__name__}: {str(error).strip()[:400]}",
                do="give a GGUF of a decoder that transformers reads, or its Hugging Face folder or .onnx file",
            ) from error
    model: PreTrainedModel = loaded[0]
    if missing := lacking(model, loaded[1]):
        raise InputRefused(
            "The GGUF file lacks weights of its model",
            where=f"{path}: {missing}",
            why="they would be random numbers",
            do="give the model as a Hugging Face folder, or convert it to GGUF again",
        )
    if dropped := _dropped(model, header):
        raise InputRefused(
            "The GGUF file holds weights that its model does not use",
            where=f"{path}: {some(dropped)}",
            why="transformers leaves them out, and the converted model would compute something else",
            do="give the model as a Hugging Face folder",
        )
    if header.scaling is not None and _unscaled(model):
        raise InputRefused(
            "The GGUF file stretches rotary positions, and transformers does not read how",
            where=f"{path}: {header.architecture}.rope.scaling.type = {header.scaling}",
            why="the converted model would compute something else",
            do="give the model as a Hugging Face folder",
        )
    if _ROPE_FACTORS in header.tensors:
        _divide_frequencies(model, path)
    model.train(False)
    return model


def write_tokenizer(path: Path, folder: Path) -> str | None:
    """Write the tokenizer that a GGUF file holds as ``tokenizer.json`` and its company.

    Returns:
        Why there is none, or None if it was written.
    """
    if not read_header(path).has_tokens:
        return "the GGUF file holds no tokenizer"
    from transformers import AutoTokenizer

    from graphrot.model.trace import quiet

    with quiet(), quiet_loading(), contextlib.redirect_stderr(io.StringIO()):
        try:
            words = AutoTokenizer.from_pretrained(path.absolute().parent, gguf_file=path.name)
            words.save_pretrained(folder)
        except Exception as error:  # as above
            said = f"{type(error).__name__}: {str(error).strip()[:200]}"
            return f"transformers cannot rebuild the tokenizer of the GGUF file ({said})"
    return None


def write_config(path: Path, folder: Path) -> None:
    """Write what a GGUF file says of its model as ``config.json``, as transformers reads it.

    Args:
        path: a file that :func:`load_gguf` takes.
        folder: made if it is not there.
    """
    from transformers import AutoConfig

    from graphrot.model.trace import quiet

    with quiet(), quiet_loading(), contextlib.redirect_stderr(io.StringIO()):
        AutoConfig.from_pretrained(path.absolute().parent, gguf_file=path.name).save_pretrained(folder)


def require_packages() -> None:
    """Say how to get what reading a GGUF file needs.

    Raises:
        EnvironmentProblem: torch, transformers, gguf or accelerate is not installed.
    """
    require_torch()
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise EnvironmentProblem(
                f"Reading a GGUF file needs a package that is not installed: {package}",
                do="pip install 'graphrot[hf]'",
            )


def _reader(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:  # whatever it meets in a broken file
        raise _corrupt(path, f"{type(error).__name__}: {str(error).strip()[:300]}") from error


def _scalar(reader: Any, key: str, path: Path) -> Any:
    field = reader.fields.get(key)
    try:
        return None if field is None else field.contents()
    except UnicodeDecodeError as error:
        raise _corrupt(path, f"{key} is no text: {error}") from error


def _corrupt(path: Path, why: str) -> InputRefused:
    return InputRefused(
        "The file is not a usable GGUF model", where=str(path), why=why, do="check the download, or convert it again"
    )


def _dropped(model: PreTrainedModel, header: Header) -> list[str]:
    """Weights of layers that the model does not have, and biases that its linears and norms do not have."""
    ggufs: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    processor = ggufs.TENSOR_PROCESSORS.get(header.architecture, ggufs.TensorProcessor)(config={})
    read = set(ggufs.get_gguf_hf_weights_map(model, processor))
    layers = getattr(model.config, "num_hidden_layers", None)
    found = []
    for name in header.tensors:
        layer = re.match(r"blk\.(\d+)\.", name)
        beyond = layer is not None and layers is not None and int(layer[1]) >= layers
        stem, _, kind = name.rpartition(".")
        if beyond or (kind == "bias" and name not in read and f"{stem}.weight" in read):
            found.append(name)
    return sorted(found)


def _unscaled(model: PreTrainedModel) -> bool:
    parameters = getattr(model.config, "rope_parameters", None) or {}
    return bool(parameters.get("rope_type", "default") == "default")


def _divide_frequencies(model: PreTrainedModel, path: Path) -> None:
    """Apply the factors that a GGUF file keeps for the rotary frequencies; transformers leaves them out.

    Raises:
        InputRefused: the model has no frequencies that they fit.
    """
    import torch

    factors = next(t for t in _reader(path).tensors if t.name == _ROPE_FACTORS)
    values = torch.from_numpy(np.array(factors.data, dtype=np.float32).reshape(-1))
    found = [(m, n) for m in model.modules() for n, b in m.named_buffers(recurse=False) if n.endswith("inv_freq")]
    fitting = [(m, n) for m, n in found if getattr(m, n).shape == values.shape]
    if not found or len(fitting) != len(found):
        raise InputRefused(
            "The GGUF file holds factors of rotary frequencies that do not fit the model",
            where=f"{path}: {_ROPE_FACTORS}, {len(values)} factors",
            do="give the model as a Hugging Face folder",
        )
    for module, name in fitting:
        setattr(module, name, getattr(module, name) / values)
