"""Half types in the pipeline: which types a model ends with, narrowing it, and measuring what that costs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphrot.analysis.types import Facts
from graphrot.emit.half import narrow
from graphrot.emit.half_rules import Provider
from graphrot.errors import CheckFailed, InputRefused
from graphrot.evaluate.compare import WINDOW, Reference, fitting, random_probes, text_probes
from graphrot.evaluate.session import open_decoder
from graphrot.graph import WeightStore
from graphrot.model.onnxfile import reopen_onnx
from graphrot.model.save import save_model
from graphrot.model.widen import HALVES, FloatName, FloatTypes
from graphrot.progress import Progress

_FLOAT = ir.DataType.FLOAT
_BY_NAME = {name: dtype for dtype, name in HALVES.items()}

CACHE_NOTE = "the key/value cache is {dtype}: caches of the source's type do not fit"
MEMORY_NOTE = (
    "the file is in {dtype}; ONNX Runtime on CPU multiplies float weights in float32 and holds them so in memory"
)


TWIN_NOTE = (
    "what was measured ran on the CPU, which has no bfloat16 kernels for most operators: the same model with casts to "
    "float32 around them. The file itself runs on CUDA only"
)


@dataclass(frozen=True)
class HalfTypes:
    """The float types that a converted model gets.

    Args:
        dtype: of weights and activations.
        ends: of its float inputs and outputs, by name.
        changed_cache: a cache has another type than in the source.
    """

    dtype: FloatName
    ends: dict[str, ir.DataType]
    changed_cache: bool = False

    @property
    def half(self) -> ir.DataType | None:
        """The half type, None for a float32 model."""
        return _BY_NAME.get(self.dtype)


@dataclass(frozen=True)
class HalfError:
    """What a narrowed model's logits are off by, as parts of the source's largest logit (itself in float32).

    Args:
        dtype: the half type.
        relative: largest difference between the written model and the source.
        plain_relative: the same for the source, narrowed alike but neither rotated nor quantized; None: it
            does not fit into the type, or its logits are not finite.
        top1: how often the written model's first choice is the source's.
        tokens: how many were compared.
    """

    dtype: Literal["float16", "bfloat16"]
    relative: float
    plain_relative: float | None
    top1: float
    tokens: int


def half_types(
    model: ir.Model, facts: Facts, source: FloatTypes, wanted: FloatName | None, integers: Container[str] = ()
) -> HalfTypes:
    """Decide the types of the result.

    Args:
        model: the float32 working model.
        facts: of it; names the caches.
        source: the types that the source had.
        wanted: the recipe's; None: the source's own, at every input and output.
        integers: inputs and outputs that hold integers afterwards.

    Returns:
        With a type asked for: caches have it; other floats that were float32 in the source, logits above
        all, stay float32.
    """
    dtype = source.name if wanted is None else wanted
    half = _BY_NAME.get(dtype, _FLOAT)
    caches = {name for pair in facts.caches for name in (pair.past, pair.present)}
    ends: dict[str, ir.DataType] = {}
    changed = False
    for value in (*model.graph.inputs, *model.graph.outputs):
        name = value.name or ""
        if value.dtype != _FLOAT or name in integers:
            continue
        before = source.ends.get(name, _FLOAT)
        after = before if wanted is None else half if name in caches or before != _FLOAT else _FLOAT
        ends[name] = after
        changed |= name in caches and after != before
    return HalfTypes(dtype, ends, changed)


def wanted_dtype(dtype: FloatName | None, provider: Provider, source: FloatTypes) -> FloatName | None:
    """The type to ask for: the recipe's; for CUDA float16 where it names none, unless the source is bfloat16."""
    if dtype is not None or provider == "cpu":
        return dtype
    return "bfloat16" if source.name == "bfloat16" else "float16"


def half_notes(types: HalfTypes, kind: str, provider: Provider = "cpu") -> tuple[str, ...]:
    """What a user has to know about the types; a checkpoint, other than an ONNX ``kind``, has no cache to compare."""
    compared = types.changed_cache and kind in ("onnx", "object", "genai")
    notes = [CACHE_NOTE.format(dtype=types.dtype)] if compared else []
    if provider == "cuda":
        return (*notes, TWIN_NOTE) if types.dtype == "bfloat16" else tuple(notes)
    return (*notes, MEMORY_NOTE.format(dtype=types.dtype)) if types.half is not None else tuple(notes)


def narrow_model(
    model: ir.Model, types: HalfTypes, folder: Path, *, provider: Provider = "cpu", progress: Progress
) -> None:
    """Narrow ``model`` in place to ``types``, for a provider; its new weights lie in ``folder``.

    Raises:
        InputRefused: a weight is too large for the type.
    """
    assert types.half is not None
    narrow(model, types.half, types.ends, store=WeightStore(folder), provider=provider, progress=progress)


def measure_half(
    source: Path,
    narrowed: ir.Model,
    types: HalfTypes,
    folder: Path,
    *,
    text: Sequence[int] | np.ndarray = (),
    window: int = WINDOW,
    progress: Progress,
) -> HalfError:
    """Compare a narrowed model with its source, and with the same source only narrowed.

    Args:
        source: the float32 working source.
        narrowed: the finished model.
        types: its types.
        folder: for scratch files; does not exist yet, and is gone afterwards.
        text: token ids; may be empty.
        window: the longest row of tokens that is run.
        progress: told of each run.

    Raises:
        CheckFailed: the narrowed model does not run, or its logits are not finite.
    """
    assert types.dtype != "float32"
    folder.mkdir(parents=True)
    try:
        decoder = open_decoder(source)
        probes = random_probes(decoder.vocabulary, batch=decoder.batch, window=window)
        probes += text_probes(text, limit=len(text), window=window) if decoder.batch in (None, 1) else []
        probes = fitting(probes, decoder)
        with Reference(decoder, probes, progress=progress, step=f"{types.dtype}: the source") as reference:
            del decoder
            save_model(narrowed, folder / "narrowed.onnx")
            try:
                ours = open_decoder(folder / "narrowed.onnx")
            except InputRefused as error:
                raise _unrunnable(types, error) from error
            found = reference.compare(ours, progress=progress, step=f"{types.dtype}: the converted model")
            del ours
            if not math.isfinite(found.max_abs):
                raise _not_finite(types)
            plain = _plain(source, reference, types, folder, progress)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return HalfError(types.dtype, found.relative, plain, found.top1, found.tokens)


def _plain(source: Path, reference: Reference, types: HalfTypes, folder: Path, progress: Progress) -> float | None:
    model = reopen_onnx(source)
    try:
        narrow_model(model, types, folder / "plain", progress=progress)
    except InputRefused:
        return None
    save_model(model, folder / "plain.onnx")
    decoder = open_decoder(folder / "plain.onnx")
    found = reference.compare(decoder, progress=progress, step=f"{types.dtype}: the source, only narrowed")
    return found.relative if math.isfinite(found.relative) else None


def _unrunnable(types: HalfTypes, error: InputRefused) -> CheckFailed:
    return CheckFailed(
        f"The {types.dtype} model does not run",
        where=error.where,
        why=error.why or error.what,
        do="report the model; --dtype float32 does without",
    )


def _not_finite(types: HalfTypes) -> CheckFailed:
    other = "bfloat16 or float32" if types.dtype == "float16" else "float32"
    return CheckFailed(
        f"The {types.dtype} model's logits are not finite",
        why="numbers inside it leave the type's range" if types.dtype == "float16" else None,
        do=f"use --dtype {other}",
    )
