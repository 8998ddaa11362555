"""The messages that docs/troubleshooting.md quotes are the ones that people get."""

from __future__ import annotations

import ctypes.util
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest

import graphrot
from tests.exported import tiny_onnx

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = [match[1].strip() for match in re.finditer(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trouble") / "OUT"
    graphrot.convert(tiny_onnx("llama"), output=output, solver="rtn")
    return output


def without_functions(folder: Path) -> object:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    del model.functions[:]
    onnx.save(model, folder / "lost.onnx")
    return onnxruntime.InferenceSession(str(folder / "lost.onnx"))


def another_library(folder: Path) -> object:
    name = ctypes.util.find_library("m") or ctypes.util.find_library("c")
    assert name
    return onnxruntime.SessionOptions().register_custom_ops_library(name)


def no_library(folder: Path) -> object:
    return onnxruntime.SessionOptions().register_custom_ops_library(str(folder / "nothing.so"))


def moved(folder: Path) -> object:
    away = folder / "away"
    away.mkdir(exist_ok=True)
    shutil.copy(folder / "model.onnx", away)
    return onnxruntime.InferenceSession(str(away / "model.onnx"))


def no_gpu(folder: Path) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["NoSuchExecutionProvider"])


CASES: tuple[tuple[str, Callable[[Path], object]], ...] = (
    ("is not a registered function/op", without_functions),
    ("undefined symbol: RegisterCustomOps", another_library),
    ("cannot open shared object file", no_library),
    ("External data path does not exist", moved),
    ("is not in available provider names", no_gpu),
)


def test_every_quoted_message_has_a_case() -> None:
    assert len(QUOTED) == len(CASES)
    for quoted, (words, _) in zip(QUOTED, CASES, strict=True):
        assert words in quoted


@pytest.mark.parametrize(("words", "fail"), CASES, ids=[words for words, _ in CASES])
def test_the_runtime_says_what_is_quoted(converted: Path, words: str, fail: Callable[[Path], object]) -> None:
    quoted = next(text for text in QUOTED if words in text)
    with pytest.raises(Exception, match=r".") as failure:  # ONNX Runtime has a class of its own for every status code
        fail(converted)
    said = str(failure.value).replace("NoSuchExecutionProvider", "CUDAExecutionProvider")
    assert quoted in said


def test_the_snippets_run(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(converted.parent)
    assert len(SNIPPETS) == 2
    for snippet in SNIPPETS:
        exec(snippet, {"onnxruntime": onnxruntime, "graphrot": graphrot})


def test_the_registered_library_mends_lost_functions(converted: Path) -> None:
    with pytest.raises(Exception, match="not a registered function"):
        without_functions(converted)
    options = onnxruntime.SessionOptions()
    graphrot.register(options)
    assert onnxruntime.InferenceSession(str(converted / "lost.onnx"), options).get_inputs()
