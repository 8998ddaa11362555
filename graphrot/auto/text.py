"""The tokens that choices are measured on: of the calibration text, behind those that gptq reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphrot.quantize import CALIBRATION_TOKENS
from graphrot.texts import Texts


@dataclass(frozen=True)
class Measured:
    """``tokens [B, S] int64``: rows that each start from an empty cache.

    ``seen``: gptq reads them, too, because the text is too short for both.
    """

    tokens: np.ndarray
    seen: bool


def measured(texts: Texts, *, count: int, window: int) -> Measured:
    """Up to ``count`` tokens in rows of ``window``: behind the calibration tokens, or the last ones of a short text.

    Raises:
        InputRefused: there is no tokenizer, or no text.
    """
    ids = texts.tokens(CALIBRATION_TOKENS + count)
    behind = ids[CALIBRATION_TOKENS:]
    seen = len(behind) < min(count, 64)
    part = ids[-count:] if seen else behind
    size = min(window, len(part))
    rows = len(part) // size
    return Measured(part[: rows * size].reshape(rows, size), seen)
