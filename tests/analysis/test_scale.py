"""Work and memory grow with the graph, and not with its square. No clock: calls and bytes are counted."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType

import onnx_ir as ir
import pytest

from graphrot.analysis.analyze import analyze
from tests.analysis.graphs import INT64, VOCAB, Builder
from tests.analysis.large import WIDTH, chain, deep

GROWTH = 2.4
"""Twice the graph may cost that much more."""


def _work(model: ir.Model) -> tuple[int, int]:
    """Calls of Python and numpy functions, and the peak of allocated bytes, while a graph is analysed."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        analyze(model)
    finally:
        sys.setprofile(None)
    tracemalloc.start()
    try:
        analyze(model)
        return calls, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("build", "size"), [(chain, 400), (deep, 6)])
def test_twice_the_graph_is_twice_the_work(build: Callable[[int], ir.Model], size: int) -> None:
    analyze(build(size))  # what is done once per process is done
    calls, peak = _work(build(size))
    more_calls, more_peak = _work(build(2 * size))
    assert more_calls <= GROWTH * calls
    assert more_peak <= GROWTH * peak


def test_eighty_layers() -> None:
    facts = analyze(deep(80))
    kinds = [s.kind for s in facts.spaces]
    assert [kinds.count(kind) for kind in ("R1", "R2", "R3", "R4")] == [1, 80, 80, 80]
    assert len(facts.gains) == 161 and facts.refused == ()


def test_ten_thousand_nodes_in_a_row() -> None:
    facts = analyze(chain(10_000))
    assert facts.nodes >= 10_000
    assert sum(s.kind == "R4" for s in facts.spaces) == 244 and len(facts.refused) == 244


@pytest.mark.parametrize(("op", "count"), [("Identity", 10_000), ("Tanh", 10_000), ("Mul", 2_000), ("Add", 2_000)])
def test_a_row_of_one_kind(op: str, count: int) -> None:
    """Also through places where a recursion would run out of stack."""
    b = Builder()
    ids = b.input("ids", ["batch", "sequence"], INT64)
    x = b.op("Gather", b.constant(b.rng.standard_normal((VOCAB, WIDTH))), b.op("Identity", ids))
    other = [b.vector(WIDTH, around=1)] if op in ("Mul", "Add") else []
    for _ in range(count):
        x = b.op(op, x, *other)
    b.result(b.linear(b.op("Mul", x, x), WIDTH, WIDTH), "y")
    b.output("y", ["batch", "sequence", WIDTH])
    assert analyze(b.model()).nodes > count
