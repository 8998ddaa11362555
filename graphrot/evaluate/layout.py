"""What a decoder's key/value cache is: names, shapes and types of its tensors, and what the metadata say it holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphrot.errors import EnvironmentProblem, InputRefused
from graphrot.evaluate.values import DTYPES

if TYPE_CHECKING:
    import onnx

TOKENS, MASK, POSITIONS, TYPES = "input_ids", "attention_mask", "position_ids", "token_type_ids"
PLAIN = (TOKENS, MASK, POSITIONS, TYPES)
"""Inputs that hold no cache."""
KEY = "graphrot.kv"
"""Where a model's metadata say what its cache holds."""
OPEN = -1
"""Stands for a width that the file does not say."""

_SHARING = frozenset({("com.microsoft", "GroupQueryAttention"), ("graphrot", "RotatedAttention")})
"""Operators that write into the buffer of their past where it is that of their present, too."""
_PASTS = {3: 1, 4: 2}
"""Inputs of these operators that are caches, and the outputs that carry them on."""
_HEAD = 4
"""Bytes of a stored row behind its codes: step and minimum."""
_BLOCK = 64
"""Tokens of which longer contents are made by repetition."""


@dataclass(frozen=True)
class Port:
    """An input or output of a model: name, type as ONNX Runtime writes it, shape with names where it is open."""

    name: str
    type: str
    shape: Sequence[int | str | None]


