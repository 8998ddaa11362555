"""Run decoder ONNX files: with a KV cache where the file has one, by running everything again where not.

Inputs and outputs are told apart by the names of the usual contract: ``input_ids``, ``attention_mask``,
``position_ids``, ``past_key_values.%d.key/value`` in; ``logits``, ``present.%d.key/value`` out. Cache types
and shapes come from the file.
"""

from __future__ import annotations

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
import onnx_ir as ir
import onnxruntime as ort

from graphrot.errors import EnvironmentProblem, InputRefused
from graphrot.evaluate.device import Device, Provider
from graphrot.evaluate.head_sizes import possible_head_sizes
from graphrot.evaluate.header import give_back, provider_of, read_header, target_of
from graphrot.evaluate.layout import (
    MASK,
    OPEN,
    PLAIN,
    POSITIONS,
    TOKENS,
    TYPES,
    CacheEntry,
    described,
    model_file,
    pair,
    written_in_place,
)
from graphrot.evaluate.values import DTYPES, array_of, ort_value
from graphrot.model.onnxfile import read_proto
from graphrot.model.structure import read_names
from graphrot.ops import library as native
from graphrot.ops.foreign import register_custom_ops
from graphrot.ops.runtime import runtime, too_new

_EXACT_QDQ = ("session.qdq_matmulnbits_accuracy_level", "0")


class Unrunnable(InputRefused):
    """ONNX Runtime does not take the model: an operator without a kernel, or an invalid graph."""


@dataclass(frozen=True)
class Cache:
    """What a run leaves for the next: cache tensors, or (for files without caches) all tokens so far.

    Attributes:
        length: tokens in it.
        tensors: ``OrtValue``, in the order of the model's inputs.
        tokens: all tokens so far, for files without caches.
        capacity: tokens that fit into ``tensors``, which are buffers that every run writes into; None: each run makes
            tensors of its own. What was there before a run stays valid, two runs behind the same cache do not.
    """

    length: int
    tensors: tuple[Any, ...] = ()
    tokens: np.ndarray | None = None
    capacity: int | None = None


