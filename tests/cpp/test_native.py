"""Build the kernels and their C++ tests with CMake, and run them."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np

from graphrot.ops.library import describe
from graphrot.rotation.hadamard import sylvester
from tests.bench.gpu_script import check_gpu_script


class Mutant(NamedTuple):
    """A kernel with one fault, the test that must fail, and a pattern of what the failure says."""

    file: str
    text: str
    broken: str
    test: str
    said: str


MUTANTS = (
    Mutant(  # a barrier is missing between warps
        "hadamard/cuda.cuh",
        "  if (last) return;\n  __syncthreads();\n",
        "  if (last) return;\n",
        "test_cuda_hadamard",
        "with no barrier in between|which was never written",
    ),
    Mutant(  # a shuffle's mask lacks lanes that call it
        "hadamard/cuda.cuh",
        "__shfl_xor_sync(kAllLanes, upper",
        "__shfl_xor_sync(0x7fffffffu, upper",
        "test_cuda_hadamard",
        "with mask 0x7fffffff, which lacks its lane",
    ),
    Mutant(  # lanes are paired wrongly
        "hadamard/cuda.cuh",
        "swap_bits<4, 32>(x)",
        "swap_bits<2, 32>(x)",
        "test_cuda_hadamard",
        "error <= tolerance",
    ),
    Mutant(  # copies to shared memory are not waited for
        "attention/many_cuda.cu",
        "    cp_async_wait<0>();\n",
        "",
        "test_cuda_attention",
        "where a copy is under way",
    ),
    Mutant(  # lanes copy over what others of their warp have still to read
        "attention/few_cuda.cu",
        "    __syncwarp();  // the tile is there for all lanes, and none reads the other stage any more\n",
        "",
        "test_cuda_attention",
        "which another thread read with no barrier in between",
    ),
    Mutant(  # a warp overwrites what others have still to read
        "matmul/rows_cuda.cu",
        "  __syncthreads();  // the results may be overwritten\n",
        "",
        "test_cuda_rows",
        "with no barrier in between",
    ),
    Mutant(  # codes and weights are read while they are copied
        "matmul/product_tile.cuh",
        "    cp_async_wait<static_cast<int>(C::kStages) - 2>();\n",
        "",
        "test_cuda_product",
        "where a copy is under way",
    ),
    Mutant(
        "matmul/gemv_cuda.cu",
        "    cp_async_wait<static_cast<int>(kDepth) - 2>();\n",
        "",
        "test_cuda_product",
        "where a copy is under way",
    ),
)

SOURCE = Path(__file__).resolve().parents[2] / "custom_ops"


def command(*arguments: str) -> str:
    environment = {**os.environ, "GRAPHROT_ISA": ""}
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_kernels_in_cpp(tmp_path: Path) -> None:
    for tool in ("cmake", "ctest", "ninja"):
        assert shutil.which(tool), f"{tool} is not on PATH; pip install '.[test]' brings it"
    source, build = tmp_path / "source", tmp_path / "build"
    shutil.copytree(SOURCE, source)
    command(
        "cmake",
        "-S",
        str(source),
        "-B",
        str(build),
        "-G",
        "Ninja",
        "-DGRAPHROT_TESTS=ON",
        "-DGRAPHROT_WERROR=ON",
        "-DGRAPHROT_BENCH=ON",
        "-DGRAPHROT_CUDA=OFF",  # nvcc is no part of these tests
    )
    command("cmake", "--build", str(build))
    measure_loops(build / "bench" / "libgraphrot_measure.so")
    printed = command("ctest", "--test-dir", str(build), "--output-on-failure")
    assert "100% tests passed" in printed  # newer versions leave the count of failures out
    files = [*source.glob("tests/test_*.cc"), *source.glob("cuda_on_cpu/tests/test_*.cc")]
    assert f"out of {len(files)}" in printed
    check_gpu_script(build / "bench" / "libgraphrot_gpu_bench_on_cpu.so", tmp_path / "gpu")
    for mutant in MUTANTS:
        mutant_is_seen(source, build, mutant)


def mutant_is_seen(source: Path, build: Path, mutant: Mutant) -> None:
    """The test, which passed, fails once the kernel is broken, and says why."""
    file = source / mutant.file
    whole = file.read_text()
    assert whole.count(mutant.text) == 1, f"{mutant.file} holds {mutant.text!r} {whole.count(mutant.text)} times"
    file.write_text(whole.replace(mutant.text, mutant.broken))
    command("cmake", "--build", str(build), "--target", mutant.test)
    done = subprocess.run([build / "cuda_on_cpu" / mutant.test], capture_output=True, text=True, check=False)
    assert done.returncode != 0, f"{mutant} is not seen"
    assert re.search(mutant.said, done.stderr), f"{mutant}: {done.stderr[-2000:]}"
    file.write_text(whole)


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
