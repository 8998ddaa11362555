"""What the weight files of a folder say they hold, and what of it cannot be: held twice, integers, too little.

The files' tables are small; no weights are read. The tables of torch's own files need torch, others do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrot.errors import InputRefused
from graphrot.model.keys import is_buffer

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("vocab_size", "hidden_size", "n_embd")
_COUNTS = (
    *("intermediate_size", "n_inner", "ffn_dim", "num_attention_heads", "n_head", "head_dim"),
    *("num_experts", "num_local_experts"),
)
"""Sizes that some models do not use, so that no tensor need have them."""
_FLOATS = ("F16", "BF16", "F32", "F64")
_NARROW = ("F8", "F6", "F4")
_SHOWN = 24
_ODD = ("I64", "U64", "BOOL")
"""Types that counters, tables and masks have too: they are refused where weights should be."""


@dataclass(frozen=True)
class Entry:
    """Type (``F32``, ``BF16``, ``I8`` ...) and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


Tables = Mapping[Path, Mapping[str, Entry]]


def torch_table(file: Path) -> dict[str, Entry]:
    """The table of one of torch's own files; {} if it is not one of tensors, which loading it will say."""
    import torch

    try:
        content = torch.load(file, map_location="meta", weights_only=True)
    except Exception:  # it raises many kinds, and the same again when the weights are loaded
        return {}
    if not isinstance(content, dict):
        return {}
    return {
        str(name): Entry(_short(str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in content.items()
        if isinstance(tensor, torch.Tensor)
    }


def check_tables(tables: Tables) -> None:
    """Refuse tensors that stand in two files, and weights that are no floats.

    Raises:
        InputRefused: naming tensor and files.
    """
    homes: dict[str, Path] = {}
    for file, table in tables.items():
        for name, entry in table.items():
            if not is_buffer(name):
                _check_type(file, name, entry.dtype)
                if (other := homes.setdefault(name, file)) != file:
                    raise InputRefused(
                        "A tensor stands in two files of the model's weights",
                        where=f"{name}: {other} and {file.name}",
                        why="which of them is meant cannot be told; an index does not decide it when all are loaded",
                        do="download index and weights again, from one place",
                    )


def check_sizes(config: Mapping[str, Any], tables: Tables, file: Path) -> None:
    """Refuse a config whose model is larger than the weights by far, before such a model is built.

    Raises:
        InputRefused: more layers than tensors, or a width that no tensor has.
    """
    entries = [entry for table in tables.values() for entry in table.values()]
    if not entries:
        return
    widest = max((max(entry.shape, default=1) for entry in entries), default=1)
    total = sum(math.prod(entry.shape) for entry in entries)
    for keys, bound, what in (
        (_LAYERS, len(entries), f"the weights are {len(entries)} tensors"),
        (_WIDTHS, widest, f"no dimension of a tensor is over {widest}"),
        (_COUNTS, total, f"the weights are {total} numbers"),
    ):
        for key in keys:
            size = config.get(key)
            if isinstance(size, int | float) and not size <= bound:  # NaN is not
                raise InputRefused(
                    "config.json does not belong to the weights",
                    where=f"{file}: {key}",
                    why=f"it is {str(size)[:_SHOWN]}, and {what}",
                    do="download config.json and weights again, from one place",
                )


def rounded(tables: Tables) -> str | None:
    """What a user has to know of float64 weights, or None if there are none."""
    names = [n for table in tables.values() for n, e in table.items() if e.dtype == "F64" and not is_buffer(n)]
    return f"{len(names)} tensors of the source are float64; they were rounded to float32" if names else None


def _check_type(file: Path, name: str, dtype: str) -> None:
    if dtype in _FLOATS or (dtype in _ODD and not name.endswith(("weight", "bias"))):
        return
    narrow = dtype.startswith(_NARROW)
    raise InputRefused(
        "The model's weights are already quantized" if narrow else "The model's weights are no floats",
        where=f"{file}: {name}",
        why=f"its type is {dtype}" + ("" if narrow else ", and config.json does not say what its numbers stand for"),
        do="give the model before quantization",
    )


def _short(dtype: str) -> str:
    short = dtype.removeprefix("torch.")
    for long, letters in (("bfloat", "BF"), ("float", "F"), ("uint", "U"), ("int", "I"), ("complex", "C")):
        short = short.replace(long, letters)
    return short.upper()
