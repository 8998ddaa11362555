"""A LayerNorm decoder through the whole pipeline."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime as ort

import graphrot
from graphrot.plan.serialize import plan_to_json
from tests.exported import tiny_onnx


def _fused(path: Path) -> Counter[str]:
    """The operators once ONNX Runtime has optimized the file."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(path.with_name("optimized.onnx"))
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)


def test_a_quantized_model_has_simplified_norms(tmp_path: Path) -> None:
    done = graphrot.convert(tiny_onnx("gpt2"), output=tmp_path / "out", recipe="w4a8", solver="rtn")
    assert done.certificate is not None and done.certificate.dtype == "float64"
    assert done.certificate.relative <= 1e-12
    (mean,) = done.report.plan.means
    assert len(mean.norms) == 5 and "mean_preserving" not in done.report.plan.rotations[0].matrix
    ops = Counter(node.op_type for node in done.model.graph)
    assert ops["SkipSimplifiedLayerNormalization"] == 5
    assert not ops["LayerNormalization"] and not ops["ReduceMean"]


def test_a_rotated_model_is_fused_by_the_runtime_and_replays(tmp_path: Path) -> None:
    done = graphrot.convert(tiny_onnx("gpt2"), output=tmp_path / "out", recipe="rotate-only")
    assert done.plan.tie is not None and done.report.plan.means[0].online == [done.plan.tie.embedding.node]
    ops = _fused(tmp_path / "out" / "model.onnx")
    assert ops["SimplifiedLayerNormalization"] + ops["SkipSimplifiedLayerNormalization"] == 5
    assert not ops["LayerNormalization"] and not ops["ReduceMean"]
    (tmp_path / "plan.json").write_text(plan_to_json(done.plan))
    again = graphrot.convert(
        tiny_onnx("gpt2"), output=tmp_path / "again", recipe="rotate-only", plan=tmp_path / "plan.json"
    )
    assert again.plan == done.plan
    first, second = (tmp_path / folder / "model.onnx.data" for folder in ("out", "again"))
    assert first.read_bytes() == second.read_bytes()
