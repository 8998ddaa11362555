"""``graphrot verify``: do two models answer the same?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphrot.cli.options import CustomOps, Provider
from graphrot.cli.output import print_json
from graphrot.cli.progress import StepBars


def verify(
    a: Annotated[Path, typer.Argument(help="The reference: a folder or an .onnx file.")],
    b: Annotated[Path, typer.Argument(help="The model to check against it.")],
    text: Annotated[Path | None, typer.Option(help="Text to compare on, besides random tokens.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with tokenizer.json, for --text.")] = None,
    provider: Provider = "cpu",
    libraries: CustomOps = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the logits of two models, from an empty cache; exit code 1 if they differ.

    With --provider cuda the second one runs there, the first on the CPU; they may be the same file.
    """
    from graphrot.api import verify as run
    from graphrot.ops.foreign import custom_ops

    with custom_ops(*(libraries or ())), StepBars() as bars:
        result = run(a, b, text=text, tokenizer=tokenizer, provider=provider, progress=bars)
    if as_json:
        print_json(result.to_dict())
    else:
        typer.echo(
            f"{'equal' if result.ok else 'different'}: max |difference| {result.max_abs:.3g}, "
            f"relative {result.relative:.3g} (allowed {result.tolerance:.3g}), top-1 {result.top1:.2%}, "
            f"{result.tokens} tokens"
        )
    if not result.ok:
        raise typer.Exit(1)
