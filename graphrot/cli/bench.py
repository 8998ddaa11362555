"""``graphrot bench``: whole models side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphrot.cli.options import CustomOps, Provider
from graphrot.cli.output import print_json
from graphrot.cli.progress import StepBars
from graphrot.errors import UsageError
from graphrot.words import size

if TYPE_CHECKING:
    from graphrot.bench.results import Comparison
    from graphrot.bench.timing import Measured

_COLUMNS = ("", "model", "median", "p10 - p90", "to the first")
_NONE = "-"


def bench(
    models: Annotated[
        list[Path],
        typer.Argument(help="Folders that convert or onnxruntime-genai's builder wrote, or .onnx files with a cache."),
    ],
    prefill: Annotated[int, typer.Option(min=1, help="Tokens of one run from an empty cache.")] = 256,
    decode: Annotated[int, typer.Option(min=1, help="Single tokens, one after the other, at each context.")] = 64,
    context: Annotated[
        str, typer.Option(metavar="LENGTH,...", help="Lengths of the cache that decoding starts with.")
    ] = "128,1024",
    batch: Annotated[int, typer.Option(min=1, help="Rows that run at once.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of ONNX Runtime; one gives the exact figures.")] = 1,
    turns: Annotated[int, typer.Option(min=1, help="How often all models run, in an order that rotates.")] = 9,
    chart: Annotated[
        Path | None, typer.Option(metavar="X.png", help="Draw speed, cache and memory by context (extra: chart).")
    ] = None,
    provider: Provider = "cpu",
    libraries: CustomOps = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure models side by side: prefill, decoding, memory; in turns, with ratios to the first."""
    from graphrot.api import bench as run
    from graphrot.ops.foreign import custom_ops

    contexts = _lengths(context)
    with custom_ops(*(libraries or ())), StepBars() as bars:
        result = run(
            *models,
            prefill=prefill,
            decode=decode,
            context=contexts,
            batch=batch,
            threads=threads,
            turns=turns,
            chart=chart,
            provider=provider,
            progress=bars,
        )
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)
    if as_json:
        print_json(result.to_dict())
    else:
        _show(result)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--context {text!r} is no list of lengths", do="give numbers with commas between, like 128,1024"
        ) from None


def _show(result: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    settings, facts = result.settings, result.record
    table = Table(
        title=f"batch {settings.batch}, {settings.threads} thread{'s' if settings.threads > 1 else ''}, "
        f"{settings.clock} time, {settings.turns} turns",
        title_justify="left",
    )
    for name in _COLUMNS:
        words = name in _COLUMNS[:2]
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for what, rows in _blocks(result):
        for index, (model, row) in enumerate(rows):
            table.add_row(what if index == 0 else "", model, *row, end_section=index + 1 == len(rows))
    console = Console(highlight=False)
    console.print(table)
    machine, versions = facts["machine"], facts["versions"]
    graphrot = facts["commit"][:12] if facts["commit"] else versions["graphrot"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']} before and {machine['load_after']} after; "
        f"ONNX Runtime {versions['onnxruntime'] or versions['onnxruntime-gpu']}, graphrot {graphrot}, "
        f"kernels {facts['isa'] or 'not installed'}",
        markup=False,
    )


def _blocks(result: Comparison) -> Iterator[tuple[str, list[tuple[str, tuple[str, str, str]]]]]:
    """For each thing that was measured: its name, and a row for each model."""
    settings, models = result.settings, result.models
    names = _names([Path(model.model) for model in models])
    speeds: list[tuple[str, list[Measured | None]]]
    speeds = [(f"prefill {settings.prefill}, tokens/s", [model.speeds.prefill for model in models])]
    for context in settings.contexts:
        speeds.append((f"decode at {context}, tokens/s", [model.speeds.decode[context] for model in models]))
    for what, figures in speeds:
        yield what, [(name, _row(value, _number)) for name, value in zip(names, figures, strict=True)]
    peaks = [model.peak_rss for model in models]
    if any(peaks):
        yield "peak memory", [(name, _row(value, _bytes)) for name, value in zip(names, peaks, strict=True)]
    for context in settings.contexts:
        sizes = [model.contexts.cache_bytes[context] for model in models]
        yield f"cache at {context}", [(name, _sizes(value, sizes[0])) for name, value in zip(names, sizes, strict=True)]
    for context in settings.contexts:
        found = [model.contexts.peak_rss[context] for model in models]
        if any(found):
            rows = [(name, _sizes(value, found[0])) for name, value in zip(names, found, strict=True)]
            yield f"memory at {context}", rows


def _names(models: list[Path]) -> list[str]:
    """The last parts of the paths, if they tell the models apart."""
    short = [model.resolve().name for model in models]
    return short if len(set(short)) == len(set(models)) else [str(model) for model in models]


def _row(value: Measured | None, show: Callable[[float], str]) -> tuple[str, str, str]:
    if value is None:
        return _NONE, "", ""
    shown, ratio = value.figure, value.ratio
    spread = "" if ratio is None else f"{ratio.median:.2f} ({ratio.p10:.2f} - {ratio.p90:.2f})"
    return show(shown.median), f"{show(shown.p10)} - {show(shown.p90)}", spread


def _sizes(value: int | None, first: int | None) -> tuple[str, str, str]:
    return (_NONE if value is None else size(value)), "", (f"{value / first:.2f}" if value and first else "")


def _number(value: float) -> str:
    return f"{value:.1f}"


def _bytes(value: float) -> str:
    return size(int(value))
