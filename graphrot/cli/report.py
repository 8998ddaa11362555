"""``graphrot report``: one page about a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphrot.cli.options import CustomOps
from graphrot.cli.output import print_json
from graphrot.cli.progress import StepBars
from graphrot.words import size


def report(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A folder (or X.onnx) that convert wrote.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.html", help="The page; default: DIR.report.html.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A text (UTF-8) to take activations on.")] = None,
    source: Annotated[
        str | None,
        typer.Option(help="What DIR was converted from: the pictures then show its own activations, before and after."),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with tokenizer.json.")] = None,
    libraries: CustomOps = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write one HTML page: sizes, accuracy, certificate, sites, outliers, errors, versions."""
    from graphrot.api import report as run
    from graphrot.ops.foreign import custom_ops

    with custom_ops(*(libraries or ())), StepBars() as bars:
        made = run(model, output=output, text=text, source=source, tokenizer=tokenizer, progress=bars)
    for note in made.notes:
        typer.echo(f"note: {note}", err=True)
    if as_json:
        print_json({"report": str(made.path), "bytes": made.bytes})
    else:
        typer.echo(f"written {made.path} ({size(made.bytes)})")
