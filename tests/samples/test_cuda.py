"""The CUDA sample's loop, on the CPU: the same buffers and shapes, without a GPU and without a graph."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import graphrot
from graphrot.evaluate.session import open_decoder
from tests.contrib.built import built
from tests.exported import tiny_onnx, with_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "It was the best"
SAME, LENGTHS = "every step has the same shapes", "the mask's length counts: no graph"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "samples" / "cuda_generate.py"), str(folder), PROMPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})


@pytest.fixture(scope="module")
def sample() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_generate", ROOT / "samples" / "cuda_generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that counts the ones of its mask, and one that takes its length; the third cannot write in place."""
    folder = tmp_path_factory.mktemp("cuda")
    exported = with_tokenizer("llama", tmp_path_factory.mktemp("exported"))
    settings = {"counts": (built("llama"), "int8"), "lengths": (exported, "int4"), "grows": (exported, None)}
    for name, (source, kv) in settings.items():
        graphrot.convert(source, output=folder / name, recipe="rotate-only", kv=kv, certificate=None)
    return {name: folder / name for name in settings}


@pytest.mark.parametrize(("name", "counts"), [("counts", True), ("lengths", False)])
def test_it_goes_on_like_generate(models: dict[str, Path], sample: ModuleType, name: str, counts: bool) -> None:
    """Both kinds of steps, and the one does not disturb the other."""
    prompt = [1, 17, 42, 5]
    plain, cache, expected = open_decoder(models[name]), None, []
    tokens = np.array([prompt])
    for _ in range(12):
        logits, cache = plain.run(tokens, cache)
        expected.append(int(logits[0, -1].argmax()))
        tokens = np.array([expected[-1:]])
    assert len(set(expected)) > 2, "a model that repeats one token would hide a wrong cache"
    for fixed in (False, True)[: 1 + counts]:
        decoder = sample.Decoder(str(models[name]), gpu=None, capacity=20, graph=False)
        answer = [int(decoder.read(prompt).argmax())]
        assert decoder.counts(answer[0]) == counts
        assert answer + sample.go_on(decoder, answer[0], 11, fixed=fixed) == expected


@pytest.mark.parametrize(("name", "words"), [("counts", SAME), ("lengths", LENGTHS)])
def test_it_runs_as_it_stands(models: dict[str, Path], name: str, words: str) -> None:
    for options, said in ((["--graph"], words), ([], "tokens/s")):
        done = run(models[name], "--cpu", "--tokens", "5", *options)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(PROMPT) and said in done.stderr


def test_what_does_not_work_is_said(models: dict[str, Path]) -> None:
    for folder, options, words in (
        (models["grows"], ["--cpu"], "cannot write into one buffer"),
        (models["counts"], [], "has no CUDAExecutionProvider: graphrot doctor says what is missing"),
        (tiny_onnx("llama").parent, ["--cpu"], "has no model.onnx and tokenizer.json"),
    ):
        done = run(folder, *options)
        assert done.returncode == 1
        assert words in done.stderr and "Traceback" not in done.stderr
