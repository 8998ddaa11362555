"""Whole conversions: which recipe writes which operators, and that files answer alike without the library."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphrot
from graphrot.evaluate.session import DecoderSession, open_decoder
from tests.exported import tiny_onnx
from tests.tiny import VOCAB

RTN = {"solver": "rtn", "certificate": None}


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in ir.load(path).graph)


@pytest.mark.parametrize(
    ("name", "options", "ours", "rotating", "transforms"),
    [
        ("llama_tied", {}, 15, 2, 0),
        ("llama_tied", {"activations": "int4", "group": 32}, 15, 2, 0),
        ("llama_tied", {"weights": "int8", "group": 32, "symmetric": False}, 15, 2, 0),
        ("llama_tied", {"head": "int4", "embedding": "int4"}, 14, 2, 0),
        ("llama_tied", {"rotations": None}, 15, 0, 0),
        ("qwen2", {"only": ("R1", "R2", "R3", "R4", "O")}, 15, 4, 4),
        ("gpt2", {}, 9, 2, 0),
    ],
    ids=str,
)
def test_every_rounded_linear_is_ours(
    name: str, options: dict[str, Any], ours: int, rotating: int, transforms: int, tmp_path: Path
) -> None:
    graphrot.convert(tiny_onnx(name), output=tmp_path / "x.onnx", recipe="w4a8", **RTN, **options)
    model = ir.load(tmp_path / "x.onnx")
    ops = operators(tmp_path / "x.onnx")
    assert (ops["RotatedMatMul"], ops["HadamardTransform"]) == (ours, transforms)
    assert ops["MatMulNBits"] == (options.get("head") == "int4")
    assert not {"QuantizeLinear", "Round", "ReduceMax", "Gemm"} & set(ops)
    nodes = [node for node in model.graph if node.op_type == "RotatedMatMul"]
    assert sum(node.attributes["rotate"].as_int() for node in nodes) == rotating
    expected = {("graphrot", "RotatedMatMul", "")} | ({("graphrot", "HadamardTransform", "")} if transforms else set())
    assert set(model.functions) == expected and model.opset_imports["graphrot"] == 1


def test_biases_are_in_the_operator(tmp_path: Path) -> None:
    """Those of q, k and v; those of all, and the beta of a norm at the head."""
    for name, biases in (("qwen2", 6), ("gpt2", 9)):
        graphrot.convert(tiny_onnx(name), output=tmp_path / f"{name}.onnx", recipe="w4a8", **RTN)
        nodes = [node for node in ir.load(tmp_path / f"{name}.onnx").graph if node.op_type == "RotatedMatMul"]
        given = [node.inputs[4] for node in nodes if len(node.inputs) > 4]
        assert len(given) == biases
        assert all(value is not None and value.dtype == ir.DataType.FLOAT for value in given)
        assert all(node.inputs[3] is not None for node in nodes if len(node.inputs) > 4)


def test_the_kernels_of_the_runtime(tmp_path: Path) -> None:
    """Asked for, and for whatever has float activations."""
    for name, options in {"asked": {"kernels": "ort"}, "weights": {"recipe": "w4a16"}}.items():
        graphrot.convert(
            tiny_onnx("llama_tied"), output=tmp_path / f"{name}.onnx", **{"recipe": "w4a8", **RTN, **options}
        )
        ops = operators(tmp_path / f"{name}.onnx")
        assert ops["MatMulNBits"] == 15 and ops["RotatedMatMul"] == 0 and ops["HadamardTransform"] == 2
    levels = [node.attributes["accuracy_level"].as_int() for node in ir.load(tmp_path / "weights.onnx").graph
              if node.op_type == "MatMulNBits"]  # fmt: skip
    assert sorted(levels) == [0] * 14 + [4], "the 8-bit head alone rounds its input"


@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_answers_without_the_library(name: str, tmp_path: Path) -> None:
    """The same tokens from kernels and functions, one by one, on caches of their own."""
    graphrot.convert(tiny_onnx(name), output=tmp_path / "x", recipe="w4a8", **RTN)
    kernels, functions = (open_decoder(tmp_path / "x", library=library) for library in (True, False))
    for seed in range(3):
        start = np.random.default_rng(seed).integers(0, VOCAB, (1, 6))
        assert greedy(kernels, start) == greedy(functions, start)


def test_the_target_says_what_the_canonical_form_says(tmp_path: Path) -> None:
    """The target portable keeps the canonical form; embeddings and heads stay float, where the two would differ."""
    settings: dict[str, Any] = {"recipe": "w4a8", "head": None, "embedding": None, **RTN}
    for target in ("ort", "portable"):
        graphrot.convert(tiny_onnx("qwen2"), output=tmp_path / target, target=target, **settings)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 12))
    ours, canonical = (open_decoder(tmp_path / target, library=False).run(tokens)[0] for target in ("ort", "portable"))
    errors = np.abs(ours - canonical).max(axis=-1) / np.abs(canonical).max()
    assert np.median(errors) < 1e-5 and errors.max() < 0.03


def greedy(decoder: DecoderSession, start: np.ndarray, length: int = 12) -> list[int]:
    logits, cache = decoder.run(start)
    found: list[int] = []
    while len(found) < length:
        token = logits[:, -1].argmax(axis=-1)[:, None]
        found.append(int(token[0, 0]))
        logits, cache = decoder.run(token, cache)
    return found
