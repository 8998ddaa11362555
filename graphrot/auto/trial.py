"""One candidate for the whole model, built as a conversion builds it, and measured against the source.

To be quick, only a part of the linears is rounded: runs of them, evenly spread over the depth. The cache is rounded
in every layer. What is compared are divergences ``KL(source || candidate)`` of the next token on held-out text.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from graphrot.analysis.types import AttentionSites, Facts, LinearRef
from graphrot.auto import sites
from graphrot.auto.effect import divergence, log_softmax
from graphrot.auto.text import measured
from graphrot.evaluate.session import DecoderSession
from graphrot.folded import materialize
from graphrot.graph import WeightStore
from graphrot.model.load import Source
from graphrot.plan.types import RotationPlan
from graphrot.prepare import rotated_graph
from graphrot.progress import silent
from graphrot.quantize import CALIBRATION_TOKENS, CALIBRATION_WINDOW, calibration_feeds, quantize
from graphrot.recipe import Recipe
from graphrot.texts import Texts

TOKENS = 512
"""Tokens that a candidate is measured on."""

_RUN = 14
_RUNS = 3
"""Linears of a larger model that are rounded: so many runs of so many neighbours."""


@dataclass(frozen=True)
class Effect:
    """What a candidate costs: its divergence at every position, ``[T] float64``."""

    positions: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.positions.mean())

    def gain_over(self, other: Effect) -> tuple[float, float]:
        """How much less this one costs, as a fraction of the other, and the standard error of that fraction."""
        base = max(other.mean, float(np.finfo(np.float64).tiny))
        difference = other.positions - self.positions
        return float(difference.mean()) / base, float(difference.std() / np.sqrt(difference.size)) / base


class Trials:
    """Measures plans on one model.

    Args:
        source: opened up; its file gives the answers that candidates are compared with.
        facts: of the source.
        attention: whose cache the recipe quantizes.
        recipe: what is rounded, and how; embedding and head stay float here.
        texts: for gptq, and to measure on.
        folder: scratch, owned by the caller.
        window: tokens of a row, at most.
    """

    def __init__(
        self,
        source: Source,
        facts: Facts,
        attention: AttentionSites,
        recipe: Recipe,
        texts: Texts,
        folder: Path,
        *,
        window: int,
    ) -> None:
        self._source, self._attention, self._texts, self._folder = source, attention, texts, folder
        self._window = window
        self._linears = facts.linears
        self._facts = replace(facts, linears=part_of(facts.linears), embeddings=())
        target = "ort" if recipe.target == "genai" else recipe.target
        self._recipe = recipe.model_copy(update={"target": target, "embedding": None, "head": None, "bits": None})
        found = measured(texts, count=TOKENS, window=window)
        self.tokens, self.seen = found.tokens, found.seen
        self._before = self._answers(DecoderSession(source.path))
        read = texts.tokens(CALIBRATION_TOKENS)
        self._halves = read[: len(read) // 2], read[len(read) // 2 :]
        self._count = 0

    def measure(self, plan: RotationPlan, *, draw: Literal[0, 1] = 0) -> Effect:
        """What the model costs under a plan, rounded as the recipe says.

        Args:
            plan: made for the source.
            draw: gptq reads the first or the second half of the calibration tokens. Rounding scatters: what holds for
                one half alone is chance.
        """
        self._count += 1
        folder = self._folder / f"trial{self._count}"
        model = rotated_graph(self._source.model, plan, quantizes=True)
        materialize(model, WeightStore(folder / "rotated"), progress=silent)
        quantize(
            model,
            self._source.model,
            self._facts,
            replace(plan, grids=()),
            self._recipe,
            texts=self._texts,
            scratch=folder / "quantized",
            longest=self._window if self._window < TOKENS else None,
            sites=self._attention,
            compared=False,
            calibration=self._halves[draw],
            progress=silent,
        )
        after = self._answers(DecoderSession(model))
        shutil.rmtree(folder)
        return Effect(np.concatenate([divergence(x, y) for x, y in zip(self._before, after, strict=True)]))

    def site_errors(self, plan: RotationPlan) -> dict[str, tuple[float, float]]:
        """What the linears behind each site lose without its rotation and with it, see :mod:`graphrot.auto.sites`."""
        folder = self._folder / "sites"
        model = rotated_graph(self._source.model, plan, quantizes=True)
        materialize(model, WeightStore(folder / "rotated"), progress=silent)
        tokens = self._halves[0][: sites.TOKENS]
        feeds = calibration_feeds(model, tokens, self._facts.caches, window=min(self._window, CALIBRATION_WINDOW))
        found = sites.site_errors(model, self._linears, plan, self._recipe, feeds, folder)
        shutil.rmtree(folder)
        return found

    def _answers(self, decoder: DecoderSession) -> list[np.ndarray]:
        """Log probabilities ``[S, V]`` of every row."""
        rows = (np.asarray(decoder.run(row[None])[0][0], dtype=np.float32) for row in self.tokens)
        return [log_softmax(np.array(row)) for row in rows]


def part_of(linears: Sequence[LinearRef]) -> tuple[LinearRef, ...]:
    """The linears that a trial rounds: all of a small model; heads never."""
    body = [linear for linear in linears if not linear.is_head]
    if len(body) <= 2 * _RUN * _RUNS:
        return tuple(body)
    starts = [round(step * (len(body) - _RUN) / (_RUNS - 1)) for step in range(_RUNS)]
    return tuple(linear for start in starts for linear in body[start : start + _RUN])
