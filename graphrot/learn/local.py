"""The local loss: how much rounding changes what the rotated model holds, tensor by tensor.

Inputs of linears on the grid of the recipe's activations, keys' and values' rows of the cache, and weights. Each
enters as its relative squared error, so that the error of a layer's product is about the sum of its parts. Nothing is
run while it is learned: the rows were read off the model before (:mod:`graphrot.learn.tap`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from graphrot.learn.parts import Turned, changes, turned
from graphrot.learn.rounding import row_errors, token_errors, weight_errors
from graphrot.quant.grid import WeightGrid

ROWS = 48
"""Tokens of every tensor in a batch."""

WEIGHTS = 4
"""Weights in a batch."""

HELDOUT_WEIGHTS = 12
"""Weights that the held-out loss looks at."""

GPTQ_SHARE = 0.3
"""What is left of a weight's error by GPTQ, about: later channels make up for earlier ones."""


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor that is rounded, in the start's basis.

    Args:
        kind: ``activation``: a linear's input. ``cache``: rows of a cache.
        learned: ``[n, K]`` float32 to learn on.
        heldout: ``[m, K]`` float32.
        parts: what acts on the channels.
        heads: rows of a token.
    """

    kind: Literal["activation", "cache"]
    learned: torch.Tensor
    heldout: torch.Tensor
    parts: tuple[Turned, ...]
    heads: int = 1


@dataclass(frozen=True)
class Weight:
    """A weight that is rounded, in the start's basis.

    Args:
        load: gives ``[N, K]`` float32.
        inputs: what acts on its K input channels.
        outputs: what acts on its N output channels.
    """

    load: Callable[[], np.ndarray]
    inputs: tuple[Turned, ...]
    outputs: tuple[Turned, ...]


@dataclass(frozen=True)
class LocalBatch:
    """Tokens and weights.

    Args:
        tokens: positions among the rows' tokens; None: the held-out rows, all of them.
        weights: positions among the weights.
    """

    tokens: torch.Tensor | None
    weights: tuple[int, ...]


class LocalTask:
    """See the module.

    Args:
        start: the matrices in whose basis the data are, ``[dim, dim]`` float64 by space id.
        rows: the tensors that are rounded.
        weights: the weights that are rounded.
        activation_bits: of ``activation`` rows; None: they stay float.
        kv_bits: of ``cache`` rows.
        grid: of the weights; None: they stay float.
        share: of the weights' error that counts.
    """

    def __init__(
        self,
        start: Mapping[str, torch.Tensor],
        rows: Sequence[Rows],
        weights: Sequence[Weight],
        *,
        activation_bits: Literal[4, 8] | None,
        kv_bits: Literal[4, 8] | None,
        grid: WeightGrid | None,
        share: float = 1.0,
    ) -> None:
        self._start = dict(start)
        bits = {"activation": activation_bits, "cache": kv_bits}
        self._rows = [entry for entry in rows if bits[entry.kind] is not None]
        self._weights = list(weights) if grid is not None else []
        self._activation_bits, self._kv_bits, self._grid, self._share = activation_bits, kv_bits, grid, share
        self._tokens = min((len(entry.learned) // entry.heads for entry in self._rows), default=0)

    @property
    def heldout(self) -> Sequence[LocalBatch]:
        """One batch: all held-out rows, and a fixed choice of weights."""
        step = max(1, -(-len(self._weights) // HELDOUT_WEIGHTS))
        return [LocalBatch(None, tuple(range(0, len(self._weights), step)))]

    def batch(self, generator: np.random.Generator) -> LocalBatch:
        """Some tokens, the same of all tensors, and some weights."""
        tokens = generator.integers(0, self._tokens, ROWS) if self._tokens else np.zeros(0, np.int64)
        count = min(WEIGHTS, len(self._weights))
        weights = generator.permutation(len(self._weights))[:count]
        return LocalBatch(torch.from_numpy(tokens), tuple(int(number) for number in weights))

    def __call__(self, matrices: Mapping[str, torch.Tensor], batch: LocalBatch) -> torch.Tensor:
        """The sum of the mean relative errors of activations, caches and weights."""
        turns = changes(self._start, matrices)
        errors: dict[str, list[torch.Tensor]] = {}
        for entry in self._rows:
            errors.setdefault(entry.kind, []).append(self._row_error(entry, batch.tokens, turns))
        for position in batch.weights:
            errors.setdefault("weight", []).append(self._share * self._weight_error(self._weights[position], turns))
        means = [torch.stack(found).mean() for found in errors.values()]
        return torch.stack(means).sum()

    def _row_error(self, entry: Rows, tokens: torch.Tensor | None, turns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        x = entry.heldout
        if tokens is not None:
            x = entry.learned.reshape(-1, entry.heads, entry.learned.shape[-1])[tokens].reshape(-1, x.shape[-1])
        x = turned(x, entry.parts, turns)
        if entry.kind == "activation":
            assert self._activation_bits is not None
            return token_errors(x, self._activation_bits).mean()
        assert self._kv_bits is not None
        return row_errors(x, self._kv_bits).mean()

    def _weight_error(self, weight: Weight, turns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        assert self._grid is not None
        numbers = turned(torch.from_numpy(weight.load()), weight.inputs, turns)
        if weight.outputs:
            numbers = turned(numbers.T, weight.outputs, turns).T
        return weight_errors(numbers.contiguous(), self._grid).mean()
