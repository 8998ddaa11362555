"""What is installed, what the runtime says, and what really runs. Looks, and judges nothing."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from graphrot.doctor.cuda import CUDA, CudaAnswer, ask_cuda
from graphrot.doctor.ranges import CORE, EXTRAS, OTHERS, RUNTIME_PACKAGES

_PROBE_SECONDS = 180


@dataclass(frozen=True)
class Gpu:
    """What ``nvidia-smi`` says: the first GPU's name, the driver, the newest CUDA that the driver runs, and the GPU's
    compute capability (empty: an old tool does not tell)."""

    name: str
    driver: str
    cuda: str
    capability: str = ""


@dataclass(frozen=True)
class Run:
    """One tiny model of one operator: its largest error against the reference, or why it did not run."""

    type: str
    error: float | None = None
    failure: str | None = None
    op: str = "HadamardTransform"


@dataclass(frozen=True)
class Facts:
    """What was seen.

    Attributes:
        python: version of the interpreter.
        packages: distribution -> version; None: not installed.
        runtime: version of the module ``onnxruntime``; None: it cannot be imported, see ``runtime_failure``.
        runtime_package: the distribution that the module's files belong to.
        cuda_build: the CUDA version that the runtime was built for; empty: built without.
        providers: what the runtime offers.
        cuda_missing: shared libraries that its CUDA provider needs and that are not found.
        cuda_answer: what it says when it is asked for a session on CUDA; None: it was not asked.
        library: path of the native library; None: not found or not loadable, see ``library_failure``.
        described: what :func:`graphrot.ops.library.describe` returns.
        registers: None: the runtime takes the library; else its words.
        kernels: runs with the library. functions: runs without it.
        crash: how the process that looked at the runtime died, if it did.
        isa_wanted: ``GRAPHROT_ISA``.
    """

    python: str
    packages: dict[str, str | None]
    runtime: str | None = None
    runtime_package: str | None = None
    runtime_failure: str | None = None
    cuda_build: str = ""
    providers: tuple[str, ...] = ()
    cuda_missing: tuple[str, ...] = ()
    cuda_answer: CudaAnswer | None = None
    library: str | None = None
    library_failure: str | None = None
    described: dict[str, Any] = field(default_factory=dict)
    registers: str | None = None
    kernels: tuple[Run, ...] = ()
    functions: tuple[Run, ...] = ()
    crash: str | None = None
    gpu: Gpu | None = None
    isa_wanted: str = ""


def gather() -> Facts:
    """Look at this machine. Never raises for what is missing or broken."""
    names = ["graphrot", *CORE, *RUNTIME_PACKAGES, *(name for extra in EXTRAS.values() for name in extra), *OTHERS]
    seen = _probe([sys.executable, "-m", "graphrot.doctor.probe"])
    for key in ("kernels", "functions"):
        seen[key] = tuple(Run(**run) for run in seen.get(key, ()))
    for key in ("providers", "cuda_missing"):
        seen[key] = tuple(seen.get(key, ()))
    return Facts(
        python=platform.python_version(),
        packages={name: _version(name) for name in names},
        gpu=_gpu(),
        cuda_answer=ask_cuda() if CUDA in seen["providers"] else None,
        isa_wanted=os.environ.get("GRAPHROT_ISA", ""),
        **seen,
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _probe(command: list[str]) -> dict[str, Any]:
    """What the probe prints; a runtime with foreign files in its folder can take the whole process down."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"crash": f"no answer within {_PROBE_SECONDS} s"}
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        found = None
    if done.returncode == 0 and isinstance(found, dict):
        return found
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return {"crash": f"{how}{': ' if last else ''}{last}"}


def _gpu() -> Gpu | None:
    """The GPU, or None where there is no driver that answers."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    listed, table = _say(tool, "--query-gpu=name,driver_version", "--format=csv,noheader"), _say(tool)
    if listed is None or table is None:
        return None
    name, _, driver = (listed.strip().splitlines() or [""])[0].partition(", ")
    cuda = re.search(r"CUDA Version:\s*(\d+\.\d+)", table)
    capability = re.match(r"\d+\.\d+", _say(tool, "--query-gpu=compute_cap", "--format=csv,noheader") or "")
    return Gpu(name, driver, cuda[1] if cuda else "", capability[0] if capability else "") if name else None


def _say(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
