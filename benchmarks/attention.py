"""``RotatedAttention`` against ONNX Runtime's ``GroupQueryAttention``, paired.

    python benchmarks/attention.py --json attention.json

Each runs one node, in turns, with past and present in one buffer of fixed capacity, so that nobody copies its cache.
RotatedAttention rotates queries and keys and stores the new ones by token and head; GroupQueryAttention rotates nothing
and has one scale for the whole cache. Ratios over 1: RotatedAttention is faster. One thread: its CPU time; two: wall
time.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
from caches import Caches, Contender
from common import isas, repeated, spread, write

from graphrot.bench.timing import CPU, WALL, figure, interleaved

SHAPES = "3/3/64,8/4/128"
CONTEXTS = "4096,32768"
PEERS = {"float": 32, "int8": 8, "int4": 4}
PREFILL = 256
LEAST_AGREEMENT = 0.9
"""Of answers with a rounded and with a float cache: their cosine, with random keys and values."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="KV heads/query heads of each/channels,...")
    parser.add_argument("--contexts", default=CONTEXTS, help="slots in use, of which one is new")
    parser.add_argument("--prefill", type=int, default=PREFILL, help="tokens from an empty cache; 0: none")
    parser.add_argument("--isas", default=isas()[0], help=f"of {','.join(isas())}")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--budget", type=float, default=0.03, help="seconds per turn and contender")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    found = []
    for shape in options.shapes.split(","):
        kv_heads, group, head_size = map(int, shape.split("/"))
        work = [(int(context), 1) for context in options.contexts.split(",") if context]
        work += [(options.prefill, options.prefill)] if options.prefill else []
        print(f"\n{kv_heads} KV heads, {group} query heads of each, {head_size} channels", flush=True)
        for context, tokens in work:
            caches = Caches(kv_heads, group, head_size, context, tokens)
            for threads in map(int, options.threads.split(",")):
                for isa in options.isas.split(","):
                    found += measure(caches, isa, threads, options)
                    gc.collect()
    if options.json:
        write(options.json, rows=found)


def measure(caches: Caches, isa: str, threads: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of one cache: a row of the table for each of our widths."""
    contenders = {f"rotated {bits}": caches.contender("rotated", bits, threads=threads, isa=isa) for bits in (4, 8)}
    contenders |= {name: caches.contender("gqa", bits, threads=threads) for name, bits in PEERS.items()}
    agree(contenders)
    before = os.getloadavg()
    tasks = [repeated(each.run, options.budget) for each in contenders.values()]
    clock = CPU if threads == 1 else WALL
    time = dict(zip(contenders, interleaved(tasks, options.turns)[..., clock].T, strict=True))
    result = []
    for bits in (4, 8):
        own = time[f"rotated {bits}"]
        ratios = {name: time[name] / own for name in PEERS}
        row: dict[str, Any] = {
            "isa": isa, "kv_heads": caches.kv_heads, "group": caches.group, "head_size": caches.head_size,
            "context": caches.context, "tokens": caches.tokens, "bits": bits, "threads": threads,
            "us": figure(own * 1e6).to_dict(),
            **{f"ratio_{name}": figure(ratio).to_dict() for name, ratio in ratios.items()},
            "load": [before, os.getloadavg()],
        }  # fmt: skip
        result.append(row)
        against = "  ".join(f"{name} {spread(ratio)}" for name, ratio in ratios.items())
        print(
            f"{isa:10s} context {caches.context:6d}  new {caches.tokens:4d}  {bits} bits  {threads} thread(s)  "
            f"{row['us']['median']:9.1f} us  {against}",
            flush=True,
        )
    return result


def agree(contenders: dict[str, Contender]) -> None:
    """All answer alike, as far as their caches let them."""
    expected = contenders["float"].answer()
    for name, contender in contenders.items():
        found = contender.answer()
        cosine = float((found * expected).sum() / np.sqrt((found**2).sum() * (expected**2).sum()))
        if not cosine > LEAST_AGREEMENT:
            raise SystemExit(f"{name} does not agree with a float cache: cosine {cosine:.4f}")


if __name__ == "__main__":
    main()
