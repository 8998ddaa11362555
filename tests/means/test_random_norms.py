"""Random graphs around LayerNorms: after graphrot's own plan and passes they answer as before."""

from __future__ import annotations

import os
import random

import numpy as np
import onnx_ir as ir

from graphrot.analysis.analyze import analyze
from graphrot.evaluate.double import exact_in_double, to_double
from graphrot.plan.build import PlanRequest, build_plan
from tests.analysis.noise import distance, disturbed
from tests.analysis.rotated import run
from tests.means.graphs import applied
from tests.means.random_norms import RandomNorms

COUNT = int(os.environ.get("GRAPHROT_FUZZ_NORMS", "80"))
KINDS = ("R1", "R2", "R3", "R4", "O", "other")


def _typed(feeds: dict[str, np.ndarray], dtype: type) -> dict[str, np.ndarray]:
    return {n: x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x for n, x in feeds.items()}


def _runs(model: ir.Model, feeds: dict[str, np.ndarray]) -> bool:
    try:
        run(model, feeds)
    except Exception:  # onnxruntime raises types of its own where a float64 kernel, or type, is missing
        return False
    return True


def _amplifies(model: ir.Model, feeds: dict[str, np.ndarray], amount: float) -> float:
    """How far the outputs move when every constant is off by about ``amount``, as a part."""
    return distance(run(model, feeds), run(disturbed(model, amount), feeds))


def check(seed: int) -> int:
    """Rotate all that is found in one graph; returns how many norms became RMS norms."""
    rng = random.Random(seed)
    graph = RandomNorms(rng.randrange, 2 + rng.randrange(18))
    model = graph.model()
    feeds, wide = _typed(graph.feeds(), np.float64), to_double(model)
    double = _runs(wide, feeds)
    if double:
        model = wide
    else:
        feeds = _typed(feeds, np.float32)
    matrices = ("random", "hadamard")[seed % 2]
    request = PlanRequest(KINDS, matrices, embedding_bits=8 if seed % 3 else None)
    plan = build_plan(analyze(model), request, source_hash="0")
    rotated = applied(model, plan)
    exact = exact_in_double(rotated)
    rotated = to_double(rotated) if double else rotated
    error = distance(run(model, feeds), run(rotated, feeds))
    tolerance, noise = (1e-9 if exact else 1e-6, 1e-13) if double else (1e-3, 1e-7)
    assert error <= tolerance or _amplifies(model, feeds, noise) > tolerance / 100, f"graph {seed}: {error}"
    return sum(len(fold.norms) for fold in plan.mean_folds)


def test_random_graphs_around_norms() -> None:
    assert sum(check(seed) for seed in range(COUNT)) >= COUNT // 20
