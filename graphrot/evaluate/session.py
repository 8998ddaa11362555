"""Run decoder ONNX files: with a KV cache where the file has one, by running everything again where not.

Inputs and outputs are told apart by the names of the usual contract: ``input_ids``, ``attention_mask``,
``position_ids``, ``past_key_values.%d.key/value`` in; ``logits``, ``present.%d.key/value`` out. Cache types
and shapes come from the file.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from graphrot.errors import InputRefused
from graphrot.evaluate.head_sizes import possible_head_sizes
from graphrot.model.onnxfile import read_proto
from graphrot.model.structure import read_names
from graphrot.ops import library as native
from graphrot.ops.foreign import register_custom_ops
from graphrot.ops.runtime import runtime, too_new

_TOKENS, _MASK, _POSITIONS, _TYPES = "input_ids", "attention_mask", "position_ids", "token_type_ids"
_PLAIN = (_TOKENS, _MASK, _POSITIONS, _TYPES)
_TOLD_APART = frozenset(_PLAIN)
_DTYPES: dict[str, Any] = {
    "tensor(double)": np.float64,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
}
_FLOATS = {
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
}
"""From the coarsest to the finest."""
_OPEN = -1
"""Stands for a width that the file does not say."""
_EXACT_QDQ = ("session.qdq_matmulnbits_accuracy_level", "0")


class Unrunnable(InputRefused):
    """ONNX Runtime does not take the model: an operator without a kernel, or an invalid graph."""


@dataclass(frozen=True)
class Cache:
    """What a run leaves for the next: cache tensors, or (for files without caches) all tokens so far."""

    length: int
    tensors: tuple[Any, ...] = ()
    tokens: np.ndarray | None = None


@dataclass(frozen=True)
class _CacheInput:
    name: str
    present: str
    shape: tuple[int, ...]
    """``[batch, heads, 0, width]`` with 0 for the batch too; both are set at run time. ``[2, batch, heads, 0, width]``
    where keys and values are one tensor."""
    dtype: Any


@dataclass(frozen=True)
class _Request:
    """What one run takes."""

    tokens: np.ndarray
    past: int
    names: tuple[str, ...]
    feeds: dict[str, Any]

    def leaves(self, results: Sequence[Any]) -> Cache:
        """The cache that a run leaves: its results behind the logits, or all tokens so far."""
        total = self.past + self.tokens.shape[1]
        return Cache(total, tuple(results[1:])) if len(self.names) > 1 else Cache(total, tokens=self.tokens)


class Bound:
    """One run of a :class:`DecoderSession` whose inputs and outputs are bound; made by :meth:`DecoderSession.bind`."""

    def __init__(self, session: DecoderSession, request: _Request, binding: Any) -> None:
        self._session, self._request, self._binding = session, request, binding

    def run(self) -> None:
        """Run.

        Raises:
            InputRefused: ONNX Runtime fails on these inputs.
        """
        with self._session._words(self._request):
            self._session._session.run_with_iobinding(self._binding)

    def cache(self) -> Cache:
        """What the run left for the next; no copy."""
        return self._request.leaves(self._binding.get_outputs())


class DecoderSession:
    """A decoder in ONNX Runtime on the CPU.

    Args:
        model: an .onnx file, a folder with ``model.onnx``, or a model in memory (written to a scratch file
            that lives as long as this object).
        library: register graphrot's kernels. None: where they are installed; True: they must be; False:
            the model's own functions run. Models without graphrot's operators never need them.
        threads: threads of ONNX Runtime; None: its own choice.
        accuracy_level: ``session.qdq_matmulnbits_accuracy_level``: 0 keeps activations of weight-only Q/DQ
            models in float, 4 allows int8. None: 0 for graphrot's portable files, whose activations carry
            their own Q/DQ, else the runtime's default.
        optimize: False runs the graph as it is written.
        sizes: values for symbolic dimensions of cache inputs other than batch and length.

    Attributes:
        dtype: the coarsest float type of its weight matrices, inputs and outputs.

    Raises:
        InputRefused: the file is missing, or its inputs and outputs are not a decoder's.
        Unrunnable: ONNX Runtime does not take it.
        EnvironmentProblem: ``library`` is True and the library is not installed; ONNX Runtime is too old for
            graphrot, or for the model.
    """

    def __init__(
        self,
        model: Path | str | ir.Model,
        *,
        library: bool | None = None,
        threads: int | None = None,
        accuracy_level: int | None = None,
        optimize: bool = True,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        runtime()
        self.path = self._place(model)
        proto = read_proto(self.path)
        metadata, domains, self.dtype = _header(proto)
        widths = possible_head_sizes(proto)
        read = read_names(proto.graph)
        del proto
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads or 0
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        if accuracy_level is not None:
            options.add_session_config_entry(_EXACT_QDQ[0], str(accuracy_level))
        elif target_of(metadata) == "portable":
            options.add_session_config_entry(*_EXACT_QDQ)
        register_custom_ops(options)
        needed = "graphrot" in domains
        self.uses_library = needed and (library is True or (library is None and native.is_available()))
        if self.uses_library:
            native.register(options)
        try:
            self._session = ort.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has a class of its own for every status code
            raise too_new(str(error), str(self.path)) or Unrunnable(
                "ONNX Runtime does not load the model",
                where=str(self.path),
                why=str(error).strip()[:600],
                do="check the model with onnx.checker, or export it again",
            ) from error
        _give_back()
        everything = self._session.get_inputs()
        self._inputs = {value.name: value for value in everything if value.name in read or value.name in _TOLD_APART}
        self._idle = len(everything) - len(self._inputs)
        """Inputs that no node reads: whatever their type, nothing need be fed to them."""
        outputs = {value.name: value for value in self._session.get_outputs()}
        self._caches = self._pair_caches(set(outputs), dict(sizes or {}))
        self._logits = self._find_logits(outputs)
        self._find_width(widths)
        last = outputs[self._logits].shape[-1] if outputs[self._logits].shape else None
        self._vocabulary = last if isinstance(last, int) else None

    @property
    def has_cache(self) -> bool:
        """Whether the file takes a KV cache."""
        return bool(self._caches)

    @cached_property
    def continues(self) -> bool:
        """Whether several tokens can follow a cache at once. Some files take one at a time."""
        tokens = np.zeros((self.batch or 1, 2), dtype=np.int64)
        try:
            self.run(tokens, self.run(tokens)[1])
        except InputRefused:
            return False
        return True

    @property
    def batch(self) -> int | None:
        """The batch that the file is fixed to, or None where any will do."""
        fixed = self._inputs[_TOKENS].shape[0]
        return fixed if isinstance(fixed, int) else None

    @property
    def vocabulary(self) -> int:
        """Number of logits; token ids below it are valid."""
        if self._vocabulary is None:
            logits, _ = self.run(np.zeros((1, 1), dtype=np.int64))
            self._vocabulary = int(logits.shape[-1])
        return self._vocabulary

    def run(self, tokens: np.ndarray, cache: Cache | None = None) -> tuple[np.ndarray, Cache]:
        """Run ``tokens [B, S]`` after what ``cache`` holds (None: nothing).

        Returns:
            Logits ``[B, S, V]`` (float32; float64 for a float64 model) and the cache to go on with. The
            given cache stays valid.

        Raises:
            InputRefused: ONNX Runtime fails on these inputs.
        """
        tokens = np.ascontiguousarray(tokens, dtype=np.int64)
        new = tokens.shape[1]
        request = self._request(tokens, cache)
        with self._words(request):
            results = self._call(request.names, request.feeds)
        logits = _array(results[0])
        if logits.dtype in (np.float16, ml_dtypes.bfloat16):
            logits = logits.astype(np.float32)
        return logits[:, -new:], request.leaves(results)

    def bind(self, tokens: np.ndarray, cache: Cache | None = None) -> Bound:
        """The same run as :meth:`run`, made ready: what is left is ONNX Runtime's own work, so that it can be timed."""
        request = self._request(np.ascontiguousarray(tokens, dtype=np.int64), cache)
        return Bound(self, request, self._binding(request.names, request.feeds))

    def _request(self, tokens: np.ndarray, cache: Cache | None) -> _Request:
        if not self._caches and cache is not None and cache.tokens is not None:
            tokens = np.concatenate([cache.tokens, tokens], axis=1)
        past = cache.length if cache is not None and self._caches else 0
        feeds = self._feeds(tokens, past)
        for position, entry in enumerate(self._caches):
            feeds[entry.name] = cache.tensors[position] if cache is not None else _empty(entry, len(tokens))
        names = (self._logits, *(entry.present for entry in self._caches))
        return _Request(tokens, past, names, feeds)

    @contextmanager
    def _words(self, request: _Request) -> Iterator[None]:
        """Give what ONNX Runtime says about a run the words of a refusal."""
        try:
            yield
        except Exception as error:  # as above
            rows, count = request.tokens.shape
            raise InputRefused(
                "ONNX Runtime failed to run the model",
                where=f"{self.path}: {rows} x {count} tokens after {request.past}",
                why=str(error).strip()[:600],
                do="check that the tokens fit the model's vocabulary and length",
            ) from error

    def _call(self, names: Sequence[str], feeds: Mapping[str, Any]) -> Any:
        if not self._idle:
            return self._session.run_with_ort_values(names, feeds)
        binding = self._binding(names, feeds)  # the other road insists on every input
        self._session.run_with_iobinding(binding)
        return binding.get_outputs()

    def _binding(self, names: Sequence[str], feeds: Mapping[str, Any]) -> Any:
        binding = self._session.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        for name in names:
            binding.bind_output(name)
        return binding

    def repeat(self, cache: Cache, batch: int) -> Cache:
        """A cache of one row for ``batch`` equal rows; copies."""
        grown = tuple(_value(np.repeat(_array(value), batch, axis=-4)) for value in cache.tensors)
        return replace(cache, tensors=grown)

    def _feeds(self, tokens: np.ndarray, past: int) -> dict[str, Any]:
        batch, count = tokens.shape
        positions = np.broadcast_to(np.arange(past, past + count), (batch, count))
        plain = {_TOKENS: tokens, _MASK: np.ones((batch, past + count)), _POSITIONS: positions}
        plain[_TYPES] = np.zeros((batch, count))  # all of one text
        return {
            name: _value(np.ascontiguousarray(array, dtype=_DTYPES[self._inputs[name].type]))
            for name, array in plain.items()
            if name in self._inputs
        }

    def _place(self, model: Path | str | ir.Model) -> Path:
        if isinstance(model, ir.Model):
            scratch = Path(tempfile.mkdtemp(prefix="graphrot-session-"))
            weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
            path = scratch / "model.onnx"
            ir.save(model, path, external_data="model.onnx.data")
            return path
        path = Path(model)
        path = path / "model.onnx" if path.is_dir() else path
        if not path.is_file():
            raise InputRefused("There is no such model", where=str(path), do="give an .onnx file or a converted folder")
        return path

    def _pair_caches(self, outputs: set[str], sizes: dict[str, int]) -> tuple[_CacheInput, ...]:
        caches: list[_CacheInput] = []
        for name, value in self._inputs.items():
            if name in _TOLD_APART:
                if value.type not in _DTYPES:
                    raise self._not_a_decoder(f"input {name!r} is {value.type}")
                continue
            present = name.replace("past_key_values", "present").replace("past", "present")
            if present == name or present not in outputs:
                raise self._not_a_decoder(f"input {name!r} is neither of {', '.join(_PLAIN)} nor a cache")
            both = value.shape[:-4] == [2]
            if value.type not in _DTYPES or len(value.shape) != 4 + both:
                raise self._not_a_decoder(f"cache input {name!r} is {value.type} {value.shape}, not of rank 4")
            _, heads, _, width = (sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in value.shape[-4:])
            if not isinstance(heads, int):
                raise self._not_a_decoder(f"cache input {name!r} leaves its heads open: {value.shape}")
            width = width if isinstance(width, int) else _OPEN
            caches.append(_CacheInput(name, present, (*[2] * both, 0, heads, 0, width), _DTYPES[value.type]))
        if _TOKENS not in self._inputs:
            raise self._not_a_decoder(f"it has no input {_TOKENS!r}")
        return tuple(caches)

    def _find_width(self, widths: Sequence[int]) -> None:
        """Set the width that cache inputs leave open: the first with which a token runs."""
        declared = self._caches
        if all(entry.shape[-1] != _OPEN for entry in declared):
            return
        for width in widths:
            self._caches = tuple(
                replace(entry, shape=(*entry.shape[:-1], width)) if entry.shape[-1] == _OPEN else entry
                for entry in declared
            )
            try:
                self.run(np.zeros((1, 1), dtype=np.int64))
            except InputRefused:
                continue
            return
        name = next(entry.name for entry in declared if entry.shape[-1] == _OPEN)
        raise self._not_a_decoder(f"cache input {name!r} leaves its width open, and it runs with none of {widths}")

    def _find_logits(self, outputs: Mapping[str, Any]) -> str:
        presents = {entry.present for entry in self._caches}
        rest = [name for name in outputs if name not in presents]
        if "logits" in rest:
            return "logits"
        if len(rest) == 1:
            return rest[0]
        raise self._not_a_decoder(f"no output is called logits; there are {', '.join(rest)}")

    def _not_a_decoder(self, why: str) -> InputRefused:
        return InputRefused(
            "The model's inputs and outputs are not those of a decoder",
            where=str(self.path),
            why=why,
            do="give a decoder with input_ids in, logits out and, if it has caches, past_key_values.N.key/value; "
            "convert --certificate off --solver clip takes other transformers",
        )


