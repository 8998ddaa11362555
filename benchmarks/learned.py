"""Perplexity with Hadamard and with learned rotations, paired by seed, in one table.

    python benchmarks/learned.py demo --text TEST.txt --calibration VALID.txt --seeds 3
    python benchmarks/learned.py demo --text TEST.txt --calibration VALID.txt --loss kl --steps 40

Learning starts from the very Hadamard matrices of the same seed. Windows of 1024 tokens without overlap, from the
start of the text; embedding and head stay float. Prints a line per seed, the mean of the ratios with their spread
and, with ``--json``, writes the figures with versions, for a record.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime
import torch

import graphrot
from graphrot.recipe import Recipe, resolve_recipe

FLOAT_TABLES: dict[str, Any] = {"embedding": None, "head": None}
CASES: dict[str, dict[str, Any]] = {
    "W4 channel A4 KV4 gptq": {"recipe": "w4a4kv4", "group": "channel", **FLOAT_TABLES},
    "W4 g32 A4 KV4 gptq": {"recipe": "w4a4kv4", **FLOAT_TABLES},
    "W4 channel A8 KV8 gptq": {"recipe": "w4a8kv8", **FLOAT_TABLES},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="Hugging Face directory, .onnx file, or demo")
    parser.add_argument("--text", type=Path, required=True, help="text to measure on")
    parser.add_argument("--calibration", required=True, help="text for learning and gptq; must not overlap --text")
    parser.add_argument("--case", choices=list(CASES), default=next(iter(CASES)))
    parser.add_argument("--loss", default="local", help="loss to learn on")
    parser.add_argument("--steps", type=int, help="steps of learning; left out: the loss' own number")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0..N-1")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    fields = dict(CASES[options.case])
    base = fields.pop("recipe")
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        recipe = resolve_recipe(base, seed=seed, certificate=None, **fields)
        rows.append(_pair(options, recipe, seed))
        row = rows[-1]
        print(
            f"seed {seed}: hadamard {row['hadamard']:.2f}  learned {row['learned']:.2f}  ratio {row['ratio']:.3f}  "
            f"held-out loss {row['heldout'][0]:.4f} -> {row['heldout'][1]:.4f}  |R - R0| {row['distance']}  "
            f"learning {row['seconds']:.0f} s",
            flush=True,
        )
    ratios = [row["ratio"] for row in rows]
    spread = f" [{min(ratios):.3f}, {max(ratios):.3f}]" if len(ratios) > 1 else ""
    print(f"{options.case}, loss {options.loss}: learned / hadamard {statistics.mean(ratios):.3f}{spread}")
    if options.json:
        record = {
            "source": options.source,
            "case": options.case,
            "loss": options.loss,
            "windows": options.windows,
            "rows": rows,
            "graphrot": graphrot.__version__,
            "onnxruntime": onnxruntime.__version__,
            "torch": torch.__version__,
            "time": time.strftime("%Y-%m-%d"),
        }
        options.json.write_text(json.dumps(record, indent=1))


def _pair(options: argparse.Namespace, recipe: Recipe, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="graphrot-learned-") as folder:
        start = time.perf_counter()
        learned = graphrot.learn(
            options.source,
            output=Path(folder) / "rotations.safetensors",
            recipe=recipe,
            loss=options.loss,
            steps=options.steps,
            calibration=options.calibration,
        )
        seconds = time.perf_counter() - start
        hadamard = _measure(options, recipe, Path(folder) / "hadamard")
        better = resolve_recipe(recipe, rotations=str(Path(folder) / "rotations.safetensors"))
        after = _measure(options, better, Path(folder) / "learned")
    return {
        "seed": seed,
        "hadamard": hadamard,
        "learned": after,
        "ratio": after / hadamard,
        "heldout": [learned.start_loss, learned.end_loss],
        "distance": ", ".join(f"{kind} {found.mean:.2f}" for kind, found in learned.distances.items()),
        "seconds": seconds,
    }


def _measure(options: argparse.Namespace, recipe: Recipe, output: Path) -> float:
    graphrot.convert(options.source, output=output, recipe=recipe, calibration=options.calibration)
    return graphrot.evaluate(output, text=options.text, window=1024, windows=options.windows).perplexity


if __name__ == "__main__":
    main()
