"""Channels that one operand holds twice, and signs that change on the way: exact, and never an obstacle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.analysis.analyze import analyze
from graphrot.analysis.labels import Labels, SourceTable, concatenate, fresh_labels
from graphrot.analysis.types import Facts, RotationSpace
from tests.analysis import graphs
from tests.analysis.graphs import FFN, GROUPS, HEADS, HIDDEN, VOCAB, WIDTH, Builder, decoder, feeds_for
from tests.analysis.rotated import relative_error

EXACT = 1e-12
MEMBERS = HEADS // GROUPS


def _kinds(facts: Facts) -> set[str]:
    return {s.kind for s in facts.spaces}


def _only(facts: Facts, kind: str) -> RotationSpace:
    (space,) = [s for s in facts.spaces if s.kind == kind]
    return space


def _heads_by_index(b: Builder, x: str) -> str:
    return b.op("Gather", x, b.ints(*np.repeat(np.arange(GROUPS), MEMBERS).tolist()), axis=1)


def _heads_by_tuples(b: Builder, x: str) -> str:
    """Heads in front, picked by GatherND."""
    index = b.constant(np.repeat(np.arange(GROUPS), MEMBERS)[:, None], np.int64)
    return b.op("Transpose", b.op("GatherND", b.op("Transpose", x, perm=[1, 0, 2, 3]), index), perm=[1, 0, 2, 3])


def _heads_joined(b: Builder, x: str) -> str:
    parts = [b.op("Slice", x, b.ints(g), b.ints(g + 1), b.ints(1)) for g in range(GROUPS) for _ in range(MEMBERS)]
    return b.op("Concat", *parts, axis=1)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("repeat", [_heads_by_index, _heads_by_tuples, _heads_joined])
def test_repeated_heads_have_a_group_each(
    repeat: Callable[[Builder, str], str], cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "grouped", repeat)
    model, _ = decoder(cache=cache)
    facts = analyze(model)
    assert facts.refused == () and _kinds(facts) >= {"R1", "R2", "R3", "R4"}
    r2 = _only(facts, "R2")
    assert [len(u.groups) for u in r2.producers] == [GROUPS]
    assert [u.groups for u in r2.consumers] == [tuple(((h * WIDTH, 1, WIDTH),) for h in range(HEADS))]
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def _stream(change: Callable[[Builder, str], str], rows: int) -> ir.Model:
    """An embedding, a change of what a linear reads, and a head."""
    b = Builder()
    table = b.constant(b.rng.standard_normal((VOCAB, HIDDEN)))
    x = b.op("Gather", table, b.input("ids", ["b", "s"], graphs.INT64))
    y = b.linear(change(b, x), rows, HIDDEN)
    b.result(b.linear(b.op("Add", x, y), HIDDEN, FFN), "y")
    b.output("y", ["b", "s", FFN])
    return b.model()


def _twice(b: Builder, x: str) -> str:
    return b.op("Concat", x, x, axis=2)


def _mirrored(b: Builder, x: str) -> str:
    return b.op("Gather", x, b.ints(*range(HIDDEN), *reversed(range(HIDDEN))), axis=2)


def _each_twice(b: Builder, x: str) -> str:
    return b.op("Gather", x, b.ints(*np.repeat(np.arange(HIDDEN), 2).tolist()), axis=-1)


@pytest.mark.parametrize("change", [_twice, _mirrored, _each_twice])
def test_a_row_that_holds_its_channels_twice(change: Callable[[Builder, str], str]) -> None:
    model = _stream(change, 2 * HIDDEN)
    facts = analyze(model)
    r1 = _only(facts, "R1")
    assert r1.dim == HIDDEN and [len(u.groups) for u in r1.consumers] == [2, 1]
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def test_overlapping_parts() -> None:
    """Channels that stand there twice do not mix with those that stand there once."""

    def overlap(b: Builder, x: str) -> str:
        parts = [b.op("Slice", x, b.ints(lo), b.ints(lo + 16), b.ints(2)) for lo in (0, 8)]
        return b.op("Concat", *parts, axis=2)

    model = _stream(overlap, 32)
    facts = analyze(model)
    assert sorted(s.dim for s in facts.spaces if s.kind == "R1") == [8, 16]
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def test_a_site_that_is_not_whole_where_it_is_read_is_lost_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason for it: labels that do not tell repetitions apart, here."""
    monkeypatch.setattr(Labels, "distinct", lambda self, salt: self)
    model = _stream(_twice, 2 * HIDDEN)
    facts = analyze(model)
    assert facts.spaces == ()
    (refusal,) = [r for r in facts.refused if r.kind == "R1" and "whole groups" in r.reason]
    assert refusal.op == "MatMul" and refusal.node in {node.outputs[0].name for node in model.graph}
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def test_repetitions_are_told_apart_and_nothing_else_is() -> None:
    source = SourceTable().get("opaque", ir.Value(name="x"), None, (2, 3), [1])
    labels = fresh_labels(source)
    assert labels.distinct(1) is labels
    joined = concatenate([labels, labels, labels], 1)
    told = joined.distinct(1)
    assert np.array_equal(told.ids, joined.ids) and told[:, :3].same_as(labels)
    assert np.unique(told.copies[0]).size == 3 and np.unique(told.copies).size == 6
    assert (told.copies.reshape(2, 3, 3) == told.copies.reshape(2, 3, 3)[..., :1]).all()


def _turned(op: str, number: float, *, first: bool) -> graphs.Hook:
    """Half of each value changed, the halves swapped."""

    def hook(b: Builder, x: str) -> str:
        half = WIDTH // 2
        one = b.op("Slice", x, b.ints(0), b.ints(half), b.ints(3))
        two = b.op("Slice", x, b.ints(half), b.ints(WIDTH), b.ints(3))
        constant = b.constant(np.full(half, number))
        changed = b.op(op, constant, two) if first else b.op(op, two, constant)
        return b.op("Concat", changed, one, axis=3)

    return hook


CHANGES = {
    "zero minus x": _turned("Sub", 0.0, first=True),
    "a constant minus x": _turned("Sub", 0.5, first=True),
    "x times minus one": _turned("Mul", -1.0, first=False),
    "x over two": _turned("Div", 2.0, first=False),
    "one over x": _turned("Div", 1.0, first=True),
    "x cubed": _turned("Pow", 3.0, first=False),
    "a constant to the x": _turned("Pow", 1.5, first=True),
}


@pytest.mark.parametrize("case", CHANGES)
def test_half_of_a_head_changes(case: str) -> None:
    """The halves no longer rotate as one, on whichever side the constant stands."""
    model, _ = decoder(values=CHANGES[case], cache=False)
    facts = analyze(model)
    assert all(s.dim <= WIDTH // 2 for s in facts.spaces if s.kind == "R2" and s.placement == "merged")
    assert relative_error(model, facts, feeds_for(model)) <= EXACT


def test_x_minus_zero_changes_nothing() -> None:
    model, _ = decoder(values=_turned("Sub", 0.0, first=False), cache=False)
    facts = analyze(model)
    assert _only(facts, "R2").dim == WIDTH
    assert relative_error(model, facts, feeds_for(model)) <= EXACT
