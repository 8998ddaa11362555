"""Forms that exporters write the same thing in: constants of one number, sums of many, masks of rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto

from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import Facts, RotationSpace
from tests.analysis.graphs import FFN, HIDDEN, VOCAB, Builder, layer_op, rms_norm
from tests.analysis.rotated import relative_error

Norm = Callable[[Builder, str], str]


def _gemm(b: Builder, x: str, rows: int, columns: int, bias: str = "", **factors: float) -> str:
    return b.op("Gemm", x, b.matrix(rows, columns), *([bias] if bias else []), **factors)


def _branch(b: Builder, x: str, **factors: float) -> str:
    return _gemm(b, b.op("Sigmoid", _gemm(b, x, HIDDEN, FFN, b.vector(FFN), **factors)), FFN, HIDDEN, b.vector(HIDDEN))


def _embedded(b: Builder) -> str:
    ids = b.input("ids", ["tokens"], TensorProto.INT64)
    return b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), ids)


def _ended(b: Builder, x: str, norm: Norm, **factors: float) -> ir.Model:
    b.result(_gemm(b, norm(b, x), HIDDEN, VOCAB, b.vector(VOCAB), **factors), "logits")
    b.output("logits", ["tokens", VOCAB])
    return b.model()


def _feeds(model: ir.Model) -> dict[str, np.ndarray]:
    """Five tokens, every other one of which a mask shows."""
    rng = np.random.default_rng(3)
    made = {
        "ids": rng.integers(0, VOCAB, 5),
        "x": rng.standard_normal((5, HIDDEN)),
        "mask": np.arange(5) % 2 == 0,
    }
    return {value.name: made[value.name] for value in model.graph.inputs if value.name}


def _exact(model: ir.Model) -> Facts:
    """Facts that hold: in float64, but for Mean, which ONNX Runtime has in float32 alone."""
    facts = analyze(model)
    double = not any(node.op_type == "Mean" for node in model.graph)
    assert relative_error(model, facts, _feeds(model), double=double) <= (1e-12 if double else 2e-5)
    return facts


def _r1(model: ir.Model) -> RotationSpace:
    facts = _exact(model)
    (space,) = [s for s in facts.spaces if s.kind == "R1"]
    assert space.placement == "merged" and not [r for r in facts.refused if r.kind == "R1"]
    return space


@pytest.mark.parametrize("norm", [rms_norm, layer_op])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_bias_of_one_number_keeps_the_mean(shape: tuple[int, ...], norm: Norm) -> None:
    """Of a Gemm that writes to the stream. What reads it keeps its place."""
    b = Builder()
    x = b.input("x", ["tokens", HIDDEN])
    first = _gemm(b, x, HIDDEN, HIDDEN, b.constant(np.full(shape, 0.7)))
    x = b.op("Add", first, _branch(b, norm(b, first)))
    space = _r1(_ended(b, x, norm))
    assert space.mean_preserving and not space.mean_folds
    assert space.mean_reader is not None and space.mean_reader.node == first


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_bias_of_one_number_behind_a_norm_is_no_reader_of_the_mean(shape: tuple[int, ...]) -> None:
    b = Builder()
    x = _embedded(b)
    hidden = b.op("Sigmoid", _gemm(b, layer_op(b, x), HIDDEN, FFN, b.constant(np.full(shape, 0.7))))
    x = b.op("Add", x, _gemm(b, hidden, FFN, HIDDEN))
    assert _r1(_ended(b, x, layer_op)).mean_folds


def test_zeros_for_a_bias_change_nothing() -> None:
    b = Builder()
    x = _embedded(b)
    x = b.op("Add", x, _gemm(b, _gemm(b, layer_op(b, x), HIDDEN, FFN), FFN, HIDDEN, b.constant(0.0)))
    assert _r1(_ended(b, x, layer_op)).mean_folds


def test_a_norm_with_one_number_for_gain_and_shift() -> None:
    def norm(b: Builder, x: str) -> str:
        return b.op("LayerNormalization", x, b.constant([1.3]), b.constant([0.2]), axis=-1)

    b = Builder()
    x = _embedded(b)
    x = b.op("Add", x, _branch(b, norm(b, x)))
    model = _ended(b, x, norm)
    space = _r1(model)
    assert space.mean_preserving and not space.mean_folds


@pytest.mark.parametrize("op", ["Sum", "Mean"])
@pytest.mark.parametrize("constant", [None, "vector", "number", "zeros"])
@pytest.mark.parametrize("norm", [rms_norm, layer_op])
def test_a_sum_of_many_is_a_chain_of_sums(op: str, constant: str | None, norm: Norm) -> None:
    b = Builder()
    x = _embedded(b)
    y = norm(b, x)
    extra = {"vector": lambda: b.vector(HIDDEN), "number": lambda: b.constant(0.3), "zeros": lambda: b.constant(0.0)}
    x = b.op(op, x, _branch(b, y), *([extra[constant]()] if constant else []), _branch(b, y))
    space = _r1(_ended(b, x, norm))
    assert any(use.op == op for use in space.producers) == (constant == "vector")
    assert space.mean_preserving == (norm is layer_op or constant == "number")
    assert space.mean_folds == (norm is layer_op and constant != "number")


def test_a_constant_twice_in_a_sum_has_no_place_of_its_own() -> None:
    b = Builder()
    x, twice = _embedded(b), b.vector(HIDDEN)
    x = b.op("Sum", x, twice, _branch(b, rms_norm(b, x)), twice)
    assert {r.op for r in _exact(_ended(b, x, rms_norm)).refused if r.kind == "R1"} == {"Sum"}


@pytest.mark.parametrize("norm", [rms_norm, layer_op])
@pytest.mark.parametrize("turned", [False, True])
def test_rows_set_to_zero_by_a_mask_of_tokens(turned: bool, norm: Norm) -> None:
    b = Builder()
    x = _embedded(b)
    mask = b.op("Unsqueeze", b.input("mask", ["tokens"], TensorProto.BOOL), b.ints(-1))
    x = b.op("Where", mask, b.constant(0.0), x) if turned else b.op("Where", mask, x, b.constant(0.0))
    x = b.op("Add", x, _branch(b, norm(b, x)))
    assert _r1(_ended(b, x, norm)).mean_folds == (norm is layer_op)


def test_behind_channels_set_to_zero_the_stream_begins() -> None:
    b = Builder()
    x = _embedded(b)
    x = b.op("Where", b.constant(np.arange(HIDDEN) > 2, np.bool_), x, b.constant(0.0))
    x = b.op("Add", x, _branch(b, rms_norm(b, x)))
    facts = _exact(_ended(b, x, rms_norm))
    assert [use.op for s in facts.spaces if s.kind == "R1" for use in s.online] == ["Where"]


@pytest.mark.parametrize("beta", [0.0, 0.5, 3.0])
def test_a_shift_folds_beside_a_bias_with_a_factor(beta: float) -> None:
    b = Builder()
    x = _embedded(b)
    x = b.op("Add", x, _branch(b, layer_op(b, x), beta=beta))
    model = _ended(b, x, layer_op)
    assert _r1(model) and len(analyze(model).gains) == 2


def test_a_product_with_a_factor_is_the_reason_that_a_shift_stays() -> None:
    """Alpha stands in front of the product, and would multiply a shift in the bias no more."""
    b = Builder()
    x = _embedded(b)
    x = b.op("Add", x, _branch(b, layer_op(b, x), alpha=2.0))
    facts = _exact(_ended(b, x, layer_op))
    assert "(alpha)" in next(r.reason for r in facts.refused if r.kind == "R1")


def test_a_stream_that_linears_read_behind_gains_alone_is_not_lost_without_a_word() -> None:
    """No table begins it, and no linear reads it but behind norms whose gains stay."""
    b = Builder()
    x = _gemm(b, b.input("x", ["tokens", HIDDEN]), HIDDEN, HIDDEN, b.vector(HIDDEN))
    first = layer_op(b, x)
    x = b.op("Add", x, _branch(b, first, alpha=2.0))
    facts = _exact(_ended(b, x, layer_op, alpha=0.5))
    (refusal,) = [r for r in facts.refused if r.kind == "R1"]
    assert not [s for s in facts.spaces if s.kind == "R1"]
    assert refusal.node == first and "(alpha)" in refusal.reason and "alpha" in refusal.change


@pytest.mark.parametrize("norm", [rms_norm, layer_op])
def test_an_output_in_front_of_the_transform_does_not_hold_the_stream(norm: Norm) -> None:
    """A norm on the embedding, which is also an output of the graph: what it gives stays as it is."""
    b = Builder()
    x = norm(b, _embedded(b))
    b.output(x, ["tokens", HIDDEN])
    x = b.op("Add", x, _branch(b, norm(b, x)))
    (space,) = [s for s in _exact(_ended(b, x, norm)).spaces if s.kind == "R1"]
    assert len(space.online) == 1 and not space.exits and space.mean_folds == (norm is layer_op)


def test_an_input_that_is_an_output_does_not_hold_the_stream() -> None:
    b = Builder()
    x = b.input("x", ["tokens", HIDDEN])
    b.output(x, ["tokens", HIDDEN])
    x = b.op("Add", x, _branch(b, layer_op(b, x)))
    (space,) = [s for s in _exact(_ended(b, x, layer_op)).spaces if s.kind == "R1"]
    assert [use.op for use in space.online] == ["graph input"] and not space.exits
