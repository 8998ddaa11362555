"""Whole decoders with weights inside of their attention: sites, exactness, quantization, what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper

import graphrot
from graphrot.errors import InputRefused
from graphrot.ops import library
from tests.analysis.graphs import INT64, VOCAB, Builder
from tests.contrib.decoders import FFN, HEADS, HIDDEN, WIDTH, decoder

SITES = {("R1", "merged", HIDDEN): 1, ("R2", "merged", WIDTH): 2, ("R3", "merged", WIDTH): 2, ("R4", "online", FFN): 2}


def _saved(folder: Path, model: ir.Model) -> Path:
    ir.save(model, folder / "source.onnx")
    return folder / "source.onnx"


def _found(path: Path) -> Counter[tuple[str, str, int]]:
    found = graphrot.inspect(path)
    assert not found.refused
    return Counter((site.kind, site.placement, site.dim) for site in found.sites)


def _signature(path: Path) -> list[tuple[str, bytes]]:
    graph = onnx.load(path, load_external_data=False).graph
    return [(value.name, value.type.SerializeToString()) for value in (*graph.input, *graph.output)]


def _answers(path: Path) -> list[np.ndarray]:
    """A prompt with padding on the left, then two chunks after what was kept; two rows."""
    options = ort.SessionOptions()
    if library.is_available():
        library.register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    tokens = np.random.default_rng(4).integers(0, 37, (2, 9))
    mask = np.ones((2, 9), np.int64)
    mask[0, :2] = 0
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    caches = {value.name: np.zeros((2, 2, HEADS, 0, WIDTH), np.float32) for value in session.get_inputs()[3:]}
    found = []
    for start, stop in ((0, 5), (5, 8), (8, 9)):
        feeds = {"input_ids": tokens[:, start:stop], "position_ids": positions[:, start:stop]}
        logits, *kept = session.run(None, feeds | {"attention_mask": mask[:, :stop]} | caches)
        caches = dict(zip(caches, kept, strict=True))
        found.append(logits)
    return found


@pytest.mark.parametrize(("opset", "kinds"), [(12, "R1 R2 R3"), (17, "R1 R2 R3 R4")])
def test_weights_inside_of_attention(opset: int, kinds: str, tmp_path: Path) -> None:
    source = _saved(tmp_path, decoder(opset=opset, fused=opset == 17))
    assert _found(source) == SITES
    result = graphrot.convert(source, output=tmp_path / "x.onnx", recipe="rotate-only", only=tuple(kinds.split()))
    assert result.certificate is not None and result.certificate.relative <= 2e-5
    assert _signature(tmp_path / "x.onnx") == _signature(source)
    for reference, ours in zip(_answers(source), _answers(tmp_path / "x.onnx"), strict=True):
        assert np.abs(reference - ours).max() <= 2e-5 * np.abs(reference).max()


def test_they_are_quantized(tmp_path: Path) -> None:
    """All four matmuls of a layer and the head, though the source has no MatMul but the output projections."""
    source = _saved(tmp_path, decoder(fused=True))
    assert Counter(node.op_type for node in ir.load(source).graph)["MatMul"] == 2
    result = graphrot.convert(source, output=tmp_path / "x.onnx", recipe="w4a16", solver="clip", weights="int8")
    assert Counter(node.op_type for node in onnx.load(tmp_path / "x.onnx").graph.node)["MatMulNBits"] == 9
    assert _signature(tmp_path / "x.onnx") == _signature(source)
    assert len([part for part in result.report.quantized if part.bits == 8]) >= 9
    for reference, ours in zip(_answers(source), _answers(tmp_path / "x.onnx"), strict=True):
        assert 0 < np.abs(reference - ours).max() < 0.15 * np.abs(reference).max()


def test_packed_heads_are_compared_as_they_run(tmp_path: Path) -> None:
    """The CPU has no kernel for the source: the certificate is against its twin that it has one for."""
    source = _saved(tmp_path, decoder("packed"))
    with pytest.raises(Exception, match="not implemented for CPU"):
        ort.InferenceSession(str(source), providers=["CPUExecutionProvider"]).run(
            None, {name: np.ones((1, 3), np.int64) for name in ("input_ids", "position_ids", "attention_mask")}
        )
    assert _found(source) == SITES
    result = graphrot.convert(source, output=tmp_path / "x.onnx", recipe="rotate-only")
    assert result.certificate is not None and result.certificate.relative <= 2e-5
    assert _signature(tmp_path / "x.onnx") == _signature(source)


def test_what_an_attention_keeps_inside_is_refused_by_name(tmp_path: Path) -> None:
    """Lengths may be lengths, or ends and starts, which MultiHeadAttention does not take."""
    model = decoder(layers=1)
    attention = next(node for node in model.graph if node.op_type == "Attention")
    mask = next(value for value in model.graph.inputs if value.name == "attention_mask")
    mask.shape, mask.dtype = ir.Shape(["lengths"]), ir.DataType.INT32
    attention.replace_input_with(3, mask)
    source = _saved(tmp_path, model)
    refused = graphrot.inspect(source).refused
    name = attention.outputs[0].name
    inside = [r for r in refused if r.op == "Attention"]
    assert {r.kind for r in refused if r not in inside} == {"R1"}
    assert [(r.kind, r.node) for r in inside] == [("R2", name), ("R3", name)]
    assert all("ends and starts" in r.reason and "before its attention was fused" in r.change for r in inside)
    with pytest.raises(InputRefused, match="R2"):
        graphrot.convert(source, recipe="rotate-only", certificate="off")


def test_an_attention_that_only_gpus_run(tmp_path: Path) -> None:
    model = decoder(layers=1)
    attention = next(node for node in model.graph if node.op_type == "Attention")
    attention.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
    with pytest.raises(InputRefused, match="fused for a GPU") as caught:
        graphrot.inspect(_saved(tmp_path, model))
    assert "MHA + RotaryEmbedding" in str(caught.value.why)


def test_an_attention_for_beam_searches(tmp_path: Path) -> None:
    """It takes one token at a time, which the probe follows, and a buffer for past and present, which it does not."""
    b = Builder(0, 17)
    ids, mask = b.input("input_ids", ["batch", 1], INT64), b.input("attention_mask", ["batch", "total"], INT64)
    x = b.op("Gather", b.matrix(VOCAB, HIDDEN), ids)
    pasts = [b.input(f"past_key_values.0.{part}", ["batch", HEADS, "past", WIDTH]) for part in ("key", "value")]
    parts = [b.linear(x, HIDDEN, HIDDEN) for _ in range(3)]
    mask = b.op("Cast", mask, to=onnx.TensorProto.INT32)
    operator = "DecoderMaskedMultiHeadAttention"
    y = b.op(operator, *parts, mask, "", *pasts, outputs=3, domain="com.microsoft", num_heads=HEADS)
    for number, part in enumerate(("key", "value"), start=int(y[1:]) + 1):
        b.result(f"t{number}", f"present.0.{part}")
        b.output(f"present.0.{part}", ["batch", HEADS, "total", WIDTH])
    b.result(b.linear(y, HIDDEN, VOCAB), "logits")
    b.output("logits", ["batch", 1, VOCAB])
    with pytest.raises(InputRefused, match="converted for a beam search") as caught:
        graphrot.inspect(_saved(tmp_path, b.model()))
    assert operator in str(caught.value.why) and "input_ids [2, 1], attention_mask [2, 6]" in str(caught.value.where)


def _one_node(path: Path, op: str, domain: str) -> Path:
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 4])
    nodes = [
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node(op, ["y"], ["z"], name="first", domain=domain),
    ]
    end = helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["N", None, None, None])
    opsets = [helper.make_opsetid(name, 1 if name else 17) for name in dict.fromkeys(["", domain])]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [end]), opset_imports=opsets, ir_version=8), path)
    return path


@pytest.mark.parametrize(
    ("op", "domain"),
    [("Conv", "com.microsoft.nchwc"), ("MemcpyFromHost", ""), ("Conv", "com.ms.internal.nhwc")],
)
def test_a_graph_of_one_kind_of_hardware(op: str, domain: str, tmp_path: Path) -> None:
    source = _one_node(tmp_path / "x.onnx", op, domain)
    for run in (graphrot.inspect, graphrot.convert):
        with pytest.raises(InputRefused, match="one kind of hardware") as caught:
            run(source)
        assert "'first'" in str(caught.value.where) and "ORT_ENABLE_EXTENDED" in str(caught.value.do)


def test_an_operator_without_a_kernel_for_the_cpu(tmp_path: Path) -> None:
    source = _one_node(tmp_path / "x.onnx", "GroupNorm", "com.microsoft")
    model = onnx.load(source)
    model.graph.node[1].CopyFrom(
        helper.make_node("GroupNorm", ["y", "g", "g"], ["z"], "first", domain="com.microsoft", groups=2, activation=0)
    )
    model.graph.node[0].CopyFrom(helper.make_node("Unsqueeze", ["x", "axes"], ["y"]))
    model.graph.initializer.extend(
        [
            onnx.numpy_helper.from_array(np.ones(4, np.float32), "g"),
            onnx.numpy_helper.from_array(np.array([1, 2]), "axes"),
        ]
    )
    onnx.save(model, source)
    with pytest.raises(InputRefused, match="no GroupNorm for the CPU") as caught:
        graphrot.inspect(source)
    assert "'first'" in str(caught.value.where)
