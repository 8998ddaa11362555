"""Load a finished model before it is written for good, and run it where it is known how."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graphrot.errors import CheckFailed, InputRefused
from graphrot.evaluate.session import DecoderSession, Unrunnable


def try_model(folder: Path, *, decoder: bool) -> None:
    """Load ``folder/model.onnx`` and, of a decoder, run a few tokens.

    Args:
        folder: holds the model.
        decoder: it has to be one; else a model with other inputs is loaded only.

    Raises:
        CheckFailed: it does not load or run, or its logits are not finite.
    """
    try:
        logits = _few_tokens(folder, decoder)
    except InputRefused as error:
        raise CheckFailed(
            "The converted model does not run", where=error.where, why=error.why or error.what, do="report the model"
        ) from error
    if not np.isfinite(logits).all():
        raise CheckFailed("The converted model's logits are not finite", do="report the model and the recipe")


def _few_tokens(folder: Path, decoder: bool) -> np.ndarray:
    try:
        session = DecoderSession(folder)
    except Unrunnable:
        raise
    except InputRefused:
        if decoder:
            raise
        return np.zeros(0)  # it was loaded: its inputs and outputs are looked at after that
    logits, cache = session.run(np.zeros((1, 3), np.int64))
    logits, _ = session.run(logits[:, -1:].argmax(axis=-1), cache)
    return logits
