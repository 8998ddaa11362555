"""``graphrot learn``: learn rotations for a model and a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphrot.cli.options import (
    FILES,
    RECIPE,
    Activations,
    Cache,
    CustomOps,
    Group,
    Only,
    Solver,
    TokenizerFolder,
    Weights,
)
from graphrot.cli.output import print_json
from graphrot.cli.progress import StepBars
from graphrot.cli.stop import STOP
from graphrot.recipe import DEFAULT_FOR_FILES, DEFAULT_RECIPE

if TYPE_CHECKING:
    from graphrot.learn.result import Learned


def learn(
    source: Annotated[str, typer.Argument(help="As convert takes it: a folder, a hub id, X.gguf, X.onnx, or 'demo'.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="X.safetensors", help="File to write.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"What will be rounded: a name, or a YAML or JSON file (default: {DEFAULT_RECIPE}; "
            f"{DEFAULT_FOR_FILES} for an .onnx source)."
        ),
    ] = None,
    loss: Annotated[
        str,
        typer.Option(
            metavar="local|data-free|ce|kl",
            help="local: rounding errors of tensors, minutes; data-free: fourth moments of weights; ce, kl: the "
            "whole model on text, slow.",
        ),
    ] = "local",
    steps: Annotated[int | None, typer.Option(help="At most so many steps.")] = None,
    rate: Annotated[float | None, typer.Option(help="Largest length of a step, as a fraction of the matrix.")] = None,
    sequences: Annotated[
        int | None, typer.Option(help="Sequences of 256 tokens of the calibration text; an eighth is held out.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="With kl: compare the likeliest tokens only.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the start and of the batches.")] = None,
    rotations: Annotated[
        str | None,
        typer.Option(metavar="hadamard|random|block-hadamard", help="The start.", rich_help_panel=RECIPE),
    ] = None,
    only: Only = None,
    weights: Weights = None,
    group: Group = None,
    activations: Activations = None,
    kv: Cache = None,
    solver: Solver = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|datasets:ID|self",
            help="What is learned on (default: Python's own help topics); as convert takes it.",
            rich_help_panel=FILES,
        ),
    ] = None,
    tokenizer: TokenizerFolder = None,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Go on where some rotations or caches are refused.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    libraries: CustomOps = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Learn the rotations of SOURCE that are folded into weights, for the rounding of a recipe.

    What comes out is for convert --rotations FILE, with the same recipe.
    """
    from graphrot.api import learn as run
    from graphrot.ops.foreign import custom_ops

    options: dict[str, Any] = {
        "rotations": rotations,
        "only": only,
        "seed": seed,
        "weights": weights,
        "group": group,
        "activations": activations,
        "kv": kv,
        "solver": solver,
    }
    with custom_ops(*(libraries or ())), StepBars() as bars:
        result = run(
            source,
            output=output,
            recipe=recipe,
            loss=loss,
            steps=steps,
            rate=rate,
            sequences=sequences,
            top_k=top_k,
            calibration=calibration,
            tokenizer=tokenizer,
            allow_partial=allow_partial,
            force=force,
            resume=resume,
            progress=bars,
            **{name: value for name, value in options.items() if value is not None},
        )
    STOP.finish()
    if as_json:
        print_json(result.to_dict())
    else:
        for line in summary(result):
            typer.echo(line)


def summary(result: Learned) -> list[str]:
    """The result in a few lines for people."""
    part = result.part
    change = result.end_loss / result.start_loss - 1
    early = ", stopped early" if result.stopped else ""
    resumed = f", resumed after step {result.resumed}" if result.resumed else ""
    lines = [
        f"written    {result.path} ({len(part.distance)} matrices)",
        f"loss       {part.loss}, held out: {result.start_loss:.6g} -> {result.end_loss:.6g} ({change:+.1%})",
        f"steps      {part.steps}, the best matrices after {result.best}{early}{resumed}",
    ]
    for kind, distance in result.distances.items():
        spread = f"{distance.mean:.4g}"
        if distance.count > 1:
            spread += f" in the mean of {distance.count}, {distance.least:.4g} to {distance.most:.4g}"
        lines.append(f"distance   |{kind} - {kind}0| = {spread}")
    lines.append(f"orthogonal |R'R - 1| <= {part.orthogonality:.1e}")
    if part.calibration is not None:
        lines.append(f"read       {part.calibration.tokens} tokens of {part.calibration.name}")
    lines += [f"note       {note}" for note in result.notes]
    steps = ", ".join(f"{step} {seconds:.1f}" for step, seconds in result.seconds.items())
    lines.append(f"time       {sum(result.seconds.values()):.1f} s ({steps})")
    return lines
