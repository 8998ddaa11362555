"""What keeps the facts sound, taken away piece by piece: each time the check of the facts must fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphrot.analysis import arithmetic, movement, provenance
from graphrot.analysis.analyze import analyze
from graphrot.analysis.labels import Labels
from graphrot.analysis.visit import Block, Visit
from tests.analysis.graphs import FFN, GROUPS, HIDDEN, VOCAB, WIDTH, Builder, decoder, feeds_for, layer_norm
from tests.analysis.rotated import relative_error

WRONG = 1e-3
EXACT = 1e-12


def _error(**options: Any) -> float:
    model, _ = decoder(**options)
    return relative_error(model, analyze(model), feeds_for(model))


def _tanh(b: Builder, x: str) -> str:
    return b.op("Tanh", x)


def _looked_at(b: Builder, x: str) -> str:
    """The embedding goes on as it is, and an unknown operator looks at it on the side."""
    extra = b.op("ReduceMax", x, b.ints(2), keepdims=0)
    b.output(b.result(extra, "extra"), ["batch", "sequence"])
    return x


def test_unknown_operators_block(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _error(embedded=_looked_at) <= EXACT
    monkeypatch.setattr(Visit, "block", lambda self, labels, reason: None)
    assert _error(embedded=_looked_at) > WRONG


def test_outputs_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def states(b: Builder, x: str) -> str:
        b.output(b.result(b.op("Identity", x), "extra"), ["batch", "sequence", HIDDEN])
        return x

    assert _error(embedded=states) <= EXACT
    monkeypatch.setattr(provenance, "Block", lambda ids, reason, at: Block(ids[:0], reason, at))
    assert _error(embedded=states) > WRONG


def test_unknown_operators_start_new_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _error(residual=_tanh) <= EXACT
    monkeypatch.setattr(provenance, "STANDARD", {**provenance.STANDARD, "Tanh": movement.keep})
    assert _error(residual=_tanh) > WRONG


def test_keys_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys, blocks are as wide as their sources: heads mix."""
    assert _error(rope=False, cache=False) <= EXACT
    monkeypatch.setattr(Visit, "key", lambda self, labels, key, reason, *, consumed=False: None)
    assert _error(rope=False, cache=False) > WRONG


def test_edges_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _error(bias=True) <= EXACT
    monkeypatch.setattr(Visit, "edge", lambda self, left, right, reason="", *, consumed=False: None)
    assert _error(bias=True) > WRONG


def test_means_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _error(norm=layer_norm) <= EXACT
    monkeypatch.setattr(Visit, "mean", lambda self, labels: None)
    assert _error(norm=layer_norm) > WRONG


def _scaled_by_position(b: Builder, x: str) -> str:
    """Each element of each value by a factor of its own, from the positions."""
    at = b.op("Unsqueeze", b.op("Cast", "positions", to=1), b.ints(1, 3))
    return b.op("Mul", x, b.op("Cos", b.op("Mul", at, b.vector(WIDTH))))


