"""Both of torch's exporters lead to the same sites, however different their graphs are."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from graphrot.analysis.analyze import analyze
from graphrot.model.export import Road
from tests.analysis.graphs import feeds_for
from tests.analysis.rotated import relative_error
from tests.exported import one_layer_onnx


def test_exporters_agree() -> None:
    seen = []
    roads: tuple[Road, ...] = ("torchscript", "dynamo")
    for road in roads:
        model = ir.load(one_layer_onnx(road))
        facts = analyze(model)
        assert facts.refused == () and facts.tied is not None and len(facts.linears) == 8
        assert Counter(s.kind for s in facts.spaces) == {"R1": 1, "R2": 1, "R3": 1, "R4": 1, "O": 1}
        assert relative_error(model, facts, feeds_for(model)) <= 1e-12
        seen.append(
            [
                (
                    s.kind,
                    s.placement,
                    s.dim,
                    [u.groups for u in (*s.producers, *s.online)],
                    [u.groups for u in s.consumers],
                )
                for s in facts.spaces
            ]
        )
    assert seen[0] == seen[1]
