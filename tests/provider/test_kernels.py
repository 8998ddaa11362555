"""The list of CUDA kernels: that it is what a release registers, and how a kernel is chosen."""

from __future__ import annotations

import json

import onnx_ir as ir
import pytest

from graphrot.emit.cuda.kernels import LIST, Kernel, cuda_kernels

F16, BF16, F32, U8 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.UINT8
I8, I32, I64 = ir.DataType.INT8, ir.DataType.INT32, ir.DataType.INT64


def serves(op: str, *inputs: ir.DataType, domain: str = "", out: ir.DataType | None = None) -> bool:
    values = [ir.Value(name=f"x{number}") for number in range(len(inputs))]
    node = ir.Node(domain, op, values, num_outputs=1)
    return cuda_kernels().serves(node, 21, inputs, [out])


def test_the_list_is_of_a_release_with_every_kind_of_operator() -> None:
    content = json.loads(LIST.read_text(encoding="utf-8"))
    assert content["onnxruntime_gpu"].startswith("1.")
    assert len(content["kernels"]) > 200
    for entries in content["kernels"].values():
        for start, end, types in entries:
            assert start >= 1 and (end is None or end >= start)
            assert all(names == sorted(names) for names in types.values())


@pytest.mark.parametrize("half", [F16, BF16])
def test_what_a_decoder_needs_in_half(half: ir.DataType) -> None:
    assert serves("MatMul", half, half)
    assert serves("Add", half, half)
    assert serves("Mul", half, half)
    assert serves("Cast", F32, out=half)
    assert serves("Gather", half, I64)
    assert serves("MatMulNBits", half, U8, half, domain="com.microsoft")
    assert serves("SkipSimplifiedLayerNormalization", half, half, half, domain="com.microsoft")
    for cache in (half, I8, U8):
        assert serves("GroupQueryAttention", half, half, half, cache, cache, I32, I32, domain="com.microsoft")
    assert serves("RotatedMatMul", half, U8, F32, domain="graphrot")


def test_what_cuda_lacks() -> None:
    assert not serves("BitShift", U8, U8)
    assert not serves("BitwiseAnd", U8, U8)
    assert not serves("DynamicQuantizeLinear", F32)
    assert not serves("GroupQueryAttention", F32, F32, F32, F32, F32, I32, I32, domain="com.microsoft")
    assert not serves("GroupQueryAttention", F16, F16, F16, F32, F32, I32, I32, domain="com.microsoft")
    assert not serves("NoSuchOperator", F16) and not serves("Relu", F16, domain="somebody")
    assert not serves("RotatedMatMul", ir.DataType.DOUBLE, U8, F32, domain="graphrot")


def test_how_versions_match() -> None:
    """A kernel without a last version serves the version it begins with, and no later definition."""
    closed, opened = Kernel(7, 12, {}), Kernel(13, None, {})
    assert closed.takes(7, []) and closed.takes(9, []) and not closed.takes(13, [])
    assert opened.takes(13, []) and not opened.takes(14, []) and not opened.takes(7, [])


def test_how_types_match() -> None:
    kernel = Kernel(1, None, {"T": frozenset({"float16"}), "X": frozenset({"int8"})})
    one, other = frozenset({"T", "A"}), frozenset({"T1", "X"})
    assert kernel.takes(1, [(one, "float16"), (other, "int8")])
    assert not kernel.takes(1, [(one, "float")])
    assert not kernel.takes(1, [(other, "uint8")])
    assert kernel.takes(1, [(one, None), (frozenset({"T9"}), "string")]), "what is not known or not bound is free"
