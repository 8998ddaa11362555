"""What graphrot makes of one row: facts of the shuffled graph, and errors by two independent roads."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import Facts
from graphrot.evaluate.double import to_double
from graphrot.folded import materialize
from graphrot.model.widen import float_types, widen
from graphrot.passes import ROTATION_PASSES
from graphrot.plan.build import PlanRequest, build_plan
from tests.analysis.rotated import relative_error, run
from tests.coverage.graphs import graph
from tests.coverage.rows import Row
from tests.coverage.shuffled import shuffled


@dataclass(frozen=True)
class Measured:
    """The shuffled model, its facts, its inputs by name, and the source's name of each tensor."""

    model: ir.Model
    facts: Facts
    feeds: dict[str, np.ndarray]
    names: dict[str, str]

    def sites(self) -> Counter[str]:
        """Spaces by kind; ``~``: online, ``?``: as an option only."""
        return Counter(s.kind + "~" * (s.placement == "online") + "?" * s.optional for s in self.facts.spaces)


@functools.cache
def measured(row: Row) -> Measured:
    """Analyse the graph of a row under other names, in another order."""
    source = graph(row.name, row.road, row.opset)
    model, names = shuffled(source.model, seed=row.opset + len(row.name))
    if float_types(model) is not None:
        with tempfile.TemporaryDirectory() as folder:
            model, _ = widen(model, Path(folder))
            model = _in_memory(model)
    feeds = {v.name or "": x[: row.batch] for v, x in zip(model.graph.inputs, source.inputs, strict=True)}
    return Measured(model, analyze(model), feeds, names)


def _in_memory(model: ir.Model) -> ir.Model:
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            value.const_value = ir.tensor(np.array(value.const_value.numpy()), name=value.name)
    return model


def error_of_facts(row: Row) -> float:
    """Relative error with a random dense matrix on every space, by code that is not graphrot's."""
    found = measured(row)
    return relative_error(found.model, found.facts, found.feeds, double=row.double)


def error_of_passes(row: Row) -> float:
    """Relative error after graphrot's own plan and passes."""
    found = measured(row)
    model = to_double(found.model) if row.double else found.model.clone()
    plan = build_plan(
        found.facts, PlanRequest(("R1", "R2", "R3", "R4", "O"), "hadamard", online_r1=True), source_hash="0"
    )
    result = model.clone()
    for kind in ROTATION_PASSES:
        kind(plan)(result)
    materialize(result, None)
    result.graph.sort()
    if row.double:
        result = to_double(result)  # the body of the online transform works in float32 otherwise
    floats = np.float64 if row.double else np.float32
    feeds = {n: x.astype(floats) if np.issubdtype(x.dtype, np.floating) else x for n, x in found.feeds.items()}
    expected, got = run(model, feeds), run(result, feeds)
    return max(float(np.abs(got[n] - x).max() / np.abs(x).max()) for n, x in expected.items())
