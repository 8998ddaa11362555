"""``graphrot bench``: whole models side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from graphrot.bench import machine
from graphrot.bench.contender import GENAI, Contender
from graphrot.bench.memory import Job, peak_rss_bytes
from graphrot.bench.timing import CPU, RESOLUTION, WALL, Measured, Stopwatch, interleaved, measured
from graphrot.errors import UsageError
from graphrot.ops.foreign import given_libraries
from graphrot.progress import Progress, silent

PROCESSES = 3
"""How often memory is measured, at most."""


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        prefill: tokens of one run from an empty cache.
        decode: single tokens, one after the other.
        contexts: lengths of the cache in front of the first of them.
        batch: equal rows.
        threads: of ONNX Runtime, inside of an operator.
        turns: how often all is measured.

    Raises:
        UsageError: one of these is not positive, or there is no context.
    """

    prefill: int = 256
    decode: int = 64
    contexts: tuple[int, ...] = (128, 1024)
    batch: int = 1
    threads: int = 1
    turns: int = 9

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "batch", "threads", "turns"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", do="give a number of at least 1")
        if not self.contexts or min(self.contexts) < 1 or len(set(self.contexts)) < len(self.contexts):
            raise UsageError(
                f"The contexts are {', '.join(map(str, self.contexts)) or 'missing'}",
                do="give different lengths of at least 1, like 128,1024",
            )

    @property
    def clock(self) -> str:
        """What the figures are in: on one thread all work is the calling thread's, and its CPU time is exact."""
        return "thread cpu" if self.threads == 1 else "wall"


@dataclass(frozen=True)
class Speeds:
    """Tokens per second, by one clock. Ratios are to the first model, of the same turn: over 1 is faster."""

    prefill: Measured
    decode: dict[int, Measured]

    def to_dict(self) -> dict[str, Any]:
        return {
            "prefill_tokens_per_s": self.prefill.to_dict(),
            "decode_tokens_per_s": {str(context): value.to_dict() for context, value in self.decode.items()},
        }


@dataclass(frozen=True)
class Result:
    """One model's figures.

    Attributes:
        model: as it was given.
        kind: ``graphrot``, ``onnxruntime-genai`` or ``onnx``.
        vocabulary: its size.
        kernels: whether graphrot's own kernels run in it.
        speeds: by the clock of the settings.
        wall: by wall time.
        peak_rss: bytes; ratio over 1: more than the first. None where the system does not tell.
    """

    model: str
    kind: str
    vocabulary: int
    kernels: bool
    speeds: Speeds
    wall: Speeds
    peak_rss: Measured | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "kind": self.kind,
            "vocabulary": self.vocabulary,
            "kernels": self.kernels,
            **self.speeds.to_dict(),
            "peak_rss_bytes": None if self.peak_rss is None else self.peak_rss.to_dict(),
            "wall": self.wall.to_dict(),
        }


@dataclass(frozen=True)
class Comparison:
    """What :func:`bench` measured, in the order in which the models were given."""

    settings: Settings
    models: tuple[Result, ...]
    notes: tuple[str, ...]
    record: dict[str, Any]
    """The machine, versions, commit and instruction set; see :func:`graphrot.bench.machine.record`."""

    def to_dict(self) -> dict[str, Any]:
        settings = self.settings
        return {
            **self.record,
            "prefill": settings.prefill,
            "decode": settings.decode,
            "context": list(settings.contexts),
            "batch": settings.batch,
            "threads": settings.threads,
            "turns": settings.turns,
            "clock": settings.clock,
            "models": [result.to_dict() for result in self.models],
            "notes": list(self.notes),
        }


