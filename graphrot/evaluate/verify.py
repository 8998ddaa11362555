"""Do two model files answer the same?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphrot.evaluate.compare import TOLERANCE, WINDOW, Reference, fitting, longest_run, random_probes, text_probes
from graphrot.evaluate.device import Provider
from graphrot.evaluate.session import open_decoder
from graphrot.evaluate.text import encode_file
from graphrot.progress import Progress, silent

TEXT_TOKENS = 4096
"""Tokens of the text that are compared, at most."""


@dataclass(frozen=True)
class Verification:
    """The outcome; ``relative`` is the largest difference as a part of the first model's largest logit.

    ``dtype`` is the coarser float type of the two models, but not finer than float32: it sets the tolerance.
    """

    ok: bool
    max_abs: float
    relative: float
    top1: float
    tokens: int
    dtype: str = "float32"

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    a: Path,
    b: Path,
    *,
    text: Path | None = None,
    tokenizer: Path | None = None,
    provider: Provider = "cpu",
    progress: Progress = silent,
) -> Verification:
    """Compare ``b`` with ``a`` on random tokens and, if given, on the first tokens of a text.

    The tolerance follows the coarser type of the two: 6e-5 of the largest logit in float32, 1.6e-2 in float16, 0.125
    in bfloat16. First choices may differ only where the first model's two best logits are closer than twice the
    largest difference.

    Args:
        a: the reference: a folder with model.onnx, or an .onnx file.
        b: the model to check.
        text: a UTF-8 file; needs a tokenizer, in ``tokenizer`` or beside one of the models.
        tokenizer: a folder with tokenizer.json.
        provider: where ``b`` runs; ``a`` runs on the CPU, and may be the same file.
        progress: told of each run.

    Raises:
        InputRefused: a file is no decoder, the logits' shapes differ, or there is no tokenizer for the text.
        EnvironmentProblem: ONNX Runtime's CUDA provider cannot be used.
    """
    first = open_decoder(a)
    window = longest_run(first, WINDOW, batch=first.batch) or WINDOW
    probes = random_probes(first.vocabulary, batch=first.batch, window=window)
    if text is not None:
        probes += text_probes(
            encode_file(text, tokenizer, beside=(a, b), limit=TEXT_TOKENS, vocabulary=first.vocabulary),
            limit=TEXT_TOKENS,
            window=window,
        )
    probes = fitting(probes, first)
    with Reference(first, probes, progress=progress, step="verify: the first model") as reference:
        types = {"float32", first.dtype}
        del first
        second = open_decoder(b, provider=provider)
        dtype = next(name for name in TOLERANCE if name in types | {second.dtype})
        found = reference.compare(second, progress=progress, step="verify: the second model")
    return Verification(
        ok=found.within(TOLERANCE[dtype]),
        max_abs=found.max_abs,
        relative=found.relative,
        top1=found.top1,
        tokens=found.tokens,
        dtype=dtype,
    )
