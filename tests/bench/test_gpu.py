"""``benchmarks/gpu.py`` where there is no GPU, and what it says of figures; ``tests/cpp`` runs it on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.gpu_script import run, script


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run(PATH=str(tmp_path))
    assert done.returncode == 4
    assert "there is no NVIDIA driver" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("answer", "words"), [("exit 9", "shows no GPU: failed"), ("echo 9.0", "failed:"), ("true", "shows no GPU")]
)
def test_what_the_driver_says_counts(tmp_path: Path, answer: str, words: str) -> None:
    """A driver that fails; a GPU without a compiler for it; a driver without a GPU."""
    for name, text in (("nvidia-smi", f"echo failed >&2\n{answer}"), ("cmake", "echo no compiler >&2\nexit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = run(PATH=str(tmp_path))
    assert done.returncode == 4
    assert words in done.stderr and "Traceback" not in done.stderr


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run("--sections", "all")
    assert done.returncode == 2 and "there are no sections all" in done.stderr
    done = run("--library", str(tmp_path / "none.so"))
    assert done.returncode == 4 and "cannot be loaded" in done.stderr and "Traceback" not in done.stderr


def test_the_aims_are_about_the_worst() -> None:
    aims = script("gpu_aims").aims
    linear = {"hadamard_percent": 5.0, "to_cublas": 2.0}
    content = {
        "hadamard": [{"rows": 4096, "channels": 8192, "of_copy": 0.9}, {"rows": 1, "channels": 8192, "of_copy": 0.1}],
        "linears": [
            *({"M": rows, **linear} for rows in (1, 256, 4096)),
            {"M": 256, "hadamard_percent": 8.0, "to_cublas": 9.0},
            {"M": 4096, "hadamard_percent": 1.0, "to_cublas": float("nan")},
        ],
    }
    assert [aim["reached"] for aim in aims(content)] == [True, False, True, False]
    words = [aim["words"] for aim in aims(content)]
    assert "at 90% of a copy" in words[0] and "adds 8.0 %" in words[1] and "2.00 times" in words[2]
    assert aims({}) == []
