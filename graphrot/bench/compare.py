"""``graphrot bench``: whole models side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from graphrot.bench import machine
from graphrot.bench.contender import GENAI, Contender
from graphrot.bench.memory import Job, peak_rss_bytes
from graphrot.bench.results import Comparison, Contexts, Result, Settings, Speeds
from graphrot.bench.timing import CPU, RESOLUTION, WALL, Measured, Stopwatch, interleaved, measured
from graphrot.errors import InputRefused, UsageError
from graphrot.ops.foreign import given_libraries
from graphrot.progress import Progress, silent

PROCESSES = 3
"""How often memory is measured, at most."""

Refusals = dict[tuple[int, int], InputRefused]
"""By model and context."""
_Row = list[Measured | None]


def bench(models: Sequence[Path], settings: Settings, *, progress: Progress = silent) -> Comparison:
    """Measure decoders side by side.

    Every turn runs every model, in an order that rotates: a prefill from an empty cache, then for each context real
    decoding steps behind a cache of random tokens in the model's own layout, written in place where the model allows
    it. Memory is that of processes of their own.

    Args:
        models: .onnx files with a KV cache, and folders: see :func:`graphrot.bench.contender.find_file`.
        settings: what is measured.
        progress: told of each turn.

    Raises:
        UsageError: no model is given.
        InputRefused: one is no decoder, has no cache, or does not take the batch, any of the lengths or the runtime.
    """
    if not models:
        raise UsageError("No model is given", do="name a folder or an .onnx file, or several to compare")
    record = machine.record()
    contenders = []
    for done, model in enumerate(models):
        progress("loading", done, len(models))
        contenders.append(_contender(model, settings))
    vocabulary = min(contender.vocabulary for contender in contenders)
    tokens = np.random.default_rng(0).integers(0, vocabulary, max(settings.prefill, settings.decode))
    prefill = _rates(
        [partial(contender.prefill, tokens[: settings.prefill]) for contender in contenders],
        settings.prefill, settings, "prefill", progress,
    )  # fmt: skip
    steps = [int(token) for token in tokens[: settings.decode]]
    refusals: Refusals = {}
    decode = {
        context: _decode(contenders, steps, context, settings, refusals, progress) for context in settings.contexts
    }
    for index in range(len(contenders)):
        if all(rates[CPU][index] is None for rates in decode.values()):
            raise refusals[index, settings.contexts[0]]
    memory = _memory([contender.model for contender in contenders], settings, progress)
    clock = CPU if settings.exact else WALL

    def speeds(index: int, clock: int) -> Speeds:
        return Speeds(prefill[clock][index], {context: rates[clock][index] for context, rates in decode.items()})

    results = []
    for index, contender in enumerate(contenders):
        taken = [context for context, rates in decode.items() if rates[CPU][index] is not None]
        caches = _contexts(contender, taken, settings, progress)
        results.append(
            Result(
                str(contender.model), contender.kind, contender.vocabulary, contender.decoder.uses_library,
                speeds(index, clock), speeds(index, WALL), memory[index], caches,
            )
        )  # fmt: skip
    record["machine"]["load_after"] = machine.load()
    return Comparison(settings, tuple(results), _notes(contenders, results, refusals, settings), record)


def _contender(model: Path, settings: Settings) -> Contender:
    return Contender(model, threads=settings.threads, batch=settings.batch, provider=settings.provider)


def _job(model: Path, settings: Settings, libraries: tuple[str, ...], context: int | None = None) -> Job:
    return Job(str(model), settings.prefill, settings.batch, settings.threads, libraries, context, settings.provider)


def _rates(
    tasks: Sequence[Callable[[], Stopwatch]], tokens: int, settings: Settings, step: str, progress: Progress
) -> tuple[list[Measured], list[Measured]]:
    """Tokens per second of tasks that run ``tokens`` in each row: by thread CPU time, and by wall time."""
    seconds = interleaved(tasks, settings.turns, step=step, progress=progress)
    rates = settings.batch * tokens / np.maximum(seconds, RESOLUTION)
    return measured(rates[..., CPU]), measured(rates[..., WALL])


def _decode(
    contenders: Sequence[Contender],
    steps: list[int],
    context: int,
    settings: Settings,
    refusals: Refusals,
    progress: Progress,
) -> tuple[_Row, _Row]:
    """By thread CPU time and by wall time, for each model; None for those that do not take so many tokens, which adds
    what they say to ``refusals``."""
    tasks = {}
    for index, contender in enumerate(contenders):
        cache = contender.fill(context, settings.decode)
        try:
            contender.decode(steps, cache)
        except InputRefused as error:
            refusals[index, context] = error
            continue
        tasks[index] = partial(contender.decode, steps, cache)
    if not tasks:
        return [None] * len(contenders), [None] * len(contenders)
    rates = _rates(list(tasks.values()), settings.decode, settings, f"decode at {context}", progress)

    def row(found: list[Measured]) -> _Row:
        by_model = dict(zip(tasks, found, strict=True))
        kept = (by_model.get(index) for index in range(len(contenders)))
        return [one if one is None or 0 in tasks else replace(one, ratio=None) for one in kept]

    return row(rates[CPU]), row(rates[WALL])


def _contexts(contender: Contender, taken: Sequence[int], settings: Settings, progress: Progress) -> Contexts:
    libraries = tuple(str(path) for path in given_libraries())
    peaks: dict[int, int | None] = dict.fromkeys(settings.contexts)
    for done, context in enumerate(taken):
        progress("memory by context", done, len(taken))
        job = _job(contender.model, settings, libraries, context)
        peaks[context] = peak_rss_bytes(job)
    sizes = {context: contender.cache_bytes(context) for context in settings.contexts}
    return Contexts(contender.in_place, sizes, peaks)


def _memory(models: Sequence[Path], settings: Settings, progress: Progress) -> list[Measured | None]:
    libraries = tuple(str(path) for path in given_libraries())
    runs = min(PROCESSES, settings.turns)
    found: list[list[int]] = []
    for turn in range(runs):
        progress("memory", turn, runs)
        jobs = [_job(model, settings, libraries) for model in models]
        peaks = [peak_rss_bytes(job) for job in jobs]
        known = [peak for peak in peaks if peak is not None]
        if len(known) < len(models):
            return [None] * len(models)
        found.append(known)
    return list(measured(np.asarray(found, dtype=np.float64)))


def _notes(
    contenders: Sequence[Contender], results: Sequence[Result], refusals: Refusals, settings: Settings
) -> tuple[str, ...]:
    notes = []
    if settings.provider == "cuda":
        notes.append("on CUDA figures are in wall time, with logits left on the GPU, and memory is the host's alone")
    elif settings.threads > 1:
        notes.append("more than one thread: figures are in wall time, which other programs disturb")
    sizes = sorted({contender.vocabulary for contender in contenders})
    if len(sizes) > 1:
        notes.append(f"vocabularies differ ({', '.join(map(str, sizes))}): tokens are drawn below {sizes[0]}")
    ways = {contender.in_place for contender in contenders}
    for contender in contenders:
        if contender.kind == GENAI:
            notes.append(f"{contender.model}: runs in plain ONNX Runtime, like the others")
        if len(ways) > 1 and not contender.in_place:
            notes.append(f"{contender.model}: copies its cache with every token; it takes lengths from its shape")
    notes += [f"left out: {error.where}: {(error.why or '').splitlines()[0]}" for error in refusals.values()]
    if any(result.peak_rss is None for result in results):
        notes.append("this system does not tell the peak memory of a process")
    return tuple(notes)
