"""Measurements of one model: perplexity, agreement with another model, tasks; and the record they leave.

Heavy imports stand inside the functions, so that ``import graphrot`` stays fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrot.errors import InputRefused, UsageError
from graphrot.progress import Progress, silent

if TYPE_CHECKING:
    import numpy as np

    from graphrot.evaluate.device import Provider
    from graphrot.evaluate.session import DecoderSession
    from graphrot.report.parts import EvaluationPart


@dataclass(frozen=True)
class Evaluation:
    """What was measured; None and empty where it was not asked for.

    Attributes:
        perplexity: on the text.
        tokens: that were predicted for it.
        window: tokens per window.
        windows: number of windows.
        reference_perplexity: of the reference, on the same windows.
        kl: divergence of the model from the reference, nats a token.
        top1: part of the positions at which both have the same likeliest token.
        tasks: metric -> figure, by task.
        notes: what a user has to know about the figures.
    """

    perplexity: float | None = None
    tokens: int | None = None
    window: int | None = None
    windows: int | None = None
    reference_perplexity: float | None = None
    kl: float | None = None
    top1: float | None = None
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The figures that were asked for, under their names."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        found = {name: value for name, value in figures.items() if value is not None}
        return {**found, "tasks": self.tasks} if self.tasks else found


_FIGURES = ("perplexity", "tokens", "window", "windows", "reference_perplexity", "kl", "top1")


def measure(
    model: Path,
    *,
    text: Path | None = None,
    window: int = 1024,
    windows: int = 3,
    tokenizer: Path | None = None,
    reference: Path | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    record: bool = False,
    allow_overlap: bool = False,
    provider: Provider = "cpu",
    progress: Progress = silent,
) -> Evaluation:
    """Measure a model; see :func:`graphrot.evaluate`."""
    from graphrot.evaluate.harness import HarnessModel
    from graphrot.evaluate.session import open_decoder
    from graphrot.evaluate.tasks import check_tasks, run_tasks
    from graphrot.evaluate.text import encode_file, find_tokenizer, foreign_notes, read_text
    from graphrot.report.record import manifest_of
    from graphrot.report.record import record as keep

    if text is None and not tasks:
        raise UsageError("There is nothing to measure", where="--text, --tasks", do="give a text, or tasks, or both")
    if reference is not None and text is None:
        raise UsageError("A reference is compared on a text", where="--reference", do="give --text FILE")
    if limit is not None and (limit < 1 or not tasks):
        raise UsageError(
            "The limit counts items of tasks, from one on",
            where=f"--limit {limit}",
            do="give --tasks, or leave it out",
        )
    if tasks:
        check_tasks(tasks)
    if text is not None:
        read_text(text)
    manifest = manifest_of(model)
    if record and manifest is None:
        raise InputRefused(
            "There is no graphrot.json to record in",
            where=str(model),
            why="convert writes it beside its models",
            do="name a model that convert wrote, or leave --record out",
        )
    decoder = open_decoder(model, provider=provider)
    words = find_tokenizer(tokenizer, beside=(model,))
    found = Evaluation(notes=foreign_notes(words, decoder.vocabulary))
    overlapping: tuple[str, ...] = ()
    if text is not None:
        tokens = encode_file(text, tokenizer, beside=(model,), vocabulary=decoder.vocabulary)
        if manifest is not None:
            overlapping = _overlap(manifest, tokens[: window * windows], text, allow=allow_overlap)
        found = _on_text(decoder, tokens, window, windows, reference, provider, progress, found)
    if tasks:
        answers = HarnessModel(decoder, words, progress=progress)
        found = replace(found, tasks=run_tasks(answers, tasks, limit=limit, progress=progress))
        if answers.shortened:
            cut = f"{answers.shortened} requests were cut at their beginning: the model takes no more tokens at once"
            found = replace(found, notes=(*found.notes, cut))
    found = replace(found, notes=(*overlapping, *found.notes))
    if record and manifest is not None:
        keep(manifest, _part(found, text, reference, limit, overlaps=bool(overlapping)))
    return found


def _overlap(manifest: Path, tokens: np.ndarray, text: Path, *, allow: bool) -> tuple[str, ...]:
    """Refuse a text that the model has seen, or note it."""
    from graphrot.report.record import seen_before

    found = seen_before(manifest, tokens)
    if found is None:
        return ()
    use, overlap = found
    why = f"the model was {use}, which shares passages with the text, one at its token {overlap.first}"
    if not allow:
        raise InputRefused(
            "The model has seen this text",
            where=str(text),
            why=f"{why}; its figures would look better than they are",
            do="measure on another text, calibrate on another, or take the figures as they are with --allow-overlap",
        )
    return (f"{why}; the figures may look better than they are",)


def _on_text(
    decoder: DecoderSession,
    tokens: np.ndarray,
    window: int,
    windows: int,
    reference: Path | None,
    provider: Provider,
    progress: Progress,
    found: Evaluation,
) -> Evaluation:
    from graphrot.evaluate.agreement import agreement
    from graphrot.evaluate.perplexity import cut, perplexity
    from graphrot.evaluate.session import open_decoder

    if reference is None:
        alone = perplexity(decoder, tokens, window=window, windows=windows, progress=progress)
        return replace(found, perplexity=alone.perplexity, tokens=alone.tokens, window=window, windows=windows)
    cut(tokens, window=window, windows=windows)  # refused before the reference is loaded
    other = open_decoder(reference, provider=provider)
    both = agreement(decoder, other, tokens, window=window, windows=windows, progress=progress)
    return replace(
        found,
        perplexity=both.model.perplexity,
        tokens=both.model.tokens,
        window=window,
        windows=windows,
        reference_perplexity=both.reference.perplexity,
        kl=both.kl,
        top1=both.top1,
    )


def _part(
    found: Evaluation, text: Path | None, reference: Path | None, limit: int | None, *, overlaps: bool
) -> EvaluationPart:
    from graphrot.model.files import sha256_of
    from graphrot.report.parts import EvaluationPart

    return EvaluationPart(
        text=None if text is None else text.name,
        sha256=None if text is None else sha256_of([text]),
        reference=None if reference is None else reference.absolute().name,
        **{name: getattr(found, name) for name in (*_FIGURES, "tasks")},
        limit=limit,
        overlaps=overlaps,
    )
