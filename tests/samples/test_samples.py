"""The samples run as they stand, on a tiny model."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import graphrot
from graphrot.evaluate.session import DecoderSession
from tests.contrib.built import built
from tests.exported import tiny_onnx, write_tokenizer

SAMPLES = Path(__file__).resolve().parents[2] / "samples"


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as somebody deployed it, with its tokenizer."""
    folder = tmp_path_factory.mktemp("deployed")
    exported = tiny_onnx("llama")
    for file in exported.parent.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    write_tokenizer(folder)
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def rotated(deployed: Path) -> Path:
    """The same, rotated but not quantized: its answers must be the same."""
    output = deployed.parent / "rotated"
    graphrot.convert(deployed, output=output, recipe="rotate-only", certificate="off")
    return output / "model.onnx"


def service(model: Path, monkeypatch: pytest.MonkeyPatch, library: str | None = None) -> ModuleType:
    monkeypatch.setenv("MODEL", str(model))
    if library is None:
        monkeypatch.delenv("CUSTOM_OPS", raising=False)
    else:
        monkeypatch.setenv("CUSTOM_OPS", library)
    spec = importlib.util.spec_from_file_location("service_app", SAMPLES / "service" / "app.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "service_app", module)
    spec.loader.exec_module(module)
    return module


def ask(app: Any) -> str:
    from fastapi.testclient import TestClient

    with TestClient(app) as client:
        answer = client.post("/complete", json={"prompt": "It was the best", "tokens": 6})
        assert client.post("/complete", json={"prompt": ""}).status_code == 422
    assert answer.status_code == 200
    return str(answer.json()["text"])


def test_the_service_answers_the_same_when_only_the_file_changes(
    deployed: Path, rotated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ask(service(deployed, monkeypatch).app)
    assert before
    assert ask(service(rotated, monkeypatch).app) == before
    assert ask(service(rotated, monkeypatch, str(graphrot.library_path())).app) == before


def test_the_service_is_plain_onnxruntime() -> None:
    text = (SAMPLES / "service" / "app.py").read_text(encoding="utf-8")
    assert "import graphrot" not in text


def run(sample: str, arguments: list[str], folder: Path) -> str:
    """Run a sample in a process of its own; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SAMPLES.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(SAMPLES / sample), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_quickstart_converts_and_generates(deployed: Path, tmp_path: Path) -> None:
    printed = run("quickstart.py", [str(deployed), "OUT", "It was the best"], tmp_path)
    assert "R1  merged" in printed and "R4  online" in printed
    assert "relative error" in printed and "It was the best" in printed
    assert "inputs: input_ids, attention_mask" in printed


@pytest.mark.parametrize(("kv", "bits", "less"), [("int4", 4, 64 / 12), (None, 32, 1.0)])
def test_the_long_context_script_hides_a_sentence_and_asks(
    deployed: Path, tmp_path: Path, kv: str | None, bits: int, less: float
) -> None:
    """What it prints is what the cache holds; a tiny model of random weights answers something."""
    overrides = {} if kv is None else {"kv": kv}
    graphrot.convert(deployed, output=tmp_path / "OUT", recipe="rotate-only", certificate="off", **overrides)
    printed = run("long_context.py", ["OUT", "The key is under the pot.", "The key is under", "120"], tmp_path)
    count = int(printed.split(" tokens, then: The key is under")[0])
    assert abs(count - 120) < 8 and "answer: " in printed
    held = count + 8
    stored, wide = round(held * 2 * 2 * 64 / less), held * 2 * 2 * 64
    assert f"cache: {stored} bytes of {bits} bits for {held} tokens; float32 {wide} bytes, {less:.2f} times" in printed
    assert f"cut back to {count} tokens" in printed


def test_the_graphsurgeon_script_edits_a_rotated_graph(deployed: Path, tmp_path: Path) -> None:
    assert "outputs logits" in run("graphsurgeon_script.py", [str(deployed), "OUT.onnx"], tmp_path)
    whole = graphrot.convert(deployed, recipe="w4a8").model
    tokens = np.arange(3, 12)[None]
    logits, _ = DecoderSession(whole).run(tokens)
    last, _ = DecoderSession(tmp_path / "OUT.onnx").run(tokens)
    assert last.shape == (1, 1, logits.shape[2])
    np.testing.assert_allclose(last, logits[:, -1:], rtol=0, atol=1e-5 * np.abs(logits).max())


def test_the_chat_streams_answers_and_keeps_to_the_conversation(tmp_path: Path) -> None:
    """What is held from turn to turn answers like the conversation as a whole."""
    graphrot.convert(built("llama"), output=tmp_path / "OUT", recipe="rotate-only", kv="int8", certificate=None)
    spec = importlib.util.spec_from_file_location("genai_chat", SAMPLES / "genai_chat.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    chat = module.Chat(str(tmp_path / "OUT"), context=200)
    first = "".join(chat.ask("It was the best", 6))
    second = "".join(chat.ask("of times", 6))
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert (chat.messages[1]["content"], chat.messages[3]["content"]) == (first, second)
    for more in ([5, 6], [2]):
        text = [*(int(token) for token in chat.generator.get_sequence(0)), *more]
        chat._read(text)
        anew = module.Chat(str(tmp_path / "OUT"), context=200)
        anew._read(text)
        one, other = (np.array(c.generator.get_logits()) for c in (chat, anew))
        assert np.abs(one - other).max() <= 1e-2 * np.abs(other).max()
        chat.generator.generate_next_token()
    with pytest.raises(SystemExit, match="give a larger --context"):
        list(chat.ask("a" * 200, 6))
    assert "import graphrot" not in (SAMPLES / "genai_chat.py").read_text(encoding="utf-8")
