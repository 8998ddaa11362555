"""A node in the way costs the site it is in the way of, and is named; the rest stays exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import Facts
from graphrot.errors import InputRefused
from tests.analysis.graphs import FFN, GROUPS, HIDDEN, INT64, VOCAB, WIDTH, Builder, Hook, decoder, feeds_for, rms_norm
from tests.analysis.rotated import relative_error

EXACT = 1e-12


def _kinds(facts: Facts) -> Counter[str]:
    return Counter(s.kind for s in facts.spaces if s.kind != "other")


def _also_output(shape: list[object]) -> Hook:
    def hook(b: Builder, x: str) -> str:
        b.output(b.result(b.op("Identity", x), "extra"), shape)
        return x

    return hook


def _tanh(b: Builder, x: str) -> str:
    return b.op("Tanh", x)


def _one_channel_less(b: Builder, x: str) -> str:
    """Set the first channel to zero, by a mask for each channel."""
    return b.op("Mul", x, b.constant([0.0] + [1.0] * (HIDDEN - 1)))


def _captured(b: Builder, x: str) -> str:
    """An If whose branches look at the tensor from outside."""
    branches = []
    for factor in ("Identity", "Neg"):
        name = b.name()
        node = helper.make_node(factor, [x], [name])
        branches.append(
            helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])
        )
    flag = b.op("Greater", b.op("ReduceMax", x, keepdims=0), b.constant(1e6))
    return b.op("If", flag, then_branch=branches[1], else_branch=branches[0])


def _picked_channels(b: Builder, x: str) -> str:
    """Reverse the channels with an index that depends on data."""
    zero = b.op("Cast", b.op("Mul", b.op("ReduceMax", x, keepdims=0), b.constant(0.0)), to=TensorProto.INT64)
    return b.op("Gather", x, b.op("Add", b.ints(*reversed(range(HIDDEN))), zero), axis=2)


def _masked_heads(b: Builder, x: str) -> str:
    """Give each head its own factor, and each of its elements one more."""
    return b.op("Mul", x, b.constant(b.rng.uniform(0.5, 2, (GROUPS, 1, WIDTH))))


def _dequantized(b: Builder, x: str) -> str:
    weight = b.op("DequantizeLinear", b.constant(np.ones((FFN, FFN)), np.int8), b.constant(0.1))
    b.output(b.result(b.op("MatMul", x, weight), "extra"), ["batch", "sequence", FFN])
    return x


def _values_read(b: Builder, x: str) -> str:
    b.output(b.result(b.op("ReduceMax", x, b.ints(3), keepdims=1), "extremes"), ["batch", GROUPS, "sequence", 1])
    return x


CASES = {
    "unknown operator on the residual stream": ({"residual": _tanh}, "R1", "Tanh"),
    "constant for each channel on the residual stream": ({"residual": _one_channel_less}, "R1", "Mul"),
    "captured by a subgraph": ({"residual": _captured}, "R1", "ReduceMax"),
    "channels picked at run time": ({"residual": _picked_channels}, "R1", "ReduceMax"),
    "activation is an output": ({"activation": _also_output(["batch", "sequence", FFN])}, "R4", "Identity"),
    "values scaled by element": ({"values": _masked_heads, "cache": False}, "R2", "Mul"),
    "values looked at": ({"values": _values_read}, "R2", "ReduceMax"),
    "query is an output": ({"query": _also_output(["batch", 4, "sequence", WIDTH])}, "R3", "Identity"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_node_in_the_way_is_named(case: str) -> None:
    options, kind, op = CASES[case]
    model, _ = decoder(**options)
    facts = analyze(model)
    whole = Counter(s.kind for s in facts.spaces if s.kind != "R1" or s.placement == "merged")
    missing = Counter({"R1": 1, "R2": 1, "R3": 1, "R4": 1}) - whole
    found = [r for r in facts.refused if r.kind == kind]
    if case == "values scaled by element":
        # The scaled values start new channels: an online rotation may stand there, a merged one not.
        assert [s.placement for s in facts.spaces if s.kind == "R2"] == ["online"]
        assert not missing
    else:
        assert set(missing) == {kind}
        assert found and {r.op for r in found} == {op}
        firsts = {node.outputs[0].name for node in model.graph}
        assert all(r.node in firsts and r.reason for r in facts.refused)
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def test_the_reason_names_the_output() -> None:
    model, _ = decoder(activation=_also_output(["batch", "sequence", FFN]))
    (refusal,) = [r for r in analyze(model).refused if r.kind == "R4"]
    assert "graph output 'extra'" in refusal.reason


def _embedded_by(lookup: Callable[[Builder, str], str]) -> tuple[Facts, float]:
    """Two residual branches on an embedding of one's own; facts, and their error in float64."""
    b = Builder()
    x = lookup(b, b.input("ids", ["batch", "sequence"], TensorProto.INT64))
    for _ in range(2):
        act = b.op("Sigmoid", b.linear(rms_norm(b, x), HIDDEN, FFN))
        x = b.op("Add", x, b.linear(act, FFN, HIDDEN))
    b.result(b.linear(rms_norm(b, x), HIDDEN, VOCAB), "logits")
    b.output("logits", ["batch", "sequence", VOCAB])
    model = b.model()
    facts = analyze(model)
    return facts, relative_error(model, facts, feeds_for(model))


def _columns(b: Builder, ids: str) -> str:
    """Columns of a table as it is stored for the head."""
    return b.op("Transpose", b.op("Gather", b.matrix(HIDDEN, VOCAB), ids, axis=1), perm=[1, 2, 0])


def _hot(b: Builder, ids: str) -> str:
    return b.op("Cast", b.op("OneHot", ids, b.constant(VOCAB, np.int64), b.ints(0, 1)), to=TensorProto.FLOAT)


