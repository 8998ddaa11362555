"""``HadamardTransform``: one instruction set against another, paired, on one thread.

    python benchmarks/hadamard_isa.py avx512 avx2

Both run in turns on the same buffers, in an order that changes; a figure is the ratio of the two times of one
turn (over 1: the first is faster), as median and the 10th and 90th percentile of all turns.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import onnx_ir as ir
from common import bound, isas, place, repeated, session, spread, write

from graphrot.bench.timing import CPU, figure, interleaved
from graphrot.ops.hadamard import ensure_function, hadamard_node
from graphrot.rotation.orthogonal import choose_matrix

SIZES = (64, 80, 96, 128, 576, 1536, 4096, 4864, 14336, 18944)
TOKENS = (1, 256)
TYPES = {"float": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


def transform(size: int, dtype: ir.DataType) -> ir.Model:
    """A model of one node."""
    x = ir.Value(name="x", shape=ir.Shape(["tokens", size]), type=ir.TensorType(dtype))
    node = hadamard_node(x, choose_matrix(size, rotations="hadamard", seed=None), "y")
    model = ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21}), ir_version=10)
    ensure_function(model)
    return model


def measure(names: list[str], size: int, tokens: int, dtype: ir.DataType, turns: int, budget: float) -> np.ndarray:
    """Seconds per run, ``[turns, names]``; a turn repeats runs until ``budget`` seconds are spent."""
    values = np.random.default_rng(0).standard_normal((tokens, size)).astype(dtype.numpy())
    x, y = place(values, dtype), place(np.zeros_like(values), dtype)
    runs = [bound(session(transform(size, dtype), isa=name), {"x": x}, {"y": y}) for name in names]
    return interleaved([repeated(run, budget) for run in runs], turns)[..., CPU]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", choices=isas())
    parser.add_argument("second", choices=isas())
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--budget", type=float, default=0.005, help="seconds per turn and instruction set")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    names = [options.first, options.second]
    rows = []
    print(f"{'type':9s} {'size':>6s} {'tokens':>6s} {names[0]:>10s} us {names[1]:>10s} us   ratio [p10, p90]")
    for (kind, dtype), tokens, size in itertools.product(TYPES.items(), TOKENS, SIZES):
        seconds = measure(names, size, tokens, dtype, options.turns, options.budget)
        ratio = seconds[:, 1] / seconds[:, 0]
        first, second = np.median(seconds, axis=0) * 1e6
        print(f"{kind:9s} {size:6d} {tokens:6d} {first:13.1f} {second:13.1f}   {spread(ratio)}", flush=True)
        row = {"type": kind, "size": size, "tokens": tokens, "ratio": figure(ratio).to_dict(), "us": [first, second]}
        rows.append(row)
    if options.json:
        write(options.json, isas=names, rows=rows)


if __name__ == "__main__":
    main()
