"""What onnxruntime-genai has to know about the inputs and outputs of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphrot.errors import InputRefused
from graphrot.model.in_place import written_in_place

TOKENS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_DO = "use --target ort, and run the model by ONNX Runtime itself"


@dataclass(frozen=True)
class Caches:
    """The key/value cache at a model's ends.

    ``past`` and ``present`` are patterns of names with ``%d``, keys first. ``width`` is the last dimension: numbers, or
    bytes where a row is packed (``rows``). It and ``heads`` are None where the graph leaves them
    open, or layers differ. ``shared``: past and present may be one buffer.
    """

    past: tuple[str, str]
    present: tuple[str, str]
    layers: int
    heads: int | None
    width: int | None
    shared: bool
    rows: bool


def caches_of(model: ir.Model) -> Caches:
    """Find the caches, and refuse a model that onnxruntime-genai could not feed.

    Args:
        model: with the usual names of inputs and outputs.

    Raises:
        InputRefused: it has no tokens, logits or cache, or an input that nothing would be fed to.
    """
    inputs, outputs = {value.name or "": value for value in model.graph.inputs}, [v.name for v in model.graph.outputs]
    others = [name for name in inputs if name not in (TOKENS, MASK, POSITIONS)]
    caches = [name for name in others if len(inputs[name].shape or ()) == 4]
    extra = [name for name in others if name not in caches and inputs[name].uses()]
    if extra:
        raise InputRefused(
            "onnxruntime-genai would not feed an input of the model",
            where=", ".join(extra),
            why=f"it gives a decoder {TOKENS}, {MASK}, {POSITIONS} and caches [batch, heads, length, width]",
            do=_DO,
        )
    if not caches or TOKENS not in inputs or LOGITS not in outputs:
        raise InputRefused(
            "The model is not a decoder with a key/value cache",
            where="inputs " + ", ".join(inputs),
            why=f"onnxruntime-genai gives each step the new tokens alone ({TOKENS}) and what the last one left, and "
            f"takes {LOGITS}",
            do="give a decoder with past_key_values inputs, or " + _DO,
        )
    past = _patterns(caches)
    present = (past[0].replace("past_key_values", "present"), past[1].replace("past_key_values", "present"))
    missing = [p % layer for p in present for layer in range(len(caches) // 2) if p % layer not in outputs]
    if missing or present == past:
        raise InputRefused(
            "The model does not give back the cache that it takes",
            where=", ".join(missing[:4]),
            why="onnxruntime-genai hands each step what the last one gave",
            do=_DO,
        )
    sizes = {tuple((inputs[name].shape or ())[axis] for axis in (1, 3)) for name in caches}
    heads, width = next(iter(sizes)) if len(sizes) == 1 else (None, None)
    heads, width = (size if isinstance(size, int) else None for size in (heads, width))
    pairs = [(p % n, q % n) for p, q in zip(past, present, strict=True) for n in range(len(caches) // 2)]
    return Caches(past, present, len(caches) // 2, heads, width, _shared(model, pairs), _rows(model))


def _patterns(names: Sequence[str]) -> tuple[str, str]:
    """Patterns of the names of keys and of values, which come in pairs for the layers 0, 1, 2 ..."""
    found: dict[str, list[int]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match:
            found.setdefault(f"{match[1]}%d{match[3]}", []).append(int(match[2]))
    keys = [pattern for pattern in found if "key" in pattern.rpartition("%d")[2] or "key" in pattern.partition("%d")[0]]
    keys = sorted(keys, key=lambda pattern: "value" in pattern.rpartition("%d")[2])
    layers = len(names) // 2
    if len(found) != 2 or not keys or any(sorted(numbers) != list(range(layers)) for numbers in found.values()):
        raise InputRefused(
            "The caches have no names that onnxruntime-genai could count",
            where=", ".join(names[:4]),
            why="it fills in the number of a layer, from 0 on, in one name for keys and one for values",
            do=_DO,
        )
    key = keys[0]
    return key, next(pattern for pattern in found if pattern != key)


def _kv(model: ir.Model) -> dict[str, object]:
    try:
        content = json.loads(model.metadata_props.get("graphrot.kv", "{}"))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _rows(model: ir.Model) -> bool:
    return _kv(model).get("layout") == "rows"


def _shared(model: ir.Model, pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether past and present may be one buffer.

    A quantized cache is ours, and the metadata say so; a float one may where attention alone reads it and writes in
    place.
    """
    if (kv := _kv(model)).get("layout") in ("rows", "gqa"):
        return kv.get("shared_buffers") is True
    return written_in_place(model, pairs)
