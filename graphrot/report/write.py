"""From the output of a conversion to its report: read what it says, measure what the pictures need, write the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from graphrot.errors import EnvironmentProblem, GraphrotError, InputRefused, UsageError
from graphrot.evaluate.outliers import first_row
from graphrot.model.ours import read_manifest
from graphrot.model.save import MANIFEST, PLAN
from graphrot.plan.serialize import load_plan
from graphrot.progress import Progress, silent
from graphrot.report.measured import Measured, gather
from graphrot.report.page import build_page
from graphrot.report.seen import seen_from_source, seen_in_written, seen_unrotated
from graphrot.texts import Texts
from graphrot.work.files import write_atomic

SUFFIX = ".report.html"
"""The page stands beside the folder, which a later conversion may replace as a whole, or beside the file."""


@dataclass(frozen=True)
class Report:
    """A page that was written, and what a user has to know about it."""

    path: Path
    bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Place:
    """Where the files of a conversion lie."""

    model: Path
    manifest: Path
    plan: Path
    tokenizer: Path | None

    @classmethod
    def of(cls, given: Path) -> _Place:
        """A folder, or the .onnx file of one or of the file form."""
        folder = given if given.is_dir() else given.parent
        alone = not given.is_dir() and not (folder / MANIFEST).is_file()
        prefix = f"{given.stem}." if alone else ""
        tokenizer = folder if (folder / "tokenizer.json").is_file() else None
        model = given if not given.is_dir() else folder / "model.onnx"
        return cls(model, folder / f"{prefix}{MANIFEST}", folder / f"{prefix}{PLAN}", tokenizer)


def write_report(
    model: str | Path,
    *,
    output: str | Path | None = None,
    text: str | Path | None = None,
    source: str | None = None,
    tokenizer: str | Path | None = None,
    progress: Progress = silent,
) -> Report:
    """Write one self-contained HTML page about a converted model.

    Args:
        model: a folder that :func:`graphrot.convert` wrote, or ``X.onnx``.
        output: the page; None: ``DIR.report.html`` beside the folder, or ``X.report.html`` beside the file.
        text: a UTF-8 text whose first tokens the activations are taken on; None: the help topics that Python brings
            along or, without a tokenizer, random tokens.
        source: what the model was converted from: the plan is replayed on it, and the pictures show its activations
            instead of those of the quantized model.
        tokenizer: a folder with tokenizer.json; None: look beside the model.
        progress: told of each step.

    Raises:
        UsageError: the output is no .html file in a folder that exists, or the plan is another source's.
        InputRefused: there is no conversion here, or a text or source that was given cannot be used.
        EnvironmentProblem: the page cannot be written, or a package is missing for what was asked.
    """
    place = _Place.of(Path(model))
    record = read_manifest(place.manifest)
    if record is None:
        raise InputRefused(
            "There is no conversion here",
            where=str(model),
            why=f"{place.manifest.name} is missing, or was not written by graphrot",
            do="give a folder (or X.onnx) that graphrot convert wrote",
        )
    target = _target(place, output)
    texts = Texts(place.tokenizer if tokenizer is None else Path(tokenizer), None if text is None else Path(text))
    measured, without = None, ""
    progress("measuring activations", 0, 1)
    try:
        measured = _measure(place, record, texts, "the help topics of Python" if text is None else Path(text).name,
                            source, progress)  # fmt: skip
    except GraphrotError as error:
        if text is not None or source is not None:
            raise
        without = f"Activations could not be measured: {error.what}" + (f" ({error.why})." if error.why else ".")
    nothing = without or "No tensor of this model is rotated or quantized."
    page = build_page(record, measured, folder=Path(model).resolve().name, without=nothing)
    content = page.encode("utf-8")
    try:
        write_atomic(target, content)
    except OSError as error:
        raise EnvironmentProblem("The report cannot be written", where=str(target), why=str(error)) from error
    return Report(target, len(content), (without,) if without else ())


def _target(place: _Place, output: str | Path | None) -> Path:
    if output is None:
        single = place.manifest.name != MANIFEST
        beside = place.model.with_suffix("") if single else place.manifest.absolute().parent.resolve()
        return beside.with_name(beside.name + SUFFIX)
    target = Path(output)
    if target.suffix.lower() not in (".html", ".htm") or target.is_dir() or not target.absolute().parent.is_dir():
        raise UsageError(f"{target} cannot be the report", do="name an .html file in a folder that exists")
    return target


def _measure(
    place: _Place, record: Mapping[str, Any], texts: Texts, name: str, source: str | None, progress: Progress
) -> Measured | None:
    """The activations; None where there are none to look at."""
    rotations = (record.get("plan") or {}).get("rotations") or []
    row = first_row(place.model, texts.tokens if texts.available else None, longest=_longest(place.model))
    words = name if texts.available else "random numbers, since there is no tokenizer"
    with TemporaryDirectory(prefix="graphrot-report-") as scratch:
        folder = Path(scratch)
        if not rotations:
            seen = seen_unrotated(place.model, record.get("quantized") or (), row, folder=folder)
            measured = gather(seen, Measured(words, len(row), "none", rotated=False))
        else:
            plan = load_plan(place.plan)
            if source is None:
                seen = seen_in_written(place.model, plan, row, folder=folder)
            else:
                recipe = record.get("recipe") or {}
                seen = seen_from_source(source, plan, recipe, row, folder=folder, progress=progress)
            basis = "model" if source is None else "source"
            measured = gather(seen, Measured(words, len(row), basis, rotated=True))
    return measured if measured.sites else None


def _longest(model: Path) -> int:
    """Tokens that the model takes at once, as many as a window has at most."""
    from graphrot.evaluate.compare import WINDOW, longest_run
    from graphrot.evaluate.session import open_decoder

    decoder = open_decoder(model)
    return longest_run(decoder, WINDOW, batch=decoder.batch) or WINDOW
