"""Gains fold to a fixpoint, in an order that can be replayed, and only where nothing else reads them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import Facts, decode_runs
from tests.analysis.graphs import FFN, HIDDEN, INT64, VOCAB, Builder, feeds_for
from tests.analysis.rotated import relative_error

EXACT = 1e-12


def _model(body: Callable[[Builder, str], str], width: int = FFN) -> ir.Model:
    """Embedding, ``body``, one output."""
    b = Builder()
    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, HIDDEN))), b.input("ids", ["b", "s"], INT64))
    b.result(body(b, x), "y")
    b.output("y", ["b", "s", width])
    return b.model()


def _facts(body: Callable[[Builder, str], str]) -> Facts:
    """Facts of the model, checked by folding them."""
    model = _model(body)
    facts = analyze(model)
    assert relative_error(model, facts, feeds_for(model)) <= EXACT
    return facts


def test_a_chain_of_gains_folds_from_the_end() -> None:
    def body(b: Builder, x: str) -> str:
        first = b.op("Add", b.op("Mul", x, b.vector(HIDDEN, around=1)), b.vector(HIDDEN))
        second = b.op("Add", b.op("Mul", first, b.vector(HIDDEN, around=1)), b.vector(HIDDEN))
        return b.linear(second, HIDDEN, FFN)

    facts = _facts(body)
    assert len(facts.gains) == 2
    assert all(g.form == "mul" and g.shift is not None for g in facts.gains)
    # The second must be folded first: the shift of the first then meets the scaled weight.
    model = _model(body)
    muls = [node.outputs[0].name for node in model.graph if node.op_type == "Mul"]
    assert [g.node for g in facts.gains] == muls[::-1]
    assert [s.kind for s in facts.spaces] == ["R1"]


def test_consumers_may_read_parts_in_another_order() -> None:
    def body(b: Builder, x: str) -> str:
        scaled = b.op("Mul", x, b.vector(HIDDEN, around=1))
        part = b.op("Slice", scaled, b.ints(HIDDEN - 1), b.ints(7), b.ints(2), b.ints(-2))
        return b.op("Add", b.linear(scaled, HIDDEN, FFN), b.linear(part, 8, FFN))

    (fold,) = _facts(body).gains
    indices = [decode_runs(c.index) for c in fold.consumers]
    assert indices == [list(range(HIDDEN)), list(range(HIDDEN - 1, 7, -2))]


def test_two_gains_may_share_a_weight() -> None:
    def body(b: Builder, x: str) -> str:
        weight = b.matrix(HIDDEN, FFN)
        halves = [b.op("MatMul", b.op("Mul", x, b.vector(HIDDEN, around=1)), weight) for _ in range(2)]
        return b.op("Add", *halves)

    facts = _facts(body)
    assert len(facts.gains) == 2
    assert len({c.use.node for g in facts.gains for c in g.consumers}) == 2


def test_gains_that_something_else_reads_stay() -> None:
    def body(b: Builder, x: str) -> str:
        scaled = b.op("Mul", x, b.vector(HIDDEN, around=1))
        return b.op("Add", b.linear(scaled, HIDDEN, HIDDEN), scaled)

    model = _model(body, HIDDEN)
    facts = analyze(model)
    assert facts.gains == ()
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def test_a_shift_that_only_some_readers_see_stays() -> None:
    def body(b: Builder, x: str) -> str:
        scaled = b.op("Mul", x, b.vector(HIDDEN, around=1))
        shifted = b.op("Add", scaled, b.vector(HIDDEN))
        return b.op("Add", b.linear(scaled, HIDDEN, FFN), b.linear(shifted, HIDDEN, FFN))

    assert _facts(body).gains == ()


def test_shifts_without_a_place_stay() -> None:
    """A Gemm with factors of its own has no plain bias."""

    def body(b: Builder, x: str) -> str:
        shifted = b.op("Add", b.op("Mul", x, b.vector(HIDDEN, around=1)), b.vector(HIDDEN))
        flat = b.op("Reshape", shifted, b.ints(-1, HIDDEN))
        y = b.op("Gemm", flat, b.matrix(HIDDEN, FFN), b.vector(FFN), alpha=0.5, beta=2.0)
        return b.op("Reshape", y, b.op("Concat", b.op("Shape", "ids"), b.ints(FFN), axis=0))

    assert _facts(body).gains == ()


def test_gemm_takes_gain_and_shift() -> None:
    def body(b: Builder, x: str) -> str:
        h = b.op("LayerNormalization", x, b.vector(HIDDEN, around=1), b.vector(HIDDEN), axis=-1)
        y = b.op("Gemm", b.op("Reshape", h, b.ints(-1, HIDDEN)), b.matrix(FFN, HIDDEN), b.vector(FFN), transB=1)
        return b.op("Reshape", y, b.op("Concat", b.op("Shape", "ids"), b.ints(FFN), axis=0))

    facts = _facts(body)
    (fold,) = facts.gains
    assert fold.form == "norm" and fold.shift_node == fold.node and fold.shift_input == 2
    assert fold.consumers[0].use.axis == 1
    assert facts.linears[0].layout == "NK" and facts.linears[0].bias is not None


@pytest.mark.parametrize("gain", [np.ones(HIDDEN), np.full(HIDDEN, 1.7), np.array(0.3)])
def test_equal_gains_have_nothing_to_fold(gain: np.ndarray) -> None:
    facts = _facts(lambda b, x: b.linear(b.op("Mul", x, b.constant(gain)), HIDDEN, FFN))
    assert facts.gains == ()
    assert [(s.kind, s.dim) for s in facts.spaces] == [("R1", HIDDEN)]


def test_a_shift_behind_an_equal_gain_is_a_producer() -> None:
    def body(b: Builder, x: str) -> str:
        h = b.op("LayerNormalization", x, b.constant(np.ones(HIDDEN)), b.vector(HIDDEN), axis=-1)
        return b.linear(h, HIDDEN, FFN)

    facts = _facts(body)
    assert facts.gains == ()
    (space,) = facts.spaces
    assert [u.role for u in space.producers] == ["table", "bias"] and space.mean_preserving


def test_zero_shifts_count_for_nothing() -> None:
    def body(b: Builder, x: str) -> str:
        h = b.op("LayerNormalization", x, b.vector(HIDDEN, around=1), b.constant(np.zeros(HIDDEN)), axis=-1)
        return b.op("Add", b.linear(h, HIDDEN, FFN), b.constant(np.zeros(FFN)))

    facts = _facts(body)
    (fold,) = facts.gains
    assert fold.shift is None
    assert [u.role for u in facts.spaces[0].producers] == ["table"]


def test_a_zero_in_the_gain_is_no_obstacle() -> None:
    def body(b: Builder, x: str) -> str:
        gain = b.constant(np.r_[0.0, np.linspace(1, 2, HIDDEN - 1)])
        return b.linear(b.op("Add", b.op("Mul", x, gain), b.vector(HIDDEN)), HIDDEN, FFN)

    assert len(_facts(body).gains) == 1


def test_a_gain_computed_from_constants_is_read() -> None:
    """One plus a weight, as some models store their gains."""
    facts = _facts(lambda b, x: b.linear(b.op("Mul", x, b.op("Add", b.vector(HIDDEN), b.constant(1.0))), HIDDEN, FFN))
    assert len(facts.gains) == 1


def test_divisors_are_no_gains() -> None:
    facts = _facts(lambda b, x: b.linear(b.op("Div", x, b.vector(HIDDEN, around=2)), HIDDEN, FFN))
    assert facts.gains == ()
    assert [s.kind for s in facts.spaces if s.placement == "merged"] == []
    assert [r.op for r in facts.refused if r.kind == "R1"] == ["Div"]


_CHANGES: dict[str, Callable[[Builder, str], str]] = {
    "a constant factor": lambda b, h: b.op("Mul", h, b.constant(3.0)),
    "a sign": lambda b, h: b.op("Neg", h),
}


@pytest.mark.parametrize("change", _CHANGES)
@pytest.mark.parametrize("shifted", [True, False])
def test_a_shift_that_is_changed_on_its_way_does_not_fold(change: str, shifted: bool) -> None:
    """``3 * (x * gain + shift) @ W`` is not ``3 * x @ (gain * W) + shift @ W``; a gain alone folds."""

    def body(b: Builder, x: str) -> str:
        shift = [b.vector(HIDDEN)] if shifted else []
        h = b.op("LayerNormalization", x, b.vector(HIDDEN, around=1), *shift, axis=-1)
        return b.linear(_CHANGES[change](b, h), HIDDEN, FFN)

    assert len(_facts(body).gains) == (0 if shifted else 1)


@pytest.mark.parametrize("op", ["Add", "Sub"])
def test_one_number_behind_a_gain_keeps_it(op: str) -> None:
    """``(x * gain + 0.7) @ W`` is not ``(x + 0.7) @ (gain * W)``."""

    def body(b: Builder, x: str) -> str:
        h = b.op(op, b.op("Mul", b.op("Tanh", x), b.vector(HIDDEN, around=1)), b.constant(0.7))
        return b.linear(h, HIDDEN, FFN)

    assert _facts(body).gains == ()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gemm", [True, False])
def test_a_gain_behind_a_branch_folds_backward(bias: bool, gemm: bool) -> None:
    """The stream reads it, so it goes into the columns of the linear in front, after the shift of the norm did."""

    def body(b: Builder, x: str) -> str:
        h = b.op("LayerNormalization", x, b.vector(HIDDEN, around=1), b.vector(HIDDEN), axis=-1)
        if gemm:
            flat = b.op("Reshape", h, b.ints(-1, HIDDEN))
            y = b.op("Gemm", flat, b.matrix(HIDDEN, HIDDEN), *([b.vector(HIDDEN)] if bias else []), transB=1)
            gained = b.op("Mul", y, b.vector(HIDDEN, around=1))
            gained = b.op("Reshape", gained, b.op("Concat", b.op("Shape", "ids"), b.ints(-1), axis=0))
        else:
            gained = b.op("Mul", b.vector(HIDDEN, around=1), b.linear(h, HIDDEN, HIDDEN, bias=bias))
        return b.linear(b.op("Add", x, gained), HIDDEN, FFN)

    facts = _facts(body)
    assert [(len(g.consumers), g.shift is not None) for g in facts.gains] == [(1 + bias, False), (1, True)]
    assert [s.kind for s in facts.spaces] == ["R1"]


@pytest.mark.parametrize("reader", ["output", "branch"])
def test_a_linear_that_something_else_reads_takes_no_gain_backward(reader: str) -> None:
    def body(b: Builder, x: str) -> str:
        y = b.linear(x, HIDDEN, HIDDEN)
        gained = b.op("Add", x, b.op("Mul", y, b.vector(HIDDEN, around=1)))
        if reader == "output":
            b.output(b.result(y, "extra"), ["b", "s", HIDDEN])
            return b.linear(gained, HIDDEN, FFN)
        return b.op("Add", b.linear(gained, HIDDEN, FFN), b.linear(b.op("Tanh", y), HIDDEN, FFN))

    assert _facts(body).gains == ()
