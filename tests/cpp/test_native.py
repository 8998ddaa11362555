"""Build the kernels and their C++ tests with CMake, and run them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

from graphrot.ops.library import describe
from graphrot.rotation.hadamard import sylvester

SOURCE = Path(__file__).resolve().parents[2] / "custom_ops"


def command(*arguments: str) -> str:
    environment = {**os.environ, "GRAPHROT_ISA": ""}
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_kernels_in_cpp(tmp_path: Path) -> None:
    for tool in ("cmake", "ctest", "ninja"):
        assert shutil.which(tool), f"{tool} is not on PATH; pip install '.[test]' brings it"
    command(
        "cmake",
        "-S",
        str(SOURCE),
        "-B",
        str(tmp_path),
        "-G",
        "Ninja",
        "-DGRAPHROT_TESTS=ON",
        "-DGRAPHROT_WERROR=ON",
        "-DGRAPHROT_BENCH=ON",
    )
    command("cmake", "--build", str(tmp_path))
    measure_loops(tmp_path / "bench" / "libgraphrot_measure.so")
    printed = command("ctest", "--test-dir", str(tmp_path), "--output-on-failure")
    assert "100% tests passed" in printed  # newer versions leave the count of failures out
    assert "out of 10" in printed


def measure_loops(path: Path) -> None:
    """What the benchmarks load: it runs, on every instruction set of this machine, and says where there is none."""
    library = ctypes.CDLL(str(path))
    for name in ("measure_read", "measure_copy", "measure_peak", "measure_hadamard", "measure_rows"):
        getattr(library, name).restype = ctypes.c_double
    size, text = ctypes.c_size_t, ctypes.c_char_p
    words = np.arange(4096.0, dtype=np.float32)
    copied, rotated = np.zeros_like(words), np.zeros_like(words)
    given, one = words.ctypes.data_as(ctypes.c_void_p), np.ones((1, 1), np.float32)
    target = rotated.ctypes.data_as(ctypes.c_void_p)
    assert library.measure_read(given, size(2048), size(2)) > 0
    assert library.measure_copy(given, copied.ctypes.data_as(ctypes.c_void_p), size(words.nbytes), size(1)) > 0
    assert np.array_equal(copied, words)
    transform = (size(64), size(64), size(1), one.ctypes.data_as(ctypes.c_void_p), ctypes.c_float(0.125), given)
    expected = words.reshape(64, 64) @ sylvester(6) / 8
    for isa in describe()["isas"]:
        name = text(isa["name"].encode())
        assert (library.measure_rows(name, *transform, size(64), size(1)) > 0) == isa["available"]
        rotated[...] = 0
        assert (library.measure_hadamard(name, *transform, target, size(64), size(1)) > 0) == isa["available"]
        assert not isa["available"] or np.allclose(rotated.reshape(64, 64), expected, rtol=1e-5, atol=1e-2)
        assert (library.measure_peak(name, size(1000)) > 0) == (isa["available"] and isa["name"] != "scalar")
