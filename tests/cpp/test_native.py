"""Build the kernels and their C++ tests with CMake, and run them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

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
        "cmake", "-S", str(SOURCE), "-B", str(tmp_path), "-G", "Ninja", "-DGRAPHROT_TESTS=ON", "-DGRAPHROT_WERROR=ON"
    )
    command("cmake", "--build", str(tmp_path))
    printed = command("ctest", "--test-dir", str(tmp_path), "--output-on-failure")
    assert "100% tests passed" in printed  # newer versions leave the count of failures out
    assert "out of 4" in printed
