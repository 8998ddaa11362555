"""Perplexity of a decoder at several recipes, rotated and not, in one table.

    python benchmarks/accuracy.py demo --text TEST.txt --calibration VALID.txt
    python benchmarks/accuracy.py model.onnx --tokenizer DIR --cases KV4 KV8 --text TEST.txt

Windows of 1024 tokens without overlap, from the start of the text; embedding and head stay float, so
that only the linears differ, or (KV) only the cache. Every figure is measured here, on the models that
``graphrot.convert`` writes. Prints a table and, with ``--json``, writes the figures with versions, for a record.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime

import graphrot
from graphrot.recipe import resolve_recipe

FLOAT_TABLES: dict[str, Any] = {"embedding": None, "head": None}
CASES: dict[str, dict[str, Any]] = {
    "A8": {"recipe": "rotate-only", "only": ("R1", "R2", "R4"), "activations": "int8"},
    "A4": {"recipe": "rotate-only", "only": ("R1", "R2", "R4"), "activations": "int4"},
    "W4 channel A8 gptq": {"recipe": "w4a8", **FLOAT_TABLES},
    "W4 g32 A4 rtn": {"recipe": "w4a8", "activations": "int4", "group": 32, "solver": "rtn", **FLOAT_TABLES},
    "W4 g32 gptq": {"recipe": "w4a16", **FLOAT_TABLES},
    "W4 g32 rtn": {"recipe": "w4a16", "solver": "rtn", **FLOAT_TABLES},
    **{f"KV{bits}": {"recipe": "rotate-only", "kv": f"int{bits}"} for bits in (4, 8)},
    **{
        f"KV{bits} ort {scales} {span}": {
            "recipe": "rotate-only",
            "kv": f"int{bits}",
            "kernels": "ort",
            "kv_scales": scales,
            "kv_range": span,
        }
        for bits in (4, 8)
        for scales in ("tensor", "channel")
        for span in ("minmax", "mse")
    },
}
"""Name -> options; each runs with ``rotations`` none and hadamard."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="Hugging Face directory, .onnx file, or demo")
    parser.add_argument("--text", type=Path, required=True, help="text to measure on")
    parser.add_argument("--calibration", type=Path, help="text for gptq and static scales; must not overlap --text")
    parser.add_argument("--tokenizer", type=Path, help="folder with the tokenizer of an .onnx file")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0..N-1 of the rotated models")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for name in options.cases:
        for rotations, seeds in ((None, 1), ("hadamard", options.seeds)):
            found = [_measure(options, CASES[name], rotations, seed) for seed in range(seeds)]
            mean = sum(found) / len(found)
            rows.append({"case": name, "rotations": rotations, "perplexity": found, "mean": mean})
            spread = " ".join(f"{value:.2f}" for value in found) if len(found) > 1 else ""
            print(f"{name:24s} {rotations or 'none':9s} {mean:10.2f}  {spread}", flush=True)
    if options.json:
        record = {
            "source": options.source,
            "windows": options.windows,
            "rows": rows,
            "graphrot": graphrot.__version__,
            "onnxruntime": onnxruntime.__version__,
            "machine": platform.processor() or platform.machine(),
            "time": time.strftime("%Y-%m-%d"),
        }
        options.json.write_text(json.dumps(record, indent=1))


def _measure(options: argparse.Namespace, case: dict[str, Any], rotations: str | None, seed: int) -> float:
    unused = {"recipe", "only"} if rotations is None else {"recipe"}
    fields = {key: value for key, value in case.items() if key not in unused}
    if rotations is not None:
        fields["seed"] = seed
    recipe = resolve_recipe(case["recipe"], rotations=rotations, certificate=None, **fields)
    with tempfile.TemporaryDirectory(prefix="graphrot-accuracy-") as folder:
        output = Path(folder) / "model"
        graphrot.convert(
            options.source,
            output=output,
            recipe=recipe,
            calibration=options.calibration if recipe.calibrates else None,
            tokenizer=options.tokenizer,
        )
        measured = graphrot.evaluate(output, text=options.text, window=1024, windows=options.windows)
    return measured.perplexity


if __name__ == "__main__":
    main()
