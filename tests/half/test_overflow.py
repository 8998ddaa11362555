"""Activations of 50,000 in float16, with every operator rounding and overflowing literally."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

import graphrot
from graphrot.emit import half_rules
from graphrot.evaluate.session import open_decoder
from graphrot.model.export import export_decoder
from graphrot.ops.hadamard import ensure_function, hadamard_node
from graphrot.plan.types import MatrixRef
from tests.half.graphs import F16, graph, narrowed, run, run_literally
from tests.half.test_narrow import RMS, expected_rms, rms_feeds
from tests.tiny import VOCAB, tiny_llama

LARGE = 50_000.0


def large_rms_feeds() -> dict[str, np.ndarray]:
    feeds = rms_feeds(np.random.default_rng(0))
    feeds["x"][:, 3], feeds["x"][:, 40] = LARGE, -LARGE
    return {"x": feeds["x"].astype(np.float16)}


def test_a_norm(tmp_path: Path) -> None:
    gain = np.ones(64, np.float32)
    model = narrowed(graph(RMS, gain=gain), F16, tmp_path, "x", "y")
    feeds = large_rms_feeds()
    expected = expected_rms(feeds["x"], gain)
    for found in (run_literally(model, tmp_path, feeds)[0], run(model, tmp_path / "run", feeds)[0]):
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-6)


def test_a_norm_in_half_would_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: powers and means by elements, in half."""
    monkeypatch.setattr(half_rules, "_ELEMENTS", half_rules._ELEMENTS | {"Pow", "ReduceMean", "Sqrt", "Reciprocal"})
    model = narrowed(graph(RMS, gain=np.ones(64, np.float32)), F16, tmp_path, "x", "y")
    feeds = large_rms_feeds()
    found = run_literally(model, tmp_path, feeds)[0]
    assert not np.allclose(found, expected_rms(feeds["x"], np.ones(64)), rtol=0.5, atol=1e-3)


@pytest.mark.parametrize("op", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_a_norm_in_one_operator(op: str, tmp_path: Path) -> None:
    """These stay in half: the runtime's kernels sum in float32."""
    text = f"(float[t, 64] x) => (float[t, 64] y) {{ y = {op}<axis = -1, epsilon = 1e-6>(x, gain) }}"
    model = narrowed(graph(text, gain=np.ones(64, np.float32)), F16, tmp_path, "x", "y")
    feeds = large_rms_feeds()
    wide = feeds["x"].astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True) if op == "LayerNormalization" else wide
    np.testing.assert_allclose(run(model, tmp_path, feeds)[0], expected_rms(centred, np.ones(64)), rtol=4e-3, atol=2e-6)


@pytest.mark.parametrize("construction", ["hadamard", "block-hadamard"])
def test_the_transform(construction: str, tmp_path: Path) -> None:
    """A row of 50,000 with mixed signs: its unscaled sums would reach 1536 * 50,000."""
    block = 512 if construction == "block-hadamard" else None
    matrix = MatrixRef(construction, 1536, block=block)
    x = ir.Value(name="x", shape=ir.Shape(["t", 1536]), type=ir.TensorType(ir.DataType.FLOAT))
    node = hadamard_node(x, matrix, "y")
    model = ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21}), ir_version=10)
    ensure_function(model)
    rng = np.random.default_rng(1)
    rows = LARGE * rng.choice([-1.0, 1.0], (4, 1536)) * (rng.random((4, 1536)) < 0.07)
    exact = run(model, tmp_path / "exact", {"x": rows})[0]
    assert 65504 > np.abs(exact).max() > 20_000
    found = run_literally(narrowed(model, F16, tmp_path, "x", "y"), tmp_path, {"x": rows.astype(np.float16)})[0]
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, exact, rtol=2.0**-10, atol=0.1)


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose residual stream carries 50,000 in one channel, from the embedding to the last norm."""
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 7] = LARGE
    path = tmp_path_factory.mktemp("outliers") / "model.onnx"
    export_decoder(model, path)
    return path


@pytest.mark.parametrize("rotations", ["hadamard", None])
def test_a_whole_model(rotations: str | None, outliers: Path, tmp_path: Path) -> None:
    options = {"recipe": "rotate-only"} if rotations else {"recipe": "w4a16", "solver": "rtn", "rotations": None}
    graphrot.convert(outliers, output=tmp_path / "half", dtype="float16", target="portable", **options)
    tokens = np.random.default_rng(2).integers(0, VOCAB, (1, 9))
    source, _ = open_decoder(outliers).run(tokens)
    model = ir.load(tmp_path / "half" / "model.onnx")
    feeds: dict[str, np.ndarray] = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    feeds["position_ids"] = np.arange(tokens.size)[None]
    for value in model.graph.inputs:
        if value.dtype == F16:
            assert value.shape is not None
            feeds[str(value.name)] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float16)
    names = {str(value.name) for value in model.graph.inputs}
    literal = run_literally(model, tmp_path, {name: array for name, array in feeds.items() if name in names})
    assert all(np.isfinite(array).all() for array in literal)
    ours, _ = open_decoder(tmp_path / "half").run(tokens)
    for logits in (literal[0], ours):
        error = np.abs(logits - source).max() / np.abs(source).max()
        assert error < (1e-2 if rotations else 1.0)
