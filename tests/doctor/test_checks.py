"""Every line of the doctor that can fail: which words it says, and the command that mends it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from graphrot.doctor.checks import Check, examine
from graphrot.doctor.cuda import CudaAnswer
from graphrot.doctor.facts import Facts, Gpu, Run
from graphrot.doctor.ranges import CORE, EXTRAS, NEWEST_RUNTIME, PYTHON, RUNTIME, Range, numbers

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"

PACKAGES: dict[str, str | None] = {
    "graphrot": "0.1.0",
    **{name: span.low for name, span in CORE.items()},
    **{name: span.low for extra in EXTRAS.values() for name, span in extra.items()},
    "onnxruntime": "1.32.0",
    "onnxruntime-gpu": None,
}
HEALTHY = Facts(
    python="3.11.7",
    packages=PACKAGES,
    runtime="1.32.0",
    runtime_package="onnxruntime",
    providers=("CPUExecutionProvider",),
    library="/site/graphrot/ops/libgraphrot_ops.so",
    described={
        "isas": [
            {"name": "avx512", "built": True, "available": False},
            {"name": "avx2", "built": True, "available": True},
            {"name": "scalar", "built": True, "available": True},
        ],
        "kernels": [{"op": "HadamardTransform", "type": "float"}],
        "selected": "avx2",
    },
    kernels=(Run("float", 1e-7), Run("float16", 1e-3), Run("bfloat16", 1e-2)),
    functions=(Run("float", 1e-7),),
)
WITH_GPU = replace(
    HEALTHY,
    packages={**PACKAGES, "onnxruntime": None, "onnxruntime-gpu": "1.31.1"},
    runtime="1.31.1",
    runtime_package="onnxruntime-gpu",
    cuda_build="13.0",
    providers=("CUDAExecutionProvider", "CPUExecutionProvider"),
    cuda_answer=CudaAnswer(works=True),
    described={**HEALTHY.described, "cuda": {"built": True, "compiler": "13.0.88", "architectures": ["80", "90"]}},
    gpu=Gpu("NVIDIA H100", "580.65", "13.0", "9.0"),
)


def packages(base: Facts = HEALTHY, **changed: str | None) -> Facts:
    return replace(base, packages={**base.packages, **{k.replace("_", "-"): v for k, v in changed.items()}})


def line(facts: Facts, name: str) -> Check:
    (found,) = (check for check in examine(facts) if check.name == name)
    return found


@pytest.mark.parametrize("facts", [HEALTHY, WITH_GPU], ids=["cpu", "gpu"])
def test_a_healthy_machine(facts: Facts) -> None:
    checks = examine(facts)
    assert [check.name for check in checks if not check.ok] == []
    assert all(check.fix == "" and check.detail for check in checks)
    assert len({check.name for check in checks}) == len(checks)


BROKEN: list[tuple[Facts, str, bool, str, str]] = [
    (replace(HEALTHY, python="3.10.14"), "python", True, "3.10.14 (supported: >=3.11)", "python3.11 -m venv .venv"),
    (packages(numpy="1.26.4"), "packages", True, "numpy>=2.0", "pip install 'numpy>=2.0'"),
    (packages(onnx_ir=None, typer=None), "packages", True, "onnx-ir>=1.0", "pip install 'onnx-ir>=1.0' 'typer>=0.15'"),
    (
        packages(onnxruntime_gpu="1.31.1"), "one onnxruntime", True, "overwrite each other",
        "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'graphrot[gpu]'",
    ),
    (
        replace(HEALTHY, runtime="1.31.1", runtime_package="onnxruntime-gpu"), "one onnxruntime", True,
        "the files are those of onnxruntime-gpu 1.31.1", "pip uninstall -y onnxruntime && pip install 'graphrot[cpu]'",
    ),
    (
        replace(packages(onnxruntime=None), runtime=None, kernels=(), functions=()), "onnxruntime", True,
        "not installed", "pip install 'graphrot[cpu]'",
    ),
    (
        replace(HEALTHY, runtime=None, runtime_failure="ImportError: libfoo", kernels=(), functions=()), "onnxruntime",
        True, "cannot be imported: ImportError: libfoo", "pip install --force-reinstall onnxruntime",
    ),
    (
        Facts("3.11.7", PACKAGES, crash="signal 11"), "onnxruntime", True, "ended in a crash: signal 11",
        "pip install --force-reinstall onnxruntime",
    ),
    (
        replace(packages(onnxruntime="1.19.2"), runtime="1.19.2"), "onnxruntime", True,
        "1.19.2 (supported: >=1.20)", "pip install -U 'onnxruntime>=1.20'",
    ),
    (
        replace(packages(onnxruntime="1.20.1"), runtime="1.20.1"), "8-bit embedding and head", False,
        "convert with --embedding none --head none", "pip install -U 'onnxruntime>=1.22'",
    ),
    (
        replace(HEALTHY, providers=("AzureExecutionProvider",)), "CPU provider", True, "AzureExecutionProvider",
        "pip install --force-reinstall onnxruntime",
    ),
    (
        replace(WITH_GPU, providers=("CPUExecutionProvider",)), "CUDA provider", False,
        "CUDAExecutionProvider is not offered", "pip install --force-reinstall onnxruntime-gpu",
    ),
    (
        replace(WITH_GPU, gpu=Gpu("NVIDIA A100", "550.54", "12.4")), "CUDA driver", False,
        "onnxruntime-gpu 1.31.1 is built for CUDA 13.0", "pip install 'onnxruntime-gpu[cuda,cudnn]>=1.20,<1.27'",
    ),
    (
        replace(WITH_GPU, gpu=Gpu("Tesla K80", "470.82", "11.4")), "CUDA driver", False,
        "runs CUDA up to 11.4", "install a driver for CUDA 13 or later",
    ),
    (replace(WITH_GPU, gpu=None), "CUDA driver", False, "nvidia-smi finds no GPU", "pip uninstall -y onnxruntime-gpu"),
    (
        replace(WITH_GPU, cuda_missing=("libcublas.so.13", "libcudnn.so.9")), "CUDA libraries", False,
        "not found: libcublas.so.13, libcudnn.so.9", "pip install 'onnxruntime-gpu[cuda,cudnn]==1.31.1'",
    ),
    (
        replace(WITH_GPU, gpu=Gpu("Tesla V100", "580.65", "13.0", "7.0")), "CUDA device", False,
        "compute capability 7.0 (graphrot's CUDA kernels: >=8.0)", "--kernels ort",
    ),
    (
        replace(WITH_GPU, cuda_answer=CudaAnswer(False, "CUDA failure 100: no CUDA-capable device", "see nvidia-smi")),
        "CUDA session", False, "onnxruntime says: CUDA failure 100: no CUDA-capable device", "see nvidia-smi",
    ),
    (
        replace(WITH_GPU, described={**HEALTHY.described, "cuda": {"built": False, "reason": "nvcc is not found"}}),
        "CUDA kernels", False, "not in the native library: nvcc is not found", "pip install --force-reinstall",
    ),
    (
        replace(HEALTHY, library=None, library_failure="graphrot's native library is not installed", kernels=()),
        "native library", True, "not installed", "pip install --force-reinstall --no-deps .",
    ),
    (
        replace(HEALTHY, described={**HEALTHY.described, "selected": "invalid"}, isa_wanted="mmx"), "instruction sets",
        True, "GRAPHROT_ISA=mmx is none of them", "unset GRAPHROT_ISA",
    ),
    (
        replace(HEALTHY, registers="RuntimeException: too old", kernels=()), "registration", True, "too old",
        "pip install --force-reinstall --no-deps .",
    ),
    (
        replace(HEALTHY, kernels=(Run("float", 0.3),)), "kernel HadamardTransform float", True, "is wrong",
        "pip install --force-reinstall --no-deps .",
    ),
    (
        replace(HEALTHY, kernels=(Run("float16", float("nan")),)), "kernel HadamardTransform float16", True, "is wrong",
        "pip install --force-reinstall --no-deps .",
    ),
    (
        replace(HEALTHY, kernels=(Run("float", 2e-4, op="RotatedAttention"),)), "kernel RotatedAttention float", True,
        "is wrong", "pip install --force-reinstall --no-deps .",
    ),
    (
        replace(HEALTHY, functions=(Run("float", failure="Fail: no kernel"),)), "function HadamardTransform float",
        True, "Fail: no kernel", "pip install --force-reinstall onnxruntime",
    ),
    (packages(torch=None), "extra hf", False, "torch not installed", "pip install 'graphrot[hf]'"),
    (packages(torch="2.15.0"), "extra hf", False, "torch>=2.9,<2.14", "pip install 'graphrot[hf]'"),
    (packages(onnxruntime_genai=None), "extra genai", False, "not installed", "pip install 'graphrot[genai]'"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "name", "essential", "detail", "fix"), BROKEN, ids=[case[1] for case in BROKEN])
def test_a_broken_part(facts: Facts, name: str, essential: bool, detail: str, fix: str) -> None:
    check = line(facts, name)
    assert not check.ok
    assert check.essential == essential
    assert detail in check.detail
    assert fix in check.fix


def test_every_line_is_seen_to_fail() -> None:
    names = {check.name for check in examine(WITH_GPU)}
    assert names - {case[1] for case in BROKEN} == {"kernel HadamardTransform bfloat16"}, (
        "the same as float and float16"
    )


def test_what_is_fine_and_worth_a_word() -> None:
    newer = line(replace(packages(onnxruntime="1.40.0"), runtime="1.40.0"), "onnxruntime")
    assert newer.ok
    assert f"newer than {NEWEST_RUNTIME}" in newer.detail
    idle = line(replace(HEALTHY, gpu=WITH_GPU.gpu), "CUDA")
    assert idle.ok
    assert "built without CUDA" in idle.detail


def test_versions_are_read_as_numbers() -> None:
    assert numbers("2.13.0+cpu") == (2, 13, 0)
    assert numbers("nightly") == ()
    assert Range("2.9", "2.14").holds("2.13.1rc1")
    assert not Range("2.9", "2.14").holds("2.14.0")
    assert not Range("1.20").holds("1.9")


def test_the_ranges_are_those_of_the_package() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert sorted(project["dependencies"]) == sorted(f"{name}{span}" for name, span in CORE.items())
    assert project["requires-python"] == str(PYTHON)
    for extra, wanted in EXTRAS.items():
        assert sorted(extras[extra]) == sorted(f"{name}{span}" for name, span in wanted.items())
    assert extras["cpu"] == [f"onnxruntime{RUNTIME}"]
    assert extras["gpu"] == [f"onnxruntime-gpu{RUNTIME}"]
