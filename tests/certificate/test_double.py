"""The float64 twin leaves the original alone."""

from __future__ import annotations

import onnx_ir as ir

from graphrot.evaluate.double import to_double
from tests.exported import tiny_onnx


def test_the_original_keeps_its_types() -> None:
    model = ir.load(tiny_onnx("llama"))
    before = [value.dtype for node in model.graph for value in node.outputs]
    twin = to_double(model)
    assert [value.dtype for node in model.graph for value in node.outputs] == before
    assert all(value.dtype != ir.DataType.FLOAT for node in twin.graph for value in node.outputs)
