"""``graphrot eval``: perplexity on a text, agreement with another model, and tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphrot.cli.options import CustomOps, Provider
from graphrot.cli.output import print_json
from graphrot.cli.progress import StepBars

if TYPE_CHECKING:
    from graphrot.measure import Evaluation


def evaluate(
    model: Annotated[Path, typer.Argument(help="A folder that convert wrote, or an .onnx file.")],
    text: Annotated[Path | None, typer.Option(help="The text to measure on (UTF-8).")] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 1024,
    windows: Annotated[int, typer.Option(min=1, help="Number of windows, from the start of the text.")] = 3,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|X.onnx",
            help="Compare with this model, the float one for example: divergence (KL) and top-1 agreement.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.yaml,...", help="Tasks of lm-eval, with commas between them."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items of each task, from its start (default: all).")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with tokenizer.json.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Put the figures into the graphrot.json beside the model.")
    ] = False,
    allow_overlap: Annotated[
        bool, typer.Option("--allow-overlap", help="Go on where the model was calibrated on parts of the text.")
    ] = False,
    provider: Provider = "cpu",
    libraries: CustomOps = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure perplexity (windows without overlap, no special tokens, float32 logits), agreement and tasks."""
    from graphrot.api import evaluate as run
    from graphrot.ops.foreign import custom_ops

    with custom_ops(*(libraries or ())), StepBars() as bars:
        result = run(
            model,
            text=text,
            window=window,
            windows=windows,
            reference=reference,
            tasks=() if tasks is None else tasks,
            limit=limit,
            tokenizer=tokenizer,
            record=record,
            allow_overlap=allow_overlap,
            provider=provider,
            progress=bars,
        )
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)
    if as_json:
        print_json(result.to_dict())
        return
    for line in summary(result):
        typer.echo(line)


def summary(result: Evaluation) -> list[str]:
    """The figures in a few lines for people."""
    lines = []
    if result.perplexity is not None:
        lines.append(f"perplexity {result.perplexity:.3f} on {result.windows} windows of {result.window} tokens")
    if result.kl is not None and result.top1 is not None:
        lines.append(
            f"reference  {result.reference_perplexity:.3f}; KL {result.kl:.4f} nats a token, "
            f"same first choice {result.top1:.2%}"
        )
    for task, figures in result.tasks.items():
        shown = (
            f"{name} {value:.4f}" + (f" +- {figures[error]:.4f}" if (error := _error(name)) in figures else "")
            for name, value in figures.items()
            if "_stderr" not in name
        )
        lines.append(f"{task:10s} {', '.join(shown)}")
    return lines


def _error(name: str) -> str:
    """The name under which the standard error of a metric stands."""
    metric, comma, kind = name.partition(",")
    return f"{metric}_stderr{comma}{kind}"