def _one_hot(b: Builder, ids: str) -> str:
    return b.op("MatMul", _hot(b, ids), b.matrix(VOCAB, HIDDEN))


def _computed_table(b: Builder, ids: str) -> str:
    return b.op("Gather", b.op("Tanh", b.matrix(VOCAB, HIDDEN)), ids)


def _elements(b: Builder, ids: str) -> str:
    """Each element of a row looked up on its own."""
    index = b.op(
        "Expand", b.op("Unsqueeze", ids, b.ints(-1)), b.op("Concat", b.op("Shape", ids), b.ints(HIDDEN), axis=0)
    )
    table = b.op("Unsqueeze", b.matrix(VOCAB, HIDDEN), b.ints(0))
    wide = b.op("Expand", table, b.op("Concat", b.op("Shape", ids, end=1), b.ints(VOCAB, HIDDEN), axis=0))
    return b.op("GatherElements", wide, index, axis=1)


def test_columns_of_a_table_are_an_embedding() -> None:
    facts, error = _embedded_by(_columns)
    (r1,) = [s for s in facts.spaces if s.kind == "R1"]
    (table,) = [u for u in r1.producers if u.role == "table"]
    assert table.axis == 0 and table.groups == (((0, 1, HIDDEN),),)
    assert facts.refused == () and error <= EXACT


@pytest.mark.parametrize(
    ("lookup", "op"), [(_one_hot, "MatMul"), (_computed_table, "Gather"), (_elements, "GatherElements")]
)
def test_behind_an_embedding_that_is_not_recognized_a_transform_may_stand(
    lookup: Callable[[Builder, str], str], op: str
) -> None:
    """But for a product by a constant, which is a linear like others."""
    facts, error = _embedded_by(lookup)
    (r1,) = [s for s in facts.spaces if s.kind == "R1"]
    assert [use.op for use in r1.online] == [op][: op != "MatMul"] and not r1.optional and not r1.exits
    assert facts.refused == () and error <= EXACT


def test_a_stream_that_begins_anywhere_and_is_looked_at_is_refused() -> None:
    def looked_at(b: Builder, ids: str) -> str:
        x = _elements(b, ids)
        b.output(b.result(b.op("ReduceMax", x, b.ints(2), keepdims=0), "extremes"), ["batch", "sequence"])
        return x

    facts, error = _embedded_by(looked_at)
    (refusal,) = [r for r in facts.refused if r.kind == "R1"]
    assert "R1" not in _kinds(facts) and error <= EXACT
    assert refusal.op == "ReduceMax" and refusal.reason


def test_a_model_without_a_residual_stream_has_no_r1_to_explain() -> None:
    b = Builder()
    hot = _hot(b, b.input("ids", ["b", "s"], TensorProto.INT64))
    y = b.linear(b.op("Tanh", b.linear(hot, VOCAB, HIDDEN)), HIDDEN, FFN)
    b.output(b.result(y, "y"), ["b", "s", FFN])
    assert not [r for r in analyze(b.model()).refused if r.kind == "R1"]


def test_post_norms_need_online_help_and_are_an_option() -> None:
    """A norm behind the residual branch: its gain has no matmul to fold into."""
    model, _ = decoder(branch=rms_norm)
    facts = analyze(model)
    (r1,) = [s for s in facts.spaces if s.kind == "R1"]
    assert r1.optional and r1.placement == "online" and [use.op for use in r1.online] == ["Mul"]
    refusal = next(r for r in facts.refused if r.kind == "R1")
    assert refusal.op == "Mul" and "gain" in refusal.reason and "--online-r1 puts 1 transform" in refusal.change
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def _first_token(b: Builder, x: str) -> str:
    """A token picked by an index from data."""
    zero = b.op("Mul", b.op("ReduceMax", "positions", keepdims=0), b.constant(0, np.int64))
    return b.op("Unsqueeze", b.op("Gather", x, zero, axis=1), b.ints(1))


def test_a_token_picked_at_run_time_is_no_obstacle() -> None:
    """Every token carries the same channels."""
    model, _ = decoder(final=_first_token)
    facts = analyze(model)
    assert _kinds(facts) == {"R1": 1, "R2": 1, "R3": 1, "R4": 1, "O": 1}
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def test_quantized_weights_are_named() -> None:
    """A weight that is dequantized in the graph."""
    model, _ = decoder(activation=_dequantized)
    (refusal,) = analyze(model).refused
    assert refusal.kind == "R4" and "comes out of DequantizeLinear" in refusal.reason


def test_facts_name_only_what_the_model_has() -> None:
    model, _ = decoder(bias=True)
    facts = analyze(model)
    values = {v.name: v for node in model.graph for v in (*node.outputs, *node.inputs) if v is not None}
    for space in facts.spaces:
        for use in (*space.producers, *space.consumers):
            node = values[use.node].producer()
            assert isinstance(node, ir.Node) and node.outputs[0].name == use.node
            operand = node.inputs[use.input]
            assert operand is not None and operand.name == use.tensor and node.op_type == use.op
        assert all(o.tensor in values for o in space.online)


def test_a_bias_that_does_not_fit_is_refused_by_node() -> None:
    """The probe runs without the weights of linears, so ONNX Runtime does not see this there."""
    b = Builder()
    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), b.input("ids", ["n"], INT64))
    b.result(b.op("Gemm", x, b.matrix(HIDDEN, FFN), b.constant(b.rng.standard_normal((FFN - 1, 1)))), "y")
    b.output("y", ["n", FFN])
    with pytest.raises(InputRefused, match="Gemm that makes 'y' do not fit"):
        analyze(b.model())
