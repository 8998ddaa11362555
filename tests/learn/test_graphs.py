"""Other graphs learn with the same code: one with LayerNorms and fused biases, and one of onnxruntime-genai's builder."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphrot
from tests.contrib.built import built
from tests.learn.subjects import TEXT, source


@pytest.fixture(scope="module", params=["gpt2", "builder"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("graphs")
    path = source("gpt2", folder) if request.param == "gpt2" else built("llama") / "model.onnx"
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return path, folder / "text.txt"


@pytest.mark.parametrize(("loss", "steps", "tokens"), [("local", 30, 16), ("ce", 16, 16)])
def test_the_held_out_loss_falls(loss: str, steps: int, tokens: int, model: tuple[Path, Path], tmp_path: Path) -> None:
    path, text = model
    result = graphrot.learn(
        path,
        output=tmp_path / "r.safetensors",
        recipe="w4a4kv4",
        loss=loss,
        steps=steps,
        sequences=tokens,
        rate=0.05,
        calibration=text,
    )
    assert result.end_loss < result.start_loss and result.best > 0
    assert result.part.orthogonality < 1e-10
    assert set(result.distances) == {"R1", "R2"} and result.distances["R1"].mean > 0.1
    converted = graphrot.convert(path, recipe="rotate-only", rotations=str(tmp_path / "r.safetensors"))
    assert converted.certificate is not None and converted.certificate.relative < converted.certificate.tolerance