@dataclass(frozen=True)
class CacheEntry:
    """One tensor of a cache: ``[batch, heads, tokens, width]``, or ``[2, batch, heads, tokens, width]`` for both keys
    and values."""

    name: str
    """Of the input that takes it."""
    present: str
    """Of the output that carries it on."""
    heads: int
    width: int
    dtype: Any
    both: bool = False

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        """With ``length`` tokens."""
        return (*[2] * self.both, batch, self.heads, length, self.width)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token and one row of the batch."""
        return (1 + self.both) * self.heads * self.width * int(np.dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class CacheLayout:
    """The cache of a model.

    Attributes:
        entries: its tensors, in the order of the model's inputs.
        holds: what the metadata say it holds, without what says nothing of the numbers; empty: they say nothing.
        shared: past and present may be one buffer of fixed capacity.
        where: the model, for messages.
    """

    entries: tuple[CacheEntry, ...]
    holds: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = False
    where: str = "the model"

    @property
    def bits(self) -> int:
        """Of one stored number."""
        bits = self.holds.get("bits")
        return bits if isinstance(bits, int) and bits else 8 * int(np.dtype(self.entries[0].dtype).itemsize)

    @property
    def rows(self) -> bool:
        """Whether a row ends in its own step and minimum."""
        return self.holds.get("layout") == "rows"

    def numbers(self, batch: int, length: int) -> int:
        """How many keys and values, as numbers, ``length`` tokens are."""
        codes = sum(entry.row_bytes - (1 + entry.both) * entry.heads * _HEAD * self.rows for entry in self.entries)
        return batch * length * codes * 8 // self.bits

    def nbytes(self, batch: int, length: int) -> int:
        """Bytes of ``length`` tokens."""
        return batch * length * sum(entry.row_bytes for entry in self.entries)

    def make(self, batch: int, length: int) -> list[np.ndarray]:
        """Tensors of zeros.

        Raises:
            EnvironmentProblem: there is no memory for them.
        """
        try:
            return [np.zeros(entry.shape(batch, length), dtype=entry.dtype) for entry in self.entries]
        except MemoryError as error:
            raise EnvironmentProblem(
                "There is no memory for the cache",
                where=self.where,
                why=f"{batch} x {length} tokens take {self.nbytes(batch, length) / 1e9:.1f} GB",
                do="use a shorter length or a smaller batch, or a cache of fewer bits",
            ) from error

    def fill(self, tensors: Sequence[np.ndarray], generator: np.random.Generator) -> None:
        """Write random keys and values, for measurements: some tokens are drawn, and repeated to the end."""
        for entry, tensor in zip(self.entries, tensors, strict=True):
            block = self._random(entry, tensor, generator)
            for start in range(0, tensor.shape[-2], _BLOCK):
                part = tensor[..., start : start + _BLOCK, :]
                part[...] = block[..., : part.shape[-2], :]

    def _random(self, entry: CacheEntry, tensor: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        shape = (*tensor.shape[:-2], _BLOCK, entry.width)
        dtype = np.dtype(entry.dtype)
        if dtype.kind not in "iu":
            return np.asarray(generator.normal(size=shape), dtype=dtype)
        block = generator.integers(-127 if dtype.kind == "i" else 0, 128 if dtype.kind == "i" else 256, shape)
        codes = np.asarray(block, dtype=dtype)
        if self.rows:  # about -2 to 2
            scales = np.array([4 / (2**self.bits - 1), -2], dtype="<f2")
            codes[..., -_HEAD:] = scales.view(np.uint8)
        return codes


def layout_of_session(session: Any, where: str | None = None) -> CacheLayout:
    """The cache of the model in an ``onnxruntime.InferenceSession``.

    Raises:
        InputRefused: it has no cache, or one that cannot be told.
    """
    ports = [[Port(v.name, v.type, v.shape) for v in side] for side in (session.get_inputs(), session.get_outputs())]
    name = where or getattr(session, "_model_path", None) or "the model of the session"
    metadata = dict(session.get_modelmeta().custom_metadata_map)
    return read_layout(ports[0], {port.name for port in ports[1]}, metadata, str(name))


def layout_of_proto(proto: onnx.ModelProto, where: str) -> CacheLayout:
    """The cache of a model that is not loaded; raises as :func:`layout_of_session`."""
    import onnx

    weights = {tensor.name for tensor in proto.graph.initializer}
    ports = []
    for value in proto.graph.input:
        if value.name not in weights:
            tensor = value.type.tensor_type
            dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim]
            kind = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
            ports.append(Port(value.name, f"tensor({kind})", dims))
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    return read_layout(ports, {value.name for value in proto.graph.output}, metadata, where, written_in_place(proto))


def read_layout(
    inputs: Iterable[Port],
    outputs: set[str],
    metadata: Mapping[str, str],
    where: str,
    in_place: Container[tuple[str, str]] = (),
) -> CacheLayout:
    """Pair cache inputs with the outputs that carry them on, and read what the metadata say of them.

    Args: see :func:`described`.

    Raises:
        InputRefused: there is no cache, or one that cannot be told.
    """
    entries = []
    for port in inputs:
        if port.name in PLAIN:
            continue
        entry, why = pair(port, outputs)
        if entry is None:
            raise InputRefused(
                "The model's inputs and outputs are not those of a decoder with a cache",
                where=where,
                why=why,
                do="give a decoder with past_key_values.N.key/value in and present.N.key/value out",
            )
        entries.append(entry)
    if not entries:
        raise InputRefused(
            "The model has no KV cache", where=where, do="export it with past_key_values.N.key/value as inputs"
        )
    return described(entries, metadata, where, in_place)


def described(
    entries: Sequence[CacheEntry], metadata: Mapping[str, str], where: str, in_place: Container[tuple[str, str]]
) -> CacheLayout:
    """The layout of these tensors.

    Args:
        entries: the tensors.
        metadata: the model's; they may say nothing of the cache.
        where: the model, for messages.
        in_place: inputs and outputs that may be one buffer, for models that say nothing of it:
            :func:`written_in_place`.
    """
    try:
        content = json.loads(metadata.get(KEY, "{}"))
    except json.JSONDecodeError:
        content = {}
    holds = content if isinstance(content, dict) else {}
    within = all((entry.name, entry.present) in in_place for entry in entries)
    width, shared = holds.pop("width", None), holds.pop("shared_buffers", within)
    if isinstance(width, int):
        entries = [replace(entry, width=width) if entry.width == OPEN else entry for entry in entries]
    return CacheLayout(tuple(entries), holds, shared is True, where)


def pair(port: Port, outputs: set[str], sizes: Mapping[str, int] | None = None) -> tuple[CacheEntry | None, str]:
    """The cache tensor that an input takes.

    Args:
        port: the input.
        outputs: names of all outputs.
        sizes: values for symbolic dimensions.

    Returns:
        The tensor; or None, and why the input takes none.
    """
    present = port.name.replace("past_key_values", "present").replace("past", "present")
    if present == port.name or present not in outputs:
        return None, f"input {port.name!r} is neither of {', '.join(PLAIN)} nor a cache"
    both = list(port.shape[:-4]) == [2]
    if port.type not in DTYPES or len(port.shape) != 4 + both:
        return None, f"cache input {port.name!r} is {port.type} {list(port.shape)}, not of rank 4"
    known = sizes or {}
    _, heads, _, width = (known.get(dim, dim) if isinstance(dim, str) else dim for dim in port.shape[-4:])
    if not isinstance(heads, int):
        return None, f"cache input {port.name!r} leaves its heads open: {list(port.shape)}"
    width = width if isinstance(width, int) else OPEN
    return CacheEntry(port.name, present, heads, width, DTYPES[port.type], both), ""


def written_in_place(proto: onnx.ModelProto) -> frozenset[tuple[str, str]]:
    """Pairs of a past and a present that may be one buffer of fixed capacity.

    So they may where an attention operator that can do it takes the one and makes the other, and no other node reads
    either: then nothing in the graph takes lengths from their shapes.
    """
    from graphrot.model.structure import read_names

    found: set[tuple[str, str]] = set()
    reads: Counter[str] = Counter()
    for node in proto.graph.node:
        reads.update(read_names(type(proto.graph)(node=[node])))
        if (node.domain, node.op_type) in _SHARING:
            ends = [(p, o) for p, o in _PASTS.items() if p < len(node.input) and o < len(node.output)]
            found |= {(node.input[p], node.output[o]) for p, o in ends if list(node.input).count(node.input[p]) == 1}
    return frozenset((past, present) for past, present in found if reads[past] == 1 and not reads[present])


def differences(mine: CacheLayout, other: CacheLayout) -> str | None:
    """Why a cache of the one layout cannot be that of the other; None where it can."""
    for key in sorted({*mine.holds, *other.holds}) if mine.holds and other.holds else ():
        if mine.holds.get(key) != other.holds.get(key):
            return f"its {key} is {mine.holds.get(key)!r}, that of {other.where} is {other.holds.get(key)!r}"
    if bool(mine.holds) != bool(other.holds):
        silent = other.where if mine.holds else mine.where
        named = mine if mine.holds else other
        if named.holds.get("rotated") or named.holds.get("layout") not in (None, "float"):
            return f"{named.where} has a cache of its own kind ({_words(named)}), and {silent} says nothing of its own"
    ours, theirs = {entry.name: entry for entry in mine.entries}, {entry.name: entry for entry in other.entries}
    if set(ours) != set(theirs):
        name = sorted(set(ours) ^ set(theirs))[0]
        return f"one of the two has no {name!r}"
    for name, entry in ours.items():
        for what in ("heads", "width", "dtype", "both", "present"):
            a, b = getattr(entry, what), getattr(theirs[name], what)
            if a != b and OPEN not in (a, b):
                words = (np.dtype(x).name if what == "dtype" else repr(x) for x in (a, b))
                return f"the {what} of {name!r} is {' there and '.join(words)} here"
    return None


def _words(layout: CacheLayout) -> str:
    return ", ".join(f"{key} {value}" for key, value in layout.holds.items() if value is not None)


def model_file(model: Path | str) -> Path:
    """The .onnx file of a model that is given as a file, or as a folder with ``model.onnx``.

    Raises:
        InputRefused: there is none.
    """
    path = Path(model)
    path = path / "model.onnx" if path.is_dir() else path
    if not path.is_file():
        raise InputRefused("There is no such model", where=str(path), do="give an .onnx file or a converted folder")
    return path
