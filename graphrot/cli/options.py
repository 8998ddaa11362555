"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CustomOps = Annotated[
    list[Path] | None,
    typer.Option(
        "--custom-ops",
        metavar="FILE",
        help="Library of somebody else's operators that the model needs; may be repeated.",
    ),
]

Provider = Annotated[
    str,
    typer.Option(metavar="cpu|cuda", help="Where the model runs: the CPU, or ONNX Runtime's CUDA provider."),
]

RECIPE = "Recipe"
"""The panel of options that replace fields of the recipe."""

FILES = "Files"

Only = Annotated[
    str | None,
    typer.Option(
        metavar="R1,R2,R3,R4,O",
        help="Rotate these sites only; O, a transform across heads, is taken nowhere else.",
        rich_help_panel=RECIPE,
    ),
]
Weights = Annotated[
    str | None, typer.Option(metavar="none|int8|int4", help="Weights of the linears.", rich_help_panel=RECIPE)
]
Group = Annotated[
    str | None, typer.Option(metavar="channel|32|64|128", help="Weights that share a scale.", rich_help_panel=RECIPE)
]
Activations = Annotated[
    str | None, typer.Option(metavar="none|int8|int4", help="Inputs of the linears, per token.", rich_help_panel=RECIPE)
]
Cache = Annotated[
    str | None, typer.Option(metavar="none|int8|int4", help="The key/value cache.", rich_help_panel=RECIPE)
]
Solver = Annotated[
    str | None, typer.Option(metavar="rtn|clip|gptq", help="How weights are rounded.", rich_help_panel=RECIPE)
]
TokenizerFolder = Annotated[
    Path | None, typer.Option(help="Folder with tokenizer.json, for an .onnx source.", rich_help_panel=FILES)
]