def bench(models: Sequence[Path], settings: Settings, *, progress: Progress = silent) -> Comparison:
    """Measure decoders side by side.

    Every turn runs every model, in an order that rotates: a prefill from an empty cache, then for each context real
    decoding steps on a cache that the model filled itself. Memory is that of processes of their own.

    Args:
        models: .onnx files with a KV cache, and folders: see :func:`graphrot.bench.contender.find_file`.
        settings: what is measured.
        progress: told of each turn.

    Raises:
        UsageError: no model is given.
        InputRefused: one is no decoder, has no cache, or does not take the batch, the lengths or the runtime.
    """
    if not models:
        raise UsageError("No model is given", do="name a folder or an .onnx file, or several to compare")
    record = machine.record()
    contenders = []
    for done, model in enumerate(models):
        progress("loading", done, len(models))
        contenders.append(Contender(model, threads=settings.threads, batch=settings.batch))
    vocabulary = min(contender.vocabulary for contender in contenders)
    length = max(settings.prefill, *settings.contexts) + settings.decode
    tokens = np.random.default_rng(0).integers(0, vocabulary, length)
    prefill = _rates(
        [partial(contender.prefill, tokens[: settings.prefill]) for contender in contenders],
        settings.prefill, settings, "prefill", progress,
    )  # fmt: skip
    decode = {context: _decode(contenders, tokens, context, settings, progress) for context in settings.contexts}
    memory = _memory([contender.model for contender in contenders], settings, progress)
    clock = CPU if settings.threads == 1 else WALL

    def speeds(index: int, clock: int) -> Speeds:
        return Speeds(prefill[clock][index], {context: rates[clock][index] for context, rates in decode.items()})

    results = tuple(
        Result(
            str(contender.model), contender.kind, contender.vocabulary, contender.decoder.uses_library,
            speeds(index, clock), speeds(index, WALL), memory[index],
        )
        for index, contender in enumerate(contenders)
    )  # fmt: skip
    record["machine"]["load_after"] = machine.load()
    return Comparison(settings, results, _notes(contenders, settings, memory), record)


def _rates(
    tasks: Sequence[Callable[[], Stopwatch]], tokens: int, settings: Settings, step: str, progress: Progress
) -> tuple[list[Measured], list[Measured]]:
    """Tokens per second of tasks that run ``tokens`` in each row: by thread CPU time, and by wall time."""
    seconds = interleaved(tasks, settings.turns, step=step, progress=progress)
    rates = settings.batch * tokens / np.maximum(seconds, RESOLUTION)
    return measured(rates[..., CPU]), measured(rates[..., WALL])


def _decode(
    contenders: Sequence[Contender], tokens: np.ndarray, context: int, settings: Settings, progress: Progress
) -> tuple[list[Measured], list[Measured]]:
    steps = [int(token) for token in tokens[context : context + settings.decode]]
    tasks = [partial(contender.decode, steps, contender.fill(tokens[:context])) for contender in contenders]
    return _rates(tasks, settings.decode, settings, f"decode at {context}", progress)


def _memory(models: Sequence[Path], settings: Settings, progress: Progress) -> list[Measured | None]:
    libraries = tuple(str(path) for path in given_libraries())
    runs = min(PROCESSES, settings.turns)
    found: list[list[int]] = []
    for turn in range(runs):
        progress("memory", turn, runs)
        jobs = [Job(str(model), settings.prefill, settings.batch, settings.threads, libraries) for model in models]
        peaks = [peak_rss_bytes(job) for job in jobs]
        known = [peak for peak in peaks if peak is not None]
        if len(known) < len(models):
            return [None] * len(models)
        found.append(known)
    return list(measured(np.asarray(found, dtype=np.float64)))


def _notes(contenders: Sequence[Contender], settings: Settings, memory: Sequence[Measured | None]) -> tuple[str, ...]:
    notes = []
    if settings.threads > 1:
        notes.append("more than one thread: figures are in wall time, which other programs disturb")
    sizes = sorted({contender.vocabulary for contender in contenders})
    if len(sizes) > 1:
        notes.append(f"vocabularies differ ({', '.join(map(str, sizes))}): tokens are drawn below {sizes[0]}")
    for contender in contenders:
        if contender.kind == GENAI:
            notes.append(f"{contender.model}: runs in plain ONNX Runtime, like the others")
    if None in memory:
        notes.append("this system does not tell the peak memory of a process")
    return tuple(notes)
