"""Rotary positions outside of GroupQueryAttention give what they gave inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphrot.model.rotary import unfuse_rotary

HEADS, KV, WIDTH, LENGTH = 4, 2, 32, 32
FLOAT, INT32 = TensorProto.FLOAT, TensorProto.INT32


def _model(*, packed: bool = False, rotary: int = WIDTH, interleaved: int = 0, **changes: Any) -> ir.Model:
    """One attention node; ``changes`` are attributes, or ``opset`` and ``extra`` inputs."""
    opset, extra = changes.pop("opset", 21), changes.pop("extra", [])
    angles = np.outer(np.arange(LENGTH), 0.7 ** np.arange(rotary // 2))
    tables = [
        numpy_helper.from_array(function(angles).astype(np.float32), name)
        for function, name in ((np.cos, "cos"), (np.sin, "sin"))
    ]
    widths = {"q": (HEADS + 2 * KV) * WIDTH} if packed else {"q": HEADS * WIDTH, "k": KV * WIDTH, "v": KV * WIDTH}
    rows = [helper.make_tensor_value_info(name, FLOAT, ["B", "S", width]) for name, width in widths.items()]
    past = [helper.make_tensor_value_info(name, FLOAT, ["B", KV, "P", "D"]) for name in ("past_k", "past_v")]
    sizes = [helper.make_tensor_value_info("last", INT32, ["B"]), helper.make_tensor_value_info("total", INT32, [])]
    operands = ["q", *(("", "") if packed else ("k", "v")), "past_k", "past_v", "last", "total", "cos", "sin", *extra]
    attributes = {"num_heads": HEADS, "kv_num_heads": KV, "do_rotary": 1, "rotary_interleaved": interleaved} | changes
    outputs = ["y", "present_k", "present_v"]
    node = helper.make_node("GroupQueryAttention", operands, outputs, domain="com.microsoft", **attributes)
    ends = [
        helper.make_tensor_value_info("y", FLOAT, ["B", "S", HEADS * WIDTH]),
        *(helper.make_tensor_value_info(name, FLOAT, ["B", KV, "T", "D"]) for name in outputs[1:]),
    ]
    graph = helper.make_graph([node], "g", [*rows, *past, *sizes], ends, tables)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def _session(model: ir.Model) -> ort.InferenceSession:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _steps(session: ort.InferenceSession, lengths: list[int], steps: list[list[int]]) -> list[np.ndarray]:
    """Run a prompt, whose rows are ``lengths`` long and padded on the right, and then chunks; all outputs.

    Rows past a row's length are left out of the answer.
    """
    batch, longest = len(lengths), max(lengths)
    rng = np.random.default_rng(5)
    cache = [np.zeros((batch, KV, 0, WIDTH), np.float32)] * 2
    stored, found = np.zeros(batch, np.int64), []
    for counts in [lengths, *steps]:
        new = max(counts)
        stored = stored + counts
        longest = int(cache[0].shape[2]) + new
        feeds: dict[str, np.ndarray] = {
            value.name: rng.standard_normal((batch, new, value.shape[2])).astype(np.float32)
            for value in session.get_inputs()
            if value.name in ("q", "k", "v")
        }
        feeds |= {"past_k": cache[0], "past_v": cache[1], "total": np.array(longest, np.int32)}
        feeds["last"] = (stored - 1).astype(np.int32)
        y, *cache = session.run(None, feeds)
        found += [y[row, : counts[row]] for row in range(batch)]
        found += [part[row, :, : stored[row]] for part in cache for row in range(batch)]
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("rotary", "interleaved"), [(WIDTH, 0), (WIDTH, 1), (16, 0), (16, 1)])
def test_the_same_numbers(packed: bool, rotary: int, interleaved: int) -> None:
    model = _model(packed=packed, rotary=rotary, interleaved=interleaved)
    before = _session(model)
    assert unfuse_rotary(model) == ("y",)
    turned = [node for node in model.graph if node.op_type == "RotaryEmbedding"]
    assert [node.attributes["interleaved"].as_int() for node in turned] == [interleaved] * 2
    after = _session(model)
    for lengths, steps in (
        ([3, 7, 5], [[1, 1, 1], [1, 1, 1]]),  # padded on the right, then one token for each row
        ([6], [[1], [4], [1]]),  # a second chunk on the cache
        ([4, 4], [[1, 1]]),
    ):
        for a, b in zip(_steps(before, lengths, steps), _steps(after, lengths, steps), strict=True):
            assert np.abs(a - b).max() <= 2e-6 * max(1.0, float(np.abs(a).max()))


def test_positions_that_are_given_are_kept() -> None:
    model = _model(extra=["positions"])
    model.graph.inputs.append(
        ir.Value(name="positions", shape=ir.Shape(["B", "S"]), type=ir.TensorType(ir.DataType.INT64))
    )
    model.graph.node(0).replace_input_with(9, model.graph.inputs[-1])
    assert unfuse_rotary(model) == ("y",)
    (first, second, attention) = list(model.graph)
    assert first.inputs[1] is second.inputs[1] is model.graph.inputs[-1]
    assert len(attention.inputs) == 7 and attention.attributes["do_rotary"].as_int() == 0
    assert "rotary_interleaved" not in attention.attributes


def test_twice_changes_nothing_more() -> None:
    model = _model()
    unfuse_rotary(model)
    names = [node.name for node in model.graph]
    assert unfuse_rotary(model) == () and [node.name for node in model.graph] == names


@pytest.mark.parametrize("changes", [{"do_rotary": 0}, {"sliding_window_cache": 1}, {"opset": 12}])
def test_what_is_left_alone(changes: dict[str, int]) -> None:
    model = _model(**changes)
    assert unfuse_rotary(model) == () and len(model.graph) == 1


def test_norms_inside_are_left_alone() -> None:
    model = _model(extra=["", "", "", "", "", "cos", "cos"])
    assert unfuse_rotary(model) == ()
