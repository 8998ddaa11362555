"""The probe finds sizes by structure, loads no big weights, and says what it needs when it cannot run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto

from graphrot.analysis.analyze import analyze
from graphrot.analysis.probe import Probe
from graphrot.analysis.scope import Scope
from graphrot.errors import InputRefused, UsageError
from tests.analysis.fused import fused_decoder
from tests.analysis.graphs import FFN, FLOAT, GROUPS, HEADS, HIDDEN, INT64, VOCAB, WIDTH, Builder, decoder, rms_norm


def _value(model: ir.Model, name: str) -> ir.Value:
    return next(v for v in (*model.graph.inputs, *model.graph.outputs) if v.name == name)


def test_sizes_follow_the_structure() -> None:
    model, _ = decoder()
    probe = Probe(Scope(model))
    run = probe.run
    sizes = {run.batch, run.sequence, run.past, run.past + run.sequence}
    assert len(sizes) == 4 and not sizes & {1, GROUPS, WIDTH}
    logits, present = probe.seen(_value(model, "logits")), probe.seen(_value(model, "present_k"))
    assert logits is not None and logits.shape == (run.batch, run.sequence, VOCAB)
    assert logits.static == (False, False, True)
    assert present is not None and present.shape == (run.batch, GROUPS, run.past + run.sequence, WIDTH)
    assert present.static == (False, True, False, True)


def test_only_trusted_numbers_are_given() -> None:
    model, _ = decoder()
    scope = Scope(model)
    probe = Probe(scope)
    targets = [node.inputs[1] for node in model.graph if node.op_type == "Expand"]
    numbers = [probe.number(v) for v in targets if v is not None]
    total = probe.run.past + probe.run.sequence
    assert [n.tolist() for n in numbers if n is not None] == 2 * [
        [probe.run.batch, GROUPS, HEADS // GROUPS, total, WIDTH]
    ]
    assert probe.number(_value(model, "ids")) is None
    assert probe.number(_value(model, "logits")) is None


class _Unreadable:
    def __call__(self) -> ir.TensorProtocol:
        raise AssertionError("a weight of a linear was read")


def test_weights_of_linears_are_not_read() -> None:
    model, _ = decoder(bias=True)
    expected = analyze(model)
    unread = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None and value.name
        if len(tensor.shape) == 2 and tensor.dtype == ir.DataType.FLOAT and VOCAB not in tuple(tensor.shape):
            value.const_value = ir.LazyTensor(_Unreadable(), tensor.dtype, ir.Shape(tensor.shape), name=value.name)
            unread += 1
    assert unread == 7
    assert analyze(model) == expected


def _only_batch_one(b: Builder, x: str) -> str:
    return b.op("Unsqueeze", b.op("Squeeze", x, b.ints(0)), b.ints(0))


def _one_token_or_one_sequence(b: Builder, x: str) -> str:
    """Fails where both batch and sequence are over 1, as some attention kernels do behind a past."""
    batch, length = (b.op("Slice", b.op("Shape", "ids"), b.ints(k), b.ints(k + 1)) for k in (0, 1))
    smaller = b.op("Min", batch, length)
    return b.op("Reshape", x, b.op("Concat", b.op("Div", batch, smaller), length, b.ints(HIDDEN), axis=0))


def test_batches_that_a_graph_cannot_run() -> None:
    model, _ = decoder(embedded=_one_token_or_one_sequence)
    probe = Probe(Scope(model))
    assert probe.run.batch == 1 and probe.run.sequence > 1
    logits = probe.seen(_value(model, "logits"))
    assert logits is not None and logits.static == (False, False, True)

    model, _ = decoder(embedded=_only_batch_one)
    logits = Probe(Scope(model)).seen(_value(model, "logits"))
    assert logits is not None and logits.static == (True, False, True)
    assert Counter(s.kind for s in analyze(model).spaces) == {"R1": 1, "R2": 1, "R3": 1, "R4": 1, "O": 1}


def _positional(b: Builder, shape: list[Any]) -> ir.Model:
    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), b.input("a", ["n", "m"], INT64))
    x = b.op("Add", x, b.op("Gather", b.constant(b.rng.standard_normal((64, HIDDEN))), b.input("b", shape, INT64)))
    b.result(b.linear(rms_norm(b, x), HIDDEN, FFN), "y")
    b.output("y", ["n", "m", FFN])
    return b.model()


@pytest.mark.parametrize(
    "shape", [["n", "m"], ["k", "l"], [None, None], [1, "m"], ["m"], ["z"], ["n", "batch-size"], ["n", "a.0 b"]]
)
def test_integer_inputs_of_any_form(shape: list[Any]) -> None:
    model = _positional(Builder(), shape)
    facts = analyze(model)
    (space,) = facts.spaces
    assert space.kind == "R1" and sorted(u.role for u in space.producers) == ["table", "table"]


def _with_mask(shape: list[Any], dtype: int) -> ir.Model:
    """A mask of rank 4 in front of the softmax."""
    b = Builder()
    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), b.input("ids", ["b", "s"], INT64))
    parts = [b.linear(x, HIDDEN, HEADS * WIDTH) for _ in range(3)]
    q, k, v = (b.op("Transpose", b.op("Reshape", p, b.ints(0, 0, HEADS, WIDTH)), perm=[0, 2, 1, 3]) for p in parts)
    cache = ["b", HEADS, "p", WIDTH]
    k, v = b.op("Concat", b.input("pk", cache), k, axis=2), b.op("Concat", b.input("pv", cache), v, axis=2)
    scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2]))
    mask = b.input("mask", shape, dtype)
    if dtype == TensorProto.BOOL:
        scores = b.op("Where", mask, scores, b.constant(-1e9))
    else:
        scores = b.op("Add", scores, mask)
    y = b.op("Transpose", b.op("MatMul", b.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    b.result(b.linear(b.op("Reshape", y, b.ints(0, 0, HEADS * WIDTH)), HEADS * WIDTH, FFN), "y")
    b.output("y", ["b", "s", FFN])
    for name, tensor in (("qk", k), ("qv", v)):
        b.output(b.result(tensor, name), ["b", HEADS, "t", WIDTH])
    return b.model()


@pytest.mark.parametrize("shape", [["b", 1, "s", "t"], [None, None, None, None], ["b", HEADS, "s", "p + s"]])
@pytest.mark.parametrize("dtype", [FLOAT, TensorProto.BOOL])
def test_masks_of_rank_four(shape: list[Any], dtype: int) -> None:
    facts = analyze(_with_mask(shape, dtype))
    assert {s.kind for s in facts.spaces} >= {"R2", "R3"}
    assert len(facts.caches) == 2


def test_sizes_can_be_given() -> None:
    model, _ = decoder()
    probe = Probe(Scope(model), {"past": 7, "batch": 3})
    assert probe.seen(_value(model, "past_k")) is not None
    seen = probe.seen(_value(model, "past_k"))
    assert seen is not None and seen.shape == (3, GROUPS, 7, WIDTH)
    assert analyze(model, sizes={"past": 7}).caches


def test_unknown_size_names_are_refused() -> None:
    model, _ = decoder()
    with pytest.raises(UsageError, match="no symbolic dimension 'heads'") as caught:
        analyze(model, sizes={"heads": 3})
    assert "sequence" in str(caught.value)
    with pytest.raises(UsageError, match="size of dimension 'past' is -1"):
        analyze(model, sizes={"past": -1})


def _head_size_unknown() -> ir.Model:
    """The size of a head is a dimension of the input; nothing in the graph says what it is."""
    b = Builder()
    cache = b.input("k", ["b", 3, "p", "d"])
    flat = b.op("Reshape", b.op("Transpose", cache, perm=[0, 2, 1, 3]), b.ints(0, 0, -1))
    b.result(b.op("MatMul", flat, b.matrix(21, FFN)), "y")
    b.output("y", ["b", "p", FFN])
    b.output(b.result(b.op("Identity", cache), "k2"), ["b", 3, "p", "d"])
    return b.model()


def test_what_cannot_run_is_refused_with_the_reason() -> None:
    with pytest.raises(InputRefused) as caught:
        analyze(_head_size_unknown())
    error = caught.value
    assert "none of the sizes" in error.what
    assert error.why and "MatMul that makes 'y' takes rows of 21" in error.why
    assert error.do and "sizes" in error.do and "d" in error.do
    assert error.where and "k [" in error.where
    analyze(_head_size_unknown(), sizes={"d": 7})


def test_a_symbolic_head_size_follows_from_the_attention() -> None:
    model = fused_decoder("grouped", rotary="inside")
    expected = analyze(model)
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        if len(value.shape) == 4:
            value.shape = ir.Shape([*value.shape[:3], "head"])
    assert analyze(model) == expected


def test_broken_graphs_are_refused() -> None:
    model, _ = decoder()
    node = next(n for n in model.graph if n.op_type == "Softmax")
    node.op_type = "Sooftmax"
    with pytest.raises(InputRefused, match="does not load the graph") as caught:
        analyze(model)
    assert caught.value.why and "Sooftmax" in caught.value.why


def test_double_and_half_precision() -> None:
    for dtype in (np.float64, np.float16):
        b = Builder()
        kind = ir.DataType.from_numpy(np.dtype(dtype))
        x = b.op("Gather", b.constant(np.ones((VOCAB, HIDDEN)), dtype), b.input("ids", ["b", "s"], INT64))
        h = b.op("RMSNormalization", x, b.constant(np.linspace(1, 2, HIDDEN), dtype), axis=-1)
        b.result(b.op("MatMul", h, b.constant(np.ones((HIDDEN, VOCAB)), dtype)), "y")
        b.output("y", ["b", "s", VOCAB])
        b.outputs[0].type.tensor_type.elem_type = int(kind)
        facts = analyze(b.model())
        assert [s.kind for s in facts.spaces] == ["R1"] and len(facts.gains) == 1


def test_a_graph_of_one_token_at_a_time() -> None:
    """The length of the mask follows: what is stored, and one."""
    b = Builder()
    ids, mask = b.input("ids", ["batch", 1], INT64), b.input("mask", ["batch", "total"])
    past = b.input("past", ["batch", GROUPS, "stored", WIDTH])
    new = b.op("Reshape", b.op("Gather", b.matrix(VOCAB, GROUPS * WIDTH), ids), b.ints(0, GROUPS, 1, WIDTH))
    present = b.op("Concat", past, new, axis=2)
    b.result(present, "present")
    b.output("present", ["batch", GROUPS, "total", WIDTH])
    b.result(b.op("Mul", "present", b.op("Unsqueeze", mask, b.ints(1, 3))), "out")
    b.output("out", ["batch", GROUPS, "total", WIDTH])
    model = b.model()
    probe = Probe(Scope(model))
    seen = probe.seen(_value(model, "out"))
    assert probe.run.sequence == 1 and seen is not None
    assert seen.shape == (probe.run.batch, GROUPS, probe.run.past + 1, WIDTH)
