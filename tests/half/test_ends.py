"""A float32 model with a half input or output stays float32, and its ends keep their types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import graphrot
from graphrot.emit.half_ends import restore_ends
from graphrot.model.widen import float_types, widen
from tests.exported import tiny_onnx
from tests.half.graphs import BF16, F16, F32, graph, made_by, run
from tests.tiny import VOCAB


def test_most_weight_bytes_decide() -> None:
    text = """(float16[n, 8] x, float16[3] idle) => (float16[n, 8] y) {
        f = Cast<to = 1>(x) z = MatMul(f, w) y = Cast<to = 10>(z)
    }"""
    found = float_types(graph(text, w=np.ones((8, 8), np.float32)))
    assert found is not None and found.name == "float32" and found.ends == {"x": F16, "idle": F16, "y": F16}
    text = """(float16[n, 8] x) => (float16[n, 8] y) {
        z = MatMul(x, w) f = Cast<to = 1>(z) g = Add(f, b) y = Cast<to = 10>(g)
    }"""
    found = float_types(graph(text, w=np.ones((8, 8), np.float16), b=np.ones((1, 8), np.float32)))
    assert found is not None and found.name == "float16"
    found = float_types(graph("(bfloat16[n] x) => (bfloat16[n] y) { y = Identity(x) }"))
    assert found is not None and found.name == "bfloat16"


def test_casts_come_back_at_the_ends(tmp_path: Path) -> None:
    text = """(float16[n, 4] x, bool c, float16[3] idle) => (float16[n, 4] y, float16[n, 4] z) {
        f = Cast<to = 1>(x)
        g = If(c) <
            then_branch = t () => (float[n, 4] a) { a = Add(f, w) },
            else_branch = e () => (float[n, 4] b) { b = Sub(f, w) }
        >
        y = Cast<to = 10>(g)
        h = Cast<to = 10>(f)
        z = Relu(h)
    }"""
    source = graph(text)
    weight = np.full((1, 4), 1 / 3, np.float32)
    source.graph.initializers["w"] = ir.Value(
        name="w", type=ir.TensorType(F32), shape=ir.Shape(weight.shape), const_value=ir.tensor(weight, name="w")
    )
    found = float_types(source)
    assert found is not None and found.name == "float32"
    model, _ = widen(source, tmp_path / "wide")
    restore_ends(model, found.ends)
    assert [v.dtype for v in (*model.graph.inputs, *model.graph.outputs)] == [F16, ir.DataType.BOOL, F16, F16, F16]
    assert [v.name for v in model.graph.outputs] == ["y", "z"]
    assert model.graph.initializers["w"].dtype == F32 and len(made_by(model, "Cast")) == 3
    x = np.array([[1.5, -2, 0.25, 4]], np.float16)
    for choice in (True, False):
        feeds = {"x": x, "c": np.array(choice), "idle": np.zeros(3)}
        y, z = run(model, tmp_path / str(choice), feeds)
        wide = x.astype(np.float32) + (weight if choice else -weight)
        assert np.array_equal(y, wide.astype(np.float16))
        assert np.array_equal(z, np.maximum(x, 0))


def test_other_halves_and_float32_ends(tmp_path: Path) -> None:
    model = graph("(float[n] x) => (float[n] y, float[n] z) { y = Relu(x) z = Neg(x) }")
    restore_ends(model, {"x": F32, "y": BF16})
    assert [v.dtype for v in (*model.graph.inputs, *model.graph.outputs)] == [F32, BF16, F32]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 decoder with a float16 input that nothing reads, and its logits in float16 beside."""
    model = onnx.load(tiny_onnx("gpt2"))
    model.graph.input.append(helper.make_tensor_value_info("idle", TensorProto.FLOAT16, [3]))
    model.graph.node.append(helper.make_node("Cast", ["logits"], ["short"], to=TensorProto.FLOAT16))
    model.graph.output.append(helper.make_tensor_value_info("short", TensorProto.FLOAT16, ["batch", "tokens", VOCAB]))
    path = tmp_path_factory.mktemp("ends") / "model.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("options", [{"recipe": "rotate-only"}, {"recipe": "w4a16", "solver": "rtn"}], ids=str)
def test_a_whole_conversion(options: dict[str, Any], source: Path, tmp_path: Path) -> None:
    result = graphrot.convert(source, output=tmp_path / "ours", certificate=None, **options)
    assert result.report.recipe["dtype"] == "float32" and result.report.half is None
    plain = graphrot.convert(tiny_onnx("gpt2"), output=tmp_path / "plain", certificate=None, **options)
    assert result.report.sizes.bits_per_weight == plain.report.sizes.bits_per_weight
    model = ir.load(tmp_path / "ours" / "model.onnx")
    assert F16 not in {value.dtype for value in model.graph.initializers.values()}
    session = ort.InferenceSession(tmp_path / "ours" / "model.onnx", providers=["CPUExecutionProvider"])
    kinds = {entry.name: entry.type for entry in (*session.get_inputs(), *session.get_outputs())}
    assert kinds["idle"] == kinds["short"] == "tensor(float16)" and kinds["logits"] == "tensor(float)"
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, 6))
    feeds: dict[str, np.ndarray] = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    feeds |= {"position_ids": np.arange(6)[None], "idle": np.zeros(3, np.float16)}
    feeds |= {name: np.zeros((1, 5, 0, 16), np.float32) for name in kinds if name.startswith("past")}
    names = {entry.name for entry in session.get_inputs()}
    logits, short = session.run(["logits", "short"], {n: array for n, array in feeds.items() if n in names})
    assert np.array_equal(short, logits.astype(np.float16)) and not np.array_equal(short, logits)