def open_decoder(
    model: Path | str | ir.Model, *, library: bool | None = None, threads: int | None = None
) -> DecoderSession:
    """Open a decoder for running; see :class:`DecoderSession`."""
    return DecoderSession(model, library=library, threads=threads)


def target_of(metadata: Mapping[str, str]) -> str | None:
    """The target that graphrot wrote a model for, out of the recipe in its metadata."""
    try:
        recipe = json.loads(metadata.get("graphrot.recipe", "null"))
    except json.JSONDecodeError:
        return None
    target = recipe.get("target") if isinstance(recipe, dict) else None
    return target if isinstance(target, str) else None


def _header(proto: onnx.ModelProto) -> tuple[dict[str, str], frozenset[str], str]:
    """The model's metadata, the domains of its operators, and its coarsest float type.

    Read from the protobuf itself, whose memory goes back at once; graph objects would stay in the heap.
    """
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    ends = (value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output))
    found = {*ends, *(tensor.data_type for tensor in proto.graph.initializer if len(tensor.dims) > 1)}
    coarsest = next((name for number, name in _FLOATS.items() if number in found), "float32")
    domains = frozenset(entry.domain for entry in proto.opset_import)
    del proto
    return metadata, domains, coarsest


def _give_back() -> None:
    """Return freed memory to the system, where the C library keeps it unless told (2 MB after 1,000 nodes)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _empty(entry: _CacheInput, batch: int) -> Any:
    *both, _, heads, length, width = entry.shape
    return _value(np.zeros((*both, batch, heads, length, width), dtype=entry.dtype))


def _value(array: np.ndarray) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _array(value: Any) -> np.ndarray:
    """The numbers of a tensor; ONNX Runtime itself has no NumPy type for bfloat16."""
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    shape = tuple(value.shape())
    raw = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape))) if np.prod(shape) else b""
    return np.frombuffer(raw, ml_dtypes.bfloat16).reshape(shape)
