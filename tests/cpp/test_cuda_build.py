"""Whether CUDA kernels are built: what CMake decides and says, and what the library says of itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphrot.ops.library import describe

SOURCE = Path(__file__).resolve().parents[2] / "custom_ops"


def configure(folder: Path, *options: str, cudacxx: str = "") -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", str(SOURCE), "-B", str(folder / "build"), "-G", "Ninja", *options]
    environment = {**os.environ, "CUDACXX": cudacxx}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_off_is_off(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DGRAPHROT_CUDA=OFF")
    assert done.returncode == 0, done.stderr
    assert "CUDA kernels: not built (GRAPHROT_CUDA=OFF)" in done.stdout
    header = (tmp_path / "build" / "cuda_build.h").read_text()
    assert "#define GRAPHROT_CUDA 0" in header
    assert '{"built": false, "compiler": "", "architectures": [], "reason": "GRAPHROT_CUDA=OFF"}' in header
    done = configure(tmp_path, "-DGRAPHROT_CUDA=MAYBE")
    assert done.returncode != 0
    assert "GRAPHROT_CUDA is MAYBE; it must be AUTO, ON or OFF" in done.stderr


def real_nvcc() -> str:
    """The compiler that the build would use, or nothing."""
    finder = [sys.executable, str(SOURCE / "cuda_toolkit.py"), "nvcc"]
    return subprocess.run(finder, capture_output=True, text=True, check=True).stdout.strip()


UNUSABLE = [
    ("", "CUDACXX names a compiler that does not exist"),
    ("exit 1", "lacks cuda_runtime.h or libcudart_static.a"),
]
if real_nvcc():
    refuses = f'case "$*" in *probe.cu*) echo "error: too new" >&2; exit 1;; *) exec {real_nvcc()} "$@";; esac'
    UNUSABLE.append((refuses, "error: too new"))


@pytest.mark.parametrize(("text", "words"), UNUSABLE)
def test_without_a_working_compiler_the_library_is_built_without(tmp_path: Path, text: str, words: str) -> None:
    named = tmp_path / "nvcc"
    if text:
        script(named, text)
    done = configure(tmp_path, cudacxx=str(named))
    assert done.returncode == 0, done.stderr
    assert re.search(rf"CUDA kernels: not built \(.*{re.escape(words)}", done.stdout), done.stdout
    done = configure(tmp_path, "-DGRAPHROT_CUDA=ON", cudacxx=str(named))
    assert done.returncode != 0
    assert "CUDA kernels cannot be built" in done.stderr
    assert words in " ".join(done.stderr.split())


def test_the_library_says_what_it_holds() -> None:
    cuda = describe()["cuda"]
    assert set(cuda) == {"built", "compiler", "architectures", "reason"}
    if cuda["built"]:
        assert re.fullmatch(r"\d+\.\d+[\d.]*", cuda["compiler"])
        assert "80" in cuda["architectures"]
        assert cuda["reason"] == ""
    else:
        assert cuda["architectures"] == []
        assert cuda["reason"]
