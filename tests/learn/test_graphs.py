"""Other graphs learn with the same code: LayerNorms and fused biases, a table shared with the head, a builder's own."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphrot
from tests.contrib.built import built
from tests.learn.subjects import TEXT, source


@pytest.mark.parametrize(
    ("name", "loss", "steps"),
    [("gpt2", "local", 30), ("gpt2", "ce", 16), ("llama_tied", "kl", 12), ("builder", "ce", 16)],
)
def test_the_held_out_loss_falls(name: str, loss: str, steps: int, tmp_path: Path) -> None:
    path = built("llama") / "model.onnx" if name == "builder" else source(name, tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    result = graphrot.learn(
        path,
        output=tmp_path / "r.safetensors",
        recipe="w4a4kv4",
        loss=loss,
        steps=steps,
        sequences=16,
        rate=0.05,
        calibration=text,
    )
    assert result.end_loss < result.start_loss and result.best > 0
    assert result.part.orthogonality < 1e-10
    assert set(result.distances) == {"R1", "R2"} and result.distances["R1"].mean > 0.1
    converted = graphrot.convert(path, recipe="rotate-only", rotations=str(tmp_path / "r.safetensors"))
    assert converted.certificate is not None and converted.certificate.relative < converted.certificate.tolerance
