"""The C++ sample: it builds, finds the runtime of the Python wheel, and answers like Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import graphrot
from graphrot.evaluate.session import open_decoder
from tests.exported import tiny_onnx

SAMPLE = Path(__file__).resolve().parents[2] / "samples" / "cpp"
PROMPT = [1, 17, 42, 5]
COUNT = 12


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("sample")
    for step in (["-S", str(SAMPLE), "-B", str(build), "-G", "Ninja"], ["--build", str(build)]):
        done = command("cmake", *step)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in done.stdout
    return build / "generate"


@pytest.fixture(scope="module")
def runtime() -> str:
    (path,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*")
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    settings = {"ort": {"solver": "rtn"}, "portable": {"solver": "rtn", "target": "portable"}}
    for name, options in settings.items():
        graphrot.convert(tiny_onnx("llama"), output=folder / f"{name}.onnx", certificate=None, **options)
    return {name: folder / f"{name}.onnx" for name in settings}


def greedy(model: Path, *, library: bool) -> list[int]:
    """What the sample is to print, by graphrot's own session."""
    decoder = open_decoder(model, library=library, threads=1)
    tokens, cache, result = np.array([PROMPT]), None, []
    for _ in range(COUNT):
        logits, cache = decoder.run(tokens, cache)
        result.append(int(logits[0, -1].argmax()))
        tokens = np.array([result[-1:]])
    return result


@pytest.mark.parametrize("target", ["ort", "portable"])
@pytest.mark.parametrize("library", [True, False])
def test_it_answers_like_python(
    program: Path, runtime: str, models: dict[str, Path], target: str, library: bool
) -> None:
    options = ["--library", os.fspath(graphrot.library_path())] if library else []
    if target == "portable":
        options += ["--config", "session.qdq_matmulnbits_accuracy_level=0"]
    done = command(str(program), runtime, str(models[target]), *options, "--count", str(COUNT), *map(str, PROMPT))
    assert done.returncode == 0, done.stderr
    printed = [int(word) for word in done.stdout.split()]
    assert printed == greedy(models[target], library=library)
    assert len(set(printed)) > 2, "a model that repeats one token would hide a wrong cache"


def test_errors_are_words(program: Path, runtime: str, models: dict[str, Path], tmp_path: Path) -> None:
    model = str(models["ort"])
    for arguments, code, words in (
        ([runtime], 2, "usage: generate"),
        ([str(tmp_path / "none.so"), model, "1"], 1, "no ONNX Runtime in"),
        ([runtime, str(tmp_path / "none.onnx"), "1"], 1, "none.onnx"),
        ([runtime, model, "--library", str(tmp_path / "none.so"), "1"], 1, "none.so"),
        ([runtime, model, "--count", "3"], 1, "at least one token"),
        ([runtime, model, "--config", "x", "1"], 1, "KEY=VALUE"),
        ([runtime, model, "--cuda", "0", "1"], 1, "CUDA execution provider is not enabled"),
    ):
        done = command(str(program), *arguments)
        assert done.returncode == code, done.stderr
        assert words in done.stderr
