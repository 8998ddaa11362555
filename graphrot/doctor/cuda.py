"""What ONNX Runtime says when it is asked for its CUDA provider: in a process of its own, whose words can be read.

ONNX Runtime writes to the stream of errors why a provider cannot be had, and goes on with the CPU.
:mod:`graphrot.doctor.ask` is what runs in that process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass

from graphrot.doctor.ranges import RUNTIME

CUDA = "CUDAExecutionProvider"
_SECONDS = 180
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST = 600
_DRIVER = r"libcuda\.so|nvcuda\.dll|driver version is insufficient|no CUDA-capable device|CUDA failure (35|100)\b"


@dataclass(frozen=True)
class CudaAnswer:
    """What came of asking.

    Attributes:
        works: a session used the provider.
        said: ONNX Runtime's own words, where it did not.
        fix: what mends it.
    """

    works: bool
    said: str = ""
    fix: str = ""


def ask_cuda() -> CudaAnswer:
    """Open a tiny session with the CUDA provider, and tell what came of it. Never raises for what is missing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "graphrot.doctor.ask"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return CudaAnswer(False, f"no answer within {_SECONDS} s")
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        found = {"failure": f"the process ended with {done.returncode}"}
    if found.get("works"):
        return CudaAnswer(True)
    said = read_words(done.stderr, str(found.get("failure") or ""))
    return CudaAnswer(False, said, mend(said, bool(found.get("offered", True)), str(found.get("runtime") or "")))


def read_words(stream: str, failure: str = "") -> str:
    """ONNX Runtime's reason, out of what it logged and of the error that it raised; one line."""
    if failure:
        found = re.search(r"CUDA failure \d+: [^;]*", failure)  # behind a long name of a function, before the place
        return " ".join((found[0] if found else failure).split())[:_LONGEST]
    plain = _COLORS.sub("", stream)
    found = re.search(r"Failed to load library \S+ with error: .*", plain)
    told = [found[0]] if found else [line for line in plain.splitlines() if re.search(r"(?i)cuda|gpu", line)]
    return " ".join(" ".join(told).split())[:_LONGEST] or "nothing"


def mend(said: str, offered: bool, runtime: str) -> str:
    """The command that mends what ONNX Runtime complains of.

    Args:
        said: its words.
        offered: the installed runtime has the provider.
        runtime: its version.
    """
    if not offered:
        return "pip uninstall -y onnxruntime && pip install 'graphrot[gpu]'"
    if re.search(_DRIVER, said):
        return "run it where nvidia-smi shows a GPU: NVIDIA's driver, for the CUDA of onnxruntime-gpu"
    if re.search(r"cannot open shared object|LoadLibrary failed|Failed to load library", said):
        return f"pip install 'onnxruntime-gpu[cuda,cudnn]=={runtime}'" if runtime else "install CUDA and cuDNN"
    return f"pip install -U 'onnxruntime-gpu[cuda,cudnn]{RUNTIME}'"
