"""What the benchmarks share: sessions of small models, bound runs, repeats within a turn, and the record."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from graphrot.bench.machine import record
from graphrot.bench.timing import Stopwatch
from graphrot.ops.library import describe, register

ROOT = Path(__file__).resolve().parents[1]


def isas() -> list[str]:
    """The instruction sets that this machine runs, best first."""
    return [isa["name"] for isa in describe()["isas"] if isa["available"]]


@contextmanager
def using(isa: str | None) -> Iterator[None]:
    """Kernels that are made inside use this instruction set; None: the one chosen already."""
    before = os.environ.get("GRAPHROT_ISA")
    if isa is not None:
        os.environ["GRAPHROT_ISA"] = isa
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("GRAPHROT_ISA", None)
        else:
            os.environ["GRAPHROT_ISA"] = before


def session(model: ir.Model, *, isa: str | None = None, threads: int = 1) -> ort.InferenceSession:
    """A session with graphrot's kernels, of one instruction set."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    register(options)
    with using(isa):
        return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of 64 bytes."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    result = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def place(values: np.ndarray, dtype: ir.DataType = ir.DataType.FLOAT) -> ort.OrtValue:
    """The runtime's view of an aligned copy."""
    raw = values.view(np.uint16) if dtype == ir.DataType.BFLOAT16 else values
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(aligned(raw), int(dtype))


def bound(
    ready: ort.InferenceSession, inputs: Mapping[str, ort.OrtValue], outputs: Mapping[str, ort.OrtValue]
) -> Callable[[], None]:
    """A run whose inputs and outputs lie where they are, so that it is little more than the kernels."""
    binding = ready.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in outputs.items():
        binding.bind_ortvalue_output(name, value)
    return lambda: ready.run_with_iobinding(binding)


def repeated(run: Callable[[], None], budget: float) -> Callable[[], Stopwatch]:
    """A task for a turn: as many runs as take about ``budget`` seconds, and the time of one."""
    first = Stopwatch()
    with first:
        run()
    once = Stopwatch()
    with once:
        run()
    count = max(1, int(budget / max(once.wall, 1e-7)))

    def task() -> Stopwatch:
        watch = Stopwatch()
        with watch:
            for _ in range(count):
                run()
        watch.cpu, watch.wall = watch.cpu / count, watch.wall / count
        return watch

    return task


def spread(values: np.ndarray) -> str:
    """``median [p10, p90]``."""
    low, median, high = np.percentile(values, [10, 50, 90])
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def write(path: Path, **content: Any) -> None:
    """Write figures, with the machine, the versions and the commit."""
    path.write_text(json.dumps({**record(), **content}, indent=2), encoding="utf-8")


@cache
def native() -> ctypes.CDLL:
    """The loops of ``custom_ops/bench``, built when they are first needed."""
    folder = ROOT / "build" / "measure"
    configure = ["cmake", "-S", str(ROOT / "custom_ops"), "-B", str(folder), "-DGRAPHROT_BENCH=ON"]
    for command in (configure, ["cmake", "--build", str(folder), "--target", "graphrot_measure"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    library = ctypes.CDLL(str(folder / "bench" / "libgraphrot_measure.so"))
    floats, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    transform: Sequence[Any] = (text, size, size, size, floats, ctypes.c_float, floats)
    for name, types in {
        "measure_read": (floats, size, size),
        "measure_copy": (floats, floats, size, size),
        "measure_peak": (text, size),
        "measure_hadamard": (*transform, floats, size, size),
        "measure_rows": (*transform, size, size),
    }.items():
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_double, list(types)
    return library


def counted(measure: Callable[[int], float], budget: float) -> Callable[[], Stopwatch]:
    """A task out of a native loop: ``measure(repeat)`` gives the seconds of that many repeats."""
    once = max(measure(1), measure(1), 1e-7)
    count = max(1, int(budget / once))

    def task() -> Stopwatch:
        watch = Stopwatch()
        watch.cpu = watch.wall = measure(count) / count
        return watch

    return task


def reading(arrays: Sequence[np.ndarray], budget: float) -> Callable[[], Stopwatch]:
    """Reading all the bytes of ``arrays``, one array after the other."""
    read = native().measure_read

    def measure(repeat: int) -> float:
        return sum(read(array.ctypes.data, array.nbytes // 8, 1) for _ in range(repeat) for array in arrays)

    return counted(measure, budget)


def multiplying(isa: str) -> Callable[[], Stopwatch] | None:
    """Multiply-adds of bytes in registers: a task whose time is that of one of them. None: there is no loop for it."""
    measure, name = native().measure_peak, isa.encode()
    if measure(name, 1000) <= 0:
        return None

    def task() -> Stopwatch:
        watch = Stopwatch()
        watch.cpu = watch.wall = 1 / measure(name, 1_000_000)
        return watch

    return task
