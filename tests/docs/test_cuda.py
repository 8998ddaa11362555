"""Every command of docs/cuda.md, in the order of the page: what needs a GPU is refused in words where there is none."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import onnx
import pytest

from graphrot.cli.main import run
from tests.contrib.built import built
from tests.exported import tiny_onnx, write_tokenizer
from tests.tiny import tiny_llama

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NEEDS_GPU = frozenset({"generate", "eval", "bench"})
HALVES = {"OUT": onnx.TensorProto.FLOAT16, "OUT_BF16": onnx.TensorProto.BFLOAT16, "OUT_KV4": onnx.TensorProto.UINT8}


def script(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a script of the checkout where there is no driver of NVIDIA's."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PATH": ""}
    command = [sys.executable, str(ROOT / words[1]), *words[2:]]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(built("llama"), "GENAI_DIR")
    tiny_llama(layers=1).save_pretrained("HF_DIR")
    write_tokenizer(Path("HF_DIR"))
    write_tokenizer(Path())
    for file in tiny_onnx("llama").parent.iterdir():
        shutil.copy(file, "MODEL.onnx" if file.suffix == ".onnx" else ".")
    Path("TEXT").write_text("It was the best of times, it was the worst of times. " * 10, encoding="utf-8")
    ran = []
    for language, text in BLOCKS:
        if language == "python":
            with pytest.warns(UserWarning, match="CUDAExecutionProvider"):
                exec(compile(text, "docs/cuda.md", "exec"), {})
            assert capsys.readouterr().out.strip() == "CPUExecutionProvider"
            continue
        for line in text.splitlines():
            words = shlex.split(line)
            ran.append(words[1] if words[0] == "graphrot" else words[0])
            if words[0] == "python":
                done = script(words)
                assert done.returncode in (1, 4) and "Traceback" not in done.stderr
                assert "CUDAExecutionProvider" in done.stderr or "there is no NVIDIA driver" in done.stderr
            elif words[0] == "graphrot":
                code = run(words[1:])
                said = capsys.readouterr()
                assert code == (4 if words[1] in NEEDS_GPU else 0), said.err
                assert words[1] not in NEEDS_GPU or "CUDA provider cannot be used" in said.err
    assert ran == ["pip", "doctor", *["convert"] * 4, "generate", "eval", "bench", "python", *["convert"] * 3, "python"]
    for name, dtype in HALVES.items():
        model = onnx.load(Path(name, "model.onnx"), load_external_data=False)
        past = next(value for value in model.graph.input if value.name.startswith("past_key_values"))
        assert past.type.tensor_type.elem_type == dtype
    assert '"cuda"' in Path("GENAI_CUDA", "genai_config.json").read_text(encoding="utf-8")


def test_what_the_page_installs_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any(need.startswith("onnxruntime-gpu") for need in project["optional-dependencies"]["gpu"])
