"""What graphrot's CUDA kernels are compared with: cuBLAS in float16, and ONNX Runtime's MatMulNBits.

Neither is needed: where one is not installed, the reason stands in place of its figures.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from gpu_device import Buffer, Device
from gpu_speed import Limits, Shape, copies_of, pool
from linears import Linears

from graphrot.ops.library import register

_NAMES = ("libcublas.so.13", "libcublas.so.12", "libcublas.so")
_PLAIN, _TRANSPOSED = 0, 1
_FLOAT16, _COMPUTE_FLOAT, _DEFAULT = 2, 68, -1
"""CUDA_R_16F, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT."""
_WORKSPACE = 64 << 20
"""Bytes; it takes its own, and none while work is recorded."""


class Missing(Exception):
    """A peer is not installed, or does not work here; the text says why."""


class Cublas:
    """Products of float16 matrices, summed in float32."""

    def __init__(self, device: Device, library: ctypes.CDLL, workspace: Buffer) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(device.stream))
        self._call("cublasSetWorkspace_v2", self._handle, ctypes.c_void_p(workspace.address), workspace.nbytes)

    def product(self, x: Buffer, weight: Buffer, y: Buffer, rows: int, shape: Shape) -> None:
        """``y [M, N] = x [M, K] @ weight [N, K].T``; the library thinks in columns: y.T = weight @ x.T."""
        k, n = (ctypes.c_int(each) for each in (shape.channels, shape.columns))
        half = ctypes.c_int(_FLOAT16)
        self._call(
            "cublasGemmEx", self._handle, ctypes.c_int(_TRANSPOSED), ctypes.c_int(_PLAIN), n, ctypes.c_int(rows), k,
            ctypes.byref(self._one), ctypes.c_void_p(weight.address), half, k, ctypes.c_void_p(x.address), half, k,
            ctypes.byref(self._zero), ctypes.c_void_p(y.address), half, n,
            ctypes.c_int(_COMPUTE_FLOAT), ctypes.c_int(_DEFAULT),
        )  # fmt: skip

    def close(self) -> None:
        self._call("cublasDestroy_v2", self._handle)

    def _call(self, name: str, *arguments: Any) -> None:
        given = [ctypes.c_size_t(each) if isinstance(each, int) else each for each in arguments]
        status = getattr(self._library, name)(*given)
        if status:
            raise Missing(f"{name} failed with status {status}")


def find_cublas() -> ctypes.CDLL:
    """Load cuBLAS: the system's, or that of a Python package.

    Raises:
        Missing: there is none.
    """
    places = [Path(folder) / "nvidia" for folder in sys.path if (Path(folder) / "nvidia").is_dir()]
    packaged = [str(path) for place in places for name in _NAMES for path in place.glob(f"*/lib/{name}")]
    for name in (*_NAMES, *packaged):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise Missing("cuBLAS is not installed")


@contextmanager
def cublas(device: Device, library: ctypes.CDLL) -> Iterator[Cublas]:
    """cuBLAS on the device's stream, checked once against NumPy."""
    with device.memory() as memory:
        made = Cublas(device, library, memory.room(_WORKSPACE if not device.on_cpu else 256))
        try:
            _agree(device, made)
            yield made
        finally:
            made.close()


def _agree(device: Device, made: Cublas) -> None:
    """Stop where the product is not the one that is meant."""
    rng = np.random.default_rng(0)
    shape, rows = Shape("", "", 64, 40), 3
    x, weight = (rng.standard_normal((n, shape.channels)).astype(np.float16) for n in (rows, shape.columns))
    with device.memory() as memory:
        result = memory.room(2 * rows * shape.columns)
        given, by = memory.put(x), memory.put(weight)
        device.run(lambda: made.product(given, by, result, rows, shape))
        found = result.array(np.float16, (rows, shape.columns)).astype(np.float64)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    if not np.abs(found - expected).max() < 1e-2 * np.abs(expected).max():
        raise Missing("cuBLAS does not compute the product that is meant")


def half_product(device: Device, most: Limits, made: Cublas, shape: Shape, rows: int) -> float:
    """Seconds of one product in float16, whose weights stream."""
    nbytes = 2 * shape.channels * shape.columns
    with device.memory() as memory:
        halves = pool(np.dtype(np.float16))
        weights = [memory.room(nbytes).fill(halves) for _ in range(copies_of(nbytes, most.stream))]
        x = memory.room(2 * rows * shape.channels).fill(halves)
        y = memory.room(2 * rows * shape.columns)

        def run() -> None:
            for weight in weights:
                made.product(x, weight, y, rows, shape)

        return float(np.median(device.seconds(run, budget=most.budget))) / len(weights)


class Runtime:
    """ONNX Runtime on the GPU, or on the CPU, where its times mean nothing."""

    def __init__(self, *, on_cpu: bool) -> None:
        self._provider = "CPUExecutionProvider" if on_cpu else "CUDAExecutionProvider"
        self._place = "cpu" if on_cpu else "cuda"
        self._on_cpu = on_cpu
        if self._provider not in ort.get_available_providers():
            raise Missing(f"onnxruntime {ort.__version__} has no {self._provider}: install onnxruntime-gpu")

    def session(self, model: ir.Model) -> ort.InferenceSession:
        """A session with graphrot's kernels that records its work as a graph."""
        options = ort.SessionOptions()
        options.log_severity_level = 3
        register(options)
        providers = [(self._provider, {} if self._on_cpu else {"enable_cuda_graph": "1"})]
        try:
            ready = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=providers)
        except Exception as error:  # onnxruntime has a class of its own for every status code
            raise Missing(f"onnxruntime refuses the model: {str(error).strip().splitlines()[0]}") from error
        if ready.get_providers()[0] != self._provider:
            raise Missing(f"onnxruntime cannot use {self._provider} here; graphrot doctor says why")
        return ready

    def seconds(self, ready: ort.InferenceSession, linears: Linears, rows: int, budget: float) -> float:
        """Seconds of one linear of a session's model; NaN on the CPU."""
        x = np.resize(pool(np.dtype(np.float16)), (rows, linears.in_features))
        given = ort.OrtValue.ortvalue_from_numpy(x, self._place, 0)
        binding = ready.io_binding()
        for name, result in linears.names():
            binding.bind_ortvalue_input(name, given)
            shape = (rows, linears.out_features)
            made = ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float16, self._place, 0)
            binding.bind_ortvalue_output(result, made)
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(rows))  # a graph for each number of rows
        for _ in range(3):  # some runs go by until one is recorded
            ready.run_with_iobinding(binding, options)
        if self._on_cpu:
            return float("nan")
        times = []
        end = time.perf_counter() + budget
        while time.perf_counter() < end or len(times) < 5:
            start = time.perf_counter()
            ready.run_with_iobinding(binding, options)
            times.append(time.perf_counter() - start)
        return float(np.median(times)) / linears.copies


def through_runtime(
    runtime: Runtime, shape: Shape, rows: Sequence[int], budget: float, stream: int
) -> Iterator[dict[str, float]]:
    """Seconds of one linear by ONNX Runtime's own kernel, and by ours inside ONNX Runtime, rotated; for each of
    ``rows``."""
    copies = copies_of(shape.channels * shape.columns // 2, stream)
    linears = Linears(shape.channels, shape.columns, copies, half=True)
    models = {"MatMulNBits": linears.runtimes_own(rotate=False), "RotatedMatMul": linears.rotated(0)}
    ready = {name: runtime.session(model) for name, model in models.items()}
    for count in rows:
        yield {name: runtime.seconds(session, linears, count, budget) for name, session in ready.items()}
