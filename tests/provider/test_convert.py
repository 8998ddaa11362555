"""Whole conversions for CUDA: every node of the file has a kernel there, and the CPU answers as for its own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphrot
from graphrot.emit.cuda.check import check_cuda, without_kernel
from graphrot.emit.cuda.kernels import cuda_kernels
from graphrot.errors import InputRefused, UsageError
from graphrot.evaluate.session import Unrunnable, open_decoder
from graphrot.half import TWIN_NOTE
from tests.contrib.built import built
from tests.exported import tiny_onnx
from tests.half.graphs import BF16, F16
from tests.tiny import VOCAB

NAMES = {"float16": F16, "bfloat16": BF16}


SCALES = {("Mul", 1), ("MatMulNBits", 2), ("GroupQueryAttention", 12), ("GroupQueryAttention", 13)}
"""Float32 where the operator wants them so, multiplies the logits' float32, or decodes weights at load time."""

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama_tied", {"recipe": "w4a8kv4"}),
    ("llama_tied", {"recipe": "w4a4kv4", "kernels": "ort", "dtype": "bfloat16"}),
    ("llama_tied", {"recipe": "w4a8", "embedding": "int4", "head": "int4", "group": 32, "symmetric": False}),
    ("qwen2", {"recipe": "w4a16", "group": "channel", "kernels": "ort", "dtype": "bfloat16"}),
    ("qwen2", {"recipe": "w4a16", "kernels": "ort", "kv": "int8"}),
    ("qwen3", {"recipe": "rotate-only", "solver": None, "dtype": "bfloat16"}),
    ("gpt2", {"recipe": "w4a8kv8"}),
    ("phi3", {"recipe": "w4a8", "target": "portable"}),
    ("gpt2", {"recipe": "w4a8", "weights": "int8", "embedding": "int8", "head": "int8", "target": "portable"}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_every_node_has_a_kernel(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """And the file says what that for the CPU says, where the CPU runs it: they differ by rounding."""
    options = {"solver": "rtn", "certificate": None, **options}
    if "kernels" in options and ("kv" in options or "kv" in options["recipe"]):  # its scales are calibrated
        np.save(tmp_path / "tokens.npy", np.random.default_rng(1).integers(0, VOCAB, 256))
        options["calibration"] = tmp_path / "tokens.npy"
    graphrot.convert(tiny_onnx(name), output=tmp_path / "cuda", provider="cuda", **options)
    model = ir.load(tmp_path / "cuda" / "model.onnx")
    assert without_kernel(model, cuda_kernels())[1] == []
    half = NAMES[options.get("dtype", "float16")]
    for value in model.graph.initializers.values():
        tensor = value.const_value
        scales = any((use.node.op_type, use.idx) in SCALES for use in value.uses())
        if tensor is not None and len(tensor.shape) > 1 and tensor.dtype.is_floating_point() and not scales:
            assert tensor.dtype == half, value.name
    caches = {value.dtype for value in model.graph.inputs if "past" in str(value.name)}
    assert caches <= {half, ir.DataType.INT8, ir.DataType.UINT8}
    if half == BF16:
        return
    graphrot.convert(tiny_onnx(name), output=tmp_path / "cpu", dtype="float16", **options)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, 12))
    ours, theirs = (open_decoder(tmp_path / which).run(tokens)[0] for which in ("cuda", "cpu"))
    errors = np.abs(ours - theirs).max(axis=-1) / np.abs(theirs).max()
    assert np.median(errors) < 0.02 and errors.max() < 0.2


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_is_measured(dtype: str | None, tmp_path: Path) -> None:
    """The file itself in float16, which is what CUDA gets unless asked; of bfloat16 a twin with casts."""
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    options = {"recipe": "rotate-only", "kv": "int8", **options}
    result = graphrot.convert(tiny_onnx("llama_tied"), output=tmp_path / "x", provider="cuda", **options)
    half = result.report.half
    assert half is not None and half.dtype == (dtype or "float16") and half.relative < 0.1
    assert result.certificate is not None and result.certificate.relative < 1e-9
    assert (TWIN_NOTE in result.notes) == (dtype == "bfloat16")
    written = json.loads((tmp_path / "x" / "graphrot.json").read_text())["recipe"]
    assert (written["provider"], written["dtype"]) == ("cuda", dtype or "float16")
    if dtype is None:
        again = open_decoder(tmp_path / "x").run(np.zeros((1, 4), np.int64))[0]
        assert np.isfinite(again).all()
        return
    with pytest.raises(Unrunnable) as found:
        open_decoder(tmp_path / "x")
    assert "--provider cuda, which it was written for" in str(found.value)


@pytest.mark.parametrize("recipe", ["w4a8", "w4a4kv4"])
def test_notes_of_a_portable_file_are_about_cuda(recipe: str) -> None:
    """Not about what ONNX Runtime does on the CPU, nor about nodes that are not in the file."""
    options: dict[str, Any] = {"recipe": recipe, "solver": "rtn", "kv": "none", "certificate": None}
    result = graphrot.convert(tiny_onnx("llama_tied"), provider="cuda", target="portable", **options)
    words = "; ".join(result.notes)
    assert f"{recipe[3]}-bit activations are rounded by Div and Round" in words
    assert "on CPU" not in words and "QuantizeLinear" not in words
    assert not any(node.op_type == "QuantizeLinear" for node in result.model.graph)


def test_float32_is_refused() -> None:
    with pytest.raises(UsageError, match="dtype float32 is not written for provider cuda"):
        graphrot.convert(tiny_onnx("llama_tied"), provider="cuda", dtype="float32")


def test_a_node_without_a_kernel_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = ir.load(tiny_onnx("llama_tied"))
    logits = model.graph.outputs[0]
    node = ir.node("Mish", [logits], name="odd")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "odd", logits.type, logits.shape
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    ir.save(model, tmp_path / "odd.onnx", external_data="odd.onnx.data")
    options: dict[str, Any] = {"recipe": "rotate-only", "certificate": None}
    with pytest.raises(InputRefused, match="nodes without a CUDA kernel") as found:
        graphrot.convert(tmp_path / "odd.onnx", output=tmp_path / "x", provider="cuda", **options)
    assert "Mish that makes 'odd'" in str(found.value) and not (tmp_path / "x").exists()


def test_a_folder_for_genai_names_the_provider(tmp_path: Path) -> None:
    graphrot.convert(
        built("llama"), output=tmp_path / "x", provider="cuda", recipe="rotate-only", kv="int8", certificate=None
    )
    check_cuda(ir.load(tmp_path / "x" / "model.onnx"))
    config = json.loads((tmp_path / "x" / "genai_config.json").read_text())
    decoder = config["model"]["decoder"]
    assert decoder["session_options"]["provider_options"] == [{"cuda": {}}]
    assert config["search"]["past_present_share_buffer"] is True
