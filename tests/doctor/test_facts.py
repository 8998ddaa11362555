"""What the doctor sees: of this machine, of a process that dies, of a GPU and libraries that are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphrot.doctor import facts, probe
from graphrot.ops.library import describe

RUN = [sys.executable, "-m", "graphrot", "doctor"]


def doctor(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(sys.path)
    everything = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([*RUN, *options], capture_output=True, text=True, check=False, env=everything)


def test_this_machine_passes() -> None:
    done = doctor("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["isa"] == describe()["selected"]
    assert "CPUExecutionProvider" in report["providers"]
    assert report["versions"]["numpy"]
    names = [check["name"] for check in report["checks"]]
    for name in (
        "kernel HadamardTransform float",
        "kernel HadamardTransform bfloat16",
        "kernel RotatedMatMul float",
        "kernel RotatedMatMul bfloat16",
        "kernel RotatedAttention float",
        "kernel RotatedAttention bfloat16",
        "function HadamardTransform float",
        "function RotatedMatMul float",
        "function RotatedAttention float",
    ):
        assert name in names
    for check in report["checks"]:
        assert set(check) == {"name", "ok", "detail", "fix", "essential"}
        assert check["ok"] or not check["essential"], check


def test_an_impossible_instruction_set_is_told_and_fails() -> None:
    done = doctor(GRAPHROT_ISA="mmx")
    assert done.returncode == 4
    assert "FAIL  instruction sets:" in done.stdout
    assert "mend: unset GRAPHROT_ISA" in done.stdout
    assert "not work: mend from the top" in done.stdout


def test_a_file_that_is_no_library_is_told_and_fails(tmp_path: Path) -> None:
    (tmp_path / "bad.so").write_bytes(b"no library")
    done = doctor("--json", GRAPHROT_LIBRARY=str(tmp_path / "bad.so"))
    assert done.returncode == 4
    report = json.loads(done.stdout)
    failed = {check["name"]: check for check in report["checks"] if not check["ok"] and check["essential"]}
    assert list(failed) == ["native library"]
    assert "cannot be loaded" in failed["native library"]["detail"]
    assert any(check["name"] == "function HadamardTransform float" and check["ok"] for check in report["checks"])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("raise SystemExit('foreign file')", "exit code 1: foreign file"),
        ("print('no json')", "exit code 0"),
    ],
)
def test_a_probe_that_dies_is_an_answer(code: str, words: str) -> None:
    assert facts._probe([sys.executable, "-c", code]) == {"crash": words}


def test_a_probe_that_hangs_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_PROBE_SECONDS", 0.2)
    assert facts._probe([sys.executable, "-c", "import time; time.sleep(600)"]) == {"crash": "no answer within 0.2 s"}


def test_a_runtime_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found = probe.look()
    assert "runtime" not in found
    assert "onnxruntime" in found["runtime_failure"]
    assert found["described"]["kernels"]


def test_a_model_that_does_not_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(op: str, name: str, *, library: bool) -> float:
        raise RuntimeError("no\nkernel")

    monkeypatch.setattr(probe, "_error", broken)
    found = probe._run("RotatedMatMul", "float", library=True)
    assert found == {"op": "RotatedMatMul", "type": "float", "failure": "RuntimeError: no kernel"}


def test_the_gpu_is_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$1" in --query-gpu=compute_cap) echo 9.0 ;; --query*) echo "NVIDIA H100, 550.54.15" ;;\n'
        '*) echo "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4 |" ;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert facts._gpu() == facts.Gpu("NVIDIA H100", "550.54.15", "12.4", "9.0")
    tool.write_text("#!/bin/sh\necho 'no devices were found' >&2\nexit 6\n")
    assert facts._gpu() is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert facts._gpu() is None


def test_cuda_libraries_are_looked_for_in_the_wheels_too(tmp_path: Path) -> None:
    wanted = probe.missing_libraries("97", [])
    assert "libcublas.so.97" in wanted
    assert "libcudart.so.97" in wanted
    folder = tmp_path / "nvidia" / "cublas" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcublas.so.97").touch()
    assert set(wanted) - set(probe.missing_libraries("97", ["", str(tmp_path)])) == {"libcublas.so.97"}
