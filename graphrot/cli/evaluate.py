"""``graphrot eval``: perplexity on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphrot.cli.options import CustomOps
from graphrot.cli.output import print_json
from graphrot.cli.progress import StepBars


def evaluate(
    model: Annotated[Path, typer.Argument(help="A folder that convert wrote, or an .onnx file.")],
    text: Annotated[Path, typer.Option(help="The text to measure on (UTF-8).")],
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 1024,
    windows: Annotated[int, typer.Option(min=1, help="Number of windows, from the start of the text.")] = 3,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with tokenizer.json.")] = None,
    libraries: CustomOps = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure perplexity: windows without overlap, no special tokens, float32 logits."""
    from graphrot.api import evaluate as run
    from graphrot.ops.foreign import custom_ops

    with custom_ops(*(libraries or ())), StepBars() as bars:
        result = run(model, text=text, window=window, windows=windows, tokenizer=tokenizer, progress=bars)
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)
    if as_json:
        print_json(
            {
                "perplexity": result.perplexity,
                "tokens": result.tokens,
                "window": result.window,
                "windows": result.windows,
            }
        )
    else:
        typer.echo(f"perplexity {result.perplexity:.3f} on {result.windows} windows of {result.window} tokens")
