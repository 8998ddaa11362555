"""What the doctor makes of ONNX Runtime's words about its CUDA provider."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphrot.doctor import cuda
from graphrot.doctor.cuda import CudaAnswer, ask_cuda, mend, read_words

LIBRARY = (
    "\x1b[1;31m2026-11-30 16:49:14.5 [E:onnxruntime:Default, provider_bridge_ort.cc:2336 TryGetProviderInfo_CUDA] "
    "provider_bridge_ort.cc:2043 onnxruntime::Provider& Get() [ONNXRuntimeError] : 1 : FAIL : Failed to load library "
    "/site/onnxruntime/capi/libonnxruntime_providers_cuda.so with error: {name}: cannot open shared object file: No "
    "such file or directory\n\x1b[m\n\x1b[0;93m2026-11-30 [W:onnxruntime:Default, onnxruntime_pybind_state.cc:1100] "
    "Failed to create CUDAExecutionProvider. Require cuDNN 9.* and CUDA 13.*.\x1b[m\n"
)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("libcublasLt.so.13", "pip install 'onnxruntime-gpu[cuda,cudnn]==1.31.1'"),
        ("libcuda.so.1", "run it where nvidia-smi shows a GPU"),
    ],
)
def test_a_library_that_is_missing(name: str, fix: str) -> None:
    said = read_words(LIBRARY.format(name=name))
    assert said.startswith("Failed to load library /site/")
    assert said.endswith(f"with error: {name}: cannot open shared object file: No such file or directory")
    assert mend(said, offered=True, runtime="1.31.1").startswith(fix)


@pytest.mark.parametrize(
    ("said", "offered", "fix"),
    [
        ("CUDA failure 100: no CUDA-capable device is detected ; GPU=0", True, "run it where nvidia-smi shows a GPU"),
        ("CUDA failure 35: CUDA driver version is insufficient", True, "run it where nvidia-smi shows a GPU"),
        ("built without CUDA", False, "pip uninstall -y onnxruntime && pip install 'graphrot[gpu]'"),
        ("something else", True, "pip install -U 'onnxruntime-gpu[cuda,cudnn]>="),
    ],
)
def test_other_reasons(said: str, offered: bool, fix: str) -> None:
    assert mend(said, offered, "1.31.1").startswith(fix)


def test_an_error_that_was_raised_comes_first() -> None:
    raised = "/src/cuda_call.cc:154 [with ERRTYPE = cudaError]\nCUDA failure 100: no\n device ; GPU=0 ; hostname=x"
    assert read_words(LIBRARY, raised) == "CUDA failure 100: no device"
    assert read_words(LIBRARY, "another  failure") == "another failure"
    assert read_words("nothing of interest\n") == "nothing"


def test_a_runtime_without_cuda_is_asked() -> None:
    """The runtime that the tests have is built for the CPU, or finds no GPU: in either case it says so."""
    answer = ask_cuda()
    assert answer.works or (answer.said and answer.fix)


def test_a_process_that_dies_or_hangs_is_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda.sys, "executable", "/bin/false")
    assert ask_cuda() == CudaAnswer(False, "the process ended with 1", mend("", True, ""))
    (tmp_path / "hangs").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "hangs").chmod(0o755)
    monkeypatch.setattr(cuda, "_SECONDS", 0.1)
    monkeypatch.setattr(cuda.sys, "executable", str(tmp_path / "hangs"))
    assert "no answer within" in ask_cuda().said