def test_per_channel_products_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor may pass only if it is one number for the whole row."""

    def passed(v: Visit, labels: Labels, position: int) -> bool:
        v.set(labels)
        return True

    assert _error(values=_scaled_by_position) <= EXACT
    monkeypatch.setattr(arithmetic, "_multiply_rows", passed)
    assert _error(values=_scaled_by_position) > WRONG


def test_gains_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def passed(v: Visit, labels: Labels, position: int) -> None:
        v.set(labels)

    assert _error() <= EXACT
    monkeypatch.setattr(arithmetic, "_multiply_constant", passed)
    assert _error() > WRONG


def _rolled(b: Builder, x: str, axis: int) -> str:
    """``x`` plus itself, one step on along ``axis``."""
    first = b.op("Slice", x, b.ints(0), b.ints(1), b.ints(axis))
    rest = b.op("Slice", x, b.ints(1), b.ints(1 << 40), b.ints(axis))
    return b.op("Add", x, b.op("Concat", rest, first, axis=axis))


def test_channels_that_meet_themselves() -> None:
    """Rolled channels do not rotate; rolled tokens do: their copies meet in step."""
    model, _ = decoder(residual=lambda b, x: _rolled(b, x, 2))
    facts = analyze(model)
    assert "R1" not in {s.kind for s in facts.spaces}
    assert relative_error(model, facts, feeds_for(model)) <= EXACT
    model, _ = decoder(residual=lambda b, x: _rolled(b, x, 1))
    facts = analyze(model)
    assert "R1" in {s.kind for s in facts.spaces}
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def _swapped_copies(b: Builder, x: str) -> str:
    """To each token, the first half of the first token and the second half of the second."""
    first = b.op("Slice", x, b.ints(0), b.ints(1), b.ints(1))
    rest = b.op("Slice", x, b.ints(1), b.ints(2), b.ints(1))
    half = HIDDEN // 2
    parts = [b.op("Slice", t, b.ints(lo), b.ints(lo + half), b.ints(2)) for t, lo in ((first, 0), (rest, half))]
    return b.op("Add", x, b.op("Concat", *parts, axis=2))


def test_copies_that_do_not_match() -> None:
    """The halves of a row come from two tokens: channels meet themselves, but not in one copy."""
    model, _ = decoder(residual=_swapped_copies)
    facts = analyze(model)
    r1 = [s for s in facts.spaces if s.kind == "R1"]
    assert all(s.dim == HIDDEN // 2 for s in r1)
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def _per_head(b: Builder, x: str) -> str:
    """Two heads of the values exchange half of their elements."""
    half = WIDTH // 2
    swapped = b.op("Gather", x, b.ints(*reversed(range(GROUPS))), axis=1)
    left = b.op("Slice", x, b.ints(0), b.ints(half), b.ints(3))
    right = b.op("Slice", swapped, b.ints(half), b.ints(WIDTH), b.ints(3))
    return b.op("Concat", left, right, axis=3)


def test_heads_that_exchange_elements() -> None:
    model, _ = decoder(values=_per_head, cache=False)
    facts = analyze(model)
    assert {s.kind for s in facts.spaces} >= {"R1", "R2", "R3", "R4"}
    (r2,) = [s for s in facts.spaces if s.kind == "R2"]
    (use,) = r2.producers
    assert use.groups == (((0, 1, 3), (9, 1, 3)), ((3, 1, 6),))
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def test_a_past_behind_an_exchange() -> None:
    """The past holds the elements as they are after the exchange, in the basis of the new head."""
    model, _ = decoder(values=_per_head)
    facts = analyze(model)
    (r2,) = [s for s in facts.spaces if s.kind == "R2"]
    assert [u.groups for u in r2.producers] == [(((0, 1, 3), (9, 1, 3)), ((6, 1, 3), (3, 1, 3)))]
    assert r2.cache_inputs == ("past_v",)
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def test_a_table_that_something_unknown_reads_is_no_obstacle_by_itself() -> None:
    """Weights are changed in copies, so only run-time tensors block."""
    b = Builder()
    table = b.constant(b.rng.standard_normal((VOCAB, HIDDEN)))
    ids = b.input("ids", ["b", "s"], 7)
    x = b.op("Gather", table, ids)
    y = b.op("MatMul", x, b.matrix(HIDDEN, FFN))
    other = b.op("Softmax", b.op("Gather", table, ids), axis=-1)
    b.result(b.op("Add", y, b.op("MatMul", other, b.matrix(HIDDEN, FFN))), "y")
    b.output("y", ["b", "s", FFN])
    model = b.model()
    facts = analyze(model)
    (space,) = [s for s in facts.spaces if s.kind == "R1"]
    assert len(space.producers) == 1
    assert [r.op for r in facts.refused] == ["Softmax"]
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def _chosen_rows(b: Builder, x: str) -> str:
    """Some rows, chosen by a threshold, go another way and come back to their places.

    With the ids of the probe, all ones, no row is chosen; with others, some are.
    """
    chosen = b.op("NonZero", b.op("Greater", b.op("Reshape", "ids", b.ints(-1)), b.constant(VOCAB // 2, np.int64)))
    flat = b.op("Reshape", x, b.ints(-1, HIDDEN))
    rows = b.op("Sigmoid", b.op("Gather", flat, b.op("Squeeze", chosen, b.ints(0)), axis=0))
    back = b.op("ScatterND", b.op("Mul", flat, b.constant(0.0)), b.op("Transpose", chosen, perm=[1, 0]), rows)
    return b.op("Add", x, b.op("Reshape", back, b.op("Shape", x)))


def test_rows_that_no_probe_has_seen_keep_their_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation reads channels of the stream there: they must stay as they are."""
    model, _ = decoder(residual=_chosen_rows)
    refusal = next(r for r in analyze(model).refused if r.kind == "R1")
    assert refusal.op == "Gather" and "no row of its result was there" in refusal.reason
    assert _error(residual=_chosen_rows) <= EXACT
    for check in ("lost_rows", "reads_nothing"):
        monkeypatch.setattr(Visit, check, lambda self: False)
    monkeypatch.setattr(provenance, "STANDARD", {**provenance.STANDARD, "ScatterND": _second})
    assert _error(residual=_chosen_rows) >= WRONG


def _second(v: Visit) -> None:
    """As if the scattered rows carried no channels of their own."""
    labels = v.labels(0)
    assert labels is not None
    v.set(labels)
