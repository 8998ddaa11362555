"""``graphrot convert``: rotate and quantize a model."""

from __future__ import annotations

from collections import Counter
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
from graphrot.words import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphrot.converted import Converted
    from graphrot.plan.types import Rotation
    from graphrot.report.parts import ChoicePart


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="Hugging Face directory, folder of onnxruntime-genai, hub id (owner/name[@revision]), "
            "X.gguf, X.onnx, or 'demo'."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write, or X.onnx.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"Name, or a YAML or JSON file (default: {DEFAULT_RECIPE}; {DEFAULT_FOR_FILES} for an .onnx "
            "source, whose cache stays as it is)."
        ),
    ] = None,
    rotations: Annotated[
        str | None,
        typer.Option(
            metavar="hadamard|random|block-hadamard|auto|none|FILE",
            help="Matrices of the folded rotations; auto: Hadamard, where measuring the rounded model shows a gain; "
            "FILE.safetensors: learned ones (graphrot learn).",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    only: Only = None,
    online_r1: Annotated[
        bool | None,
        typer.Option(
            "--online-r1",
            help="Rotate the residual stream also where that needs transforms in every layer (norms behind branches).",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of signs and random matrices.", rich_help_panel=RECIPE)] = None,
    weights: Weights = None,
    group: Group = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="Grids without or with zero points.", rich_help_panel=RECIPE),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            metavar="4.6",
            help="Stored bits per weight at most, scales included: every weight gets a grid of its own, by measuring.",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    embedding: Annotated[
        str | None, typer.Option(metavar="none|int8|int4", help="The embedding table.", rich_help_panel=RECIPE)
    ] = None,
    head: Annotated[
        str | None, typer.Option(metavar="none|int8|int4", help="The LM head.", rich_help_panel=RECIPE)
    ] = None,
    activations: Activations = None,
    kv: Cache = None,
    kv_scales: Annotated[
        str | None,
        typer.Option(
            metavar="tensor|channel",
            help="With --kernels ort: numbers of the cache that share a scale.",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    kv_range: Annotated[
        str | None,
        typer.Option(
            metavar="minmax|mse",
            help="With --kernels ort: how these scales are chosen on the calibration text.",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    solver: Solver = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="portable|ort|genai",
            help="Which operators to write; genai: a folder for onnxruntime-genai.",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    provider: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda",
            help="Where the model will run; cuda: float16 or bfloat16, and every node has a CUDA kernel.",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="float32|float16|bfloat16",
            help="Type of what stays float, and of the cache (default: float32, or an .onnx source's own; float16 for "
            "cuda).",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            metavar="graphrot|ort",
            help="Whose matmuls take rounded inputs, and whose attention a quantized cache.",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(metavar="full|off", help="Compare the rotated model with its source.", rich_help_panel=RECIPE),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|datasets:ID|self",
            help="What gptq and --kv-scales read: a text file, a token file (.npy, .npz, .tokens.json), "
            "datasets:ID\\[/CONFIG]\\[:SPLIT\\[:COLUMN]], or self: the model's own samples "
            "(default: Python's own help topics).",
            rich_help_panel=FILES,
        ),
    ] = None,
    tokenizer: TokenizerFolder = None,
    plan: Annotated[
        Path | None, typer.Option(help="Replay a plan (JSON) instead of making one.", rich_help_panel=FILES)
    ] = None,
    allow_partial: Annotated[
        bool,
        typer.Option("--allow-partial", help="Go on where some of the asked rotations, or of the caches, are refused."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier conversion wrote.")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep the work of a run that is stopped; go on where one was stopped."),
    ] = False,
    libraries: CustomOps = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Rotate SOURCE, quantize it, check it, and write the result.

    Options replace fields of the recipe; contradictions are refused.
    """
    from graphrot.convert import convert as run
    from graphrot.ops.foreign import custom_ops

    options: dict[str, Any] = {
        "rotations": rotations,
        "only": only,
        "online_r1": online_r1,
        "seed": seed,
        "weights": weights,
        "group": group,
        "symmetric": symmetric,
        "bits": bits,
        "embedding": embedding,
        "head": head,
        "activations": activations,
        "kv": kv,
        "kv_scales": kv_scales,
        "kv_range": kv_range,
        "solver": solver,
        "target": target,
        "provider": provider,
        "dtype": dtype,
        "kernels": kernels,
        "certificate": certificate,
    }
    with custom_ops(*(libraries or ())), StepBars() as bars:
        result = run(
            source,
            output=output,
            recipe=recipe,
            calibration=calibration,
            tokenizer=tokenizer,
            plan=plan,
            allow_partial=allow_partial,
            force=force,
            resume=resume,
            progress=bars,
            **{name: value for name, value in options.items() if value is not None},
        )
    STOP.finish()
    if as_json:
        print_json(result.report.model_dump())
    else:
        for line in summary(result, output):
            typer.echo(line)


def summary(result: Converted, output: Path) -> list[str]:
    """The result in a few lines for people."""
    report = result.report
    kinds: dict[str, int] = {}
    for rotation in report.plan.rotations:
        kinds[rotation.kind] = kinds.get(rotation.kind, 0) + 1
    rotated = ", ".join(f"{kind} x{count}" for kind, count in sorted(kinds.items())) or "nothing"
    lines = [f"written    {output}", f"rotated    {rotated}"]
    lines += [f"chosen     {line}" for line in chosen(report.choices)]
    online = _transforms(result.plan.rotations)
    lines += [f"online     {online}"] if online else []
    notes = {r.matrix["note"] for r in report.plan.rotations if "note" in r.matrix}
    lines += [f"note       {note}" for note in sorted(notes)]
    lines += [f"refused    {r.kind} at {r.node} ({r.op}): {r.reason}" for r in report.plan.refused]
    certificate = report.certificate
    if certificate is not None:
        relative, control = certificate.relative, certificate.control_relative
        lines.append(
            f"certified  relative error {relative:.1e}, allowed {certificate.tolerance:.1e} "
            f"({certificate.dtype}, {certificate.tokens} tokens, top-1 {certificate.top1:.2%}"
            + ("" if control is None else f"; one inverse left out: {control:.1e}")
            + ")"
        )
    else:
        lines.append("unchecked  the certificate is off: compare the outputs with the source's")
    half = report.half
    if half is not None and not report.quantized:
        plain = "does not fit" if half.plain_relative is None else f"{half.plain_relative:.1e}"
        lines.append(
            f"{half.dtype:10s} relative error {half.relative:.1e} (the source only cast: {plain}; "
            f"{half.tokens} tokens, top-1 {half.top1:.2%})"
        )
    sizes = report.sizes
    bits = f", {sizes.bits_per_weight:.2f} bits per weight" if report.quantized else ""
    lines.append(f"size       {size(sizes.source_bytes)} -> {size(sizes.model_bytes)}{bits}")
    compared = [q for q in report.quantized if q.error_without_rotation not in (None, q.error)]
    if compared:
        better = sum(q.error < (q.error_without_rotation or 0.0) for q in compared)
        lines.append(f"rounding   rotation made the error smaller in {better} of {len(compared)} rotated tensors")
    lines += [f"note       {note}" for note in result.notes]
    steps = ", ".join(f"{step} {seconds:.1f}" for step, seconds in report.seconds.items() if seconds >= 0.05)
    lines.append(f"time       {sum(report.seconds.values()):.1f} s ({steps})")
    return lines


def chosen(choices: Sequence[ChoicePart]) -> list[str]:
    """What was measured, in a line for each decision about the whole model or a kind of site."""
    lines = []
    for choice in choices:
        if choice.kind == "weight" or "." in choice.name:
            continue
        figures = ", ".join(f"{name} {figure:.4f}" for name, figure in choice.candidates.items())
        lines.append(f"{choice.name}: {choice.chosen} ({figures}; {choice.why})")
    grids = Counter(choice.chosen for choice in choices if choice.kind == "weight")
    if grids:
        lines.append("grids: " + ", ".join(f"{grid} x{count}" for grid, count in grids.most_common()))
    return lines


def _transforms(rotations: Sequence[Rotation]) -> str:
    """What the online rotations cost: transforms that run for every token, by kind and size."""
    from graphrot.analysis.types import places

    counts: dict[tuple[str, int], int] = {}
    for rotation in rotations:
        added = len(places(rotation.space))
        if added:
            key = rotation.space.kind, rotation.space.dim
            counts[key] = counts.get(key, 0) + added
    parts = [f"{kind} {count} of size {dim}" for (kind, dim), count in sorted(counts.items())]
    return f"Hadamard transforms for every token: {', '.join(parts)}" if parts else ""
