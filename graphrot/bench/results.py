"""What ``graphrot bench`` is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from graphrot.bench.timing import Measured
from graphrot.errors import UsageError


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
        provider: where the models run.

    Raises:
        UsageError: one of these is not positive, or there is no context.
    """

    prefill: int = 256
    decode: int = 64
    contexts: tuple[int, ...] = (128, 1024)
    batch: int = 1
    threads: int = 1
    turns: int = 9
    provider: Literal["cpu", "cuda"] = "cpu"

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
    def exact(self) -> bool:
        """Whether all work is the calling thread's, whose CPU time is exact."""
        return self.threads == 1 and self.provider == "cpu"

    @property
    def clock(self) -> str:
        """What the figures are in."""
        return "thread cpu" if self.exact else "wall"


@dataclass(frozen=True)
class Speeds:
    """Tokens per second, by one clock. Ratios are to the first model, of the same turn: over 1 is faster. None: the
    model does not take so many tokens."""

    prefill: Measured
    decode: dict[int, Measured | None]

    def to_dict(self) -> dict[str, Any]:
        return {
            "prefill_tokens_per_s": self.prefill.to_dict(),
            "decode_tokens_per_s": {
                str(context): None if value is None else value.to_dict() for context, value in self.decode.items()
            },
        }


@dataclass(frozen=True)
class Contexts:
    """What a model's cache takes, by its length.

    Attributes:
        in_place: new tokens are written into buffers that are there; else every run makes a longer cache and copies.
        cache_bytes: of the tokens themselves, in all rows.
        peak_rss: bytes of a process of its own that loads the model, and runs one token behind such a cache. None where
            the system does not tell, or the model does not take so many.
    """

    in_place: bool
    cache_bytes: dict[int, int]
    peak_rss: dict[int, int | None]

    def to_dict(self) -> dict[str, Any]:
        return {
            "cache_in_place": self.in_place,
            "cache_bytes": {str(context): value for context, value in self.cache_bytes.items()},
            "decode_peak_rss_bytes": {str(context): value for context, value in self.peak_rss.items()},
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
        contexts: the cache at the lengths that decoding starts with.
    """

    model: str
    kind: str
    vocabulary: int
    kernels: bool
    speeds: Speeds
    wall: Speeds
    peak_rss: Measured | None
    contexts: Contexts

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "kind": self.kind,
            "vocabulary": self.vocabulary,
            "kernels": self.kernels,
            **self.speeds.to_dict(),
            "peak_rss_bytes": None if self.peak_rss is None else self.peak_rss.to_dict(),
            **self.contexts.to_dict(),
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
            "provider": settings.provider,
            "turns": settings.turns,
            "clock": settings.clock,
            "models": [result.to_dict() for result in self.models],
            "notes": list(self.notes),
        }
