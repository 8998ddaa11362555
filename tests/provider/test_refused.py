"""Asked for CUDA where there is none: refused in ONNX Runtime's words, with what mends it, before anything runs."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest

import graphrot
from graphrot.cli.main import run
from graphrot.doctor.cuda import CUDA, CudaAnswer
from graphrot.errors import EnvironmentProblem, UsageError
from graphrot.evaluate import device
from tests.exported import tiny_onnx, with_tokenizer

ANSWER = CudaAnswer(False, "CUDA failure 100: no CUDA-capable device", "run it where nvidia-smi shows a GPU")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without one, whatever this machine has."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(device, "ask_cuda", lambda: ANSWER)


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "{folder}", "--prompt", "It was"],
        ["eval", "{folder}", "--text", "{text}", "--window", "8", "--windows", "1"],
        ["bench", "{folder}", "--prefill", "4", "--decode", "2", "--context", "4", "--turns", "1"],
        ["verify", "{folder}", "{folder}"],
    ],
    ids=lambda words: words[0],
)
def test_commands(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_tokenizer("llama_tied", tmp_path)
    (tmp_path / "text").write_text("It was the best of times, it was the worst of times.", encoding="utf-8")
    command = [word.format(folder=tmp_path, text=tmp_path / "text") for word in words]
    assert run([*command, "--provider", "cuda"]) == 4
    said = capsys.readouterr().err
    assert "environment: ONNX Runtime's CUDA provider cannot be used" in said
    assert ANSWER.said in said and ANSWER.fix in said and "--provider cpu" in said
    assert run([*command, "--provider", "tpu"]) == 2
    assert "There is no provider 'tpu'" in capsys.readouterr().err


def test_from_python() -> None:
    with pytest.raises(EnvironmentProblem, match="no CUDA-capable device"):
        graphrot.verify(tiny_onnx("llama_tied"), tiny_onnx("llama_tied"), provider="cuda")
    with pytest.raises(UsageError, match="no provider 'gpu'"):
        graphrot.generate(tiny_onnx("llama_tied"), prompt="x", provider="gpu")


class Session:
    """A session that ONNX Runtime made without the provider that was asked for, or that it refused to make."""

    failure: Exception | None = None

    def __init__(self, *_: object, **__: object) -> None:
        if self.failure is not None:
            raise self.failure

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


@pytest.mark.parametrize("failure", [None, RuntimeError("CUDA failure 100")])
def test_a_provider_that_is_offered_and_does_not_work(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime itself would go on with the CPU."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, "CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(Session, "failure", failure)
    with pytest.raises(EnvironmentProblem, match="cannot be used"):
        device.Device("cuda").open("x.onnx", onnxruntime.SessionOptions())
    monkeypatch.setattr(device, "ask_cuda", lambda: CudaAnswer(works=True))
    if failure is not None:
        with pytest.raises(RuntimeError, match="CUDA failure 100"):
            device.Device("cuda").open("x.onnx", onnxruntime.SessionOptions())
