"""Compare an exported graph with the torch model it came from. No export is trusted without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort
import torch
from transformers.cache_utils import DynamicCache

from graphrot.model.trace import Signature, forward, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 3e-4
"""Largest accepted difference, as a part of the largest magnitude in the tensor (both are float32)."""


@dataclass(frozen=True)
class Case:
    """One run: ``past`` cached tokens, ``sequence`` new ones, ``padded`` positions masked at row 1's start."""

    batch: int
    past: int
    sequence: int
    padded: int = 0


CASES = (Case(1, 0, 7), Case(2, 0, 4, padded=2), Case(2, 6, 4), Case(1, 9, 1), Case(2, 7, 1, padded=3), Case(1, 0, 1))
"""Prefill, padding, a second chunk after a past, decoding one token. None has the sizes of the trace."""


@dataclass(frozen=True)
class Mismatch:
    """The worst disagreement over all cases: largest difference over largest magnitude."""

    relative: float
    tensor: str
    case: Case

    @property
    def acceptable(self) -> bool:
        """Whether the difference is float32 noise."""
        return self.relative <= TOLERANCE

    def __str__(self) -> str:
        c = self.case
        return (
            f"{self.tensor} differs by {self.relative:.3g} of its largest value "
            f"(batch {c.batch}, past {c.past}, sequence {c.sequence}, padded {c.padded})"
        )


def compare(path: Path, model: PreTrainedModel, signature: Signature, *, threads: int = 0) -> Mismatch:
    """Run both on random tokens and return the worst difference of logits and caches.

    Args:
        path: the exported file.
        model: the torch model, float32, with whatever attention implementation it normally uses.
        signature: inputs and outputs of the graph.
        threads: threads of ONNX Runtime; 0 lets it choose.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_prepacking", "1")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    worst = Mismatch(-1.0, "", CASES[0])
    for number, case in enumerate(CASES):
        for name, relative in _differences(session, model, signature, case, seed=number):
            if not relative <= worst.relative:  # a NaN counts as worst
                worst = Mismatch(relative if relative == relative else float("inf"), name, case)
    return worst


def _differences(
    session: ort.InferenceSession, model: PreTrainedModel, signature: Signature, case: Case, *, seed: int
) -> list[tuple[str, float]]:
    generator = torch.Generator().manual_seed(seed)
    total = case.past + case.sequence
    ids = torch.randint(0, signature.vocabulary, (case.batch, total), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, : case.padded] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0) if signature.takes_positions else None
    past, new = slice(0, case.past), slice(case.past, total)
    cache = DynamicCache()
    with torch.no_grad(), quiet():
        if case.past:
            cached = None if positions is None else positions[:, past]
            forward(model, ids[:, past], mask[:, past], cached, cache)
        feeds = {"input_ids": ids[:, new].numpy(), "attention_mask": mask.numpy()}
        if positions is not None:
            feeds["position_ids"] = positions[:, new].numpy()
        for layer, (key_heads, key_dim, value_heads, value_dim) in enumerate(signature.heads):
            for kind, heads, dim in (("key", key_heads, key_dim), ("value", value_heads, value_dim)):
                held = getattr(cache.layers[layer], kind + "s") if case.past else torch.zeros(case.batch, heads, 0, dim)
                feeds[f"past_key_values.{layer}.{kind}"] = held.numpy().copy()
        logits, grown = forward(model, ids[:, new], mask, None if positions is None else positions[:, new], cache)
    expected = [logits.numpy(), *(t.numpy() for t in grown)]
    actual = session.run(list(signature.outputs()), feeds)
    real = mask.bool().numpy()
    found: list[tuple[str, float]] = []
    for name, want, got in zip(signature.outputs(), expected, actual, strict=True):
        if want.shape != np.shape(got):
            found.append((name, float("inf")))
            continue
        # Positions that are padding attend to nothing real: their values are free.
        rows = real[:, new] if name == "logits" else real
        want, got = (a if name == "logits" else np.moveaxis(a, 2, 1) for a in (want, np.asarray(got)))
        scale = float(np.abs(want[rows]).max())
        found.append((name, float(np.abs(want[rows] - got[rows]).max()) / max(scale, 1e-30)))
    return found
