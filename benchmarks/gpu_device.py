"""A GPU as ``benchmarks/gpu.py`` sees it: memory with guards, and work that is recorded once and timed by replaying it.

The library is ``custom_ops/bench/cuda.cc``, built for GPUs, or for the CPU, where its times mean nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GUARD = 256
"""Bytes in front of and behind every buffer; a multiple of what a transaction of the memory takes."""
GUARD_BYTE, POISON_BYTE = 0xA5, 0xFF
"""What guards hold, and what a buffer holds before it is written: NaN in every type of ours."""
_NAME_BYTES = 256


class GpuError(Exception):
    """The library or the driver refused something; the text says what."""


@dataclass(frozen=True)
class Buffer:
    """Memory of the device."""

    device: Device
    address: int
    nbytes: int

    def array(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """What it holds, from its beginning."""
        result = np.empty(shape, dtype)
        if result.nbytes > self.nbytes:
            raise GpuError(f"{result.nbytes} bytes of a buffer of {self.nbytes}")
        self.device.call("bench_download", result.ctypes.data, self.address, result.nbytes)
        return result

    def fill(self, pattern: np.ndarray) -> Buffer:
        """Repeat ``pattern`` through all of it; returns the buffer."""
        pattern = np.ascontiguousarray(pattern).reshape(-1).view(np.uint8)[: self.nbytes]
        self.device.call("bench_upload", self.address, pattern.ctypes.data, pattern.nbytes)
        done = pattern.nbytes
        while 0 < done < self.nbytes:
            more = min(done, self.nbytes - done)
            self.device.call("bench_copy", self.address + done, self.address, more)
            done += more
        self.device.call("bench_wait")
        return self


class Memory:
    """Buffers that live as long as the ``with`` block that they were made in."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: list[Buffer] = []

    def room(self, nbytes: int) -> Buffer:
        """A poisoned buffer."""
        base = ctypes.c_void_p()
        self._device.call("bench_allocate", nbytes + 2 * GUARD, ctypes.byref(base))
        buffer = Buffer(self._device, int(base.value or 0) + GUARD, nbytes)
        self._buffers.append(buffer)
        for guard in self._guards(buffer):
            guard.fill(np.full(GUARD, GUARD_BYTE, np.uint8))
        return buffer.fill(np.full(1 << 20, POISON_BYTE, np.uint8)) if nbytes else buffer

    def put(self, array: np.ndarray) -> Buffer:
        """A buffer with what ``array`` holds."""
        array = np.ascontiguousarray(array)
        buffer = self.room(array.nbytes)
        self._device.call("bench_upload", buffer.address, array.ctypes.data, array.nbytes)
        return buffer

    def check(self) -> None:
        """Raise unless all guards hold what they held."""
        self._device.call("bench_wait")
        for buffer in self._buffers:
            for guard in self._guards(buffer):
                if (guard.array(np.uint8, (GUARD,)) != GUARD_BYTE).any():
                    raise GpuError(f"something was written outside a buffer of {buffer.nbytes} bytes")

    def release(self) -> None:
        self._device.call("bench_wait")
        while self._buffers:
            self._device.call("bench_release", self._buffers.pop().address - GUARD)

    def _guards(self, buffer: Buffer) -> tuple[Buffer, Buffer]:
        return (
            Buffer(self._device, buffer.address - GUARD, GUARD),
            Buffer(self._device, buffer.address + buffer.nbytes, GUARD),
        )


class Device:
    """The device that the library runs on.

    Args:
        path: of the library.

    Attributes:
        on_cpu: kernels run on the CPU, and no time means anything.
        name: as the driver says it.
        capability: ``(9, 0)`` for sm_90.
        multiprocessors: how many.
        shared_bytes: shared memory that a block may have.

    Raises:
        GpuError: the library cannot be loaded, or there is no device.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise GpuError(f"{path} cannot be loaded: {error}") from error
        self._library.bench_error.restype = ctypes.c_char_p
        self._library.bench_stream.restype = ctypes.c_void_p
        self.on_cpu = bool(self._library.bench_on_cpu())
        name, numbers = ctypes.create_string_buffer(_NAME_BYTES), (ctypes.c_int * 3)()
        shared = ctypes.c_size_t()
        self.call("bench_device", name, _NAME_BYTES, numbers, ctypes.byref(shared))
        self.name = name.value.decode() or "kernels on the CPU"
        self.capability = (int(numbers[0]), int(numbers[1]))
        self.multiprocessors = int(numbers[2])
        self.shared_bytes = int(shared.value)

    @property
    def stream(self) -> int:
        """The stream that everything runs on; 0 on the CPU."""
        return int(self._library.bench_stream() or 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library. Whole numbers are sizes or addresses; others come as ctypes."""
        given = [ctypes.c_size_t(each) if isinstance(each, int) else each for each in arguments]
        if getattr(self._library, name)(*given):
            raise GpuError(f"{name}: {self._library.bench_error().decode(errors='replace')}")

    @contextmanager
    def memory(self) -> Iterator[Memory]:
        """Memory for a ``with`` block."""
        memory = Memory(self)
        try:
            yield memory
        finally:
            memory.release()

    def run(self, enqueue: Callable[[], None]) -> None:
        """Run and wait."""
        enqueue()
        self.call("bench_wait")

    def seconds(self, enqueue: Callable[[], None], *, budget: float, turns: int = 7) -> np.ndarray:
        """Seconds of what ``enqueue`` launches, ``[turns]``, by the device's clock.

        It is recorded as a graph and replayed, so that launching costs next to nothing; a first replay does not count.
        On the CPU it runs once, and the result is NaN.

        Args:
            enqueue: launches on :attr:`stream`; must launch the same at every call.
            budget: seconds that all turns may take together, about.
            turns: how often to measure.
        """
        if not self.on_cpu:
            self.run(enqueue)  # kernels are loaded when they first run, which a recording does not allow
        recording = ctypes.c_void_p()
        self.call("bench_begin")
        try:
            enqueue()
        except BaseException:
            self.call("bench_abandon")
            raise
        self.call("bench_end", ctypes.byref(recording))
        try:
            if self.on_cpu:
                return np.full(turns, np.nan)
            self._replay(recording, 1)
            once = self._replay(recording, 1)
            count = max(1, int(budget / turns / max(once, 1e-6)))
            return np.array([self._replay(recording, count) / count for _ in range(turns)])
        finally:
            self.call("bench_drop", recording)

    def _replay(self, recording: ctypes.c_void_p, count: int) -> float:
        seconds = ctypes.c_double()
        self.call("bench_replay", recording, count, ctypes.byref(seconds))
        return float(seconds.value)
