"""The demo model in float16: rotated, it must stay as good as in float32. Run with ``pytest -m demo``."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

import graphrot
from graphrot.evaluate.text import default_calibration_text
from graphrot.model.demo import demo_folder, demo_onnx

pytestmark = pytest.mark.demo


def test_float16_keeps_the_perplexity(tmp_path: Path) -> None:
    source = demo_onnx(demo_folder())
    output = tmp_path / "half"
    result = graphrot.convert("demo", output=output, recipe="rotate-only", dtype="float16", certificate=None)
    assert result.report.sizes.model_bytes < 0.51 * source.with_name("model.onnx.data").stat().st_size
    types = {value.name: value.dtype for value in ir.load(output / "model.onnx").graph.outputs}
    assert types.pop("logits") == ir.DataType.FLOAT and set(types.values()) == {ir.DataType.FLOAT16}
    text = tmp_path / "text.txt"
    whole = default_calibration_text()
    text.write_text(whole[len(whole) // 2 :], encoding="utf-8")
    floats, ours = (
        graphrot.evaluate(model, text=text, window=512, windows=2, tokenizer=output).perplexity
        for model in (source, output)
    )
    print(f"\nperplexity: float32 {floats:.3f}, float16 {ours:.3f}")
    assert ours <= 1.01 * floats