@dataclass(frozen=True)
class _Request:
    """What one run takes, and the buffers that it fills."""

    tokens: np.ndarray
    past: int
    names: tuple[str, ...]
    feeds: dict[str, Any]
    targets: dict[str, Any]
    """Output -> the buffer it is written into; those of others are the runtime's to make."""
    capacity: int | None = None

    def leaves(self, results: Sequence[Any]) -> Cache:
        """The cache that a run leaves: its results behind the logits, or all tokens so far."""
        total = self.past + self.tokens.shape[1]
        if len(self.names) == 1:
            return Cache(total, tokens=self.tokens)
        tensors = tuple(self.targets.values()) or tuple(results[1:])
        return Cache(total, tensors, None, self.capacity)


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
    """A decoder in ONNX Runtime, on the CPU or in its CUDA provider.

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
        provider: where it runs. On CUDA a cache stays on the GPU, and logits come back to the CPU.

    Attributes:
        dtype: the coarsest float type of its weight matrices, inputs and outputs.
        layout: its cache; without entries where the file has none.

    Raises:
        InputRefused: the file is missing, or its inputs and outputs are not a decoder's.
        Unrunnable: ONNX Runtime does not take it.
        EnvironmentProblem: ``library`` is True and the library is not installed; ONNX Runtime is too old for
            graphrot, or for the model; its CUDA provider is asked for and cannot be used.
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
        provider: Provider = "cpu",
    ) -> None:
        runtime()
        self._device = Device(provider)
        self.path = self._place(model)
        proto = read_proto(self.path)
        metadata, domains, self.dtype = read_header(proto)
        widths = possible_head_sizes(proto)
        read = read_names(proto.graph)
        in_place = written_in_place(proto)
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
            self._session = self._device.open(str(self.path), options)
        except EnvironmentProblem:
            raise
        except Exception as error:  # ONNX Runtime has a class of its own for every status code
            raise too_new(str(error), str(self.path)) or Unrunnable(
                "ONNX Runtime does not load the model",
                where=str(self.path),
                why=str(error).strip()[:600],
                do="run it with --provider cuda, which it was written for"
                if provider_of(metadata) == "cuda" and self._device.is_cpu
                else "check the model with onnx.checker, or export it again",
            ) from error
        give_back()
        everything = self._session.get_inputs()
        self._inputs = {value.name: value for value in everything if value.name in read or value.name in PLAIN}
        self._idle = len(everything) - len(self._inputs)
        """Inputs that no node reads: whatever their type, nothing need be fed to them."""
        outputs = {value.name: value for value in self._session.get_outputs()}
        entries = self._pair_caches(set(outputs), dict(sizes or {}))
        self.layout = described(entries, metadata, str(self.path), in_place)
        self._logits = self._find_logits(outputs)
        self._find_width(widths)
        last = outputs[self._logits].shape[-1] if outputs[self._logits].shape else None
        self._vocabulary = last if isinstance(last, int) else None

    @property
    def has_cache(self) -> bool:
        """Whether the file takes a KV cache."""
        return bool(self.layout.entries)

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
        fixed = self._inputs[TOKENS].shape[0]
        return fixed if isinstance(fixed, int) else None

    @property
    def vocabulary(self) -> int:
        """Number of logits; token ids below it are valid."""
        if self._vocabulary is None:
            logits, _ = self.run(np.zeros((1, 1), dtype=np.int64))
            self._vocabulary = int(logits.shape[-1])
        return self._vocabulary

    def reserve(self, batch: int, capacity: int) -> Cache | None:
        """An empty cache with room for ``capacity`` tokens, which runs write into in place and no run copies; it grows
        by itself, twofold or more, when it is full. None where the model cannot do that.

        Raises:
            EnvironmentProblem: there is no memory for it.
        """
        if not self.has_cache or not self.layout.shared or self.batch not in (None, batch):
            return None
        return Cache(0, tuple(map(self._device.put, self.layout.make(batch, capacity))), None, capacity)

    def filled(self, batch: int, length: int, room: int) -> Cache:
        """A cache of ``length`` random tokens, for measurements: in buffers with room for so many more where the model
        can write in place.

        Raises:
            EnvironmentProblem: there is no memory for it.
        """
        capacity = length + room if self.layout.shared else None
        arrays = self.layout.make(batch, capacity or length)
        self.layout.fill(arrays, np.random.default_rng(0))
        return Cache(length, tuple(map(self._device.put, arrays)), None, capacity)

    def run(self, tokens: np.ndarray, cache: Cache | None = None) -> tuple[np.ndarray, Cache]:
        """Run ``tokens [B, S]`` after what ``cache`` holds (None: nothing).

        Returns:
            Logits ``[B, S, V]`` (float32; float64 for a float64 model) and the cache to go on with. The
            given cache stays valid; of one with a capacity that is :class:`Cache`'s.

        Raises:
            InputRefused: ONNX Runtime fails on these inputs.
        """
        tokens = np.ascontiguousarray(tokens, dtype=np.int64)
        new = tokens.shape[1]
        request = self._request(tokens, cache)
        with self._words(request):
            results = self._call(request)
        logits = array_of(results[0])
        if logits.dtype in (np.float16, ml_dtypes.bfloat16):
            logits = logits.astype(np.float32)
        return logits[:, -new:], request.leaves(results)

    def watch(self, tokens: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """What these outputs, of whatever names, hold after ``tokens [B, S]`` on an empty cache; refuses as above."""
        request = replace(self._request(np.ascontiguousarray(tokens, dtype=np.int64), None), names=tuple(names))
        with self._words(request):
            return dict(zip(names, map(array_of, self._call(request)), strict=True))

    def bind(self, tokens: np.ndarray, cache: Cache | None = None) -> Bound:
        """The same run as :meth:`run`, made ready: what is left is ONNX Runtime's own work, so that it can be timed.
        Logits stay where it runs."""
        request = self._request(np.ascontiguousarray(tokens, dtype=np.int64), cache)
        return Bound(self, request, self._binding(request, self._device.place))

    def _request(self, tokens: np.ndarray, cache: Cache | None) -> _Request:
        entries = self.layout.entries
        if not entries and cache is not None and cache.tokens is not None:
            tokens = np.concatenate([cache.tokens, tokens], axis=1)
        past = cache.length if cache is not None and entries else 0
        feeds = self._feeds(tokens, past)
        names = (self._logits, *(entry.present for entry in entries))
        if cache is None or not entries:
            empty = self.layout.make(len(tokens), 0)
            feeds |= {entry.name: ort_value(array) for entry, array in zip(entries, empty, strict=True)}
            return _Request(tokens, past, names, feeds, {})
        cache = self._with_room(cache, past + tokens.shape[1])
        feeds |= {entry.name: value for entry, value in zip(entries, cache.tensors, strict=True)}
        targets = {} if cache.capacity is None else dict(zip(names[1:], cache.tensors, strict=True))
        return _Request(tokens, past, names, feeds, targets, cache.capacity)

    def _with_room(self, cache: Cache, total: int) -> Cache:
        if cache.capacity is None or total <= cache.capacity:
            return cache
        times = max(2, -(-total // cache.capacity))
        longer = tuple(self._device.repeated(value, times) for value in cache.tensors)
        return replace(cache, tensors=longer, capacity=times * cache.capacity)

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

    def _call(self, request: _Request) -> Any:
        if not self._idle and not request.targets and self._device.is_cpu:
            return self._session.run_with_ort_values(request.names, request.feeds)
        binding = self._binding(request)  # the other road insists on every input, and makes every output
        self._session.run_with_iobinding(binding)
        return binding.get_outputs()

    def _binding(self, request: _Request, place: str = "cpu") -> Any:
        """Inputs and outputs of a run; those that carry the cache on stay where it runs, others go to ``place``."""
        presents = {entry.present for entry in self.layout.entries}
        binding = self._session.io_binding()
        for name, value in request.feeds.items():
            binding.bind_ortvalue_input(name, value)
        for name in request.names:
            if name in request.targets:
                binding.bind_ortvalue_output(name, request.targets[name])
            else:
                binding.bind_output(name, self._device.place if name in presents else place)
        return binding

    def _feeds(self, tokens: np.ndarray, past: int) -> dict[str, Any]:
        batch, count = tokens.shape
        positions = np.broadcast_to(np.arange(past, past + count), (batch, count))
        plain = {TOKENS: tokens, MASK: np.ones((batch, past + count)), POSITIONS: positions}
        plain[TYPES] = np.zeros((batch, count))  # all of one text
        return {
            name: ort_value(np.ascontiguousarray(array, dtype=DTYPES[self._inputs[name].type]))
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
        return model_file(model)

    def _pair_caches(self, outputs: set[str], sizes: dict[str, int]) -> list[CacheEntry]:
        entries = []
        for name, value in self._inputs.items():
            if name in PLAIN:
                if value.type not in DTYPES:
                    raise self._not_a_decoder(f"input {name!r} is {value.type}")
                continue
            entry, why = pair(value, outputs, sizes)
            if entry is None:
                raise self._not_a_decoder(why)
            entries.append(entry)
        if TOKENS not in self._inputs:
            raise self._not_a_decoder(f"it has no input {TOKENS!r}")
        return entries

    def _find_width(self, widths: Sequence[int]) -> None:
        """Set the width that cache inputs leave open: the first with which a token runs."""
        declared = self.layout.entries
        if all(entry.width != OPEN for entry in declared):
            return
        for width in widths:
            entries = (replace(entry, width=width) if entry.width == OPEN else entry for entry in declared)
            self.layout = replace(self.layout, entries=tuple(entries))
            try:
                self.run(np.zeros((1, 1), dtype=np.int64))
            except InputRefused:
                continue
            return
        name = next(entry.name for entry in declared if entry.width == OPEN)
        raise self._not_a_decoder(f"cache input {name!r} leaves its width open, and it runs with none of {widths}")

    def _find_logits(self, outputs: Mapping[str, Any]) -> str:
        presents = {entry.present for entry in self.layout.entries}
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
    model: Path | str | ir.Model,
    *,
    library: bool | None = None,
    threads: int | None = None,
    provider: Provider = "cpu",
) -> DecoderSession:
    """Open a decoder for running; see :class:`DecoderSession`."""
    return DecoderSession(model, library=library, threads=threads, provider=provider)
