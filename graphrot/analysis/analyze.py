"""The way from a graph to facts."""

from __future__ import annotations

import time
from collections.abc import Mapping

import onnx_ir as ir

from graphrot.analysis.gains import fold_gains
from graphrot.analysis.heads import find_heads
from graphrot.analysis.linears import find_embeddings, find_linears
from graphrot.analysis.partition import Partition
from graphrot.analysis.probe import Probe
from graphrot.analysis.provenance import Provenance
from graphrot.analysis.refusals import find_refusals
from graphrot.analysis.scope import Scope
from graphrot.analysis.spaces import Spaces
from graphrot.analysis.streams import open_ends
from graphrot.analysis.tied import find_tied
from graphrot.analysis.types import Facts
from graphrot.progress import Progress, silent

_STEPS = 5


def analyze(model: ir.Model, *, sizes: Mapping[str, int] | None = None, progress: Progress | None = None) -> Facts:
    """Find everything that can be rotated, and what stands in the way of the rest.

    The model is not changed, and the weights of its linears are not loaded, but to compare the head with
    the embedding table, block by block.

    Args:
        model: a decoder with dynamic sizes.
        sizes: sizes for symbolic dimensions of the inputs, by name, where the probe cannot find them
            (dimensions that stand for head sizes, for instance).
        progress: told of each step.

    Returns:
        Facts that name values of ``model``.

    Raises:
        InputRefused: the graph does not run at any sizes the probe tries.
        UsageError: ``sizes`` names no dimension of the model.
        EnvironmentProblem: ONNX Runtime is missing.
    """
    tell = progress or silent
    started = time.perf_counter()
    tell("probing the graph", 0, _STEPS)
    scope = Scope(model)
    probe = Probe(scope, sizes)
    tell("following channels", 1, _STEPS)
    provenance = Provenance(scope, probe)
    tell("folding gains", 2, _STEPS)
    gains = fold_gains(provenance)
    open_ends(provenance)
    tell("finding rotations", 3, _STEPS)
    partition = Partition(provenance.graph.table, [record for _, record in provenance.all_records()])
    spaces = Spaces(provenance, partition)
    heads = find_heads(provenance, partition, gains, spaces.spaces)
    linears = find_linears(scope, probe, (pair.present for pair in provenance.caches))
    embeddings = find_embeddings(scope, linears)
    refused = find_refusals(provenance, partition, spaces, embeddings)
    tell("comparing the head with the embedding", 4, _STEPS)
    tied = find_tied(model, embeddings, linears, spaces.spaces)
    tell("analysed", _STEPS, _STEPS)
    return Facts(
        nodes=len(model.graph),
        opset=model.graph.opset_imports.get("", model.graph.opset_imports.get("ai.onnx", 0)),
        spaces=(*spaces.spaces, *heads.spaces),
        gains=gains,
        linears=linears,
        embeddings=embeddings,
        tied=tied,
        caches=tuple(provenance.caches),
        refused=(*refused, *heads.refused),
        seconds=time.perf_counter() - started,
    )
