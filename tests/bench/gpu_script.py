"""What the tests of ``benchmarks/gpu.py`` share, and those of them that need its library, which one test builds."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import graphrot
from tests.contrib.built import built

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SOURCES = FOLDER.parent / "custom_ops"
STAND_IN = Path(__file__).with_name("cublas_stand_in.cc")


def script(name: str) -> ModuleType:
    """A module of the benchmarks."""
    with patch.object(sys, "path", [str(FOLDER), *sys.path]):
        return importlib.import_module(name)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    path = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(FOLDER / "gpu.py"), *arguments]
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


def check_gpu_script(library: Path, folder: Path) -> None:
    """``benchmarks/gpu.py`` as a whole, with its kernels on the CPU and at tiny sizes; and that it can fail."""
    folder.mkdir()
    everything_runs(library, folder)
    a_part_can_be_run(library)
    what_is_left_when_time_is_up_is_said(library, folder)
    what_does_not_fit_is_refused(library)
    a_model_decodes(library, folder)
    device = script("gpu_device").Device(library)
    memory_is_what_it_says(device)
    for mutant, words in (
        (too_few, "the result is wrong"),
        (too_many, "outside a buffer"),
        (changing, "two runs gave different results"),
    ):
        a_wrong_kernel_fails(device, mutant, words)
    a_wrong_order_of_codes_fails(device)
    wrong_rows_of_the_cache_fail(device)


def everything_runs(library: Path, folder: Path) -> None:
    """All kernels are right, every section has its rows, and no time is told."""
    target = folder / "libcublas.so.13"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", "-O1", f"-I{SOURCES}", str(STAND_IN)]
    subprocess.run([*command, "-o", str(target)], check=True)
    figures = folder / "gpu.json"
    done = run("--on-cpu", "--library", str(library), "--json", str(figures), LD_LIBRARY_PATH=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(figures.read_text())
    assert content["device"]["on_cpu"] and content["failed_checks"] == 0 and content["left_out"] == []
    plan = script("gpu_plan").TINY
    assert [len(content[name]) for name in ("limits", "hadamard", "linears", "attention", "runtime")] == [
        *(1, len(plan.transforms), len(plan.shapes) * len(plan.rows) * len(plan.groups), len(plan.attention)),
        len(plan.runtime_shapes) * len(plan.rows),
    ]
    kinds = {check["name"].split()[0] for check in content["checks"]}
    assert kinds == {"HadamardTransform", "rows", "product", "attention"}
    assert all(check["passed"] and 0 <= check["error"] <= 1 for check in content["checks"])
    assert max(check["error"] for check in content["checks"]) > 0.1  # what is allowed is not far from what happens
    assert content["aims"] == [] and np.isnan(content["linears"][0]["us"])
    lines = done.stdout.splitlines()
    assert sum(line.startswith("ok ") for line in lines) == len(content["checks"])
    assert all(" us " not in line or " - us " in line for line in lines)


def a_part_can_be_run(library: Path) -> None:
    done = run("--on-cpu", "--library", str(library), "--sections", "linears", "--shapes", "8B", LD_LIBRARY_PATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8B" in done.stdout and "1B" not in done.stdout and "checks failed" not in done.stdout
    assert "cuBLAS: left out, cuBLAS is not installed" in done.stdout


def what_is_left_when_time_is_up_is_said(library: Path, folder: Path) -> None:
    figures = folder / "late.json"
    done = run("--on-cpu", "--library", str(library), "--minutes", "0", "--json", str(figures), LD_LIBRARY_PATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(figures.read_text())
    assert len(content["checks"]) == 4 and "hadamard" not in content
    assert {each["why"] for each in content["left_out"]} == {"the time is up", "cuBLAS is not installed"}
    assert len([each for each in content["left_out"] if "more checks" in each["what"]]) == 4


def what_does_not_fit_is_refused(library: Path) -> None:
    done = run("--library", str(library))
    assert done.returncode == 2 and "--library and --on-cpu do not fit together" in done.stderr


def a_model_decodes(library: Path, folder: Path) -> None:
    """Both ways, where the model takes steps of one shape; one that cannot be loaded is left out."""
    model, part = folder / "model", ["--sections", "attention"]
    graphrot.convert(built("llama"), output=model, recipe="rotate-only", kv="int8", certificate=None)
    for name, rows in ((model, [False, True]), (folder / "none", [])):
        figures = folder / f"{name.name}.json"
        done = run("--on-cpu", "--library", str(library), *part, "--model", str(name), "--json", str(figures))
        assert done.returncode == 0, done.stdout + done.stderr
        content = json.loads(figures.read_text())
        assert [row["graph"] for row in content.get("model", [])] == rows
        assert len(content["left_out"]) == (0 if rows else 1)
        assert ("model step by step" in done.stdout) == bool(rows)


def memory_is_what_it_says(device: Any) -> None:
    errors = script("gpu_device").GpuError
    assert device.on_cpu and device.capability >= (8, 0) and device.multiprocessors > 0
    with device.memory() as memory:
        buffer = memory.room(7)
        assert (buffer.array(np.uint8, (7,)) == 0xFF).all()
        assert (memory.put(np.arange(7, dtype=np.uint8)).array(np.uint8, (7,)) == np.arange(7)).all()
        assert (memory.room(10).fill(np.arange(4, dtype=np.uint8)).array(np.uint8, (10,)) == np.arange(10) % 4).all()
        with pytest.raises(errors, match="8 bytes of a buffer of 7"):
            buffer.array(np.uint8, (8,))


def too_few(real: Callable[..., None]) -> Callable[..., None]:
    """The last block is left as it was."""
    return lambda device, by, dtype, given, result, blocks: real(device, by, dtype, given, result, blocks - 1)


def too_many(real: Callable[..., None]) -> Callable[..., None]:
    """A block behind the last one is written."""

    def wrong(device: Any, by: Any, dtype: str, given: Any, result: Any, blocks: int) -> None:
        real(device, by, dtype, given, result, blocks)
        size = by.split.size * script("gpu_kernels").DTYPES[dtype].itemsize
        device.call("bench_copy", result.address + blocks * size, result.address, 16)

    return wrong


def changing(real: Callable[..., None]) -> Callable[..., None]:
    """Every second run has another result."""
    turns = iter(range(1000))

    def wrong(device: Any, by: Any, dtype: str, given: Any, result: Any, blocks: int) -> None:
        real(device, by, dtype, given, result, blocks)
        if next(turns) % 2:
            device.call("bench_copy", result.address + 2, result.address, 2)

    return wrong


def a_wrong_kernel_fails(device: Any, mutant: Callable[..., Any], words: str) -> None:
    checks = script("gpu_checks")
    with patch.object(checks, "hadamard", mutant(checks.hadamard)):
        found = [each for each in checks.hadamard_checks(device, [64]) if not each.name.endswith("in place")]
    assert len(found) == 3 and not any(check.passed for check in found)
    assert all(words in check.words for check in found)


def a_wrong_order_of_codes_fails(device: Any) -> None:
    """Rows and products are checked each by itself, so that one wrong order in both shows."""
    checks = script("gpu_checks")
    with patch.object(checks, "INTERLEAVED", list(range(32))):
        found = {check.name: check.passed for check in checks.rows_checks(device, [64])}
        products = list(checks.product_checks(device, [checks.Linear(2, 64, 16, 0)]))
    assert {passed for name, passed in found.items() if "interleaved" in name} == {False}
    assert {passed for name, passed in found.items() if "interleaved" not in name} == {True}
    assert len(products) == 3 and not any(check.passed for check in products)


def wrong_rows_of_the_cache_fail(device: Any) -> None:
    checks = script("gpu_check_attention")
    real = checks.attention

    def unrotated(device: Any, by: Any, *rest: Any) -> None:
        real(device, None, *rest)

    with patch.object(checks, "attention", unrotated):
        found = list(checks.attention_checks(device, [checks.Heads(2, 1, 64, 8, 1, 3, 9)]))
    assert len(found) == 3 and not any(check.passed for check in found)
