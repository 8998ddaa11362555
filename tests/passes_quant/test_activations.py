"""Per-token rounding: equal to the numpy reference, shared by the readers of one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from graphrot.errors import InputRefused
from graphrot.graph import WeightStore
from graphrot.passes.quantize_activations import QuantizeActivations
from graphrot.passes.quantize_weights import QuantizeWeights
from graphrot.passes.records import QuantizedActivation
from graphrot.quant.activations import EPSILON, fake_quantize_tokens
from graphrot.quant.grid import WeightGrid
from tests.passes_quant.graphs import PLAN, Example, check, describe, difference, ids, run_ort

Bits = Literal[4, 8]


def rounded(example: Example, bits: Bits) -> tuple[ir.Model, list[QuantizedActivation]]:
    model = example.model()
    step = QuantizeActivations(PLAN, example.linears, bits=bits)
    assert step(model).modified
    return model, step.records


def expose(model: ir.Model, name: str) -> None:
    value = next(out for node in model.graph for out in node.outputs if out.name == name)
    value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(["batch", "tokens", None])
    model.graph.outputs.append(value)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_those_of_the_reference(bits: Bits) -> None:
    example = Example()
    example.weights["table"][7] = 0  # a token of zeros
    model, _ = rounded(example, bits)
    expose(model, "x.rounded")
    proto = check(model)
    tokens = np.array([[7, 3, 3], [1, 49, 0]])
    want = fake_quantize_tokens(example.weights["table"][tokens], bits)
    assert (want[0, 0] == 0).all()
    for result in (
        ReferenceEvaluator(proto).run(["x.rounded"], {"ids": tokens})[0],
        *(run_ort(proto, tokens, level=level, output="x.rounded") for level in (0, 1, 2, 99)),
    ):
        np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize("bits", [8, 4])
def test_whole_graph(bits: Bits) -> None:
    example = Example()
    proto = check(rounded(example, bits)[0])
    tokens = ids(example)

    def rounding(node: str, x: np.ndarray) -> np.ndarray:
        return x if node == "logits" else fake_quantize_tokens(x.astype(np.float32), bits).astype(np.float64)

    want = example.reference(tokens, rounding=rounding)
    assert difference(run_ort(proto, tokens), want) < 2e-6
    assert difference(example.reference(tokens), want) > 1e-3


def test_float16() -> None:
    example = Example(dtype=np.float16)
    example.weights["table"][7] = 0
    model, _ = rounded(example, 8)
    proto = check(model)
    result = run_ort(proto, np.array([[7, 3]]))
    assert result.dtype == np.float16 and np.isfinite(result).all()


def test_readers_share_one_chain_and_others_keep_the_floats() -> None:
    example = Example()
    model, records = rounded(example, 8)
    assert [(r.input, r.output, r.bits, r.linears) for r in records] == [
        ("x", "x.rounded", 8, ("a", "g")),
        ("flat", "flat.rounded", 8, ("d",)),
    ]
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph) == 2
    shape = next(node for node in model.graph if node.op_type == "Shape")
    assert shape.inputs[0] is not None and shape.inputs[0].name == "x"


def test_golden() -> None:
    model, _ = rounded(Example(), 4)
    parts = ("magnitude", "largest", "range", "scale", "int4", "whole", "rounded")
    assert describe(model, *(f"x.{part}" for part in parts), "a") == [
        "x.magnitude = Abs(x)",
        "x.largest = ReduceMax<keepdims=1>(x.magnitude, last_axis)",
        "x.range = Max(x.largest, least_magnitude)",
        "x.scale = Div(x.range, largest_int4)",
        "x.int4 = QuantizeLinear<axis=-1, block_size=48, output_dtype=22>(x, x.scale)",
        "x.whole = DequantizeLinear(x.int4, one)",
        "x.rounded = Mul(x.whole, x.scale)",
        "a = MatMul(x.rounded, w_a)",
    ]
    least = model.graph.initializers["least_magnitude"].const_value
    assert least is not None and least.numpy() == np.float32(EPSILON)


def test_twice_changes_nothing() -> None:
    example = Example()
    model, _ = rounded(example, 8)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    again = QuantizeActivations(PLAN, example.linears, bits=8)
    assert not again(model).modified
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_a_dropped_scale_is_seen() -> None:
    example = Example()
    model, _ = rounded(example, 8)
    node = next(n for n in model.graph if n.outputs[0].name == "x.rounded")
    node.outputs[0].replace_all_uses_with(node.inputs[0])
    tokens = ids(example)
    assert difference(run_ort(check(model), tokens), example.reference(tokens)) > 0.1


def test_refused_after_the_weights(tmp_path: Path) -> None:
    example = Example()
    model = example.model()
    linear = example.linears[2]
    tensors = example.quantized(WeightGrid(4))
    QuantizeWeights(PLAN, [(linear, tensors["d"])], store=WeightStore(tmp_path))(model)
    with pytest.raises(InputRefused, match="Only the input of a MatMul or Gemm") as caught:
        QuantizeActivations(PLAN, [linear], bits=8).apply(model, set())
    assert "before weights" in str(caught.value)
