"""Random graphs: the analysis never fails on one, never hangs, and what it finds never changes an output.

``GRAPHROT_FUZZ_GRAPHS=2000 pytest tests/analysis/test_random_graphs.py`` looks at more of them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import Facts
from graphrot.errors import GraphrotError
from graphrot.evaluate.double import to_double
from graphrot.folded import materialize
from graphrot.model.onnxfile import open_onnx
from graphrot.passes import ROTATION_PASSES
from graphrot.plan.build import PlanRequest, build_plan
from tests.analysis.noise import distance, disturbed
from tests.analysis.random_graphs import RandomGraph, broken
from tests.analysis.rotated import rotated, run

COUNT = int(os.environ.get("GRAPHROT_FUZZ_GRAPHS", "120"))
TOLERANCE = 1e-9
"""Of float64 copies; random graphs may divide by small numbers."""
SINGLE = 1e-3

_SETTINGS = settings(
    max_examples=COUNT,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class _Choices:
    """Numbers from hypothesis, for one graph."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def __call__(self, below: int) -> int:
        return self._data.draw(st.integers(0, below - 1))


def _error(model: ir.Model, facts: Facts, feeds: dict[str, np.ndarray], *, must_run: bool = True) -> float:
    """The largest error in units of what is tolerated; zero where a graph does not run or amplifies rounding."""
    for double, tolerance in ((True, TOLERANCE), (False, SINGLE)):
        floats = np.float64 if double else np.float32
        typed = {n: x.astype(floats) if np.issubdtype(x.dtype, np.floating) else x for n, x in feeds.items()}
        plain = to_double(model) if double else model
        try:
            expected = run(plain, typed)
        except Exception:  # onnxruntime raises types of its own
            continue
        error = distance(expected, run(rotated(model, facts, double=double).model, typed))
        passed = _by_passes(plain, facts, double)
        if passed is not None:
            error = max(error, distance(expected, run(passed, typed)))
        noise = 1e-13 if double else 1e-7
        if error > tolerance and distance(expected, run(disturbed(plain, noise), typed)) > tolerance / 100:
            return 0.0
        return error / tolerance
    assert not must_run
    return 0.0


def _by_passes(plain: ir.Model, facts: Facts, double: bool) -> ir.Model | None:
    """The model rotated by graphrot's own plan and passes; None where Hartley's matrices, which online transforms
    hold in float32, take part."""
    plan = build_plan(facts, PlanRequest(("R1", "R2", "R3", "R4"), "hadamard", online_r1=True), source_hash="0")
    if any(r.matrix.construction == "hartley" and r.placement == "online" for r in plan.rotations):
        return None
    result = plain.clone()
    for kind in ROTATION_PASSES:
        kind(plan)(result)
    materialize(result, None)
    result.graph.sort()
    return to_double(result) if double else result


@_SETTINGS
@given(st.data(), st.integers(1, 24))
def test_what_is_found_never_changes_an_output(data: st.DataObject, steps: int) -> None:
    graph = RandomGraph(_Choices(data), steps)
    model = graph.model()
    facts = analyze(model)
    note(f"{len(model.graph)} nodes, {len(facts.spaces)} spaces")
    assert _error(model, facts, graph.feeds()) <= 1


@_SETTINGS
@given(st.data(), st.integers(1, 16))
def test_broken_graphs_are_refused_or_understood(data: st.DataObject, steps: int) -> None:
    choices = _Choices(data)
    graph = RandomGraph(choices, steps)
    proto = ir.to_proto(graph.model())
    broken(proto, choices)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(proto.SerializeToString())
        try:
            model = open_onnx(path)
            facts = analyze(model)
        except GraphrotError:
            return
        assert _error(model, facts, graph.feeds(), must_run=False) <= 1
