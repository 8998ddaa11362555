"""Do two model files answer the same?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphrot.evaluate.compare import TOLERANCE, Reference, random_probes, text_probes
from graphrot.evaluate.session import open_decoder
from graphrot.evaluate.text import encode_file
from graphrot.progress import Progress, silent

TEXT_TOKENS = 4096
"""Tokens of the text that are compared, at most."""


@dataclass(frozen=True)
class Verification:
    """The outcome; ``relative`` is the largest difference as a part of the first model's largest logit."""

    ok: bool
    max_abs: float
    relative: float
    top1: float
    tokens: int

    @property
    def tolerance(self) -> float:
        return TOLERANCE["float32"]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    a: Path, b: Path, *, text: Path | None = None, tokenizer: Path | None = None, progress: Progress = silent
) -> Verification:
    """Compare ``b`` with ``a`` on random tokens and, if given, on the first tokens of a text.

    First choices may differ only where the first model's two best logits are closer than twice the
    largest difference.

    Args:
        a: the reference: a folder with model.onnx, or an .onnx file.
        b: the model to check.
        text: a UTF-8 file; needs a tokenizer, in ``tokenizer`` or beside one of the models.
        tokenizer: a folder with tokenizer.json.
        progress: told of each run.

    Raises:
        InputRefused: a file is no decoder, the logits' shapes differ, or there is no tokenizer for the text.
    """
    first = open_decoder(a)
    probes = random_probes(first.vocabulary, batch=first.batch)
    if text is not None:
        probes += text_probes(encode_file(text, tokenizer, beside=(a, b), limit=TEXT_TOKENS), limit=TEXT_TOKENS)
    with Reference(first, probes, progress=progress, step="verify: the first model") as reference:
        del first
        found = reference.compare(open_decoder(b), progress=progress, step="verify: the second model")
    return Verification(
        ok=found.within(TOLERANCE["float32"]),
        max_abs=found.max_abs,
        relative=found.relative,
        top1=found.top1,
        tokens=found.tokens,
    )
