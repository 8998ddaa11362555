"""Builds what ``benchmarks/gpu.py`` loads, when it is first needed and after every change of a source."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from gpu_device import GpuError

from graphrot.ops.library import OVERRIDE, file_name

ROOT = Path(__file__).resolve().parents[1]
_LINES = 15
"""Of a compiler's complaint."""


def build(*, on_cpu: bool, folder: Path | None = None) -> Path:
    """The library, for the GPU at hand or for the CPU.

    For the GPU that of the operators is built, too, for ONNX Runtime to load, unless another one is named already.

    Args:
        on_cpu: kernels as plain C++.
        folder: where it is built; None: in the checkout's ``build``.

    Raises:
        GpuError: there is no GPU, or no compiler; the text says which.
    """
    name = "graphrot_gpu_bench_on_cpu" if on_cpu else "graphrot_gpu_bench"
    place = folder or ROOT / "build" / ("gpu-on-cpu" if on_cpu else "gpu")
    cuda = ["-DGRAPHROT_CUDA=OFF"]
    if not on_cpu:
        cuda = ["-DGRAPHROT_CUDA=ON", f"-DGRAPHROT_CUDA_ARCHITECTURES={architecture()}"]
    _run("cmake", "-S", str(ROOT / "custom_ops"), "-B", str(place), "-DGRAPHROT_BENCH=ON", *cuda)
    targets = [name] if on_cpu else [name, "graphrot_ops"]
    _run("cmake", "--build", str(place), "--parallel", str(os.cpu_count() or 1), "--target", *targets)
    if not on_cpu:
        os.environ.setdefault(OVERRIDE, str(place / file_name()))
    return place / "bench" / f"lib{name}.so"


def architecture() -> str:
    """The GPU at hand as the compiler names it: ``90`` for compute capability 9.0.

    Raises:
        GpuError: there is none.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise GpuError("there is no NVIDIA driver (nvidia-smi is not on PATH); graphrot doctor says more")
    question = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(question, capture_output=True, text=True, check=False)
    found = answer.stdout.split()
    if answer.returncode or not found:
        raise GpuError(f"the NVIDIA driver shows no GPU: {(answer.stderr or answer.stdout).strip()}")
    return found[0].replace(".", "")


def _run(*command: str) -> None:
    if shutil.which(command[0]) is None:
        raise GpuError(f"{command[0]} is not on PATH; pip install cmake ninja brings it")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_LINES:])
        raise GpuError(f"{' '.join(command)} failed:\n{said}")
