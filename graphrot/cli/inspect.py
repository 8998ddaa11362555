"""``graphrot inspect``: which rotations a graph allows, and what stands in the way of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphrot.cli.options import CustomOps
from graphrot.cli.output import print_json
from graphrot.cli.progress import StepBars


def inspect(
    model: Annotated[Path, typer.Argument(help="An .onnx file, or a folder with model.onnx.")],
    libraries: CustomOps = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the rotation sites of a graph, without changing anything."""
    from graphrot.api import inspect as run
    from graphrot.ops.foreign import custom_ops

    with custom_ops(*(libraries or ())), StepBars() as bars:
        found = run(model, progress=bars)
    if as_json:
        print_json(found.model_dump())
        return
    typer.echo(f"{found.nodes} nodes, opset {found.opset}")
    counts: dict[tuple[str, str, int, str], list[int]] = {}
    for site in found.sites:
        entry = counts.setdefault((site.kind, site.placement, site.dim, site.mean), [0, 0, 0])
        entry[0] += 1
        entry[1] += len(site.producers)
        entry[2] += len(site.consumers)
    for (kind, placement, dim, mean), (sites, producers, consumers) in sorted(counts.items()):
        uses = f"{producers} producers, {consumers} consumers"
        if mean:
            uses += "; LayerNorm: " + ("the mean folds into the producers" if mean == "folded" else mean)
        if kind == "O":
            uses += "; an option: --only R1,R2,R3,R4,O"
        typer.echo(f"{kind:2s}  {sites:4d} sites  {placement:6s}  size {dim}, {uses}")
    if not found.sites:
        typer.echo("no rotation site found")
    for refusal in found.refused:
        typer.echo(f"{refusal.kind:2s}  refused at {refusal.node} ({refusal.op}): {refusal.reason}")
        typer.echo(f"    what would change it: {refusal.change}")
