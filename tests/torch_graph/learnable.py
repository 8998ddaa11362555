"""Rotated graphs whose R1 and R2 are open, as learning sees them, and the same graphs with the matrices in place."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from graphrot.analysis.analyze import analyze
from graphrot.analysis.types import AttentionSites, Facts, LinearRef
from graphrot.cache import find_sites
from graphrot.evaluate.double import to_double
from graphrot.folded import materialize
from graphrot.model.load import Source, load_source
from graphrot.ops.library import register
from graphrot.passes.refs import current_linears
from graphrot.plan.types import MatrixRef
from graphrot.prepare import opened_up, plan_for, rotated_graph
from graphrot.quant.feeds import token_feeds
from graphrot.recipe import resolve_recipe
from graphrot.rotation.orthogonal import build_matrix
from tests.contrib.built import built
from tests.exported import tiny_onnx


@dataclass(frozen=True)
class Learnable:
    """A decoder on its way to learned rotations."""

    source: Source
    facts: Facts
    sites: AttentionSites
    model: ir.Model
    """Rotated, with R1 and R2 open."""
    fixed: ir.Model
    """Rotated by the matrices that learning starts from."""
    matrices: dict[str, torch.Tensor]
    linears: tuple[LinearRef, ...]

    def feeds(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        return token_feeds(self.model, tokens, self.facts.caches)

    def start(self) -> dict[str, torch.Tensor]:
        """The matrices, ready for gradients."""
        return {key: matrix.clone().requires_grad_() for key, matrix in self.matrices.items()}


def learnable(path: Path, recipe: str = "w4a4kv4", *, double: bool = False) -> Learnable:
    """Open the R1 and R2 of a decoder's plan; ``double``: of its float64 twin."""
    source = load_source(str(path), workdir=path.parent / "work")
    if double:
        source = replace(source, model=to_double(source.model))
    wanted = resolve_recipe(recipe, kv="none") if double else resolve_recipe(recipe)
    source = opened_up(source, rotary=True)
    facts = analyze(source.model)
    sites = find_sites(source.model, facts, wanted, allow_partial=False)
    plan = plan_for(facts, wanted, source_hash=source.sha256)
    matrices: dict[str, torch.Tensor] = {}
    rotations = []
    for rotation in plan.rotations:
        if rotation.placement == "merged" and rotation.space.kind in ("R1", "R2"):
            key, dim = rotation.space.id, rotation.matrix.dim
            matrices[key] = torch.from_numpy(build_matrix(rotation.matrix).dense())
            rotation = replace(rotation, matrix=MatrixRef("file", dim, file="", key=key))
        rotations.append(rotation)
    fixed = rotated_graph(source.model, plan, quantizes=True)
    model = rotated_graph(source.model, replace(plan, rotations=tuple(rotations)), quantizes=True)
    linears = tuple(linear for linear in current_linears(model, facts.linears) if not linear.is_head)
    return Learnable(source, facts, sites, model, fixed, matrices, linears)


@functools.cache
def tiny_learnable(name: str, *, double: bool = False) -> Learnable:
    """Of ``tests.tiny``; ``built/NAME``: as the genai builder writes it."""
    kind, _, inner = name.rpartition("/")
    return learnable(built(inner) / "model.onnx" if kind else tiny_onnx(inner), double=double)


def answer(
    model: ir.Model, feeds: dict[str, np.ndarray], output: str = "logits", *, double: bool = False
) -> np.ndarray:
    """What ONNX Runtime makes of a graph; pending edits are written on a copy."""
    copy = model.clone()
    materialize(copy, None)
    ir.external_data.load_to_model(copy)
    if double:
        copy = to_double(copy)
        feeds = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in feeds.items()}
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if not double:
        register(options)
    session = ort.InferenceSession(ir.to_proto(copy).SerializeToString(), options, providers=["CPUExecutionProvider"])
    known = {value.name for value in session.get_inputs()}
    return np.asarray(session.run([output], {k: v for k, v in feeds.items() if k in known})[0])


def rows(count: int = 2, length: int = 12, seed: int = 0) -> np.ndarray:
    """Tokens ``[count, length]``."""
    return np.random.default_rng(seed).integers(3, 130, (count, length))
