"""The figures by context as a picture: speed of decoding, bytes of the cache, peak memory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from graphrot.bench.results import Comparison, Result
from graphrot.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MEGABYTE = 1e6
_SIZE = (15.0, 4.6)
_DPI = 110


def check(path: Path) -> None:
    """Refuse a chart that cannot be drawn, before anything is measured.

    Raises:
        UsageError: it is no .png, or its folder does not exist.
        EnvironmentProblem: there is no matplotlib.
    """
    if path.suffix.lower() != ".png" or path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"{path} cannot be the chart", do="name a .png file in a folder that exists")
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise EnvironmentProblem(
            "matplotlib, which draws the chart, is not installed", why=str(error), do="pip install 'graphrot[chart]'"
        ) from error


def draw(comparison: Comparison, path: Path) -> None:
    """Write the chart as PNG; no display is needed.

    Args:
        comparison: what was measured.
        path: the file; it is replaced.

    Raises:
        EnvironmentProblem: it cannot be written, or there is no matplotlib.
    """
    check(path)
    from matplotlib.figure import Figure

    settings, machine = comparison.settings, comparison.record["machine"]
    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    speed, cache, memory = figure.subplots(1, 3)
    names = _names([result.model for result in comparison.models])
    for name, result in zip(names, comparison.models, strict=True):
        _line(speed, name, _speeds(result))
        _line(cache, name, {context: count / _MEGABYTE for context, count in result.contexts.cache_bytes.items()})
        peaks = result.contexts.peak_rss
        _line(memory, name, {context: None if peak is None else peak / _MEGABYTE for context, peak in peaks.items()})
    for axes, title, unit in (
        (speed, "decoding", f"tokens per second ({settings.clock} time)"),
        (cache, "key/value cache", "MB"),
        (memory, "peak memory of the process", "MB"),
    ):
        axes.set_title(title)
        axes.set_xlabel("context, tokens in the cache")
        axes.set_ylabel(unit)
        axes.set_xscale("log", base=2)
        axes.set_xticks(settings.contexts, [str(context) for context in settings.contexts])
        axes.minorticks_off()
        axes.set_ylim(0, 1.05 * max(axes.dataLim.ymax, 1e-9))
        axes.grid(alpha=0.3)
    speed.legend()
    threads = f"{settings.threads} thread{'s' if settings.threads > 1 else ''}"
    figure.suptitle(f"{machine['cpu']}, {threads}, batch {settings.batch}", fontsize="medium")
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise EnvironmentProblem("The chart cannot be written", where=str(path), why=str(error)) from error


def _speeds(result: Result) -> dict[int, float | None]:
    return {c: None if value is None else value.figure.median for c, value in result.speeds.decode.items()}


def _line(axes: Axes, name: str, points: Mapping[int, float | None]) -> None:
    known = sorted((context, value) for context, value in points.items() if value is not None)
    axes.plot([context for context, _ in known], [value for _, value in known], marker="o", label=name)


def _names(models: list[str]) -> list[str]:
    short = [Path(model).resolve().name for model in models]
    return short if len(set(short)) == len(set(models)) else models
