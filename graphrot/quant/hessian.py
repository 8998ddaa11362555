"""Second moments of a layer's inputs, summed over tokens."""

from __future__ import annotations

import numpy as np

_TOKENS = 512
"""Tokens per float32 product; the products are added in float64."""


class SecondMoment:
    """Accumulates ``X.T @ X`` and the sum of the rows of X.

    Args:
        features: K, the width of the inputs.
    """

    def __init__(self, features: int) -> None:
        self.matrix = np.zeros((features, features), dtype=np.float64)
        self.total = np.zeros(features, dtype=np.float64)
        self.tokens = 0

    def add(self, inputs: np.ndarray) -> None:
        """Add the tokens of ``[..., K]`` inputs, any float dtype."""
        rows = np.asarray(inputs, dtype=np.float32).reshape(-1, self.matrix.shape[0])
        for start in range(0, rows.shape[0], _TOKENS):
            part = rows[start : start + _TOKENS]
            self.matrix += part.T @ part
        self.total += rows.sum(axis=0, dtype=np.float64)
        self.tokens += rows.shape[0]
