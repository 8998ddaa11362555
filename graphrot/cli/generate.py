"""``graphrot generate``: continue a prompt, token by token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from graphrot.cli.options import CustomOps, Provider
from graphrot.cli.output import print_json


def generate(
    model: Annotated[Path, typer.Argument(help="A folder that convert wrote, or an .onnx file.")],
    prompt: Annotated[str, typer.Option(help="Text to continue, or to answer with --chat.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 64,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    no_library: Annotated[
        bool, typer.Option("--no-library", help="Do not register the native library; functions run instead.")
    ] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with tokenizer.json.")] = None,
    provider: Provider = "cpu",
    libraries: CustomOps = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON when done, instead of streaming.")] = False,
) -> None:
    """Generate text with ONNX Runtime. Streams to stdout."""
    from graphrot.api import generate as run
    from graphrot.ops.foreign import custom_ops

    def stream(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    with custom_ops(*(libraries or ())):
        result = run(
            model,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            greedy=greedy,
            chat=chat,
            library=not no_library,
            tokenizer=tokenizer,
            provider=provider,
            on_text=None if as_json else stream,
        )
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)
    if as_json:
        print_json({"text": result.text, "tokens": result.tokens})
    else:
        typer.echo()
