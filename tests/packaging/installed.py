"""Run in an environment that has the wheel alone: write logits with one ONNX Runtime, compare with another's.

    python installed.py write      # in the folder that holds the converted models
    python installed.py compare

Every model runs with the native library and without it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime

import graphrot
from graphrot.errors import InputRefused
from graphrot.evaluate.session import open_decoder

TOLERANCE = {"rotated": 1e-5, "portable": 1e-5, "four": 5e-3, "default": 5e-3}
"""Largest difference, of the largest logit. Where activations are rounded, one may fall to the other side."""
ANSWERS = Path("answers.npz")


def answers(model: str, *, library: bool) -> np.ndarray:
    """Logits ``[2, 24, V]`` of a prompt in two chunks, the second on the model's own cache."""
    decoder = open_decoder(model, library=library, threads=1)
    assert decoder.uses_library == library
    tokens = np.random.default_rng(0).integers(0, decoder.vocabulary, (2, 24))
    first, cache = decoder.run(tokens[:, :15])
    second, _ = decoder.run(tokens[:, 15:], cache)
    return np.concatenate([first, second], axis=1)


def collect() -> dict[str, np.ndarray]:
    """All answers of this runtime: ``model``, and ``model.library``."""
    found = {}
    for model in TOLERANCE:
        found[model] = answers(model, library=False)
        found[f"{model}.library"] = answers(model, library=True)
    return found


def refusal(model: str) -> str:
    """The words with which the runtime does not take a model; empty where it takes it."""
    try:
        answers(model, library=True)
    except InputRefused as error:
        return str(error)
    return ""


def write() -> None:
    place = graphrot.library_path()
    assert Path(sys.prefix).resolve() in place.parents, f"the library is not the wheel's: {place}"
    answers("packed", library=True)
    np.savez(ANSWERS, **collect())


def compare() -> None:
    for key, expected in np.load(ANSWERS).items():
        ours = answers(key.partition(".")[0], library=key.endswith(".library"))
        error = float(np.abs(ours - expected).max() / np.abs(expected).max())
        top1 = float((ours.argmax(-1) == expected.argmax(-1)).mean())
        print(f"onnxruntime {onnxruntime.__version__}, {key}: relative difference {error:.2g}, top-1 {top1:.1%}")
        assert error <= TOLERANCE[key.partition(".")[0]], error
    assert "Only 4b quantization is supported" in refusal("packed"), "8-bit weights in the runtime's own operator"


if __name__ == "__main__":
    {"write": write, "compare": compare}[sys.argv[1]]()
    print(f"onnxruntime {onnxruntime.__version__}: {sys.argv[1]} done")
