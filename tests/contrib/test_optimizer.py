"""Outputs of ONNX Runtime's optimizer: the sites of the export are found again, and exact; what is refused says why."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import graphrot
from graphrot.ops import library
from tests.contrib.optimized import exported, optimized, saved
from tests.coverage.rows import ROWS

SITES = {
    row.name: " ".join(site for site in row.sites.split() if "?" not in site and site[:2] not in ("O~", "ot"))
    for row in ROWS
    if row.road == "torchscript"
}
"""By the export that the optimizer gets: kind, ``~`` for an online one, and how many. Options do not count."""
SKIP, RMS = "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"
FUSED: list[tuple[str, str, int, bool, set[str]]] = [
    ("bert", "bert", 0, False, {"Attention", "BiasGelu", "EmbedLayerNormalization", SKIP}),
    ("bert", "bert", 1, True, {"Attention", "BiasGelu", "EmbedLayerNormalization", SKIP}),
    ("vit", "vit", 2, False, {"BiasGelu", SKIP}),
    ("whisper_encoder", "bart", 1, False, {"Attention", "BiasGelu", "Gelu", SKIP}),
    ("whisper_decoder", "bart", 1, False, {"Attention", "BiasGelu", "EmbedLayerNormalization", SKIP}),
    ("t5", "t5", 0, False, {"FastGelu", RMS}),
    ("llama", "gpt2", 2, False, {"QuickGelu"}),
    ("phi2", "gpt2", 0, False, {"FastGelu"}),
]
"""Model, ``model_type``, ``opt_level``, float16, and the operators of com.microsoft that come out."""


def _operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node if node.domain == "com.microsoft"}


def _sites(path: Path) -> str:
    found = graphrot.inspect(path).sites
    counts = Counter(site.kind + "~" * (site.placement == "online") for site in found if site.kind != "other")
    return " ".join(f"{kind}:{count}" for kind, count in sorted(counts.items()))


def _error(source: Path, ours: Path) -> float:
    """Relative, of all outputs: two rows, the first with two tokens of padding; outputs at padding count too."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if library.is_available():
        library.register(options)
    first, second = (ort.InferenceSession(str(p), options, providers=["CPUExecutionProvider"]) for p in (source, ours))
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for number, value in enumerate(first.get_inputs()):
        shape = [size if isinstance(size, int) else (2 if k == 0 else 7) for k, size in enumerate(value.shape)]
        if value.type.startswith("tensor(float"):
            dtype = np.float16 if "16" in value.type else np.float32
            feeds[value.name] = rng.standard_normal(shape).astype(dtype)
        else:
            dtype = np.int32 if "32" in value.type else np.int64
            feeds[value.name] = (np.ones(shape) if number == 1 else rng.integers(3, 131, shape)).astype(dtype)
            if number == 1:
                feeds[value.name][0, -2:] = 0
    pairs = zip(first.run(None, feeds), second.run(None, feeds), strict=True)
    return max(float(np.abs(a.astype(np.float64) - b).max() / np.abs(a).max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "kind", "level", "half", "operators"), FUSED, ids=[f"{row[0]}-{row[2]}{'-half' * row[3]}" for row in FUSED]
)
def test_the_sites_of_the_export(
    name: str, kind: str, level: int, half: bool, operators: set[str], tmp_path: Path
) -> None:
    source = optimized(name, kind, level=level, half=half)
    assert operators <= _operators(source)
    assert _sites(source) == SITES[name]
    graphrot.convert(source, output=tmp_path / "x.onnx", recipe="rotate-only", certificate="off", allow_partial=True)
    assert _error(source, tmp_path / "x.onnx") <= (4e-3 if half else 2e-5)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_graph_that_the_runtime_saved(name: str, tmp_path: Path) -> None:
    source = saved(name)
    assert "FusedMatMul" in _operators(source)
    assert _sites(source) == SITES[name]
    settings: dict[str, Any] = {"certificate": "off", "allow_partial": True}
    graphrot.convert(source, output=tmp_path / "x.onnx", recipe="rotate-only", **settings)
    assert _error(source, tmp_path / "x.onnx") <= 2e-5


def test_what_is_refused_is_what_the_export_has_refused() -> None:
    """One for each matmul that reads the stream behind a norm, the projections inside of the attention among them."""
    for source in (exported("bert"), optimized("bert", "bert")):
        assert [(r.kind, r.op) for r in graphrot.inspect(source).refused] == [("R1", "MatMul")] * 4


@pytest.mark.parametrize(("name", "kind"), [("cached gpt2", "gpt2"), ("cached llama", "gpt2")])
def test_with_caches(name: str, kind: str, tmp_path: Path) -> None:
    source = optimized(name, kind)
    result = graphrot.convert(source, recipe="rotate-only")
    assert result.certificate is not None and result.certificate.relative <= 2e-5
    online = {"cached gpt2": {"R4": 2}, "cached llama": {"R3": 2, "R4": 2}}[name]
    placed = [rotation.space.kind for rotation in result.plan.rotations if rotation.space.placement == "online"]
    assert Counter(placed) == online


def test_an_encoder_is_quantized(tmp_path: Path) -> None:
    """Every matmul of two layers, the projections inside of the attention as one; pooling layers and head too."""
    source, ours = optimized("bert", "bert"), tmp_path / "x.onnx"
    settings: dict[str, Any] = {"certificate": "off", "allow_partial": True, "solver": "clip", "weights": "int8"}
    graphrot.convert(source, output=ours, recipe="w4a16", **settings)
    nodes = Counter(node.op_type for node in onnx.load(ours).graph.node)
    assert nodes["MatMulNBits"] == 2 * 4 + 2 and "Attention" not in nodes
    assert _error(source, ours) < 0.1
