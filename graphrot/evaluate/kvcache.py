"""The key/value cache of a decoder that runs in a plain ``onnxruntime.InferenceSession``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphrot.doctor.cuda import CUDA
from graphrot.errors import InputRefused, UsageError
from graphrot.evaluate.device import Device
from graphrot.evaluate.layout import (
    MASK,
    OPEN,
    POSITIONS,
    TOKENS,
    CacheLayout,
    differences,
    layout_of_proto,
    layout_of_session,
    model_file,
)
from graphrot.evaluate.values import DTYPES, array_of, ort_value

if TYPE_CHECKING:
    import onnxruntime as ort


class _Held:
    """One tensor as ONNX Runtime has it, and as an array: over the same memory on the CPU (a copy for bfloat16 of the
    runtime), a fresh copy of what lies on a GPU."""

    def __init__(self, source: Any, device: Device) -> None:
        self._device = device
        self._array = source if isinstance(source, np.ndarray) and device.is_cpu else None
        self.value = device.put(source) if isinstance(source, np.ndarray) else source

    @property
    def array(self) -> np.ndarray:
        if self._array is not None:
            return self._array
        array = self._device.take(self.value)
        if self._device.is_cpu:
            self._array = array
        return array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape())

    @property
    def dtype(self) -> Any:
        return np.dtype(DTYPES[self.value.data_type()])


class KVCache:
    """Keys and values of the tokens so far, for a decoder in a plain ONNX Runtime session.

    It begins empty. :meth:`run` runs the session and keeps what it leaves; to run the session by other means there are
    :meth:`feeds` and :meth:`take`, or :meth:`bind` and :meth:`advance`. What the cache holds (float, 8 or 4 bits,
    rotated or not) stands in the model's metadata; a cache of another kind is refused before anything runs. For a
    session of the CUDA provider it lies on the GPU.

    Without ``capacity`` each run makes a cache that is longer, and copies. With it there are buffers of that many
    tokens, bound as past and as present at once, into which new tokens are written in place: nothing is copied.

    ::

        cache = graphrot.KVCache(session, capacity=2048)
        logits = cache.run(session, {"input_ids": prompt})[0]  # prompt [batch, tokens] int64
        while ...:
            logits = cache.run(session, {"input_ids": token})[0]

    Padding is the caller's ``attention_mask [batch, total]``, for the tokens in the cache and the new ones; a mask of
    the new ones alone is refused. Models whose attention counts the ones of the mask
    (GroupQueryAttention, files of onnxruntime-genai's builder) take padding on the right: a row's ones come first,
    its next token goes behind them, over what padding left there. In other models
    the mask's columns are the cache's tokens, and padding is hidden where it stands.

    Args:
        model: an ``onnxruntime.InferenceSession``; or an .onnx file or a folder with ``model.onnx``, which is read, not
            loaded.
        batch: rows.
        capacity: tokens that fit; None: it grows.
        width: of a row, where the model leaves it open.

    Raises:
        InputRefused: the model has no cache; leaves its width open; or its past and present cannot be one buffer, and
            ``capacity`` is given.
        UsageError: ``batch`` or ``capacity`` is below 1.
        EnvironmentProblem: there is no memory for the buffers.
    """

    def __init__(
        self,
        model: ort.InferenceSession | Path | str,
        *,
        batch: int = 1,
        capacity: int | None = None,
        width: int | None = None,
    ) -> None:
        if batch < 1 or (capacity is not None and capacity < 1):
            raise UsageError(f"A cache of {batch} rows and {capacity} tokens", do="give numbers of at least 1")
        layout = _closed(_layout(model), width)
        if capacity is not None and not layout.shared:
            raise InputRefused(
                "The model cannot write into a cache of fixed capacity",
                where=layout.where,
                why="its metadata do not say that past and present may be one buffer (graphrot.kv, shared_buffers)",
                do="leave capacity out: the cache grows; for a model that graphrot did not write, give its file",
            )
        self.layout = layout
        self._batch, self._capacity, self._length = batch, capacity, 0
        self._device = _device(model)
        self._held = [_Held(array, self._device) for array in layout.make(batch, capacity or 0)]
        self._fit = weakref.ref(model) if hasattr(model, "get_inputs") else None
        """The session that was compared last."""

    @property
    def batch(self) -> int:
        """Rows."""
        return self._batch

    @property
    def capacity(self) -> int | None:
        """Tokens that fit; None: it grows."""
        return self._capacity

    @property
    def length(self) -> int:
        """Tokens that it holds, padding included."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors; of the whole buffers where there is a capacity."""
        return self.layout.nbytes(self._batch, self._capacity or self._length)

    @property
    def float_nbytes(self) -> int:
        """Bytes that the same tokens take in float32."""
        return 4 * self.layout.numbers(self._batch, self._capacity or self._length)

    @property
    def presents(self) -> list[str]:
        """Names of the outputs that carry the cache on, in the order of :meth:`take`."""
        return [entry.present for entry in self.layout.entries]

    def run(
        self, session: ort.InferenceSession, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> list[np.ndarray]:
        """Run new tokens behind the cache, and keep what the run leaves.

        Args:
            session: of the model that the cache was made for, or of one with the same kind of cache.
            feeds: ``input_ids [batch, new]``, and whatever else the model takes beside the cache. ``attention_mask``
                (all ones) and ``position_ids`` (counted by the mask) are made where they are left out.
            outputs: names; None: all that are no cache.

        Returns:
            The outputs, as arrays.

        Raises:
            InputRefused: the session's cache is of another kind, or the tokens do not fit into the capacity.
            UsageError: the feeds do not fit the cache.
        """
        self.check(session)
        complete, total = self._complete(session, feeds)
        names = outputs
        if names is None:
            kept = set(self.presents)
            names = [value.name for value in session.get_outputs() if value.name not in kept]
        binding = session.io_binding()
        for name, array in complete.items():
            binding.bind_ortvalue_input(name, ort_value(np.ascontiguousarray(array)))
        for name in names:
            binding.bind_output(name)
        self.bind(binding)
        session.run_with_iobinding(binding)
        results = list(binding.get_outputs())
        if self._capacity is None:
            self.take(results[len(names) :])
        else:
            self.advance(total)
        return [array_of(value) for value in results[: len(names)]]

    def feeds(self) -> dict[str, np.ndarray]:
        """The inputs of the next run that take the cache, for ``session.run``; its outputs then go to :meth:`take`.

        Raises:
            UsageError: it has a capacity, which ``session.run`` would copy each time.
        """
        if self._capacity is not None:
            raise UsageError("A cache with a capacity is bound, not fed", do="use run, or bind and advance")
        return {entry.name: held.array for entry, held in zip(self.layout.entries, self._held, strict=True)}

    def take(self, tensors: Sequence[Any]) -> None:
        """Keep what a run left, in place of what the cache held.

        Args:
            tensors: arrays or ``OrtValue`` of the outputs :attr:`presents`, in that order.

        Raises:
            InputRefused: they are no such cache: their number, types, heads, widths, rows or lengths.
            UsageError: it has a capacity: a run writes there by itself.
        """
        if self._capacity is not None:
            raise UsageError("A cache with a capacity takes no tensors over", do="bind it, and call advance")
        ready = (np.ascontiguousarray(t) if isinstance(t, np.ndarray) else t for t in tensors)
        held = [_Held(tensor, self._device) for tensor in ready]
        length = held[0].shape[-2] if held and len(held[0].shape) > 1 else 0
        if len(held) != len(self.layout.entries):
            raise self._foreign(f"it has {len(held)} tensors, not {len(self.layout.entries)}")
        for entry, one in zip(self.layout.entries, held, strict=True):
            expected = entry.shape(self._batch, length)
            if one.shape != expected or one.dtype != np.dtype(entry.dtype):
                kinds = f"{one.dtype.name} {list(one.shape)}, not {np.dtype(entry.dtype).name} {list(expected)}"
                raise self._foreign(f"{entry.present!r} is {kinds}")
        self._held, self._length = held, length

    def bind(self, binding: ort.IOBinding) -> None:
        """Bind the cache's inputs and outputs of a run. With a capacity both are the same buffers, which stay the same
        for all runs, until :meth:`reorder` changes the batch; without one bind anew for every run, whose outputs go to
        :meth:`take`."""
        for entry, held in zip(self.layout.entries, self._held, strict=True):
            binding.bind_ortvalue_input(entry.name, held.value)
            if self._capacity is None:
                binding.bind_output(entry.present, self._device.place)
            else:
                binding.bind_ortvalue_output(entry.present, held.value)

    def advance(self, total: int) -> None:
        """Say that after a bound run ``total`` tokens are in the buffers (the width of its attention_mask).

        Raises:
            InputRefused: so many do not fit.
            UsageError: it has no capacity.
        """
        if self._capacity is None:
            raise UsageError("A cache without a capacity learns its length by itself", do="use take")
        self._refuse_overflow(total)
        self._length = max(self._length, total)

    def check(self, session: ort.InferenceSession) -> None:
        """Refuse a session whose cache is of another kind than this one.

        Raises:
            InputRefused: names, heads, widths or types differ, or the metadata say that layout, bits or rotation do.
        """
        if self._fit is not None and self._fit() is session:
            return
        why = differences(self.layout, layout_of_session(session))
        if why is not None:
            raise self._foreign(why)
        self._fit = weakref.ref(session)

    def trim(self, length: int) -> None:
        """Go back to the first ``length`` tokens, as if those behind them had never run.

        Raises:
            UsageError: it holds fewer, or the number is negative.
        """
        if not 0 <= length <= self._length:
            raise UsageError(
                f"The cache cannot be cut to {length} tokens",
                why=f"it holds {self._length}",
                do=f"give a number from 0 to {self._length}",
            )
        if self._capacity is None and length < self._length:
            cut = (np.ascontiguousarray(held.array[..., :length, :]) for held in self._held)
            self._held = [_Held(array, self._device) for array in cut]
        self._length = length

    def reorder(self, indices: Sequence[int] | np.ndarray) -> None:
        """Row ``b`` of the batch becomes what row ``indices[b]`` was, for beams; more or fewer rows than before change
        the batch: ``[0] * 4`` repeats one row.

        Raises:
            UsageError: no rows are given, or ones that there are not.
            EnvironmentProblem: there is no memory for more rows.
        """
        rows = np.asarray(indices)
        if rows.ndim != 1 or rows.size == 0 or rows.dtype.kind not in "iu" or not self._has(rows):
            raise UsageError(
                f"The cache has no rows {rows.tolist()}",
                why=f"its batch is {self._batch}",
                do=f"give a list of numbers from 0 to {self._batch - 1}",
            )
        used = slice(0, self._length)
        if self._capacity is not None and len(rows) == self._batch:
            for held in self._held:  # bindings stay as they are
                array = held.array
                array[..., used, :] = np.take(array[..., used, :], rows, axis=-4)
                self._device.write(held.value, array)
            return
        made = self.layout.make(len(rows), self._capacity or self._length)
        for held, target in zip(self._held, made, strict=True):
            target[..., used, :] = np.take(held.array[..., used, :], rows, axis=-4)
        self._held, self._batch = [_Held(array, self._device) for array in made], len(rows)

    def _has(self, rows: np.ndarray) -> bool:
        return bool(rows.min() >= 0 and rows.max() < self._batch)

    def _complete(
        self, session: ort.InferenceSession, feeds: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], int]:
        """All feeds beside the cache, and the tokens that there will be."""
        wanted = {value.name: DTYPES.get(value.type) for value in session.get_inputs()}
        caches = {entry.name for entry in self.layout.entries}
        for name in feeds:
            if name in caches or name not in wanted:
                raise UsageError(
                    f"{name!r} cannot be fed",
                    why="the cache feeds it" if name in caches else "the model has no such input",
                    do=f"give {', '.join(sorted(set(wanted) - caches))}",
                )
        if TOKENS not in feeds:
            raise UsageError(f"There is no {TOKENS!r} among the feeds", do="give it, [batch, new tokens]")
        complete = {name: np.asarray(array) for name, array in feeds.items()}
        tokens = complete[TOKENS]
        if tokens.ndim != 2 or len(tokens) != self._batch:
            raise UsageError(
                f"{TOKENS!r} is {list(tokens.shape)}",
                why=f"the cache has {self._batch} rows",
                do="give [batch, new tokens], or make the cache for another batch",
            )
        most = self._length + tokens.shape[1]
        mask = complete.setdefault(MASK, np.ones((self._batch, most), dtype=np.int64))
        if mask.ndim != 2 or len(mask) != self._batch or mask.shape[1] != most:
            raise UsageError(
                f"{MASK!r} is {list(mask.shape)}",
                why=f"there are {self._length} tokens in the cache and {tokens.shape[1]} new ones",
                do=f"give [{self._batch}, {most}]",
            )
        counted = (np.cumsum(mask, axis=1) - 1).clip(0)[:, -tokens.shape[1] :]
        complete.setdefault(POSITIONS, counted)
        self._refuse_overflow(mask.shape[1])
        ready = {name: np.asarray(array, dtype=wanted[name]) for name, array in complete.items() if name in wanted}
        return ready, mask.shape[1]

    def _refuse_overflow(self, total: int) -> None:
        if self._capacity is not None and total > self._capacity:
            raise InputRefused(
                "The cache is full",
                where=f"{self.layout.where}: {total} tokens in a cache of {self._capacity}",
                do="make it with a larger capacity, or trim it",
            )

    def _foreign(self, why: str) -> InputRefused:
        return InputRefused(
            "The cache is of another kind",
            where=f"a cache of {self.layout.where}",
            why=why,
            do="start from an empty cache: graphrot.KVCache(session)",
        )


def _device(model: Any) -> Device:
    """Where a session runs; for a file, the CPU."""
    providers = model.get_providers() if hasattr(model, "get_providers") else []
    return Device("cuda" if CUDA in providers else "cpu")


def _layout(model: Any) -> CacheLayout:
    if isinstance(model, (str, Path)):
        from graphrot.model.onnxfile import read_proto

        path = model_file(model)
        return layout_of_proto(read_proto(path), str(path))
    return layout_of_session(model)


def _closed(layout: CacheLayout, width: int | None) -> CacheLayout:
    if all(entry.width != OPEN for entry in layout.entries):
        return layout
    if width is None:
        name = next(entry.name for entry in layout.entries if entry.width == OPEN)
        raise InputRefused(
            "The model leaves the width of its cache open",
            where=f"{layout.where}: input {name!r}",
            do="give width: the size of a head",
        )
    entries = (replace(entry, width=width) if entry.width == OPEN else entry for entry in layout.entries)
    return replace(layout, entries=tuple(entries))
